package core

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

// Lack is what a failed allocation requested of a device's memory. The zero value is for
// memory elsewhere, and for a device whose memory was not queried.
type Lack struct {
	Bytes uint64 // requested, and not granted yet
	// Free and Total are the device's, as the driver counts them for all processes.
	Free, Total uint64
}

// Occupant is implemented by live objects that are memory.
type Occupant interface {
	// BytesOn returns how many bytes of a device's memory it is.
	BytesOn(driver.Device) uint64
}

// A context takes several hundred MiB, and the memory that others hold includes the contexts
// of this process, which it cannot give back. So much is not counted as held by others:
// mostContexts, or the share 1/contextShare of a small device.
const (
	mostContexts = 1 << 30
	contextShare = 16
)

// Own returns how many bytes of a device's memory this System has, without managed memory, which may
// lie anywhere. Memory that was imported twice counts twice.
func (s *System) Own(on driver.Device) (bytes uint64) {
	s.Live.Each(func(_ *life.Object, owner life.Owner) {
		if o, ok := owner.(Occupant); ok {
			bytes += o.BytesOn(on)
		}
	})
	return bytes
}

// others says how much of a device others hold, if that is why the allocation failed: it
// needs more than is free, and would succeed if they gave back what they hold beyond what
// contexts may take. What they hold is what the driver counts as used, less the System's own
// memory. That is a lower bound: memory that the System imported twice counts twice, and all
// of its managed memory counts, though that may lie on any device.
func (s *System) others(on driver.Device, l Lack) string {
	if l.Bytes <= l.Free {
		return ""
	}
	_, managed := s.Live.Count(life.KindManaged)
	own := uint64(managed) + s.Own(on)
	contexts := min(mostContexts, l.Total/contextShare)
	used := l.Total - l.Free
	if used < own || used-own < l.Bytes-l.Free+contexts {
		return ""
	}
	return fmt.Sprintf("other processes, contexts, graphs and libraries hold at least %s of the device's %s: cuvmm top lists the processes",
		errs.Bytes(used-own), errs.Bytes(l.Total))
}
