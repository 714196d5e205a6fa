package load

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/bulk"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

// verifyPiece is how many bytes a thread of Verify reads at a time.
const verifyPiece = 4<<20 - bulk.Slack

// Verify reads all tensors of a layout without a device, returns the layout with their digests, and compares
// those that the files declare, as LoadAll does (ErrDigest, ErrChanged). Progress is not called.
func (m *Model) Verify(ctx context.Context, o Options, l *handles.Manifest) (*handles.Manifest, error) {
	const op = "load.Model.Verify"
	if ctx == nil {
		return nil, errs.Invalid(op, "a nil context", "pass one, such as context.Background()")
	}
	if err := o.check(op); err != nil {
		return nil, err
	}
	if err := m.enter(op); err != nil {
		return nil, err
	}
	defer m.leave()
	items, err := m.laidOut(op, l)
	if err != nil {
		return nil, err
	}
	v := loading{reading: reading{op: op, how: o.Reading, items: items}, m: m}
	digests, err := v.compared(o, func() error { return v.readAll(ctx, o, int64(l.Bytes)) })
	if err != nil {
		return nil, err
	}
	return withDigests(l.Bytes, slices.Clone(l.Tensors), digests), nil
}

// readAll reads so many bytes of the stream, on the threads of the options.
func (r *reading) readAll(ctx context.Context, o Options, bytes int64) error {
	threads := o.Threads
	if threads == 0 {
		threads = min(mostThreads, runtime.GOMAXPROCS(0))
	}
	threads = int(min(int64(threads), (bytes+verifyPiece-1)/verifyPiece))
	if threads == 0 {
		return nil
	}
	mem, err := osmem.AllocHuge(uint64(threads) * (verifyPiece + bulk.Slack))
	if err != nil {
		return fmt.Errorf("%s: %w", r.op, err)
	}
	g, ctx := errgroup.WithContext(ctx)
	var taken atomic.Int64
	for i := range threads {
		room := mem[i*(verifyPiece+bulk.Slack):][:verifyPiece+bulk.Slack]
		g.Go(func() error {
			for {
				at := taken.Add(verifyPiece) - verifyPiece
				if at >= bytes {
					return nil
				}
				if _, err := r.read(ctx, room, uint64(at), int(min(verifyPiece, bytes-at))); err != nil {
					return err
				}
			}
		})
	}
	err = g.Wait()
	if freed := osmem.Free(mem); err == nil {
		err = freed
	}
	return err
}

// Verify reads the tensors of a manifest from the memory that begins at an address, once the work that
// is on the stream is done. It returns the manifest with their digests, and compares those that it has
// already (ErrDigest). The digests of a manifest without any are those of what is there now. Options.Reading
// and NoDigests do not matter.
//
// Verify only knows addresses: the memory must not be closed, shortened or suspended meanwhile.
func Verify(ctx context.Context, o Options, on *cuda.Stream, l *handles.Manifest, at cuda.Ptr) (*handles.Manifest, error) {
	const op = "load.Verify"
	if l == nil {
		return nil, errNoLayout(op)
	}
	if err := l.Validate(); err != nil {
		return nil, err
	}
	items := make([]item, len(l.Tensors))
	for i := range l.Tensors {
		t := &l.Tensors[i]
		items[i] = item{block: block{bytes: int64(t.Size())}, start: int64(t.Offset), part: i}
	}
	all := []bulk.Segment{{Ptr: driver.Ptr(at), Bytes: uint64(l.Bytes)}} // the gaps too: one copy for many small tensors
	st, err := usable(ctx, op, o, on, all)
	if err != nil {
		return nil, err
	}
	digests := make([]string, len(items))
	s := &sums{items: items, whole: func(i int, crc uint32) { digests[i] = digestOf(crc) }}
	err = o.copies(op, st, func(b bulk.Options) error {
		return bulk.Of(st.Ctx).Drain(ctx, all, func(_ context.Context, piece []byte, offset uint64) error {
			s.addPiece(piece, int64(offset))
			return nil
		}, b)
	})
	if err != nil {
		return nil, err
	}
	s.end()
	for i, t := range l.Tensors {
		if t.Digest != "" && t.Digest != digests[i] {
			return nil, &Error{Op: op, Tensor: t.Name, kind: ErrDigest, Asked: fmt.Sprintf("%s, where the manifest has %s", digests[i], t.Digest),
				Hint: "write the memory anew, and find what wrote to it since"}
		}
	}
	return withDigests(l.Bytes, slices.Clone(l.Tensors), digests), nil
}
