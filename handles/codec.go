package handles

import (
	"encoding/binary"
	"fmt"
	"strings"
	"unicode/utf8"
)

// encoder appends little-endian values.
type encoder struct{ b []byte }

func (e *encoder) uint8(v uint8)   { e.b = append(e.b, v) }
func (e *encoder) uint16(v uint16) { e.b = binary.LittleEndian.AppendUint16(e.b, v) }
func (e *encoder) uint32(v uint32) { e.b = binary.LittleEndian.AppendUint32(e.b, v) }
func (e *encoder) uint64(v uint64) { e.b = binary.LittleEndian.AppendUint64(e.b, v) }
func (e *encoder) token(t token)   { e.b = append(e.b, t[:]...) }

func (e *encoder) bool(v bool) {
	if v {
		e.uint8(1)
	} else {
		e.uint8(0)
	}
}

// clipped is a text of at most so many bytes, which ends behind a whole character.
func clipped(s string, most int) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "")
	}
	return s
}

// text is clipped where it is longer than the most.
func (e *encoder) text(s string, most int) {
	s = clipped(s, most)
	e.uint16(uint16(len(s)))
	e.b = append(e.b, s...)
}

func (e *encoder) blob(b []byte) {
	e.uint32(uint32(len(b)))
	e.b = append(e.b, b...)
}

// decoder takes them again, from bytes that nobody has counted: the first that
// is missing or wrong is the error, and everything after it reads zero.
type decoder struct {
	r   reader
	err error
}

// need reports whether n more bytes are there.
func (d *decoder) need(n int) bool {
	if d.err == nil && len(d.r.b) < n {
		d.fail("%d bytes where %d more are needed", len(d.r.b), n)
	}
	return d.err == nil
}

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf(format, args...)
	}
}

func (d *decoder) uint8() uint8 {
	if !d.need(1) {
		return 0
	}
	return d.r.uint8()
}

func (d *decoder) uint16() uint16 {
	if !d.need(2) {
		return 0
	}
	return d.r.uint16()
}

func (d *decoder) uint32() uint32 {
	if !d.need(4) {
		return 0
	}
	return d.r.uint32()
}

func (d *decoder) uint64() uint64 {
	if !d.need(8) {
		return 0
	}
	return d.r.uint64()
}

func (d *decoder) bool() bool {
	v := d.uint8()
	if v > 1 {
		d.fail("%d where 0 or 1 belongs", v)
	}
	return v == 1
}

func (d *decoder) token() (t token) {
	if d.need(len(t)) {
		copy(t[:], d.r.bytes(len(t)))
	}
	return t
}

func (d *decoder) text(most int) string {
	n := int(d.uint16())
	if n > most {
		d.fail("a text of %d bytes, where %d is the most", n, most)
	}
	if !d.need(n) {
		return ""
	}
	s := string(d.r.bytes(n))
	if !utf8.ValidString(s) {
		d.fail("a text that is no UTF-8")
	}
	return s
}

func (d *decoder) blob(most int) []byte {
	n := d.uint32()
	if uint64(n) > uint64(most) {
		d.fail("%d bytes, where %d is the most", n, most)
	}
	if !d.need(int(n)) {
		return nil
	}
	return append([]byte(nil), d.r.bytes(int(n))...)
}

// count reads how many things of at least size bytes follow, which must be
// there.
func (d *decoder) count(size, most int) int {
	n := d.uint32()
	if uint64(n) > uint64(most) {
		d.fail("%d entries, where %d is the most", n, most)
		return 0
	}
	if !d.need(int(n) * size) {
		return 0
	}
	return int(n)
}

// end answers what was wrong, bytes that are left over included.
func (d *decoder) end() error {
	if d.err == nil && len(d.r.b) > 0 {
		d.fail("%d bytes too many", len(d.r.b))
	}
	return d.err
}
