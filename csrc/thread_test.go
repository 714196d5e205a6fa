//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc_test

import (
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// What happens to the thread when one of the steps around a call fails. The
// whole steps are checked for every call by TestCalls.
func TestThreadWhereAStepFails(t *testing.T) {
	const (
		exchange = "cuThreadExchangeStreamCaptureMode"
		get      = "cuCtxGetCurrent"
		set      = "cuCtxSetCurrent"
		free     = "cuMemFree"
	)
	f := buildFake(t)
	d := f.open(t)
	for _, c := range []struct {
		name    string
		current driver.Context
		step    string
		result  driver.Result
		after   uint32 // so many times the step works
		want    driver.Result
		calls   []string
		left    driver.Context
		mode    driver.CaptureMode
	}{
		{"the mode cannot be exchanged, as before cuInit", theirs, exchange, driver.NotInitialized, 0,
			driver.Success, []string{exchange, get, set, free, set}, theirs, driver.CaptureGlobal},
		{"the mode cannot be restored", theirs, exchange, driver.Unknown, 1,
			driver.Success, []string{exchange, get, set, free, set, exchange}, theirs, driver.CaptureRelaxed},
		{"the current context cannot be read", theirs, get, driver.Deinitialized, 0,
			driver.Deinitialized, []string{exchange, get, exchange}, theirs, driver.CaptureGlobal},
		{"the context cannot be made current", theirs, set, driver.ContextDestroyed, 0,
			driver.ContextDestroyed, []string{exchange, get, set, set, get, exchange}, theirs, driver.CaptureGlobal},
		{"no context was current, and ours cannot be made so", 0, set, driver.ContextDestroyed, 0,
			driver.ContextDestroyed, []string{exchange, get, set, set, get, exchange}, 0, driver.CaptureGlobal},
	} {
		t.Run(c.name, func(t *testing.T) {
			th := enterThread(t, f, d.Foreign(), c.current, driver.CaptureGlobal)
			defer th.leave()
			f.returns(c.step, c.result, c.after)
			defer f.returns("", driver.Success)
			require.Equal(t, c.want, d.MemFree(ours, ptr))
			require.Equal(t, c.calls, entries(f.calls(t)))
			th.requireLeft(c.left, c.mode)
		})
	}
}

// A thread must not keep our context where its own is gone.
func TestThreadWhoseContextIsGone(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	th := enterThread(t, f, d.Foreign(), theirs, driver.CaptureGlobal)
	defer th.leave()
	f.returns("cuCtxSetCurrent", driver.ContextDestroyed, 1)
	defer f.returns("", driver.Success)
	require.Equal(t, driver.Success, d.MemFree(ours, ptr))
	// The fake fails the last attempt too: what counts is that it is made.
	calls := f.calls(t)
	require.Equal(t, []string{"cuThreadExchangeStreamCaptureMode", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuMemFree",
		"cuCtxSetCurrent", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode"}, entries(calls))
	require.Equal(t, le(uint64(theirs)), calls[4].Args)
	require.Equal(t, le(uint64(0)), calls[6].Args)
}

// A driver without the exchange (none that can be opened lacks it, but it is
// not to be relied on) makes its calls all the same.
func TestThreadWithoutAnExchange(t *testing.T) {
	f := buildFake(t, `FAKECUDA_MISSING="cuThreadExchangeStreamCaptureMode"`)
	d := f.open(t)
	require.Equal(t, driver.Success, d.MemRelease(handle))
	require.Equal(t, []string{"cuMemRelease"}, entries(f.calls(t)))
	_, r := d.Foreign().ThreadExchangeStreamCaptureMode(driver.CaptureRelaxed)
	require.Equal(t, driver.MissingEntryPoint, r)
}

func TestExchangeAnswersTheModeBefore(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	th := enterThread(t, f, d.Foreign(), 0, driver.CaptureThreadLocal)
	defer th.leave()
	was, r := d.Foreign().ThreadExchangeStreamCaptureMode(driver.CaptureRelaxed)
	require.Equal(t, driver.Success, r)
	require.Equal(t, driver.CaptureThreadLocal, was)
}

func TestCurrentContextIsRead(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	th := enterThread(t, f, d.Foreign(), theirs, driver.CaptureGlobal)
	defer th.leave()
	c, r := d.Foreign().CtxGetCurrent()
	require.Equal(t, driver.Success, r)
	require.Equal(t, theirs, c)
}

// Goroutines that move between threads, on threads that belong to others.
func TestCallsFromManyGoroutines(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	const goroutines, calls = 8, 20
	var wg sync.WaitGroup
	failed := make(chan error, 2*goroutines)
	for i := range goroutines {
		mine := driver.Context(0xa0 + i)
		wg.Go(func() { // an owner of its thread, with a context of its own
			runtime.LockOSThread() // never unlocked: the thread ends with its goroutine
			if r := d.Foreign().CtxSetCurrent(mine); r != driver.Success {
				failed <- fmt.Errorf("cuCtxSetCurrent: %v", r)
			}
			for range calls {
				d.EventQuery(ours, event)
				if c, _ := d.Foreign().CtxGetCurrent(); c != mine {
					failed <- fmt.Errorf("the thread of %#x has %#x current", mine, c)
				}
			}
		})
		wg.Go(func() { // a goroutine on any thread
			for range calls {
				d.StreamQuery(ours, stream)
				runtime.Gosched()
			}
		})
	}
	wg.Wait()
	close(failed)
	for err := range failed {
		t.Error(err)
	}
	seen := map[string]int{}
	for _, c := range f.calls(t) {
		if c.Entry == "cuEventQuery" || c.Entry == "cuStreamQuery" {
			seen[c.Entry]++
			require.Equal(t, ours, c.Context, "the current context of %s", c.Entry)
			require.Equal(t, driver.CaptureRelaxed, c.Mode, "the capture mode of %s", c.Entry)
		}
	}
	require.Equal(t, map[string]int{"cuEventQuery": goroutines * calls, "cuStreamQuery": goroutines * calls}, seen)
}

// Asking whether a stream captures leaves the thread alone, unless the stream is one that every
// context has.
func TestAskingOfADefaultStream(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	for _, s := range []driver.Stream{driver.StreamNull, driver.StreamLegacy, driver.StreamPerThread} {
		th := enterThread(t, f, d.Foreign(), theirs, driver.CaptureGlobal)
		_, r := d.StreamIsCapturing(ours, s)
		require.Equal(t, driver.Success, r)
		calls := f.calls(t)
		require.Equal(t, []string{"cuThreadExchangeStreamCaptureMode", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuStreamIsCapturing", "cuCtxSetCurrent",
			"cuThreadExchangeStreamCaptureMode"}, entries(calls))
		require.Equal(t, ours, calls[3].Context)
		require.Equal(t, driver.CaptureRelaxed, calls[3].Mode)
		th.requireLeft(theirs, driver.CaptureGlobal)
		th.leave()
	}
}

// Every entry point is asked for in the version that its declaration was
// written for, with the flags that give the legacy default stream.
func TestEntryPointsAreAskedInTheirVersion(t *testing.T) {
	for _, variant := range []string{"FAKECUDA_VERSION=13010", "FAKECUDA_PROC_V1"} {
		t.Run(variant, func(t *testing.T) {
			f := buildFake(t, variant)
			d, err := open(csrc.Options{Path: f.path})
			require.NoError(t, err)
			asked := map[string][]int32{} // two forms of one entry point are asked apart
			for _, c := range f.calls(t) {
				if c.Entry != "cuGetProcAddress" {
					continue
				}
				name, rest := string(c.Args[:len(c.Args)-13]), c.Args[len(c.Args)-13:]
				require.Equal(t, byte(0), rest[0], "the NUL after %s", name)
				require.Equal(t, le(uint64(0)), rest[5:], "the flags for %s", name)
				asked[name] = append(asked[name], int32(rest[1])|int32(rest[2])<<8|int32(rest[3])<<16|int32(rest[4])<<24)
			}
			want := map[string][]int32{"cuCtxPopCurrent": {4000}}
			for c := range driver.Call(driver.CallCount) {
				want[c.Entry()] = append(want[c.Entry()], c.Version())
				require.True(t, d.Has(c), "%v", c)
			}
			require.Contains(t, [][]int32{{2000}, {2000, 2000}}, asked["cuInit"], "called to see that the driver works")
			asked["cuInit"] = want["cuInit"]
			require.Equal(t, want, asked)
			require.False(t, d.Has(-1))
			require.False(t, d.Has(driver.Call(driver.CallCount)))
		})
	}
}

// An older driver is opened, and what it lacks is said at the call.
func TestOlderDriver(t *testing.T) {
	f := buildFake(t, "FAKECUDA_VERSION=11030")
	d := f.open(t)
	for call, r := range rows {
		require.Equal(t, call.Version() <= 11030, d.Has(call), "%v", call)
		if d.Has(call) {
			continue
		}
		values := r.do(d.Foreign(), ours)
		require.Equal(t, driver.MissingEntryPoint, values[len(values)-1], "%v", call)
		if !r.foreign {
			values = r.do(d, ours)
			require.Equal(t, driver.MissingEntryPoint, values[len(values)-1], "%v", call)
		}
	}
	require.Empty(t, f.calls(t), "a missing entry point touches nothing")
}

// Any single entry point may be missing, but for those without which nothing
// works.
func TestMissingEntryPoints(t *testing.T) {
	needed := map[driver.Call]bool{driver.CallInit: true, driver.CallCtxGetCurrent: true, driver.CallCtxSetCurrent: true}
	list := "cuNothing"
	for call := range rows {
		if !needed[call] {
			list += "," + call.String()
		}
	}
	f := buildFake(t, fmt.Sprintf("FAKECUDA_MISSING=%q", list))
	d := f.open(t)
	for call, r := range rows {
		require.Equal(t, needed[call], d.Has(call), "%v", call)
		if needed[call] {
			continue
		}
		values := r.do(d.Foreign(), ours)
		require.Equal(t, driver.MissingEntryPoint, values[len(values)-1], "%v", call)
		if !r.foreign {
			values = r.do(d, ours)
			require.Equal(t, driver.MissingEntryPoint, values[len(values)-1], "%v", call)
		}
	}
	require.Empty(t, f.calls(t), "a missing entry point touches nothing")

	f = buildFake(t, `FAKECUDA_MISSING="cuCtxPopCurrent"`)
	_, r := f.open(t).Foreign().CtxCreate(0, device)
	require.Equal(t, driver.MissingEntryPoint, r, "a context that cannot be taken off the thread is not made")
	require.Empty(t, f.calls(t))
}
