package cuda

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// FabricHandle names memory that any process with the same IMEX channel open can
// import, anywhere on its NVLink fabric. It keeps nothing alive: once the memory's
// creator has released it the handle names nothing. It is no secret either, since the
// channel alone grants access, but only importers need it. So String, every verb of
// fmt and log/slog print a short form, "fabric:9f86d081884c", which tells handles
// apart and from which no handle can be made. fmt prints an unexported field of a
// struct in full: give such a struct a String method.
//
// The bytes are the binary form. MarshalText, and with it JSON, writes all of them as
// 128 lower-case hex digits, for importers. Handles are comparable: equal handles name
// the same memory, but memory may have several.
type FabricHandle [64]byte

// String returns the short form: 48 bits of the handle's SHA-256.
func (h FabricHandle) String() string {
	sum := sha256.Sum256(h[:])
	return "fabric:" + hex.EncodeToString(sum[:6])
}

// Format writes the short form for every verb.
func (h FabricHandle) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(h.String())) }

// LogValue returns the short form.
func (h FabricHandle) LogValue() slog.Value { return slog.StringValue(h.String()) }

// MarshalBinary returns a copy of the bytes.
func (h FabricHandle) MarshalBinary() ([]byte, error) { return h[:], nil }

// UnmarshalBinary takes 64 bytes and nothing else. After an error the handle is
// as it was.
func (h *FabricHandle) UnmarshalBinary(b []byte) error {
	if len(b) != len(h) {
		return handleError("binary", errs.Count(len(b), "byte"), fmt.Sprintf("a fabric handle has %d", len(h)))
	}
	copy(h[:], b)
	return nil
}

// MarshalText writes 128 lower-case hex digits.
func (h FabricHandle) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, h[:]), nil }

// UnmarshalText reads the text form and takes nothing else, not even capitals or
// spaces. After an error the handle is as it was.
func (h *FabricHandle) UnmarshalText(text []byte) error {
	if want := hex.EncodedLen(len(h)); len(text) != want {
		return handleError("text", errs.Count(len(text), "character"), fmt.Sprintf("a fabric handle has %d hex digits", want))
	}
	if at := bytes.IndexFunc(text, func(r rune) bool { return (r < '0' || r > '9') && (r < 'a' || r > 'f') }); at >= 0 {
		return handleError("text", fmt.Sprintf("%q after %s", text[at:at+1], errs.Count(at, "character")), "a fabric handle is of the digits 0 to 9 and a to f")
	}
	_, err := hex.Decode(h[:], text)
	return err
}

// handleError names no more of the text than what is wrong in it.
func handleError(form, asked, hint string) error {
	return fmt.Errorf("cuda.FabricHandle: %w: the %s form of %s; %s", ErrInvalidArgument, form, asked, hint)
}
