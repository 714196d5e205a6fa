package trace

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math"
)

// MaxFile is the most bytes that Read takes, after decompression.
const MaxFile = 1 << 30

// Read reads a trace in any form that this package knows, compressed with gzip
// or not: the binary form (MarshalBinary), the text form (WriteText), and a list
// of requests as JSON:
//
//	[[0, 524288], [1, 2048], [0, 0]]
//
// Each entry is a block's number and the bytes requested; 0 bytes free the block,
// whose number may then be used again. A list has one stream. The trace is named
// name if its form has no name of its own. An error names the line, the byte or
// the operation that is wrong.
func Read(r io.Reader, name string) (*Trace, error) {
	data, err := readAll(r, MaxFile)
	if err == nil && bytes.HasPrefix(data, []byte{0x1f, 0x8b}) {
		data, err = unzip(data)
	}
	if err != nil {
		return nil, fmt.Errorf("reading a trace: %w", err)
	}
	switch start := bytes.TrimLeft(data, " \t\r\n"); {
	case bytes.HasPrefix(data, []byte(magic)):
		t := new(Trace)
		return t, t.UnmarshalBinary(data)
	case bytes.HasPrefix(start, []byte("{")):
		return ReadText(bytes.NewReader(data))
	case bytes.HasPrefix(start, []byte("[")):
		return readList(data, name)
	case len(start) == 0:
		return nil, errors.New("reading a trace: the file is empty")
	case data[0] == 0x80 || bytes.HasPrefix(data, []byte("PK")):
		return nil, errors.New("reading a trace: this looks like a Python pickle: convert a snapshot of PyTorch's memory with scripts/pool-peers.py convert")
	}
	return nil, fmt.Errorf("reading a trace: it begins with %.8q: use the binary form, a JSON object per line, or a JSON list of [block, bytes]", data)
}

func readAll(r io.Reader, most int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, most+1))
	if err == nil && int64(len(data)) > most {
		err = fmt.Errorf("the file has more than %d bytes, the most that is read: cut the trace into parts", most)
	}
	return data, err
}

func unzip(data []byte) ([]byte, error) {
	z, err := gzip.NewReader(bytes.NewReader(data))
	if err == nil {
		data, err = readAll(z, MaxFile)
	}
	if err != nil {
		return nil, fmt.Errorf("decompressing it: %w", err)
	}
	return data, nil
}

// list reads a JSON list of pairs. It is a scanner of its own, since the
// standard decoder takes a second for what this reads in some milliseconds, and
// names no operation in its errors.
type list struct {
	data []byte
	at   int
}

func readList(data []byte, name string) (*Trace, error) {
	l := list{data: data}
	t, err := l.trace(name)
	if err != nil {
		line := 1 + bytes.Count(data[:l.at], []byte("\n"))
		return nil, fmt.Errorf("reading a trace, line %d, operation %d (byte %d): %w", line, len(t.Ops), l.at, err)
	}
	if err := t.Check(); err != nil {
		return nil, fmt.Errorf("reading a trace: %w", err)
	}
	return t, nil
}

// trace returns what was read so far, even with an error.
func (l *list) trace(name string) (*Trace, error) {
	t := &Trace{Name: name, Streams: 1, Tags: []string{""}}
	type use struct {
		id    uint32 // of the trace
		since int    // the operation that allocated it
	}
	live := map[uint64]use{}
	next := uint32(0)
	if err := l.want('['); err != nil {
		return t, err
	}
	for first := true; ; first = false {
		if l.next() == ']' {
			l.at++
			break
		}
		if !first {
			if err := l.want(','); err != nil {
				return t, err
			}
		}
		block, size, err := l.pair()
		if err != nil {
			return t, err
		}
		u, lives := live[block]
		switch {
		case size == 0 && !lives:
			return t, fmt.Errorf("block %d is freed, but is not allocated: remove [%d, 0], or allocate the block before it", block, block)
		case size == 0:
			t.Ops = append(t.Ops, Op{Kind: Free, ID: u.id})
			delete(live, block)
		case lives:
			return t, fmt.Errorf("block %d is allocated, but lives since operation %d: free it first with [%d, 0], or give this one another number", block, u.since, block)
		case size > MaxBytes:
			return t, fmt.Errorf("block %d has %d bytes, at most %d are allowed: give bytes, not bits or addresses", block, size, MaxBytes)
		case next == math.MaxUint32:
			return t, errors.New("there are more blocks than can be numbered: cut the trace into parts")
		default:
			live[block] = use{next, len(t.Ops)}
			t.Ops = append(t.Ops, Op{Kind: Alloc, ID: next, Bytes: int(size)})
			next++
		}
	}
	if c := l.next(); c != 0 {
		return t, fmt.Errorf("%q after the end of the list: remove it", c)
	}
	return t, nil
}

func (l *list) pair() (block, size uint64, err error) {
	if err = l.want('['); err != nil {
		return 0, 0, err
	}
	if block, err = l.number(); err != nil {
		return 0, 0, err
	}
	if err = l.want(','); err != nil {
		return 0, 0, err
	}
	if size, err = l.number(); err != nil {
		return 0, 0, err
	}
	return block, size, l.want(']')
}

// next is the next byte that is no white space, or 0 at the end.
func (l *list) next() byte {
	for ; l.at < len(l.data); l.at++ {
		switch c := l.data[l.at]; c {
		case ' ', '\t', '\r', '\n':
		default:
			return c
		}
	}
	return 0
}

func (l *list) want(c byte) error {
	switch got := l.next(); got {
	case c:
		l.at++
		return nil
	case 0:
		return fmt.Errorf("the list ends where %q is expected: the file is cut off", c)
	default:
		return fmt.Errorf("%q where %q is expected: each entry is [block, bytes]", got, c)
	}
}

func (l *list) number() (uint64, error) {
	l.next()
	start, n := l.at, uint64(0)
	for ; l.at < len(l.data) && l.data[l.at]-'0' <= 9; l.at++ {
		digit := uint64(l.data[l.at] - '0')
		if n > (math.MaxUint64-digit)/10 {
			return 0, errors.New("a number that is too large: use unsigned integers of 64 bits")
		}
		n = 10*n + digit
	}
	if l.at == start {
		rest := l.data[l.at:]
		return 0, fmt.Errorf("%.12q is not a number: use unsigned integers", rest)
	}
	if l.at < len(l.data) && (l.data[l.at] == '.' || l.data[l.at]|0x20 == 'e') {
		return 0, errors.New("a number with a fraction or an exponent: use unsigned integers")
	}
	return n, nil
}
