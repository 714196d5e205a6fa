// Package wire implements the binary form of all messages between processes of this
// library: little-endian values, texts preceded by their length, and the kinds and limits
// of messages. docs/protocol.md specifies it.
package wire

import (
	"encoding/binary"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Encoder appends values to B.
type Encoder struct{ B []byte }

func (e *Encoder) Uint8(v uint8)   { e.B = append(e.B, v) }
func (e *Encoder) Uint16(v uint16) { e.B = binary.LittleEndian.AppendUint16(e.B, v) }
func (e *Encoder) Uint32(v uint32) { e.B = binary.LittleEndian.AppendUint32(e.B, v) }
func (e *Encoder) Uint64(v uint64) { e.B = binary.LittleEndian.AppendUint64(e.B, v) }

// Raw appends bytes of a length that both sides know.
func (e *Encoder) Raw(b []byte) { e.B = append(e.B, b...) }

func (e *Encoder) Bool(v bool) {
	if v {
		e.Uint8(1)
	} else {
		e.Uint8(0)
	}
}

// Text appends a text preceded by its length, clipped to a number of bytes.
func (e *Encoder) Text(s string, most int) {
	s = Clip(s, most)
	e.Uint16(uint16(len(s)))
	e.B = append(e.B, s...)
}

// Blob appends bytes preceded by their length.
func (e *Encoder) Blob(b []byte) {
	e.Uint32(uint32(len(b)))
	e.B = append(e.B, b...)
}

// Clip shortens a text to a number of bytes of valid UTF-8, between characters.
func Clip(s string, most int) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "")
	}
	return s
}

// Decoder takes values from the front of B, which it does not trust: the first missing or
// invalid value becomes the error, and all later ones read as zero.
type Decoder struct {
	B   []byte
	err error
}

// Fail records an error, unless there is one.
func (d *Decoder) Fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf(format, args...)
	}
}

// Err returns the error so far.
func (d *Decoder) Err() error { return d.err }

// Raw takes n bytes, which still refer to the message. After an error it returns nil.
func (d *Decoder) Raw(n int) []byte {
	if d.err == nil && len(d.B) < n {
		d.Fail("%d bytes where %d more are needed", len(d.B), n)
	}
	if d.err != nil {
		return nil
	}
	front := d.B[:n]
	d.B = d.B[n:]
	return front
}

func (d *Decoder) Uint8() uint8 {
	if b := d.Raw(1); b != nil {
		return b[0]
	}
	return 0
}

func (d *Decoder) Uint16() uint16 {
	if b := d.Raw(2); b != nil {
		return binary.LittleEndian.Uint16(b)
	}
	return 0
}

func (d *Decoder) Uint32() uint32 {
	if b := d.Raw(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (d *Decoder) Uint64() uint64 {
	if b := d.Raw(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

func (d *Decoder) Bool() bool {
	v := d.Uint8()
	if v > 1 {
		d.Fail("%d where 0 or 1 belongs", v)
	}
	return v == 1
}

func (d *Decoder) Text(most int) string {
	n := int(d.Uint16())
	if n > most {
		d.Fail("a text of %d bytes, where %d is the most", n, most)
	}
	s := string(d.Raw(n))
	if !utf8.ValidString(s) {
		d.Fail("a text that is not UTF-8")
	}
	return s
}

// Blob returns a copy.
func (d *Decoder) Blob(most int) []byte {
	n := d.Uint32()
	if uint64(n) > uint64(most) {
		d.Fail("%d bytes, where %d is the most", n, most)
		return nil
	}
	return append([]byte(nil), d.Raw(int(n))...)
}

// Count takes the number of entries that follow, of at least size bytes each, all of
// which must be present.
func (d *Decoder) Count(size, most int) int {
	n := d.Uint32()
	if uint64(n) > uint64(most) {
		d.Fail("%d entries, where %d is the most", n, most)
	}
	if d.err == nil && len(d.B) < int(n)*size {
		d.Fail("%d bytes where %d more are needed", len(d.B), int(n)*size)
	}
	if d.err != nil {
		return 0
	}
	return int(n)
}

// End returns the error, which surplus bytes are too.
func (d *Decoder) End() error {
	if len(d.B) > 0 {
		d.Fail("%d bytes too many", len(d.B))
	}
	return d.err
}
