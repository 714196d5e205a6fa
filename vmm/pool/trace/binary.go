package trace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// The binary form: the magic, then numbers as unsigned LEB128 of the fewest
// bytes, texts as a length and that many bytes.
//
//	magic, name, streams, number of tags, each tag, number of operations
//	Alloc: bytes*4 + 0, stream, tag
//	Free:  distance*4 + 1, where distance is from the number of the next block
//	Use:   distance*4 + 2, stream
//	Sync:  3
//
// So equal traces have equal bytes, and each sequence of bytes is at most one
// trace.
const magic = "cuvmmtr\x01"

// AppendBinary appends the binary form. It returns the error of Check for a
// trace that makes no sense.
func (t *Trace) AppendBinary(b []byte) ([]byte, error) {
	if err := t.Check(); err != nil {
		return b, err
	}
	b = append(b, magic...)
	b = appendText(b, t.Name)
	b = binary.AppendUvarint(b, uint64(t.Streams))
	b = binary.AppendUvarint(b, uint64(len(t.Tags)))
	for _, tag := range t.Tags {
		b = appendText(b, tag)
	}
	b = binary.AppendUvarint(b, uint64(len(t.Ops)))
	next := uint64(0)
	for _, op := range t.Ops {
		distance := next - uint64(op.ID)
		switch op.Kind {
		case Alloc:
			b = binary.AppendUvarint(b, uint64(op.Bytes)<<2|uint64(Alloc))
			b = binary.AppendUvarint(b, uint64(op.Stream))
			b = binary.AppendUvarint(b, uint64(op.Tag))
			next++
		case Free:
			b = binary.AppendUvarint(b, distance<<2|uint64(Free))
		case Use:
			b = binary.AppendUvarint(b, distance<<2|uint64(Use))
			b = binary.AppendUvarint(b, uint64(op.Stream))
		case Sync:
			b = append(b, byte(Sync))
		}
	}
	return b, nil
}

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// MarshalBinary returns the binary form.
func (t *Trace) MarshalBinary() ([]byte, error) { return t.AppendBinary(nil) }

// UnmarshalBinary replaces t by what b says. It keeps nothing of b, and changes
// nothing when it returns an error.
func (t *Trace) UnmarshalBinary(b []byte) error {
	d := decoder{rest: b}
	got, err := d.trace()
	if err != nil {
		return fmt.Errorf("decoding a trace, at byte %d of %d: %w", len(b)-len(d.rest), len(b), err)
	}
	*t = got
	return nil
}

type decoder struct{ rest []byte }

func (d *decoder) trace() (t Trace, err error) {
	if len(d.rest) < len(magic) || string(d.rest[:len(magic)]) != magic {
		return t, errors.New("no trace of this version")
	}
	d.rest = d.rest[len(magic):]
	if t.Name, err = d.text(); err != nil {
		return t, err
	}
	if t.Streams, err = d.count(MaxStreams); err != nil {
		return t, err
	}
	tags, err := d.count(MaxTags)
	if err != nil {
		return t, err
	}
	for range tags {
		tag, err := d.text()
		if err != nil {
			return t, err
		}
		t.Tags = append(t.Tags, tag)
	}
	// An operation takes a byte at least, so a short input asks for little.
	n, err := d.count(len(d.rest))
	if err != nil {
		return t, err
	}
	t.Ops = make([]Op, 0, min(n, len(d.rest)))
	next := uint64(0)
	for range n {
		op, err := d.op(next)
		if err != nil {
			return t, err
		}
		if op.Kind == Alloc {
			next++
		}
		t.Ops = append(t.Ops, op)
	}
	if len(d.rest) > 0 {
		return t, errors.New("more bytes than the trace has")
	}
	return t, t.Check()
}

func (d *decoder) op(next uint64) (Op, error) {
	head, err := d.number(math.MaxUint64)
	if err != nil {
		return Op{}, err
	}
	op, value := Op{Kind: Kind(head & 3)}, head>>2
	if op.Kind == Sync {
		if value != 0 {
			return op, fmt.Errorf("sync with %d", value)
		}
		return op, nil
	}
	if op.Kind == Alloc {
		if next > math.MaxUint32 {
			return op, errors.New("more blocks than can be numbered")
		}
		op.ID, op.Bytes = uint32(next), int(value) // of 62 bits
	} else {
		if value == 0 || value > next {
			return op, fmt.Errorf("%v of the block %d before %d", op.Kind, value, next)
		}
		op.ID = uint32(next - value)
	}
	if op.Kind == Alloc || op.Kind == Use {
		stream, err := d.number(MaxStreams)
		if err != nil {
			return op, err
		}
		op.Stream = uint32(stream)
	}
	if op.Kind == Alloc {
		tag, err := d.number(MaxTags)
		if err != nil {
			return op, err
		}
		op.Tag = uint32(tag)
	}
	return op, nil
}

func (d *decoder) number(most uint64) (uint64, error) {
	v, n := binary.Uvarint(d.rest)
	switch {
	case n <= 0:
		return 0, errors.New("a number that does not end, or is too large")
	case n > 1 && d.rest[n-1] == 0:
		return 0, errors.New("a number of more bytes than it needs")
	case v > most:
		return 0, fmt.Errorf("%d where %d is the most", v, most)
	}
	d.rest = d.rest[n:]
	return v, nil
}

func (d *decoder) count(most int) (int, error) {
	v, err := d.number(uint64(most))
	return int(v), err
}

func (d *decoder) text() (string, error) {
	n, err := d.count(min(MaxText, len(d.rest)))
	if err != nil {
		return "", err
	}
	if n > len(d.rest) {
		return "", errors.New("a text that is cut off")
	}
	s := string(d.rest[:n])
	d.rest = d.rest[n:]
	return s, nil
}
