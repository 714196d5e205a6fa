package vmm

import (
	"errors"
	"fmt"
	"io"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// ioBytes is how much a Writer or Reader copies at a time, enough to make the driver's
// cost per copy negligible.
const ioBytes = 4 << 20

// maxIdleReads is how often in a row a reader may return neither bytes nor an
// error, as bufio has it.
const maxIdleReads = 100

// Writer is an io.Writer that appends to a buffer. It is not safe for concurrent use,
// but other goroutines may use the buffer meanwhile.
type Writer struct{ b *Buffer }

// NewWriter returns a Writer, which does not own the buffer. Each Write returns when
// its bytes are in the buffer; io.Copy copies large pieces and waits once, at the end.
func NewWriter(b *Buffer) *Writer { return &Writer{b} }

// Write appends p.
func (w *Writer) Write(p []byte) (int, error) {
	if w.b.inner() == nil {
		return 0, errNilBuffer("vmm.Writer.Write")
	}
	if _, err := w.b.Append(nil, p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// ReadFrom appends everything that r has, until io.EOF, and returns when it is in
// the buffer. It reads one piece while the previous one is being copied. n counts
// the bytes that were appended; if appending fails, up to 4 MiB more have been
// read from r and are lost. If r keeps returning no bytes and no error, ReadFrom
// returns io.ErrNoProgress.
func (w *Writer) ReadFrom(r io.Reader) (n int64, err error) {
	const op = "vmm.Writer.ReadFrom"
	switch {
	case w.b.inner() == nil:
		return 0, errNilBuffer(op)
	case r == nil:
		return 0, errs.Invalid(op, "a nil io.Reader", "pass what is to be read")
	}
	s, err := w.b.Device().Transfer()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, s.Synchronize()) }()
	piece := make([]byte, ioBytes)
	for have, idle := 0, 0; ; {
		got, end := r.Read(piece[have:])
		if got < 0 || got > len(piece)-have {
			return n, errCount(op, "Read", got, len(piece)-have)
		}
		if idle++; got > 0 {
			idle = 0
		}
		if idle == maxIdleReads && end == nil {
			end = io.ErrNoProgress
		}
		have += got
		if have == len(piece) || have > 0 && end != nil {
			if _, err := w.b.Append(s, piece[:have]); err != nil {
				return n, err
			}
			n += int64(have)
			have = 0
		}
		if end == io.EOF { // as it is: io.ErrUnexpectedEOF is the reader's error
			return n, nil
		}
		if end != nil {
			return n, end
		}
	}
}

// Reader is an io.Reader of a buffer, from its start to the end that it has when the
// Reader gets there. It reads on the device's own stream: the caller first waits for
// streams that still write to the buffer. It is not safe for concurrent use.
type Reader struct {
	b   *Buffer
	off int
}

// NewReader returns a Reader, which does not own the buffer.
func NewReader(b *Buffer) *Reader { return &Reader{b: b} }

// Read copies the next bytes to p.
func (r *Reader) Read(p []byte) (int, error) {
	if r.b.inner() == nil {
		return 0, errNilBuffer("vmm.Reader.Read")
	}
	n := min(len(p), r.b.Len()-r.off)
	if len(p) == 0 {
		return 0, nil
	}
	if n <= 0 {
		// A closed buffer has no end: it returns ErrClosed.
		if _, err := r.b.Slice(0, 0); err != nil {
			return 0, err
		}
		return 0, io.EOF
	}
	part, err := r.b.Slice(r.off, r.off+n)
	if err != nil {
		return 0, err
	}
	if err := part.CopyTo(nil, p[:n]); err != nil {
		return 0, err
	}
	r.off += n
	return n, nil
}

// WriteTo writes the rest of the buffer to w. After an error the Reader stands
// behind the last byte that w took. A Write that takes less and returns no error
// is io.ErrShortWrite.
func (r *Reader) WriteTo(w io.Writer) (n int64, err error) {
	const op = "vmm.Reader.WriteTo"
	switch {
	case r.b.inner() == nil:
		return 0, errNilBuffer(op)
	case w == nil:
		return 0, errs.Invalid(op, "a nil io.Writer", "pass what is to be written to")
	}
	piece := make([]byte, ioBytes)
	for {
		got, err := r.Read(piece)
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
		put, err := w.Write(piece[:got])
		if put < 0 || put > got {
			r.off -= got
			return n, errCount(op, "Write", put, got)
		}
		n += int64(put)
		r.off -= got - put
		if err == nil && put < got {
			err = io.ErrShortWrite
		}
		if err != nil {
			return n, err
		}
	}
}

// errCount returns the error of a reader or writer that breaks its contract.
func errCount(op, method string, n, of int) error {
	return errs.Invalid(op, fmt.Sprintf("a %s that returned %s for %d", method, errs.Count(n, "byte"), of),
		"mend the reader or writer: the count lies between 0 and the length of its argument")
}

var (
	_ io.ReaderFrom = (*Writer)(nil)
	_ io.WriterTo   = (*Reader)(nil)
)
