package core_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// bare is a System without a driver: undoing calls none.
func bare() *core.System {
	return core.NewSystem(nil, 13000, core.Config{Log: slog.New(slog.DiscardHandler)})
}

// teardown of a model: it is refused so often, and counts what may not happen.
type teardown struct {
	refused int
	done    bool
}

// Whatever is refused, and however often: teardowns run the last first, none after it
// succeeded, none before the one behind it, and in the end all of them.
func TestUndoGoesOnWhereItStopped(t *testing.T) {
	rapid.Check(t, func(drawn *rapid.T) {
		refused := rapid.SliceOfN(rapid.SliceOfN(rapid.IntRange(0, 3), 0, 4), 1, 4).Draw(drawn, "refusals of each part of each transaction")
		// In the bubble no timer fires, which would try the leftovers beside the test.
		if !t.Run("", func(t *testing.T) { synctest.Test(t, func(t *testing.T) { undoGoesOn(t, refused) }) }) {
			drawn.Fatal("see above")
		}
	})
}

func undoGoesOn(t *testing.T, refused [][]int) {
	s := bare()
	groups := make([][]*teardown, len(refused))
	expected := func() (n, bytes int) {
		for _, g := range groups {
			for _, d := range g {
				if !d.done {
					n, bytes = n+1, bytes+10
				}
			}
		}
		return n, bytes
	}
	for i := range groups {
		u := s.NewUndo(3)
		for j, n := range refused[i] {
			d := &teardown{refused: n}
			groups[i] = append(groups[i], d)
			u.Own("memory", 10, func() error {
				for k, other := range groups[i] {
					require.Equal(t, k > j, other.done, "part %d is given back while %d is %v", j, k, other.done)
				}
				if d.refused > 0 {
					d.refused--
					return errTest
				}
				d.done = true
				return nil
			})
		}
		before, _ := expected()
		err := u.After(errors.New("cause"))
		require.ErrorContains(t, err, "cause")
		after, _ := expected()
		require.Equal(t, after > before-len(groups[i]), errors.Is(err, errTest), "the error says what is left")
		require.NoError(t, u.After(nil), "the transaction has ended")
	}
	for range 20 {
		n, bytes := expected()
		require.Len(t, s.Leftovers(), n)
		require.Equal(t, bytes, s.LeftoverBytes(3))
		require.Zero(t, s.LeftoverBytes(core.NoDevice))
		err := s.Drain(t.Context())
		if n, _ = expected(); n == 0 {
			require.NoError(t, err)
			break
		}
		require.ErrorIs(t, err, errTest)
	}
	require.Empty(t, s.Leftovers())
	require.True(t, s.Retire())
}

func TestUndoThatIsKept(t *testing.T) {
	s := bare()
	part, whole := s.NewUndo(0), s.NewUndo(0)
	part.Own("event", 0, func() error { t.Error("kept"); return nil })
	whole.Take(part)
	require.NoError(t, part.Back())
	whole.Keep()
	require.ErrorIs(t, whole.After(errTest), errTest)
	require.Empty(t, s.Leftovers())
}

func TestUndoOfAnOwnerGoesOnWithEachClose(t *testing.T) {
	s := bare()
	u, order := s.NewUndo(0), ""
	refused := true
	for _, name := range []string{"a", "b", "c"} {
		u.Own(name, 0, func() error {
			if name == "b" && refused {
				return errTest
			}
			order += name
			return nil
		})
	}
	require.ErrorIs(t, u.Back(), errTest)
	require.ErrorIs(t, u.Back(), errTest)
	refused = false
	require.NoError(t, u.Back())
	require.NoError(t, u.Back())
	require.Equal(t, "cba", order)
	require.Empty(t, s.Leftovers(), "the owner has it")
}

// A teardown that would have to wait is called again soon, and Drain waits for it.
func TestUndoThatWouldHaveToWait(t *testing.T) {
	s := bare()
	u, tries := s.NewUndo(0), 0
	u.Own("managed memory", 0, func() error {
		if tries++; tries < 4 {
			return life.ErrAgain
		}
		return nil
	})
	require.Equal(t, errTest, u.After(errTest), "nothing has failed")
	require.NoError(t, s.Drain(t.Context()))
	require.Equal(t, 4, tries)
}

// One that waits at first and is refused then is tried once by each Drain.
func TestUndoThatWaitsAndIsRefused(t *testing.T) {
	s := bare()
	tries := 0
	s.Left("managed memory", 5, 0, errTest, func() error {
		if tries++; tries%2 == 1 {
			return life.ErrAgain
		}
		return errTest
	})
	for i := range 3 {
		require.ErrorIs(t, s.Drain(t.Context()), errTest)
		require.Equal(t, 2*(i+1), tries)
		require.Len(t, s.Leftovers(), 1)
	}
}

// What GPU work may still use is given back when the GPU has passed it: nothing waits.
func TestUndoBehindAFence(t *testing.T) {
	m, s, st := system(t, core.Config{})
	release := m.Hold(uintptr(st.Handle))
	work(t, st)
	f, err := s.NewFence("x", []*core.Stream{st})
	require.NoError(t, err)
	u := s.NewUndo(0)
	var given atomic.Bool
	u.Own("memory", 1, func() error { given.Store(true); return nil })
	u.Behind(f)
	u.Behind(new(core.Fence))
	require.Equal(t, errTest, u.After(errTest))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, s.Drain(ctx), context.DeadlineExceeded)
	require.False(t, given.Load())
	release()
	require.NoError(t, s.Drain(t.Context()))
	require.True(t, given.Load())
}

// No call is needed: a timer tries it again.
func TestLeftoversAreTriedAgainByThemselves(t *testing.T) {
	var log bytes.Buffer
	s := core.NewSystem(nil, 13000, core.Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	var tries atomic.Int64
	s.Left("event", 0, 0, errTest, func() error {
		if tries.Add(1) < 3 {
			return errTest
		}
		return nil
	})
	require.False(t, s.Retire())
	require.Eventually(t, func() bool { return len(s.Leftovers()) == 0 }, time.Minute, time.Millisecond)
	require.Equal(t, int64(3), tries.Load())
	require.Equal(t, 1, bytes.Count(log.Bytes(), []byte("did not take back")), "it is logged once")
}

// An allocation that lacks memory tries them, once, and counts what they hold.
func TestLeftoversAndMemory(t *testing.T) {
	s := bare()
	refused := true
	s.Left("memory", 2<<20, 1, errTest, func() error {
		if refused {
			return errTest
		}
		return nil
	})
	tries := 0
	try := func() driver.Result {
		if tries++; tries == 1 || refused {
			return driver.OutOfMemory
		}
		return driver.Success
	}
	require.Equal(t, driver.OutOfMemory, s.Allocate(1, try))
	require.Contains(t, s.Missing(1, core.Lack{}), "2 MiB are left of operations that failed")
	require.Empty(t, s.Missing(0, core.Lack{}))
	tries, refused = 0, false
	require.Equal(t, driver.Success, s.Allocate(1, try))
	require.Equal(t, 2, tries)
	require.Empty(t, s.Missing(1, core.Lack{}))
}

// System.Close names what is left as the library's own.
func TestLeftoversAtTheEnd(t *testing.T) {
	s := bare()
	for i := range 2 {
		s.Left(fmt.Sprint("memory", i), 1<<20, 1, errTest, func() error { return errTest })
	}
	s.Settle()
	require.False(t, s.Retire())
	err := s.InUse()
	require.ErrorContains(t, err, "1 MiB of memory0, which the library could not give back")
	require.ErrorContains(t, err, "1 such leftover more")
}
