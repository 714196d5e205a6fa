// Package core implements the inner state of a System, shared by the public packages:
// the driver, the known contexts and streams, captures, fences, the reclaimer, memory
// pressure, lost contexts and cached facts. Users never import it and no public
// signature needs it; the public objects embed a holder, and the functions SystemOf,
// ContextOf and StreamOf look inside.
//
// ARCHITECTURE.md has the order of its locks among all others, and notes.go says how
// closing waits for the GPU.
package core

import (
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// Config is how a System was opened.
type Config struct {
	Log *slog.Logger
	// TraceLeaks keeps the creation stack of every object.
	TraceLeaks bool
	// NamedStreamsOnly: the caller promises that all work which touches this
	// System's memory is on streams that the System knows.
	NamedStreamsOnly bool
	// AllocationWait bounds how long an allocation waits for memory that was
	// closed and is pending.
	AllocationWait time.Duration
	// Close is called after the last user of the System is gone.
	Close func() error
}

// System is the inner state of a cuda.System.
type System struct {
	// Serial numbers the Systems of the process from 1; no number is reused.
	Serial int64

	Drv    driver.Driver
	Config Config
	// Version is the driver's CUDA version.
	Version int32
	// Devices are those that the process sees.
	Devices []driver.Device

	closed atomic.Bool

	// Live are the objects that were not closed.
	Live life.List
	// shown are what snapshots show besides.
	shown shown

	facts  facts
	losses losses
	// Shared counts what was exported and released.
	Shared Shared

	mu       lock.Mutex[lock.Leaf] // guards changes of contexts
	contexts atomic.Pointer[[]*Context]

	reclaim   reclaimer
	leftovers leftovers
	unsettled unsettled
	keepers   keepers
	locals    locals
	attached  attached
	suspended suspended
	// Rates are those of the copies out of suspended memory, and in.
	Rates struct{ Out, In Rate }
	// Away counts memory that was dropped beneath its owners.
	Away Tally

	logged atomic.Uint32 // the position in the driver's log behind what errors have said
}

var lastSystem atomic.Int64

// NewSystem wraps an initialised driver.
func NewSystem(d driver.Driver, version int32, c Config) *System {
	s := &System{Serial: lastSystem.Add(1), Drv: d, Config: c, Version: version}
	s.Live.Init(c.Log, c.TraceLeaks)
	s.reclaim.sys = s
	return s
}

// CallError makes the error of a driver call that failed and named no context; see
// Observe for the devices.
func (s *System) CallError(op string, c driver.Call, r driver.Result, asked string, devices ...driver.Device) error {
	s.Observe(r, devices...)
	return errs.New(errs.Failure{Op: op, Call: c, Result: r, Logged: s.logOf(c, r), Asked: asked})
}

// Tally counts what there is of something, and its bytes.
type Tally struct{ count, bytes atomic.Int64 }

// Add counts one of so many bytes.
func (t *Tally) Add(bytes uint64) {
	t.count.Add(1)
	t.bytes.Add(int64(bytes))
}

// Sub ends the count of one.
func (t *Tally) Sub(bytes uint64) {
	t.count.Add(-1)
	t.bytes.Add(-int64(bytes))
}

// Now returns how many there are, and their bytes.
func (t *Tally) Now() (count, bytes int) { return int(t.count.Load()), int(t.bytes.Load()) }

// Shared counts memory that was exported and is released here: other processes may
// still hold it, so it does not count as free.
type Shared struct{ count, bytes atomic.Uint64 }

// Release counts one.
func (s *Shared) Release(bytes uint64) {
	s.count.Add(1)
	s.bytes.Add(bytes)
}

// Released returns how many were released, and their bytes.
func (s *Shared) Released() (count, bytes int) { return int(s.count.Load()), int(s.bytes.Load()) }
