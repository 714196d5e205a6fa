package load

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sort"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cuvmm/cuvmm/internal/bulk"
)

const (
	// stepBytes is how much is read and summed at a time: it stays in a core's cache in between,
	// and makes a call's cost small.
	stepBytes = 256 << 10
	// probeBytes is the first step of a run that may be cold. It is small, since the kernel
	// begins to read ahead for it.
	probeBytes = 4 << 10
	// directStep is how much is read past the page cache at a time, at most.
	directStep = 2 << 20
	// slowRead is how long one of those may take. A load that is canceled waits for those under way.
	slowRead = 25 * time.Millisecond
	// leastDirect is the least that is read past the page cache.
	leastDirect = 128 << 10
)

// item is a block with its place in a stream of bytes.
type item struct {
	block
	tensor *tensor
	index  int // the tensor's, which is read without the tensor
	start  int64
	part   int // whose it is among the caller's
}

// want is the digest that the file declares of the item's bytes, or empty.
func (it *item) want() string {
	if it.tensor.Digest == "" || it.bytes != int64(it.tensor.Size()) {
		return ""
	}
	return it.tensor.Digest
}

// reading reads a stream of bytes, which items are places of, from files. What lies between
// items is zero.
type reading struct {
	op    string
	how   Reading
	items []item // in the order of start, without overlap
	base  int64  // of the stream that is read, in that of the items
	sums  *sums  // nil if none are wanted
	pace  pace
	// failed: a direct read was refused, so the page cache serves the rest.
	failed atomic.Bool
}

// run is bytes that follow each other in a file and in a piece.
type run struct {
	tensor *tensor // of its first byte
	offset int64   // in the file
	at, n  int     // in the piece
}

// span is the bytes of an item in a piece.
type span struct {
	item, at, n, done int
	within            int64 // the item
	crc               uint32
}

// piece is a part of the stream that is being read.
type piece struct {
	*reading
	room  []byte // begins at a page
	buf   []byte // the piece, which begins in its room at byte at
	at    int
	runs  []run
	spans []span
	sum   int // spans that are summed up
}

// read is a bulk.Read.
func (r *reading) read(ctx context.Context, buf []byte, offset uint64, n int) (at int, err error) {
	p := &piece{reading: r, room: buf}
	p.find(r.base+int64(offset), n)
	at, first := p.align()
	p.at, p.buf = at, buf[at:at+n]
	// The blocks of direct reads reach into their neighbors' places, which are read after them.
	if first >= 0 {
		if err := p.fill(ctx, p.runs[first], true, first == 0); err != nil {
			return 0, err
		}
	}
	for i, run := range p.runs {
		if i == first {
			continue
		}
		if err := p.fill(ctx, run, false, first <= 0); err != nil {
			return 0, err
		}
	}
	p.clear()
	p.summed(n)
	if r.sums != nil {
		r.sums.add(p.spans)
	}
	return at, nil
}

// spansOf returns the bytes of items among n bytes of the stream.
func spansOf(items []item, offset int64, n int) (all []span) {
	end := offset + int64(n)
	i := sort.Search(len(items), func(i int) bool { return items[i].start+items[i].bytes > offset })
	all = make([]span, 0, sort.Search(len(items)-i, func(j int) bool { return items[i+j].start >= end }))
	for ; i < len(items) && items[i].start < end; i++ {
		it := &items[i]
		from := max(offset, it.start)
		all = append(all, span{item: i, at: int(from - offset), n: int(min(end, it.start+it.bytes) - from), within: from - it.start})
	}
	return all
}

// find collects the spans of n bytes of the stream, and their runs.
func (p *piece) find(offset int64, n int) {
	p.spans = spansOf(p.items, offset, n)
	for _, s := range p.spans {
		it, at := &p.items[s.item], s.at
		it.each(s.within, int64(s.n), func(offset, n int64) {
			if last := len(p.runs) - 1; last >= 0 {
				l := &p.runs[last]
				if l.tensor.file == it.tensor.file && l.offset+int64(l.n) == offset && l.at+l.n == at {
					l.n, at = l.n+int(n), at+int(n)
					return
				}
			}
			p.runs = append(p.runs, run{it.tensor, offset, at, int(n)})
			at += int(n)
		})
	}
}

// align returns where the piece begins in its room so that its largest run can be read past the
// page cache, and which that is; -1 if none is.
func (p *piece) align() (at, first int) {
	first = -1
	if p.how == PageCache || p.failed.Load() {
		return 0, -1
	}
	for i, r := range p.runs {
		if a := r.alignment(); a > 0 && r.n >= leastDirect && (first < 0 || r.n > p.runs[first].n) {
			at, first = int((r.offset-int64(r.at))&int64(a-1)), i
		}
	}
	return at, first
}

// alignment is that of direct reads from the run's file, or 0.
func (r *run) alignment() int {
	if a := r.tensor.file.Align(); a <= bulk.Slack/2 && a&(a-1) == 0 {
		return a
	}
	return 0
}

// fill reads a run. With direct it may read past the page cache what that does not have, and with
// inOrder all before it is read.
func (p *piece) fill(ctx context.Context, r run, direct, inOrder bool) error {
	for done := 0; done < r.n; {
		if err := context.Cause(ctx); err != nil {
			return fmt.Errorf("%s: %w", p.op, err)
		}
		step, offset := min(stepBytes, r.n-done), r.offset+int64(done)
		if direct && p.how == Automatic && done == 0 {
			step = min(step, probeBytes)
		}
		to := p.buf[r.at+done:][:step]
		if direct {
			n, known := 0, p.how == Direct
			if p.how == Automatic {
				n, known = r.tensor.file.Cached(to, offset)
			}
			done += n
			if n < step {
				if done = p.past(ctx, r, done, known); done < r.n {
					direct = false // what is left is little, or cannot be read in that way
					continue
				}
			}
		} else {
			if err := r.tensor.file.ReadAt(to, offset); err != nil {
				return p.failure(r, err)
			}
			done += step
		}
		if inOrder {
			p.summed(r.at + done)
		}
	}
	return nil
}

// past reads the rest of a run past the page cache if it is worth that, and returns how much of
// the run is read. If a read fails, the page cache, which is asked next, knows why.
func (p *piece) past(ctx context.Context, r run, done int, known bool) int {
	a := int64(r.alignment())
	begin := (r.offset + int64(done)) &^ (a - 1)
	if !known || r.n-done < leastDirect && p.how == Automatic || begin < r.offset && done > 0 {
		return done
	}
	// Where the block begins in the piece's room, which may be before the piece.
	at := p.at + r.at + int(begin-r.offset)
	end := (r.offset + int64(r.n) + a - 1) &^ (a - 1)
	for begin < end && ctx.Err() == nil {
		n, began := int(min(p.pace.step(), end-begin)), time.Now()
		got, err := r.tensor.file.ReadDirect(p.room[at:][:n], begin)
		p.pace.took(int64(n), time.Since(began))
		if err != nil {
			if errors.Is(err, syscall.EINVAL) {
				p.failed.Store(true)
			}
			return done
		}
		done = max(done, min(r.n, int(begin-r.offset)+got))
		if got < n {
			return done
		}
		at, begin = at+n, begin+int64(n)
	}
	return done
}

// pace is how much is read past the page cache at a time: little, while storage is slow.
type pace struct{ bytes atomic.Int64 }

func (p *pace) step() int64 { return max(p.bytes.Load(), leastDirect) }

func (p *pace) took(bytes int64, d time.Duration) {
	switch step := p.step(); {
	case d > slowRead:
		p.bytes.Store(step / 2)
	case d < slowRead/4 && bytes == step:
		p.bytes.Store(min(2*step, directStep))
	}
}

// failure returns the error of a read. A file that ended is shorter than it was.
func (p *piece) failure(r run, err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		e := r.tensor.file.changed(p.op, "it is shorter than it was")
		e.Tensor = r.tensor.Name
		return e
	}
	e := ioError(p.op, r.tensor.file.path, fmt.Sprintf("%d bytes from %d on", r.n, r.offset), err)
	e.Tensor = r.tensor.Name
	return e
}

// summed adds the bytes before one of the piece to the sums, which have those before already.
func (p *piece) summed(to int) {
	if p.sums == nil {
		return
	}
	for ; p.sum < len(p.spans); p.sum++ {
		s := &p.spans[p.sum]
		end := min(s.n, to-s.at)
		if end > s.done {
			s.crc = crc32.Update(s.crc, castagnoli, p.buf[s.at+s.done:s.at+end])
			s.done = end
		}
		if s.done < s.n {
			return
		}
	}
}

// clear zeroes what lies between items.
func (p *piece) clear() {
	at := 0
	for _, s := range p.spans {
		clear(p.buf[at:s.at])
		at = s.at + s.n
	}
	clear(p.buf[at:])
}
