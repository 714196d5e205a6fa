//go:build linux

package phys_test

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/stretchr/testify/require"
)

// swap gives the handle other memory, as soon as no one uses what it has.
func swap(t require.TestingT, s *core.System, h *phys.Handle) {
	for {
		err := h.Take("test")
		if err == nil {
			break
		}
		require.ErrorIs(t, err, cuda.ErrInUse)
	}
	require.Equal(t, driver.Success, h.Drop())
	d, r := s.Drv.MemCreate(h.Size, h.Asked)
	require.Equal(t, driver.Success, r)
	h.Give(d)
}

// Each state of the memory, and what each call does in it.
func TestMemoryThatIsTaken(t *testing.T) {
	const present, used, taken, away = 0, 1, 2, 3
	refused := errors.New("refused")
	type event struct {
		name string
		do   func(h *phys.Handle, s *core.System) error
		// to is the state after the event, by the state before; panics is a mistake of the
		// caller, and no the state unchanged with an error.
		to [4]int
	}
	const panics, no = -1, -2
	use := func(h *phys.Handle, _ *core.System) error { _, err := h.Use("test"); return err }
	events := []event{
		{"Use", use, [4]int{used, used, no, no}},
		{"Done", func(h *phys.Handle, _ *core.System) error { h.Done(); return nil }, [4]int{panics, present, panics, panics}},
		{"Take", func(h *phys.Handle, _ *core.System) error { return h.Take("test") }, [4]int{taken, no, no, no}},
		{"Drop", func(h *phys.Handle, _ *core.System) error { require.Equal(t, driver.Success, h.Drop()); return nil }, [4]int{panics, panics, away, panics}},
		{"Return", func(h *phys.Handle, _ *core.System) error { h.Return(); return nil }, [4]int{panics, panics, present, panics}},
		{"Give", func(h *phys.Handle, s *core.System) error {
			d, r := s.Drv.MemCreate(h.Size, h.Asked)
			if r != driver.Success {
				return refused
			}
			defer func() {
				if p := recover(); p != nil {
					s.Drv.MemRelease(d)
					panic(p)
				}
			}()
			h.Give(d)
			return nil
		}, [4]int{panics, panics, panics, present}},
		{"Renew", func(h *phys.Handle, _ *core.System) error {
			if r, err := h.Renew(); err != nil || r != driver.Success {
				return refused
			}
			return nil
		}, [4]int{panics, panics, panics, present}},
	}
	for _, e := range events {
		for before, after := range e.to {
			m, stats, s := open(t)
			h := createShareable(t, s)
			id := h.ID()
			if before == used {
				require.NoError(t, use(h, s))
			}
			if before >= taken {
				require.NoError(t, h.Take("test"))
			}
			if before == away {
				m.Inject(sim.Fault{Call: "cuMemRelease", Result: cuda.Code(driver.Unknown)})
				require.Equal(t, driver.Unknown, h.Drop(), "it is still taken")
				require.Equal(t, driver.Success, h.Drop())
				require.Zero(t, stats.Stats().AllocatedBytes)
				require.Zero(t, m.Live()[sim.KindAllocation])
			}
			if after == panics {
				require.Panics(t, func() { _ = e.do(h, s) }, "%s in state %d", e.name, before)
			} else if err := e.do(h, s); after == no {
				refusal := cuda.ErrSuspended
				if e.name == "Take" {
					refusal = cuda.ErrInUse
				}
				require.ErrorIs(t, err, refusal, "%s in state %d", e.name, before)
			} else {
				require.NoError(t, err, "%s in state %d", e.name, before)
			}
			if after == present || after == used {
				_, err := h.Reported("test")
				require.NoError(t, err)
				require.Equal(t, before != away, h.ID() == id, "other memory has another identity")
				require.Equal(t, 2*mib, stats.Stats().AllocatedBytes)
				require.EqualValues(t, 2*mib, h.BytesOn(0))
				require.Zero(t, h.BytesOn(1), "it lies on device 0")
			} else if after == away {
				require.Zero(t, h.BytesOn(0), "it was released")
			}
			require.Equal(t, driver.Success, h.Release())
			require.Zero(t, m.Live()[sim.KindAllocation], "%s in state %d", e.name, before)
		}
	}
}

func TestWhatNoOneTakes(t *testing.T) {
	_, _, s := open(t)
	h := createShareable(t, s)
	defer released(t, h)
	file := exported(t, h)
	defer file.Close()
	again, err := phys.Import("test", s, int(file.Fd()), 2*mib)
	require.NoError(t, err)
	defer released(t, again)
	require.ErrorIs(t, again.Take("test"), cuda.ErrNotSupported)
}

// Memory that was exported is private again once it is other memory; what a pool recycled
// stays refused, since its bytes may come back.
func TestOtherMemoryIsPrivate(t *testing.T) {
	_, stats, s := open(t)
	h := createShareable(t, s)
	defer released(t, h)
	require.NoError(t, exported(t, h).Close())
	swap(t, s, h)
	require.Equal(t, 1, stats.Stats().SharedReleased)
	require.False(t, h.Exported())
	require.True(t, h.Recycle())
	swap(t, s, h)
	_, err := h.Export("test")
	require.ErrorIs(t, err, cuda.ErrNotPermitted)
}

// Export and Reported run while the memory is swapped: each sees the old memory or the
// new one, and the driver is never asked about a handle that was released.
func TestSwapsBesideUsers(t *testing.T) {
	m, _, s := open(t)
	h := createShareable(t, s)
	defer released(t, h)
	reported := m.Count("cuMemGetAllocationPropertiesFromHandle")
	stop := make(chan struct{})
	var wg sync.WaitGroup
	users := []func() error{
		func() error {
			n, err := h.Export("test")
			if err == nil {
				err = fd.Close(n)
			}
			return err
		},
		func() error { _, err := h.Reported("test"); return err },
		func() error { h.ID(); return nil },
	}
	for _, f := range users {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := f(); err != nil && !errors.Is(err, cuda.ErrSuspended) {
					t.Error(err)
					return
				}
			}
		})
	}
	last := h.ID()
	asked := func() bool { return m.Count("cuMemGetAllocationPropertiesFromHandle") > reported }
	for start, n := time.Now(), 0; n < 20 || time.Since(start) < 200*time.Millisecond || !asked() && time.Since(start) < 10*time.Second; n++ {
		swap(t, s, h)
		require.Greater(t, h.ID(), last)
		last = h.ID()
	}
	close(stop)
	wg.Wait()
	require.True(t, asked())
}
