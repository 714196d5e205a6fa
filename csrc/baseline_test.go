//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc_test

import (
	"encoding/hex"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/cbench"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// The C loops of internal/cbench are checked here, where the fake driver is.

func openLoops(t *testing.T, f *fake) *cbench.Library {
	t.Helper()
	l, err := cbench.Open(f.path)
	require.NoError(t, err)
	return l
}

// plain drops from calls what only their place in the record tells.
func plain(calls []recorded) []recorded {
	for i := range calls {
		calls[i].Thread = 0
	}
	return calls
}

// A baseline that made other calls than the library would compare nothing.
func TestStepLoopsAreTheLibrarysSteps(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	l := openLoops(t, f)
	for _, current := range []driver.Context{0, ours, theirs} {
		th := enterThread(t, f, d.Foreign(), current, driver.CaptureGlobal)
		_, r := d.StreamIsCapturing(ours, stream)
		require.Equal(t, driver.Success, r)
		want := plain(f.calls(t))

		took, r := l.CaptureSteps(ours, stream, 3)
		require.Equal(t, driver.Success, r)
		require.Positive(t, took)
		require.Equal(t, slices.Concat(want, want, want), plain(f.calls(t)))
		th.requireLeft(current, driver.CaptureGlobal)
		th.leave()
	}

	prop := driver.AllocationProp{Type: driver.AllocationPinned, Location: driver.Location{Type: driver.LocationDevice, ID: 5}}
	_, r := d.MemGetAllocationGranularity(prop, driver.GranularityMinimum)
	require.Equal(t, driver.Success, r)
	want := plain(f.calls(t))
	_, r = l.GranularitySteps(5, 2)
	require.Equal(t, driver.Success, r)
	require.Equal(t, slices.Concat(want, want), plain(f.calls(t)))
}

var (
	onDevice           = unhex("01000000 00000000 01000000 05000000 0000000000000000 0000000000000000")
	deviceGrant        = unhex("01000000 05000000 03000000")
	reserved           = uint64(0x7f0000000000)
	created            = uint64(0x4000000000000001)
	zero               = uint64(0)
	chunk       uint64 = 2 << 20
)

func call(entry string, args ...any) recorded { return recorded{Entry: entry, Args: le(args...)} }

func sameCalls(t *testing.T, want, got []recorded) {
	t.Helper()
	require.Equal(t, entries(want), entries(got))
	for i := range want {
		require.Equal(t, hex.EncodeToString(want[i].Args), hex.EncodeToString(got[i].Args), "the arguments of call %d, %s", i, want[i].Entry)
	}
}

func TestCycleLoop(t *testing.T) {
	f := buildFake(t)
	l := openLoops(t, f)
	cycle := []recorded{
		call("cuMemAddressReserve", chunk, zero, zero, zero),
		call("cuMemCreate", chunk, onDevice, zero),
		call("cuMemMap", reserved, chunk, zero, created, zero),
		call("cuMemSetAccess", reserved, chunk, deviceGrant, uint64(1)),
		call("cuMemUnmap", reserved, chunk),
		call("cuMemRelease", created),
		call("cuMemAddressFree", reserved, chunk),
	}
	took, r := l.VMMCycle(5, chunk, 2)
	require.Equal(t, driver.Success, r)
	require.Positive(t, took)
	sameCalls(t, slices.Concat(cycle, cycle), f.calls(t))

	// A failure is returned, and what was made before it is released.
	for entry, want := range map[string][]recorded{
		"cuMemAddressReserve": cycle[:1],
		"cuMemCreate":         {cycle[0], cycle[1], cycle[6]},
		"cuMemMap":            {cycle[0], cycle[1], cycle[2], cycle[5], cycle[6]},
		"cuMemSetAccess":      cycle,
		"cuMemAddressFree":    cycle,
	} {
		f.returns(entry, driver.OutOfMemory)
		_, r := l.VMMCycle(5, chunk, 2)
		require.Equal(t, driver.OutOfMemory, r, entry)
		sameCalls(t, want, f.calls(t))
	}
}

func TestGrowLoop(t *testing.T) {
	f := buildFake(t)
	l := openLoops(t, f)
	steps := [][]uint64{{chunk}, {}, {2 * chunk, chunk}}
	create := func(n uint64) recorded { return call("cuMemCreate", n, onDevice, zero) }
	mapAt := func(at, n uint64) recorded { return call("cuMemMap", reserved+at, n, zero, created, zero) }
	grant := func(at, n uint64) recorded {
		return call("cuMemSetAccess", reserved+at, n, deviceGrant, uint64(1))
	}
	unmap := func(at, n uint64) recorded { return call("cuMemUnmap", reserved+at, n) }
	reserve, release, free := call("cuMemAddressReserve", 8*chunk, zero, zero, zero), call("cuMemRelease", created), call("cuMemAddressFree", reserved, 8*chunk)

	took, r := l.GrowLoop(5, 8*chunk, steps)
	require.Equal(t, driver.Success, r)
	require.Positive(t, took)
	sameCalls(t, []recorded{
		reserve,
		create(chunk), mapAt(0, chunk), grant(0, chunk),
		create(2 * chunk), mapAt(chunk, 2*chunk), create(chunk), mapAt(3*chunk, chunk), grant(chunk, 3*chunk),
		unmap(0, chunk), release, unmap(chunk, 2*chunk), release, unmap(3*chunk, chunk), release,
		free,
	}, f.calls(t))

	f.returns("cuMemMap", driver.OutOfMemory, 1)
	_, r = l.GrowLoop(5, 8*chunk, steps)
	require.Equal(t, driver.OutOfMemory, r)
	sameCalls(t, []recorded{
		reserve,
		create(chunk), mapAt(0, chunk), grant(0, chunk),
		create(2 * chunk), mapAt(chunk, 2*chunk),
		unmap(0, chunk), release, release,
		free,
	}, f.calls(t))

	f.returns("cuMemAddressReserve", driver.OutOfMemory)
	_, r = l.GrowLoop(5, 8*chunk, steps)
	require.Equal(t, driver.OutOfMemory, r)
	sameCalls(t, []recorded{reserve}, f.calls(t))
}

func TestCopyLoop(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	l := openLoops(t, f)
	th := enterThread(t, f, d.Foreign(), theirs, driver.CaptureThreadLocal)
	defer th.leave()
	host := uint64(uintptr(hostPtr))
	took, r := l.CopyLoop(ours, stream, ptr, hostPtr, 10, 4, 2)
	require.Equal(t, driver.Success, r)
	require.Positive(t, took)
	round := []recorded{
		call("cuMemcpyHtoDAsync", ptr, host, uint64(4), stream),
		call("cuMemcpyHtoDAsync", ptr+4, host+4, uint64(4), stream),
		call("cuMemcpyHtoDAsync", ptr+8, host+8, uint64(2), stream),
		call("cuStreamSynchronize", stream),
	}
	calls := f.calls(t)
	sameCalls(t, slices.Concat(
		[]recorded{call("cuCtxGetCurrent"), call("cuCtxSetCurrent", ours)}, round, round, []recorded{call("cuCtxSetCurrent", theirs)},
	), calls)
	require.Equal(t, ours, calls[2].Context)
	th.requireLeft(theirs, driver.CaptureThreadLocal)

	f.returns("cuMemcpyHtoDAsync", driver.InvalidValue, 1)
	_, r = l.CopyLoop(ours, stream, ptr, hostPtr, 10, 4, 2)
	require.Equal(t, driver.InvalidValue, r)
	th.requireLeft(theirs, driver.CaptureThreadLocal)
	_, r = l.CopyLoop(ours, stream, ptr, hostPtr, 10, 0, 1)
	require.Equal(t, driver.InvalidValue, r, "chunks of nothing")
}

func TestCaptureHolder(t *testing.T) {
	f := buildFake(t)
	l := openLoops(t, f)
	var h cbench.CaptureHolder
	require.Equal(t, driver.Success, h.End(), "a holder that never held")

	begin, err := h.Start(l, ours, stream, driver.CaptureThreadLocal)
	require.NoError(t, err)
	require.Equal(t, driver.Success, begin)
	calls := f.calls(t)
	sameCalls(t, []recorded{call("cuCtxSetCurrent", ours), call("cuStreamBeginCapture", stream, int32(driver.CaptureThreadLocal))}, calls)
	holder := calls[1].Thread
	require.Equal(t, ours, calls[1].Context)
	require.Equal(t, driver.CaptureGlobal, calls[1].Mode, "a thread whose mode was not switched")
	require.True(t, isThread(holder))
	_, err = h.Start(l, ours, stream, driver.CaptureGlobal)
	require.Error(t, err, "it holds one already")

	require.Equal(t, driver.Success, h.End())
	calls = f.calls(t)
	sameCalls(t, []recorded{call("cuStreamEndCapture", stream), call("cuGraphDestroy", uint64(0x6000000001)), call("cuCtxSetCurrent", zero)}, calls)
	for _, c := range calls {
		require.Equal(t, holder, c.Thread, "%s on the holder's thread", c.Entry)
	}
	require.Eventually(t, func() bool { return !isThread(holder) }, time.Minute, time.Millisecond, "the thread is joined")

	// A capture that another call broke, and one that could not begin.
	f.returns("cuStreamEndCapture", driver.CaptureInvalid)
	_, err = h.Start(l, ours, stream, driver.CaptureGlobal)
	require.NoError(t, err)
	require.Equal(t, driver.CaptureInvalid, h.End())
	f.returns("cuStreamBeginCapture", driver.IllegalState)
	f.calls(t)
	begin, err = h.Start(l, ours, stream, driver.CaptureGlobal)
	require.NoError(t, err)
	require.Equal(t, driver.IllegalState, begin)
	require.Equal(t, driver.Success, h.End())
	require.Equal(t, []string{"cuCtxSetCurrent", "cuStreamBeginCapture", "cuCtxSetCurrent"}, entries(f.calls(t)))
}

// isThread reports whether the process has such a thread now.
func isThread(id int) bool { return unix.Tgkill(unix.Getpid(), id, 0) == nil }

func TestLoopsOfNoLibrary(t *testing.T) {
	require.True(t, cbench.Available)
	_, err := cbench.Open(filepath.Join(t.TempDir(), "none.so"))
	require.ErrorContains(t, err, "none.so")
	f := buildFake(t, "FAKECUDA_NOT_CUDA")
	_, err = cbench.Open(f.path)
	require.ErrorContains(t, err, "has no cuThreadExchangeStreamCaptureMode")
	require.Positive(t, cbench.EmptyLoop(1000))
}
