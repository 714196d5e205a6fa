package suspend

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/bulk"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// kept is the bytes of chunks of one member in host memory, one behind the other. It is given
// back as a whole, when no chunk needs it any more.
type kept struct {
	dev     *cuda.Device // which copies
	backing *bulk.Backing
	bytes   uint64
	chunks  int // guarded by the lock of the Suspension
}

// save keeps the bytes of chunks. It has the host memory before it waits for the GPU.
func (s *Suspension) save(ctx context.Context, op string, chunks []*chunk, wait func() error) error {
	if s.o.Keep {
		if err := s.reserve(ctx, op, chunks); err != nil {
			return err
		}
	}
	if err := wait(); err != nil {
		return err
	}
	rate := &s.sys.Rates.Out
	for _, c := range chunks {
		if c.kept != nil && c.kept.backing.Pinned() < c.kept.bytes {
			rate = new(core.Rate) // pinning takes longer than the copies, and the next time there is none
		}
	}
	return s.move(ctx, chunks, rate, func(k *kept, part []bulk.Segment, off uint64) error {
		return k.backing.Out(ctx, part, off, bulk.Options{Op: op})
	})
}

// load copies the bytes of chunks back.
func (s *Suspension) load(ctx context.Context, op string, chunks []*chunk) error {
	return s.move(ctx, chunks, &s.sys.Rates.In, func(k *kept, part []bulk.Segment, off uint64) error {
		return k.backing.In(ctx, part, off, bulk.Options{Op: op})
	})
}

// reserve takes host memory for chunks, one block for those of a member.
func (s *Suspension) reserve(ctx context.Context, op string, chunks []*chunk) error {
	type key struct {
		of  *place
		dev *cuda.Device
	}
	all := map[key]*kept{}
	for _, c := range chunks {
		m, dev, err := c.reader(op)
		if err != nil {
			return err
		}
		k := key{c.first, dev}
		if all[k] == nil {
			all[k] = &kept{dev: dev}
		}
		c.at, c.kept, c.off = m, all[k], all[k].bytes
		c.kept.bytes += c.size
		c.kept.chunks++
	}
	for _, k := range all {
		ctxOf, err := core.ContextOf(op, k.dev)
		if err == nil {
			k.backing, err = bulk.Of(ctxOf).Reserve(ctx, k.bytes, false, bulk.Options{Op: op})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// move copies the bytes of chunks at their mapping at, in runs that follow each other in what
// is kept. The devices copy side by side.
func (s *Suspension) move(ctx context.Context, chunks []*chunk, rate *core.Rate, part func(k *kept, part []bulk.Segment, off uint64) error) error {
	began, bytes := time.Now(), uint64(0)
	type run struct {
		k        *kept
		segments []bulk.Segment
		from, to uint64
	}
	byDevice := map[*cuda.Device][]run{}
	for _, c := range chunks {
		if c.kept == nil {
			continue // nothing is kept
		}
		runs := byDevice[c.kept.dev]
		if n := len(runs); n == 0 || runs[n-1].k != c.kept || runs[n-1].to != c.off {
			runs = append(runs, run{k: c.kept, from: c.off, to: c.off})
		}
		last := &runs[len(runs)-1]
		last.segments = append(last.segments, bulk.Segment{Ptr: c.at.Ptr(), Bytes: c.size})
		last.to += c.size
		byDevice[c.kept.dev] = runs
		bytes += c.size
	}
	var devices sync.WaitGroup
	failed := make(chan error, len(byDevice))
	for _, runs := range byDevice {
		devices.Go(func() {
			for _, r := range runs {
				if err := part(r.k, r.segments, r.from); err != nil {
					failed <- err
					return
				}
			}
		})
	}
	devices.Wait()
	close(failed)
	err := <-failed
	if err == nil {
		rate.Note(bytes, time.Since(began))
	}
	return err
}

// forget ends the chunk's part in what is kept.
func (c *chunk) forget() {
	mu := &c.first.of.mu
	mu.Lock()
	k := c.kept
	c.kept = nil
	last := false
	if k != nil {
		k.chunks--
		last = k.chunks == 0 && k.backing != nil
	}
	mu.Unlock()
	if last {
		k.backing.Release()
	}
}

// reader returns a mapping of the chunk, and the device that copies through it: the memory's
// own, if that may read it there, or another that may.
func (c *chunk) reader(op string) (m *vrange.Mapping, by *cuda.Device, err error) {
	devices := c.maps[0].Range.CUDA.Devices()
	for _, at := range c.maps {
		for _, a := range at.Access() {
			if a.Location.Type != driver.LocationDevice {
				continue
			}
			if home := a.Location == c.h.Asked.Location; home || m == nil {
				m, by = at, devices[a.Location.ID]
				if home {
					return m, by, nil
				}
			}
		}
	}
	if m == nil {
		return nil, nil, errs.New(errs.Failure{Op: op, Kind: errs.NotPermitted,
			Asked: fmt.Sprintf("the bytes of %s at %#x, which no device may read", errs.Bytes(c.size), uint64(c.maps[0].Ptr())),
			Hint:  "grant a device access with SetAccess before, or Drop the bytes"})
	}
	return m, by, nil
}
