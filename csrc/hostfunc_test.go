//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc_test

import (
	"sync/atomic"
	"testing"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// The fake driver calls the function at once, so the pipe has the calls in the order
// of the launches, and the release behind them.
func TestHostFuncsAreCalledForEachLaunchAndThenReleased(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	th := enterThread(t, f, d.Foreign(), ours, driver.CaptureGlobal)
	defer th.leave()
	var first, second atomic.Int64
	a, b := d.NewHostFunc(func() { first.Add(1) }), d.NewHostFunc(func() { second.Add(1) })
	require.NotEqual(t, a, b)
	const launches = 20_000 // more than the pipe holds
	for range launches {
		require.Equal(t, driver.Success, d.LaunchHostFunc(ours, stream, a))
	}
	released := make(chan int64, 1)
	d.ReleaseHostFunc(a, func() { released <- first.Load() })
	require.EqualValues(t, launches, <-released, "the release comes behind all calls")
	require.Equal(t, driver.Success, d.LaunchHostFunc(ours, stream, a))
	require.Equal(t, driver.Success, d.LaunchHostFunc(ours, stream, b))
	d.ReleaseHostFunc(b, func() { released <- second.Load() })
	require.EqualValues(t, 1, <-released)
	require.EqualValues(t, launches, first.Load(), "a function that was released is not called")

	// Without a function the goroutine is gone, and comes back.
	c := d.NewHostFunc(func() { second.Add(1) })
	d.ReleaseHostFunc(c, func() { released <- -1 })
	require.EqualValues(t, -1, <-released, "it was never launched")
	c = d.NewHostFunc(func() { second.Add(1) })
	require.Equal(t, driver.Success, d.LaunchHostFunc(ours, stream, c))
	d.ReleaseHostFunc(c, func() { released <- second.Load() })
	require.EqualValues(t, 2, <-released)
}

func TestAHostFuncThatTheDriverRefusesIsReleased(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	f.returns("cuLaunchHostFunc", driver.InvalidHandle)
	defer f.returns("", driver.Success)
	h := d.NewHostFunc(func() { t.Error("it was called") })
	require.Equal(t, driver.InvalidHandle, d.LaunchHostFunc(ours, stream, h))
	released := make(chan struct{})
	d.ReleaseHostFunc(h, func() { close(released) })
	<-released
}
