package core_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// A request that finds no memory is tried again after whatever came free since its
// latest try, also if that was the last thing pending.
func TestMemoryThatComesBackIsNeverRefused(t *testing.T) {
	const wait = time.Minute
	for name, arrange := range map[string]func(s *core.System, free func()){
		"at once, when the try has just failed": func(s *core.System, free func()) {
			done := s.Pending()
			free()
			done()
		},
		"by the last teardown, after a while": func(s *core.System, free func()) {
			done := s.Pending()
			time.AfterFunc(20*time.Millisecond, func() { free(); done() })
		},
		"by a function of the user, after a teardown": func(s *core.System, free func()) {
			s.Reclaim(&core.Fence{}, closedLife(), func() error { s.Go(free); return nil })
		},
		"by what is kept and the GPU has to pass yet": func(s *core.System, free func()) {
			asked := 0
			s.OnPressure(func(uint64) (uint64, bool) {
				switch asked++; {
				case asked < 10:
					return 0, true
				case asked == 10:
					free()
					return 1, false
				}
				return 0, false
			})
		},
		"by what a teardown hands to the keepers of memory": func(s *core.System, free func()) {
			kept := make(chan uint64, 1)
			s.OnPressure(func(uint64) (uint64, bool) {
				select {
				case n := <-kept:
					free()
					return n, false
				default:
					return 0, false
				}
			})
			done := s.Pending()
			time.AfterFunc(20*time.Millisecond, func() { kept <- 1; done() })
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, s, _ := system(t, core.Config{AllocationWait: wait})
			free := make(chan struct{})
			arranged := false
			r := s.Allocate(1, func() driver.Result {
				select {
				case <-free:
					return driver.Success
				default:
				}
				if !arranged {
					arranged = true
					arrange(s, func() { close(free) })
				}
				return driver.OutOfMemory
			})
			require.Equal(t, driver.Success, r)
			require.NoError(t, s.Drain(t.Context()))
		})
	}
}

// Without anything to come a request is refused at once, whatever the bound, and
// with something that does not come in time at the bound.
func TestWhatDoesNotComeIsNotWaitedForLonger(t *testing.T) {
	refuse := func() driver.Result { return driver.OutOfMemory }
	_, s, _ := system(t, core.Config{AllocationWait: time.Hour})
	require.Equal(t, driver.OutOfMemory, s.Allocate(1, refuse))
	_, s, _ = system(t, core.Config{AllocationWait: 10 * time.Millisecond})
	done := s.Pending()
	require.Equal(t, driver.OutOfMemory, s.Allocate(1, refuse))
	done()
	// Memory that always comes, and never to this request.
	s.OnPressure(func(uint64) (uint64, bool) { return 1, true })
	require.Equal(t, driver.OutOfMemory, s.Allocate(1, refuse))
}
