package epoch_test

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/epoch"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Goroutines write to a byte of the room with each operation.
const (
	goroutines, rounds = 4, 200
	room               = goroutines * rounds
)

// world is a clock of a stream whose work the test holds up.
type world struct {
	t      *testing.T
	m      *sim.Machine
	d      *cuda.Device
	s      *cuda.Stream
	b      *vmm.Buffer
	mu     sync.Mutex
	lost   atomic.Bool
	passes atomic.Int64
	epoch.Clock
}

func newWorld(t *testing.T) *world {
	t.Helper()
	m, sys := sim.Open(t)
	w := &world{t: t, m: m, d: sys.Devices()[0]}
	var err error
	w.s, err = w.d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	w.b, err = vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: room})
	require.NoError(t, err)
	require.NoError(t, w.b.Resize(w.s, room))
	require.NoError(t, w.s.Synchronize())
	m.ResetCounts()
	t.Cleanup(func() {
		m.Release(w.s.Handle())
		require.NoError(t, w.b.Close())
		require.NoError(t, w.Await("test"))
		require.NoError(t, w.s.Close())
	})
	w.Init(core.StreamOf(w.s), core.SystemOf(sys), epoch.Owner{Locker: &w.mu, Op: "test", Lost: w.lost.Load, Passed: func() { w.passes.Add(1) }}, false)
	return w
}

// touch stamps what was freed now.
func (w *world) touch() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.Touch()
}

func (w *world) hold()       { w.m.Hold(w.s.Handle()); w.work() }
func (w *world) let()        { w.m.Release(w.s.Handle()); require.NoError(w.t, w.s.Synchronize()) }
func (w *world) events() int { return w.m.Count("cuEventRecord") }

// work is something for the stream to do.
func (w *world) work() {
	w.t.Helper()
	require.NoError(w.t, w.s.Memset(w.b.Ptr(), 1, 1))
}

func TestOneEventServesManyFrees(t *testing.T) {
	w := newWorld(t)
	w.hold()
	first := w.touch()
	require.Zero(t, w.events(), "no event before it is needed")
	for range 100 {
		w.touch()
	}
	require.True(t, w.Advance())
	require.True(t, w.Advance())
	require.Equal(t, 1, w.events())
	second := w.touch()
	require.Greater(t, second, first, "what is freed behind the event is of a later epoch")
	require.False(t, w.Passed(first))

	w.let()
	require.False(t, w.Passed(first), "it passes when the clock advances")
	w.Advance()
	require.True(t, w.Passed(first))
	require.True(t, epoch.Point{Clock: &w.Clock, Epoch: first}.Passed())
	require.NoError(t, w.s.Synchronize())
	w.Advance()
	require.True(t, w.Passed(second))
	require.False(t, w.Behind())
	require.Equal(t, second, w.Last())
	before := w.events()
	require.False(t, w.Advance())
	require.Equal(t, before, w.events(), "nothing was stamped since")
	require.NoError(t, w.Check())
}

func TestACaptureIsLeftAlone(t *testing.T) {
	w := newWorld(t)
	stamp := w.touch()
	drv, st := driver.Of(w.m), core.StreamOf(w.s)
	require.Equal(t, driver.Success, drv.StreamBeginCapture(st.Ctx.Handle, st.Handle, driver.CaptureGlobal))
	require.False(t, w.Advance())
	require.False(t, w.Passed(stamp))
	require.ErrorIs(t, w.Await("test"), cuda.ErrCapturing)
	g, r := drv.StreamEndCapture(st.Ctx.Handle, st.Handle)
	require.Equal(t, driver.Success, r, "the capture lives")
	require.Equal(t, driver.Success, drv.GraphDestroy(g))
	w.touch()
	require.NoError(t, w.Await("test"))
	require.True(t, w.Passed(stamp))
}

func TestAManualClockPassesByPassAlone(t *testing.T) {
	w := newWorld(t)
	w.SetManual(true)
	stamp := w.touch()
	require.False(t, w.Advance())
	require.False(t, w.Passed(stamp))
	w.Pass(w.End())
	require.True(t, w.Passed(stamp))
	require.EqualValues(t, 1, w.passes.Load())
	w.Pass(stamp - 1)
	require.Equal(t, stamp, w.Last(), "it only grows")
	w.SetManual(false)
}

func TestAFailedRecordPassesNothing(t *testing.T) {
	w := newWorld(t)
	w.hold()
	stamp := w.touch()
	w.m.Inject(sim.Fault{Call: "cuEventRecord", Result: cuda.Code(driver.OutOfMemory)})
	require.False(t, w.Advance())
	require.False(t, w.Passed(stamp))
	require.True(t, w.Advance(), "the next one records an event behind the same work")
	w.let()
	w.Advance()
	require.True(t, w.Passed(stamp))
}

func TestLostMemoryHasPassed(t *testing.T) {
	w := newWorld(t)
	w.hold()
	stamp := w.touch()
	require.True(t, w.Advance())
	w.lost.Store(true)
	require.False(t, w.Advance())
	require.True(t, w.Passed(stamp))
	stamp = w.touch()
	require.False(t, w.Advance())
	require.True(t, w.Passed(stamp))
	w.let()
}

func TestAStreamThatIsGoneHasPassed(t *testing.T) {
	w := newWorld(t)
	stamp := w.touch()
	require.NoError(t, w.s.Close())
	require.False(t, w.Advance())
	require.True(t, w.Passed(stamp))
}

func TestWaitingInVain(t *testing.T) {
	w := newWorld(t)
	w.hold()
	w.touch()
	require.True(t, w.Promises())
	require.False(t, w.Stalled())
	w.m.ResetCounts()
	require.True(t, w.Promises())
	require.Zero(t, w.m.Count("cuEventQuery"), "the caller that waits queries")
	w.Stall()
	require.True(t, w.Stalled())
	stamp := w.touch()
	w.let()
	w.hold()
	w.Advance()
	w.Advance()
	require.False(t, w.Passed(stamp))
	require.False(t, w.Stalled(), "of the next event nothing is known yet")
	w.let()
}

func TestAWaitThatFailsPassesNothing(t *testing.T) {
	w := newWorld(t)
	stamp := w.touch()
	w.m.Inject(sim.Fault{Call: "cuEventSynchronize", Result: cuda.Code(driver.OutOfMemory)})
	var failed *cuda.Error
	require.ErrorAs(t, w.Await("test"), &failed)
	require.False(t, w.Passed(stamp))
}

// Whatever goroutines do at once, nothing passes that the GPU has not.
func TestNothingPassesTooEarly(t *testing.T) {
	w := newWorld(t)
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(g)))
			for i := g * rounds; i < (g+1)*rounds; i++ {
				at := w.b.Ptr() + cuda.Ptr(i)
				w.mu.Lock() // as a free is
				err := w.s.Memset(at, 1, 1)
				stamp := w.Touch()
				w.mu.Unlock()
				for err == nil && !w.Passed(stamp) {
					if random.IntN(20) == 0 {
						err = w.Await("test")
					} else {
						w.Advance()
					}
				}
				got, failed := w.m.Bytes(at, 1)
				if err != nil || failed != nil || got[0] != 1 {
					t.Errorf("operation %d: %v, %v, %v", i, err, failed, got)
				}
			}
		})
	}
	wg.Wait()
	w.mu.Lock()
	require.NoError(t, w.Check())
	w.mu.Unlock()
}
