package load

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/bulk"
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
	made := &handles.Manifest{Bytes: l.Bytes, Tensors: slices.Clone(l.Tensors)}
	err = v.compared(o, func() error { return v.readAll(ctx, o, int64(l.Bytes)) },
		func(it *item, digest string) { made.Tensors[it.part].Digest = digest })
	if err != nil {
		return nil, err
	}
	return made, nil
}

// readAll reads so many bytes of the stream, on the threads of the options.
func (r *reading) readAll(ctx context.Context, o Options, bytes int64) error {
	threads := o.Threads
	if threads == 0 {
		threads = min(16, runtime.GOMAXPROCS(0))
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
