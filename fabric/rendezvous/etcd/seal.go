package etcd

import (
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
	mac := hmac.New(sha256.New, hash(s))
	mac.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(key))))
	mac.Write([]byte(key))
	mac.Write(value)
	return mac.Sum(nil)
}

func hash(s rendezvous.Secret) []byte {
	h := sha256.Sum256(s)
	return h[:]
}
