package cuda_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

var errWalk = errors.New("of the body")

// walked is what an operation of the walk works with.
type walked struct {
	d     *cuda.Device
	s     *cuda.Stream
	h     *cuda.HostBuffer
	owned []closer // what is closed when the faults are over
}

// own keeps what an operation made, for when its own Close fails.
func own[C closer](w *walked, c C, err error) (C, error) {
	if err == nil {
		w.owned = append(w.owned, c)
	}
	return c, err
}

// at is memory that every operation may use: the pinned block, which the device sees.
func (w *walked) at() cuda.Ptr { return w.h.Ptr() }

var walkedOperations = map[string]func(w *walked) error{
	"a stream": func(w *walked) error {
		s, err := w.d.NewStream(cuda.StreamOptions{})
		if s, err = own(w, s, err); err != nil {
			return err
		}
		return errors.Join(s.Memset(w.at(), 1, 64), s.Synchronize(), s.Close())
	},
	"staging": func(w *walked) error {
		s, err := w.d.NewStream(cuda.StreamOptions{})
		if s, err = own(w, s, err); err != nil {
			return err
		}
		return errors.Join(s.Upload(w.at(), pattern(100, 1)), s.Download(make([]byte, 64), w.at()), s.Close())
	},
	"an event": func(w *walked) error {
		e, err := w.d.NewEvent(cuda.EventOptions{})
		if e, err = own(w, e, err); err != nil {
			return err
		}
		return errors.Join(e.Record(w.s), w.s.Wait(e), e.Synchronize(), e.Close())
	},
	"a graph": func(w *walked) error {
		g, err := w.s.WithCapture(thread, func() error { return w.s.Upload(w.at(), pattern(100, 1)) })
		if g, err = own(w, g, err); err != nil {
			return err
		}
		return errors.Join(g.Launch(w.s), g.Close())
	},
	"a graph, later": func(w *walked) error {
		g, err := w.s.WithCapture(thread, func() error { return w.s.Upload(w.at(), pattern(100, 1)) })
		if g, err = own(w, g, err); err != nil {
			return err
		}
		return errors.Join(g.Launch(w.s), g.CloseAfter(w.s), w.d.System().Drain(context.Background()))
	},
	"a capture that fails": func(w *walked) error {
		_, err := w.s.WithCapture(thread, func() error { return errors.Join(w.s.Memset(w.at(), 1, 64), errWalk) })
		if errors.Is(err, errWalk) {
			return nil
		}
		return err
	},
	"pinned memory": func(w *walked) error {
		h, err := w.d.NewHostBuffer(4096)
		if h, err = own(w, h, err); err != nil {
			return err
		}
		return errors.Join(w.s.Memset(h.Ptr(), 1, 64), h.Close())
	},
	"pinned memory, later": func(w *walked) error {
		h, err := w.d.NewHostBuffer(4096)
		if h, err = own(w, h, err); err != nil {
			return err
		}
		return errors.Join(w.s.Memset(h.Ptr(), 1, 64), h.CloseAfter(w.s), w.d.System().Drain(context.Background()))
	},
	"a callback": func(w *walked) error {
		return errors.Join(w.s.Callback(func(error) {}), w.d.System().Drain(context.Background()))
	},
	"a trial": func(w *walked) error { _, err := w.d.Probe(); return err },
}

// Whatever call of an operation fails, and whatever other call behind it, its undo included:
// once the driver takes everything again, Drain and Close leave nothing.
func TestEveryFailureLeavesNothing(t *testing.T) {
	for name, op := range walkedOperations {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pairs := 0
			for k := 0; strike(t, op, k, -1) == 1; k++ {
				for j := 0; strike(t, op, k, j) == 2; j++ {
					pairs++
				}
			}
			require.Greater(t, pairs, 3)
		})
	}
}

// strike has the k-th call of an operation fail and the j-th behind it, if j is not negative.
// It returns how many faults struck.
func strike(t *testing.T, op func(*walked) error, k, j int) (struck int) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	sys, err := m.OpenOwned(cuda.Options{AllocationWait: -1})
	require.NoError(t, err)
	w := &walked{d: sys.Devices()[0]}
	s, err := w.d.NewStream(cuda.StreamOptions{})
	w.s, err = own(w, s, err)
	require.NoError(t, err)
	h, err := w.d.NewHostBuffer(4096)
	w.h, err = own(w, h, err)
	require.NoError(t, err)

	m.Inject(sim.Fault{After: k, Result: cuda.Code(driver.Unknown)})
	if j >= 0 {
		m.Inject(sim.Fault{After: k + j, Result: cuda.Code(driver.Unknown)}) // it does not count the call that the first strikes
	}
	var counted atomic.Int64
	m.OnCall(func(string) { counted.Add(1) })
	failed := op(w)
	m.OnCall(nil)
	m.ClearFaults()

	at := fmt.Sprintf("call %d, and %d behind it: %v", k, j, failed)
	_ = sys.Drain(t.Context()) // which reports the teardowns that failed
	require.NoError(t, sys.Drain(t.Context()), at)
	require.Empty(t, sys.Leftovers(), at)
	for i := len(w.owned) - 1; i >= 0; i-- {
		require.NoError(t, w.owned[i].Close(), at)
	}
	require.NoError(t, sys.Close(), at)
	require.Empty(t, m.Fault(), at)
	require.Empty(t, m.Leaks(), at)
	switch calls := int(counted.Load()); {
	case calls <= k:
		return 0
	case j < 0 || calls <= k+j+1:
		return 1
	}
	return 2
}
