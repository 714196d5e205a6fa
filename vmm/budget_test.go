package vmm_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func inBudget(t *testing.T, d *cuda.Device, b *cuda.Budget, name string) *vmm.Buffer {
	t.Helper()
	buf, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib), Name: name, Tag: "llm", Budget: b})
	require.NoError(t, err)
	return buf
}

// A shared chunk counts once, for the buffer that made it, until its last owner is closed.
func TestSharedMemoryIsChargedOnce(t *testing.T) {
	_, d := open(t)
	b := cuda.NewBudget(8*mib, cuda.BudgetOptions{Name: "gpu"})
	buf := inBudget(t, d, b, "cache")
	_, err := buf.Append(nil, make([]byte, 3*mib))
	require.NoError(t, err)
	require.Equal(t, 4*mib, b.Stats().Committed)
	fork, err := buf.Fork(nil, 3*mib, vmm.ForkOptions{})
	require.NoError(t, err)
	require.Equal(t, cuda.BudgetStats{Name: "gpu", Limit: 8 * mib, Committed: 6 * mib, Peak: 6 * mib, Owners: []cuda.BudgetUse{
		{Kind: "buffer", Name: "cache", Tag: "llm", Committed: 4 * mib, InUse: 3 * mib},
		{Kind: "buffer", Name: "cache", Tag: "llm", Committed: 2 * mib, InUse: 3 * mib},
	}}, b.Stats())
	require.Equal(t, []cuda.BudgetUse{{Tag: "llm", Committed: 6 * mib, InUse: 6 * mib}}, b.Stats().ByTag())

	moved, err := buf.Move(vmm.MoveOptions{})
	require.NoError(t, err)
	require.Equal(t, 6*mib, b.Stats().Committed)
	require.NoError(t, buf.Close())
	require.Equal(t, 6*mib, b.Stats().Committed)
	require.Equal(t, 3*mib, b.Stats().Owners[0].InUse, "of the successor")
	require.NoError(t, moved.Close())
	st := b.Stats()
	require.Equal(t, 4*mib, st.Committed, "the fork has a chunk of the buffer's")
	require.NoError(t, fork.Close())
	st = b.Stats()
	require.Zero(t, st.Committed)
	require.Empty(t, st.Owners)
	require.Equal(t, 6*mib, st.Peak)
}

// What the budget has no room for is refused before the driver is called, and says who has it.
func TestABudgetRefuses(t *testing.T) {
	m, d := open(t)
	all := cuda.NewBudget(6*mib, cuda.BudgetOptions{Name: "all"})
	b := cuda.NewBudget(0, cuda.BudgetOptions{Parent: all})
	buf := inBudget(t, d, b, "weights")
	require.NoError(t, buf.Grow(4*mib))
	wide, err := vmm.NewBuffer(d, vmm.BufferOptions{})
	require.NoError(t, err)
	closed(t, wide)
	_, err = wide.AppendUndefined(8 * mib)
	require.NoError(t, err)
	source, err := wide.Slice(0, 8*mib)
	require.NoError(t, err)
	for name, grow := range map[string]func() error{
		"Grow":            func() error { return buf.Grow(8 * mib) },
		"Append":          func() error { _, err := buf.Append(nil, make([]byte, 8*mib)); return err },
		"AppendUndefined": func() error { _, err := buf.AppendUndefined(8 * mib); return err },
		"AppendSlice":     func() error { _, err := buf.AppendSlice(nil, source); return err },
		"Resize":          func() error { return buf.Resize(nil, 8*mib) },
		"CreateWithin":    func() error { _, err := vmm.CreateWithin(b, d, 4*mib, vmm.Properties{}); return err },
	} {
		before, creations := buf.Stats(), m.Count("cuMemCreate")-m.Count("cuMemRelease")
		err := grow()
		require.ErrorIs(t, err, cuda.ErrBudget, name)
		require.ErrorContains(t, err, `of budget "all", which has`, name)
		require.ErrorContains(t, err, `buffer "weights" tagged "llm" `, name)
		require.ErrorContains(t, err, "Budget.SetLimit", name)
		require.Equal(t, before, buf.Stats(), name)
		require.Equal(t, creations, m.Count("cuMemCreate")-m.Count("cuMemRelease"), name)
		require.Equal(t, 4*mib, all.Stats().Committed, name)
	}
	require.NoError(t, all.SetLimit(2*mib), "below what is committed")
	require.Equal(t, 4*mib, buf.Stats().Committed)
	require.ErrorIs(t, buf.Grow(6*mib), cuda.ErrBudget)
	require.NoError(t, all.SetLimit(0))
	require.NoError(t, buf.Grow(6*mib))
	require.NoError(t, buf.Close())
	require.Zero(t, all.Stats().Committed)
}

// A failure of the driver gives the charge back, and so does the undo of a build; what the
// driver does not take back stays charged until it does.
func TestFailuresGiveTheChargeBack(t *testing.T) {
	m, d := open(t)
	b := cuda.NewBudget(0, cuda.BudgetOptions{})
	buf := inBudget(t, d, b, "")
	for _, call := range []string{"cuMemCreate", "cuMemMap", "cuMemSetAccess"} {
		lift := m.Inject(sim.Fault{Call: call, Result: 999, Times: -1})
		require.Error(t, buf.Grow(6*mib), call)
		lift()
		require.Zero(t, b.Stats().Committed, call)
	}
	liftMap := m.Inject(sim.Fault{Call: "cuMemMap", Result: 999, Times: -1})
	liftRelease := m.Inject(sim.Fault{Call: "cuMemRelease", Result: 999, Times: -1})
	require.Error(t, buf.Grow(6*mib))
	require.Equal(t, 6*mib, b.Stats().Committed, "the driver has the memory")
	liftMap()
	liftRelease()
	require.NoError(t, d.System().Drain(t.Context()))
	require.Zero(t, b.Stats().Committed)
	require.NoError(t, buf.Close())
}

// Owners are asked without a lock of the buffer that grows, and can free what they like.
func TestOwnersMakeRoom(t *testing.T) {
	m, d := open(t)
	b := cuda.NewBudget(6*mib, cuda.BudgetOptions{})
	buf, cold := inBudget(t, d, b, "hot"), inBudget(t, d, b, "cold")
	require.NoError(t, cold.Grow(4*mib))
	s := stream(t, d)
	m.Hold(s.Handle())
	require.NoError(t, s.Memset(cold.Ptr(), 1, 1))
	var needs []int
	remove, err := b.OnPressure(0, func(need int) int {
		needs = append(needs, need)
		require.NoError(t, buf.Clip(), "of the buffer that grows")
		require.NoError(t, cold.CloseAfter(s))
		m.Release(s.Handle())
		return 4 * mib
	})
	require.NoError(t, err)
	require.NoError(t, buf.Grow(6*mib))
	require.Equal(t, []int{4 * mib}, needs, "for all that the request lacks")
	require.Equal(t, 6*mib, b.Stats().Committed)
	remove()
	require.ErrorIs(t, buf.Grow(8*mib), cuda.ErrBudget)
	require.Len(t, needs, 1)
	require.NoError(t, buf.Close())
}

// Memory that was closed and waits for the GPU makes room by itself.
func TestWhatWasClosedMakesRoom(t *testing.T) {
	m, d := open(t)
	b := cuda.NewBudget(6*mib, cuda.BudgetOptions{})
	buf, cold := inBudget(t, d, b, "hot"), inBudget(t, d, b, "cold")
	require.NoError(t, cold.Grow(4*mib))
	s := stream(t, d)
	m.Hold(s.Handle())
	require.NoError(t, cold.CloseAfter(s))
	require.Equal(t, 4*mib, b.Stats().Committed, "the reclaimer has it")
	grown := make(chan error)
	go func() { grown <- buf.Grow(6 * mib) }()
	m.Release(s.Handle())
	require.NoError(t, <-grown)
	require.NoError(t, buf.Close())
	require.Zero(t, b.Stats().Committed)
}

// Memory that is suspended leaves its budget, and comes back within it.
func TestSuspendedMemoryLeavesItsBudget(t *testing.T) {
	_, d := open(t)
	b := cuda.NewBudget(6*mib, cuda.BudgetOptions{})
	buf, other := inBudget(t, d, b, "asleep"), inBudget(t, d, b, "awake")
	_, err := buf.Append(nil, pattern(4*mib, 1))
	require.NoError(t, err)
	s, err := vmm.Suspend(t.Context(), vmm.SuspendOptions{}, buf)
	require.NoError(t, err)
	require.Zero(t, b.Stats().Committed)
	require.NoError(t, other.Grow(4*mib))
	err = s.Resume(context.Background())
	require.ErrorIs(t, err, cuda.ErrBudget)
	require.ErrorContains(t, err, `buffer "awake" tagged "llm" 4 MiB`)
	require.Equal(t, 4*mib, b.Stats().Committed, "and nothing of what sleeps on")
	require.NoError(t, other.Close())
	require.NoError(t, s.Resume(t.Context()))
	require.Equal(t, 4*mib, b.Stats().Committed)
	got := make([]byte, 4*mib)
	all, err := buf.Slice(0, 4*mib)
	require.NoError(t, err)
	require.NoError(t, all.CopyTo(nil, got))
	require.Equal(t, pattern(4*mib, 1), got)
	_, err = vmm.Suspend(t.Context(), vmm.SuspendOptions{}, buf)
	require.NoError(t, err)
	require.NoError(t, buf.Close())
	require.Zero(t, b.Stats().Committed, "it was credited once")
}

func TestInvalidBudgets(t *testing.T) {
	_, d := open(t)
	for _, b := range []*cuda.Budget{{}, cuda.NewBudget(-1, cuda.BudgetOptions{}), cuda.NewBudget(1, cuda.BudgetOptions{Name: "a\nb"}),
		cuda.NewBudget(1, cuda.BudgetOptions{Parent: new(cuda.Budget)})} {
		_, err := vmm.NewBuffer(d, vmm.BufferOptions{Budget: b})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		_, err = vmm.CreateWithin(b, d, 2*mib, vmm.Properties{})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.ErrorIs(t, b.SetLimit(1), cuda.ErrInvalidArgument)
		_, err = b.OnPressure(0, func(int) int { return 0 })
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	good := cuda.NewBudget(1, cuda.BudgetOptions{})
	require.ErrorIs(t, good.SetLimit(-1), cuda.ErrInvalidArgument)
	_, err := good.OnPressure(0, nil)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	a, err := vmm.CreateWithin(nil, d, 2*mib, vmm.Properties{})
	require.NoError(t, err)
	require.NoError(t, a.Close())
}

// Sixteen goroutines that grow, fork, move and close buffers, some after the GPU, leave each
// budget with exactly what its owners have.
func TestBudgetsUnderGoroutines(t *testing.T) {
	const limit = 48 * mib
	_, d := open(t)
	top := cuda.NewBudget(limit, cuda.BudgetOptions{})
	below := []*cuda.Budget{top, cuda.NewBudget(24*mib, cuda.BudgetOptions{Parent: top})}
	streams := []*cuda.Stream{stream(t, d), stream(t, d)}
	var all sync.WaitGroup
	for g := range 16 {
		all.Go(func() {
			s := streams[g%2]
			for i := range 6 {
				buf, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 16 * mib, Chunks: vmm.FixedChunks(2 * mib), Budget: below[g%2]})
				if !noError(t, err) {
					return
				}
				_, err = buf.AppendUndefined((i%3 + 1) * 2 * mib)
				if err == nil && i%2 == 0 {
					var fork *vmm.Buffer
					if fork, err = buf.Fork(s, buf.Len()-1, vmm.ForkOptions{}); err == nil {
						noError(t, fork.CloseAfter(s))
					}
				}
				if err != nil && !isBudget(err) {
					noError(t, err)
				}
				if c := top.Stats().Committed; c > limit {
					t.Errorf("%d committed of %d", c, limit)
				}
				if i%3 == 0 {
					noError(t, buf.Close())
				} else {
					noError(t, buf.CloseAfter(s))
				}
			}
		})
	}
	all.Wait()
	require.NoError(t, d.System().Drain(t.Context()))
	for _, b := range below {
		require.Zero(t, b.Stats().Committed)
		require.Empty(t, b.Stats().Owners)
	}
}

// noError is require.NoError for other goroutines.
func noError(t *testing.T, err error) bool {
	if err != nil {
		t.Error(err)
	}
	return err == nil
}

func isBudget(err error) bool { return errors.Is(err, cuda.ErrBudget) }
