//go:build linux

package peertest

import (
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"golang.org/x/sys/unix"
)

// WithCosts makes a software machine take as long for the calls that share memory
// as was measured of the real driver (docs/measurements/sharing.md), so that the library's own cost
// shows in proportion.
func WithCosts(m *sim.Machine) {
	const (
		export, take, mapping, access = 38 * time.Microsecond, 28 * time.Microsecond, 4 * time.Microsecond, 30 * time.Microsecond
	)
	var mapped atomic.Int64 // since the last grant, which costs by the chunk
	m.OnCall(func(call string) {
		switch call {
		case "cuMemExportToShareableHandle":
			spin(export)
		case "cuMemImportFromShareableHandle":
			spin(take)
		case "cuMemMap":
			mapped.Add(1)
			spin(mapping)
		case "cuMemSetAccess":
			spin(access * time.Duration(mapped.Swap(0)))
		}
	})
}

// spin is a processor at work for so long.
func spin(d time.Duration) {
	for start := time.Now(); time.Since(start) < d; {
	}
}

// Monotonic is a clock that all processes share, in nanoseconds.
func Monotonic() int64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return ts.Nano()
}
