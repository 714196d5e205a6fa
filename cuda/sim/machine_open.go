package sim

import (
	stdcontext "context"
	"errors"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
)

// Open opens the machine's driver, as cuda.Open opens the real one. Each Open
// makes a System of its own. Closing the System does not close the machine.
func (m *Machine) Open(o cuda.Options) (*cuda.System, error) {
	core.UseDriver(&o, &m.library, nil)
	return cuda.Open(o)
}

// OpenOwned is Open for a machine that has this System alone: closing the System
// closes it, and reports what the machine found leaked.
func (m *Machine) OpenOwned(o cuda.Options) (*cuda.System, error) {
	core.UseDriver(&o, &m.library, m.Close)
	return cuda.Open(o)
}

// TB is what Open needs of a test; *testing.T and *testing.B have it.
type TB interface {
	Helper()
	Cleanup(func())
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// drainTime bounds how long Open's check waits for memory that was closed with
// CloseAfter. Work on a stream that a test still holds never ends.
const drainTime = 10 * time.Second

// Open makes a machine for a test and opens it, with leak tracing on. When the
// test ends, everything that it made must be closed: what is not is an error
// of the test, with the stack that made it. A test that destroys a context, to see
// what a fault does, closes its objects as any other.
func Open(tb TB, options ...Options) (*Machine, *cuda.System) {
	tb.Helper()
	var o Options
	if len(options) > 0 {
		o = options[0]
	}
	m, err := New(o)
	if err != nil {
		tb.Fatalf("%v", err)
	}
	s, err := m.Open(cuda.Options{TraceLeaks: true})
	if err != nil {
		tb.Fatalf("%v", err)
	}
	tb.Cleanup(func() {
		tb.Helper()
		ctx, cancel := stdcontext.WithTimeout(stdcontext.Background(), drainTime)
		defer cancel()
		if err := s.Drain(ctx); err != nil {
			tb.Errorf("%v", err)
		}
		err := errors.Join(s.Close(), m.besideEnded(), m.racesEnded())
		if err != nil {
			tb.Errorf("%v", err)
			for _, o := range s.Live() {
				tb.Errorf("leaked: %s", o)
			}
		}
		// What the System left is on the machine as well, and was reported.
		if left := m.Close(); left != nil && err == nil {
			tb.Errorf("%v", left)
		}
	})
	return m, s
}
