package pool_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// watch runs f and returns the driver calls that were made meanwhile, without
// polls of events, whose number varies.
func (w *world) watch(f func() error, on func(call string)) (calls []string, err error) {
	var mu sync.Mutex
	var made []string
	w.m.OnCall(func(call string) {
		if on != nil {
			on(call)
		}
		mu.Lock()
		defer mu.Unlock()
		made = append(made, call)
	})
	err = f()
	w.m.OnCall(nil)
	mu.Lock()
	defer mu.Unlock()
	return slices.Clone(made), err
}

// blow is a fault: a call fails, a run call possibly after a few of its parts,
// and then the j-th of the calls behind it, too, if j is not negative.
type blow struct {
	sim.Fault
	j int
}

func (b blow) String() string {
	text := fmt.Sprintf("%s number %d returns %d", b.Call, b.After, b.Result)
	if b.Parts > 0 {
		text += fmt.Sprintf(" after %d parts", b.Parts-1)
	}
	if b.j >= 0 {
		text += fmt.Sprintf(", and then call %d", b.j)
	}
	return text
}

// TestEveryFailureOfEveryOperation has each driver call of an operation fail, and
// with it each of those behind it. The pool stays consistent and goes on, it
// counts the memory that it has, and everything can be closed.
func TestEveryFailureOfEveryOperation(t *testing.T) {
	if thorough {
		t.Skip("it checks the pool itself, after every operation")
	}
	patient(t)
	for _, sc := range scenarios {
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, sc)
			calls, err := w.watch(func() error { return sc.op(w) }, nil)
			require.NoError(t, err)
			w.sane(sc.name)
			w.end(sc.name)
			all, seen := map[string]int{}, map[string]int{}
			for _, call := range calls {
				all[call]++
			}
			for _, call := range calls {
				nth := seen[call]
				seen[call]++
				// Between the first ones and the last is nothing new; and polls of
				// events are never equally many.
				if nth > 1 && (nth+1 < all[call] || strings.HasPrefix(call, "cuEvent")) {
					continue
				}
				f := sim.Fault{Call: call, After: nth, Result: code}
				sc.strike(t, f)
				switch call {
				case "cuMemCreate", "cuMemAddressReserve":
					f.Result = cuda.Code(driver.OutOfMemory)
					sc.strike(t, f)
				case "cuMemUnmap", "cuMemSetAccess":
					for f.Parts = 2; f.Parts <= 2; f.Parts++ {
						sc.strike(t, f)
					}
				}
			}
		})
	}
}

// strike has one call fail, and then with each of the next ones, which undo what
// was done so far.
func (sc scenario) strike(t *testing.T, f sim.Fault) {
	sc.run(t, blow{f, -1})
	if f.Call == "cuStreamEndCapture" {
		return // where what follows fails too, the stream captures for ever
	}
	for j := 0; j < 4 && sc.run(t, blow{f, j}) == 2; j++ {
	}
}

// run is one blow at the operation. It returns how many of its faults struck.
func (sc scenario) run(t *testing.T, b blow) (struck int) {
	w := newWorld(t, sc)
	n, behind := 0, -1
	var mu sync.Mutex
	w.m.Inject(b.Fault)
	_, err := w.watch(func() error { return sc.op(w) }, func(call string) {
		mu.Lock()
		defer mu.Unlock()
		if behind >= 0 {
			if behind == b.j {
				w.struck = append(w.struck, call)
			}
			behind++
		}
		if call == b.Call {
			if n++; n == b.After+1 {
				w.struck = append(w.struck, call)
				if b.j >= 0 {
					behind = 0
					w.m.Inject(sim.Fault{After: b.j, Result: code})
				}
			}
		}
	})
	w.m.ClearFaults()
	mu.Lock()
	defer mu.Unlock()
	at := fmt.Sprintf("%s, %v, struck %v: %v", sc.name, b, w.struck, err)
	w.sane(at)
	if err != nil {
		var typed *cuda.Error
		require.ErrorAs(t, err, &typed, at)
		if len(w.struck) == 2 { // what could not be undone counts
			require.NoError(t, w.p.SetLimit(0), at)
		}
		require.NoError(t, sc.op(w), "again, after %s", at)
		w.sane("again, after " + at)
	}
	w.goOn(at)
	w.end(at)
	return len(w.struck)
}

// TestEveryLossInEveryOperation makes the driver report from some call on that the
// context is gone: then nothing waits, and closing drops the state.
func TestEveryLossInEveryOperation(t *testing.T) {
	if thorough {
		t.Skip("it checks the pool itself, after every operation")
	}
	for _, sc := range scenarios {
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			for k := 0; ; k++ {
				w := newWorld(t, sc)
				w.m.Inject(sim.Fault{After: k, Times: -1, Result: cuda.Code(driver.IllegalAddress)})
				calls, err := w.watch(func() error { return sc.op(w) }, nil)
				w.m.ClearFaults()
				if len(calls) <= k {
					w.end(sc.name)
					return
				}
				at := fmt.Sprintf("%s, %s (%d) lost the context: %v", sc.name, calls[k], k, err)
				if err != nil {
					require.ErrorIs(t, err, cuda.ErrDeviceLost, at)
				}
				require.NoError(t, w.p.Check(), at)
				for _, ws := range w.ready {
					require.NoError(t, ws.Close(), at)
				}
				for _, b := range w.live {
					require.NoError(t, w.p.Free(b), at)
				}
				for _, g := range w.graphs {
					require.NoError(t, g.Close(), at)
				}
				require.NoError(t, w.drain(), at)
				require.NoError(t, w.p.Close(), at)
				require.NoError(t, w.p.Check(), at)
				require.Zero(t, w.p.Stats().Reserved, at)
				for i := len(w.ends) - 1; i >= 0; i-- {
					require.NoError(t, w.ends[i](), at)
				}
				require.Empty(t, w.sys.Live(), at)
				require.NoError(t, w.sys.Close(), at)
				_ = w.m.Close() // what was dropped is still there: the driver was not asked any more
			}
		})
	}
}

// sane checks what holds in every state.
func (w *world) sane(at string) {
	require.NoError(w.t, w.p.Check(), at)
	st := w.p.Stats()
	bytes, blocks := uint64(0), len(w.live)
	for _, b := range w.live {
		bytes += uint64(b.Bytes())
	}
	for _, ws := range w.ready {
		for _, name := range []string{"a", "b", "c"} {
			if b, ok := ws.Get(name); ok {
				blocks++
				bytes += uint64(b.Bytes())
			}
		}
	}
	require.Equal(w.t, blocks, st.Blocks, at)
	require.EqualValues(w.t, bytes, st.Requested, at)
	// A try of what is left may be between the driver and the pool's count just now.
	for end := time.Now().Add(10 * time.Second); w.base-w.free() != st.Reserved-st.Suspended && time.Now().Before(end); st = w.p.Stats() {
		time.Sleep(time.Millisecond)
	}
	require.Equal(w.t, w.base-w.free(), st.Reserved-st.Suspended, "the pool counts what it has: %s", at)
	require.LessOrEqual(w.t, st.PeakReserved, w.base, "the pool never had more than there is: %s", at)
	gputest.Accounted(w.t, w.m, w.sys, at)
}

// goOn requests blocks of every kind.
func (w *world) goOn(at string) {
	require.NoError(w.t, w.p.SetLimit(0), at)
	for _, b := range w.live {
		require.NoError(w.t, w.p.Free(b), at)
	}
	w.live = nil
	for _, bytes := range []int{100, 8 * kib, kib64, 5 * kib64, 16 * kib64} {
		b, err := w.p.Alloc(pool.Request{Bytes: bytes, Stream: w.other})
		if errors.Is(err, cuda.ErrClosed) {
			return // it was
		}
		require.NoError(w.t, err, "%d bytes after %s", bytes, at)
		w.live = append(w.live, b)
		require.NoError(w.t, w.other.Memset(b.Ptr(), 1, bytes))
	}
	require.NoError(w.t, w.other.Synchronize(), at)
	w.sane("going on after " + at)
}

// end closes everything, and fails if anything is left.
func (w *world) end(at string) {
	t := w.t
	for _, ws := range w.ready {
		require.NoError(t, ws.Close(), at)
	}
	w.ready = nil
	for _, b := range w.live {
		require.NoError(t, w.p.Free(b), at)
	}
	w.live = nil
	for _, g := range w.graphs {
		require.NoError(t, g.Close(), at)
	}
	require.NoError(t, w.drain(), at)
	require.NoError(t, w.p.Close(), at)
	w.sane("closed, after " + at)
	require.Zero(t, w.p.Stats().Reserved, at)
	for i := len(w.ends) - 1; i >= 0; i-- {
		require.NoError(t, w.ends[i](), at)
	}
	require.Empty(t, w.sys.Live(), at)
	require.NoError(t, w.sys.Close(), at)
	require.Empty(t, w.m.Fault(), at)
	leaks := w.m.Leaks()
	if slices.Contains(w.struck, "cuEventDestroy") {
		leaks = slices.DeleteFunc(leaks, func(l sim.Leak) bool { return l.Kind == sim.KindEvent })
	}
	require.Empty(t, leaks, at)
	require.Empty(t, w.m.Races(), at)
	_ = w.m.Close() // what it could report was looked at
}

// Errors of what gives memory back name the operation that the caller called.
func TestTrimAndCloseFailUnderTheirOwnNames(t *testing.T) {
	for name, do := range map[string]func(p *pool.Pool) error{
		"pool.Trim":  func(p *pool.Pool) error { _, err := p.Trim(0); return err },
		"pool.Close": (*pool.Pool).Close,
	} {
		for _, n := range []int{3 * mib, 70 * mib} {
			m, d := open(t)
			s, err := d.NewStream(cuda.StreamOptions{})
			require.NoError(t, err)
			p, err := pool.New(d, pool.Options{})
			require.NoError(t, err)
			b, err := p.Alloc(pool.Request{Bytes: n, Stream: s})
			require.NoError(t, err)
			require.NoError(t, p.Free(b))
			require.NoError(t, s.Close(), "what it freed has passed")
			remove := m.Inject(sim.Fault{Call: "cuMemUnmap", Times: -1, Result: code})
			err = do(p)
			remove()
			require.ErrorContains(t, err, name+": ")
			require.NotContains(t, err.Error(), "pool.Alloc")
			require.NoError(t, p.Close())
		}
	}
}
