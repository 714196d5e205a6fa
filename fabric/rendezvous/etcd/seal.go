package etcd

import (
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"

	"github.com/cuvmm/cuvmm/fabric/rendezvous"
)

// seal appends the proof that a process with the secret wrote this value under
// this key. The key names the session, so a value is good for one group.
func seal(s rendezvous.Secret, key string, value []byte) string {
	return string(append(value[:len(value):len(value)], proof(s, key, value)...))
}

// open returns a value without its proof, if that is of the secret.
func open(s rendezvous.Secret, key string, sealed []byte) (value []byte, ok bool) {
	n := len(sealed) - sha256.Size
	if n < 0 {
		return nil, false
	}
	return sealed[:n], hmac.Equal(sealed[n:], proof(s, key, sealed[:n]))
}

// proof is made without a secret, too: then it shows that none is expected.
func proof(s rendezvous.Secret, key string, value []byte) []byte {
	hashed := sha256.Sum256(s)
	mac := hmac.New(sha256.New, hashed[:])
	mac.Write(under(key, value))
	return mac.Sum(nil)
}

// sign appends the signature of the rank that writes the value under the key. All ranks
// have the secret, so it does not tell them apart.
func sign(private ed25519.PrivateKey, key string, value []byte) []byte {
	return append(value[:len(value):len(value)], ed25519.Sign(private, under(key, value))...)
}

// signed returns a value without its signature, and whether that is of the public key.
func signed(public ed25519.PublicKey, key string, b []byte) (value []byte, ok bool) {
	n := len(b) - ed25519.SignatureSize
	if n < 0 {
		return nil, false
	}
	return b[:n], len(public) == ed25519.PublicKeySize && ed25519.Verify(public, under(key, b[:n]), b[n:])
}

// under joins a key and a value in one way only.
func under(key string, value []byte) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(key)))
	return append(append(b, key...), value...)
}
