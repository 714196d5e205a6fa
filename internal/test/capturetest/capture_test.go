package capturetest

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// tables are the cases of every package, by its folder.
var tables = map[string]table{
	"cuda":      cudaCases,
	"cuda/auto": autoCases,
	"fabric":    fabricCases,
	"handles":   handlesCases,

	"handles/peer":    peerCases,
	"handles/publish": publishCases,

	"inspect":   inspectCases,
	"managed":   managedCases,
	"multicast": multicastCases,
	"vmm":       vmmCases,
	"vmm/pool":  join(poolCases, poolLookCases),

	"vmm/pool/pooltest": poolTestCases,
}

// A table has the cases of a package's functions ("Open") and methods
// ("Stream.Wait").
type table map[string]operation

// An operation readies what a call needs, and returns the call itself, which
// runs while a stream captures. What it makes is closed with the world.
type operation func(w *world) (call func() error)

// situation is a foreign capture in global mode, which is the easiest to break.
type situation struct {
	name string
	// flags of the stream that captures.
	flags driver.StreamFlags
	// borrowed: the System knows the stream.
	borrowed bool
	// same: the operation runs on the thread that began the capture.
	same bool
}

var situations = []situation{
	{name: "a stream unknown to the System, on another thread", flags: driver.StreamNonBlocking},
	{name: "a borrowed stream, on another thread", flags: driver.StreamNonBlocking, borrowed: true},
	{name: "a borrowed blocking stream, on another thread", flags: driver.StreamDefault, borrowed: true},
	{name: "a stream unknown to the System, on the same thread", flags: driver.StreamNonBlocking, same: true},
}

func TestAForeignCaptureSurvivesEveryOperation(t *testing.T) {
	each(t, func(t *testing.T, p place) {
		for _, folder := range slices.Sorted(maps.Keys(tables)) {
			for _, name := range slices.Sorted(maps.Keys(tables[folder])) {
				t.Run(folder+"."+name, func(t *testing.T) {
					for _, s := range situations {
						t.Run(s.name, func(t *testing.T) {
							w := &world{t, p}
							c := newCapture(w, s)
							call := tables[folder][name](w)
							end, err := c.during(call)
							require.NoError(t, err)
							require.Equal(t, driver.Success, end, "the operation ended the capture")
						})
					}
				})
			}
		}
	})
}

// The cases reach the calls that end captures: made in the thread's own mode,
// as other libraries make them, they do end one.
func TestTheSameOperationsEndACaptureInTheThreadsOwnMode(t *testing.T) {
	each(t, func(t *testing.T, p place) {
		sys, err := gputest.Wrap(core.SystemOf(p.dev).Drv.Foreign(), nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, sys.Close()) })
		for folder, names := range map[string][]string{
			"cuda": {"Device.NewHostBuffer", "Device.Context", "Event.Done", "Event.Synchronize", "HostBuffer.Close",
				"Module.Close", "Stream.Close", "Stream.Done", "Stream.Download", "Stream.Synchronize", "Stream.Upload", "System.TrimHost"},
			"handles/publish": {"TakeOver"},
			"managed":         {"New", "Allocator.Close", "Buffer.Close", "Range.Host"},
			"vmm": {"Buffer.Append", "Buffer.Close", "Buffer.Clip", "Buffer.SetAccess", "Mapping.Close",
				"Slice.CopyTo", "Writer.ReadFrom"},
		} {
			for _, name := range names {
				t.Run(folder+"."+name, func(t *testing.T) {
					w := &world{t, place{sys.Devices()[0], p.folder}}
					c := newCapture(w, situations[0])
					end, _ := c.during(tables[folder][name](w))
					require.Equal(t, driver.CaptureInvalid, end)
				})
			}
		}
	})
}

// A call that is known to end captures is seen to.
func TestACaptureThatIsEndedIsNoticed(t *testing.T) {
	each(t, func(t *testing.T, p place) {
		for _, s := range situations {
			w := &world{t, p}
			c := newCapture(w, s)
			other := core.StreamOf(w.stream())
			end, err := c.during(func() error {
				if r := c.f.StreamQuery(other.Ctx.Handle, other.Handle); r != driver.CaptureUnsupported {
					return fmt.Errorf("the query returned %v", r)
				}
				return nil
			})
			require.NoError(t, err)
			require.Equal(t, driver.CaptureInvalid, end, s.name)
		}
	})
}

// each is gputest.Each, with multicast on the software driver and a machine there that
// processes can share.
func each(t *testing.T, test func(t *testing.T, p place)) {
	t.Run("software", func(t *testing.T) {
		p := place{folder: sharedFolder(t)}
		_, s := sim.Open(t, p.machine())
		p.dev = s.Devices()[0]
		test(t, p)
	})
	t.Run("real", func(t *testing.T) { test(t, place{dev: gputest.Real(t)}) })
}

// machine is the software machine of a place.
func (p place) machine() sim.Options {
	o := sim.WithMulticast(1)
	o.Folder = p.folder
	return o
}

// capture is what another library in the process does.
type capture struct {
	situation
	w       *world
	f       driver.Foreign
	ctx     driver.Context
	stream  driver.Stream
	scratch driver.Ptr
}

func newCapture(w *world, s situation) *capture {
	w.Helper()
	ctx, err := core.ContextOf("test", w.dev)
	require.NoError(w, err)
	c := &capture{situation: s, w: w, f: ctx.System().Drv.Foreign(), ctx: ctx.Handle}
	c.scratch = driver.Ptr(w.memory(64))
	var r driver.Result
	c.stream, r = c.f.StreamCreate(c.ctx, s.flags)
	c.ok(r)
	w.Cleanup(func() { c.ok(c.f.StreamDestroy(c.ctx, c.stream)) })
	if s.borrowed {
		b, err := w.dev.BorrowStream(uintptr(c.stream))
		require.NoError(w, err)
		w.closed(b)
	}
	return c
}

func (c *capture) ok(r driver.Result) {
	c.w.Helper()
	require.Equal(c.w, driver.Success, r)
}

// during captures, with the call meanwhile, and returns how the capture ended.
// Where it did well, its graph works.
func (c *capture) during(call func() error) (end driver.Result, err error) {
	c.w.Helper()
	c.ok(c.f.MemsetD8Async(c.ctx, c.scratch, 1, 64, c.stream))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c.ok(c.f.StreamBeginCapture(c.ctx, c.stream, driver.CaptureGlobal))
	node := c.f.MemsetD8Async(c.ctx, c.scratch, 2, 64, c.stream)
	if c.same {
		err = call()
	} else {
		var wg sync.WaitGroup
		wg.Go(func() { err = call() })
		wg.Wait()
	}
	g, end := c.f.StreamEndCapture(c.ctx, c.stream)
	c.ok(node)
	if end != driver.Success {
		return end, err
	}
	exec, r := c.f.GraphInstantiate(c.ctx, g)
	c.ok(r)
	c.ok(c.f.GraphDestroy(g))
	require.Equal(c.w, byte(1), c.read(), "captured work does not run")
	c.ok(c.f.GraphLaunch(c.ctx, exec, c.stream))
	require.Equal(c.w, byte(2), c.read(), "the graph works")
	c.ok(c.f.GraphExecDestroy(exec))
	return end, err
}

// read is what the captured work has left.
func (c *capture) read() byte {
	c.w.Helper()
	c.ok(c.f.StreamSynchronize(c.ctx, c.stream))
	t, err := c.w.dev.Transfer()
	require.NoError(c.w, err)
	b := make([]byte, 1)
	require.NoError(c.w, t.Download(b, cuda.Ptr(c.scratch)))
	return b[0]
}
