package etcd

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"log/slog"

	"github.com/cuvmm/cuvmm/cuda"
)

// MinSecret is the least length of a secret, in bytes.
const MinSecret = 16

// Secret proves that a process belongs to a group: random bytes that all its processes
// have, from a file or a variable of the job that starts them. It is never written to the
// server; package fmt, log/slog and encoding/json write its length alone.
type Secret []byte

// String returns the secret's length in words.
func (s Secret) String() string { return fmt.Sprintf("secret of %d bytes", len(s)) }

// Format writes String, whatever the verb.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(s.String())) }

// LogValue returns String: log/slog would write the bytes.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// MarshalText returns String, so that no dump of a program's options has the secret.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Check returns an error for a secret that is too short to withstand guessing.
func (s Secret) Check() error {
	if n := len(s); n > 0 && n < MinSecret {
		return fmt.Errorf("%w: a secret of %d bytes: use %d random bytes or more, or none", cuda.ErrInvalidArgument, n, MinSecret)
	}
	return nil
}

// seal appends the proof that a process with the secret wrote this value under
// this key. The key names the session, so a value is good for one group.
func seal(s Secret, key string, value []byte) string {
	return string(append(value[:len(value):len(value)], proof(s, key, value)...))
}

// open returns a value without its proof, if the proof fits the secret.
func open(s Secret, key string, sealed []byte) (value []byte, ok bool) {
	n := len(sealed) - sha256.Size
	if n < 0 {
		return nil, false
	}
	return sealed[:n], hmac.Equal(sealed[n:], proof(s, key, sealed[:n]))
}

// proof makes a proof without a secret, too: it shows that the peer expects none.
func proof(s Secret, key string, value []byte) []byte {
	hashed := sha256.Sum256(s) // HMAC pads short keys: a secret and one with a zero behind it would be the same
	mac := hmac.New(sha256.New, hashed[:])
	// The length joins key and value in one way only.
	mac.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(key))))
	mac.Write([]byte(key))
	mac.Write(value)
	return mac.Sum(nil)
}
