package suspend

import (
	"context"
	"fmt"

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

// reserve takes host memory for chunks, one block for those of a member.
func (s *Suspension) reserve(ctx context.Context, op string, chunks []*chunk) error {
	type key struct {
		of  *place
		dev *cuda.Device
	}
	all := map[key]*kept{}
	for _, c := range chunks {
		if len(c.parts) == 0 {
			continue
		}
		m, dev, err := c.reader(op)
		if err != nil {
			return err
		}
		k := key{c.first, dev}
		if all[k] == nil {
			all[k] = &kept{dev: dev}
		}
		c.at, c.kept, c.off = m, all[k], all[k].bytes
		c.kept.bytes += c.bytes()
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
