package rendezvous

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"log/slog"

	"github.com/cuvmm/cuvmm/cuda"
)

// MinSecret is the least length of a secret, in bytes.
const MinSecret = 16

// Secret proves that a process belongs to a group: random bytes that all its processes
// have, from a file or a variable of the job that starts them. It never
// travels; package fmt, log/slog and encoding/json write its length alone.
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

// nonce makes every proof valid for one handshake only.
type nonce [32]byte

func newNonce() (n nonce) {
	_, _ = rand.Read(n[:]) // never fails
	return n
}

// Each side proves the secret with a label of its own, so that neither can send
// the other's proof back.
const (
	memberProves = "cuvmm rendezvous member"
	hostProves   = "cuvmm rendezvous host"
)

// proof returns the proof of one side for a connection. Without a secret it shows
// that neither side expects one.
func (s Secret) proof(label string, h hello, challenge nonce) []byte {
	key := sha256.Sum256(s) // HMAC pads short keys: a secret and one with a zero behind it would be the same
	mac := hmac.New(sha256.New, key[:])
	mac.Write([]byte(label))
	mac.Write(h.message().Body)
	mac.Write(challenge[:])
	return mac.Sum(nil)
}

func (s Secret) proves(label string, h hello, challenge nonce, proof []byte) bool {
	return hmac.Equal(proof, s.proof(label, h, challenge))
}
