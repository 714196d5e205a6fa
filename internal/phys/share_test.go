//go:build linux

package phys_test

import (
	"os"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/stretchr/testify/require"
)

var shareable = func() driver.AllocationProp {
	p := onDevice
	p.RequestedHandleTypes = driver.HandlePosixFD
	return p
}()

func createShareable(t *testing.T, s *core.System) *phys.Handle {
	t.Helper()
	h, r, _ := phys.Create(s, 2*mib, shareable, nil)
	require.Equal(t, driver.Success, r)
	return h
}

func released(t *testing.T, h *phys.Handle) {
	t.Helper()
	require.Equal(t, driver.Success, h.Release())
}

func exported(t *testing.T, h *phys.Handle) *os.File {
	t.Helper()
	fd, err := h.Export("test")
	require.NoError(t, err)
	return os.NewFile(uintptr(fd), "exported")
}

func TestExportedMemoryIsMarkedForEver(t *testing.T) {
	m, s, sys := open(t)
	h := createShareable(t, sys)
	require.False(t, h.Exported())
	file := exported(t, h)
	require.True(t, h.Exported())
	require.False(t, h.Recycle(), "another process may hold it")
	again, err := phys.Import("test", sys, int(file.Fd()), 2*mib)
	require.NoError(t, err)
	require.NotEqual(t, h.ID(), again.ID())
	require.True(t, again.Exported())
	require.False(t, again.Recycle())
	require.Equal(t, driver.Location{Type: driver.LocationDevice}, again.Asked.Location)
	require.Zero(t, again.Asked.RequestedHandleTypes)
	_, err = again.Export("test")
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.NoError(t, file.Close())

	// What was released is not taken for free.
	released(t, h)
	require.Equal(t, 1, s.Stats().SharedReleased)
	require.Equal(t, 2*mib, s.Stats().SharedReleasedBytes)
	require.Equal(t, 1, m.Live()[sim.KindAllocation])
	released(t, again)
	require.Equal(t, 1, s.Stats().SharedReleased)
}

func TestAnExportThatFailedMayStillBeHeld(t *testing.T) {
	m, s, sys := open(t)
	h := createShareable(t, sys)
	m.Inject(sim.Fault{Call: "cuMemExportToShareableHandle", Result: cuda.Code(driver.OperatingSystem)})
	_, err := h.Export("test")
	require.ErrorContains(t, err, "ulimit -n")
	require.True(t, h.Exported())
	released(t, h)
	require.Equal(t, 1, s.Stats().SharedReleased)
}

func TestImportsThatFailLeaveNothing(t *testing.T) {
	m, _, sys := open(t)
	h := createShareable(t, sys)
	defer released(t, h)
	file := exported(t, h)
	defer file.Close()
	for _, c := range []struct {
		calls []string
		want  string
	}{
		{[]string{"cuMemImportFromShareableHandle"}, "cuMemImportFromShareableHandle returned"},
		{[]string{"cuMemGetAllocationPropertiesFromHandle"}, "cuMemGetAllocationPropertiesFromHandle returned"},
		{[]string{"cuMemGetAllocationPropertiesFromHandle", "cuMemRelease"}, "undoing it failed, which System.Drain tries again"},
	} {
		for _, call := range c.calls {
			m.Inject(sim.Fault{Call: call, Result: cuda.Code(driver.NotPermitted)})
		}
		_, err := phys.Import("test", sys, int(file.Fd()), 2*mib)
		require.ErrorIs(t, err, cuda.ErrNotPermitted)
		require.ErrorContains(t, err, c.want)
		require.NoError(t, sys.Drain(t.Context()))
		require.Equal(t, 1, m.Live()[sim.KindAllocation])
	}
	null, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer null.Close()
	_, err = phys.Import("test", sys, int(null.Fd()), 2*mib)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
}

// What an owner wrote never reaches another process when the memory goes to
// another owner.
func TestMemoryOfAnEarlierOwnerIsNotExported(t *testing.T) {
	_, _, sys := open(t)
	h := createShareable(t, sys)
	defer released(t, h)
	require.True(t, h.Recycle())
	require.True(t, h.Recycle(), "it may go on to many")
	_, err := h.Export("test")
	require.ErrorIs(t, err, cuda.ErrNotPermitted)
	require.ErrorContains(t, err, "earlier owner")
	require.False(t, h.Exported())
}

// Memory that followers alone have counts as theirs until anything else exports it, or they are
// not told any more. A pool takes none of it.
func TestWhatMakesMemoryFollowed(t *testing.T) {
	_, _, sys := open(t)
	follow := func(h *phys.Handle) {
		fd, err := h.ExportFollowed("test")
		require.NoError(t, err)
		require.NoError(t, os.NewFile(uintptr(fd), "followed").Close())
	}
	for name, c := range map[string]struct {
		after    func(h *phys.Handle)
		followed bool
	}{
		"nothing":         {func(*phys.Handle) {}, true},
		"followed again":  {follow, true},
		"an export":       {func(h *phys.Handle) { require.NoError(t, exported(t, h).Close()); follow(h) }, false},
		"no one is told":  {func(h *phys.Handle) { h.Unfollowed("p") }, false},
		"it comes anew":   {func(h *phys.Handle) { swap(t, sys, h); require.False(t, h.Exported()) }, false},
		"and is followed": {func(h *phys.Handle) { swap(t, sys, h); follow(h) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			h := createShareable(t, sys)
			defer released(t, h)
			h.Unfollowed("p")
			require.False(t, h.Exported())
			follow(h)
			require.True(t, h.Followed())
			require.True(t, h.Exported())
			c.after(h)
			require.Equal(t, c.followed, h.Followed())
			require.Equal(t, name == "it comes anew", h.Recycle())
		})
	}
}
