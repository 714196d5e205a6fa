package vmm_test

import (
	"context"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// half is so many chunks as one copy takes. Only when it has passed is a third one submitted.
const half = 64

// two is a buffer of two copies, and a small one behind it. Host memory is pinned for both.
type two struct {
	*world
	large, small *vmm.Buffer
	contents     [2][]byte
}

func newTwo(t *testing.T) *two {
	w := newWorld(t, false)
	v := &two{world: w, large: w.bufferIn(2*half, 2*half), small: w.buffer(2)}
	require.NoError(t, w.suspend(v.large, v.small).Resume(w.ctx()))
	v.contents = [2][]byte{w.bytes(v.large), w.bytes(v.small)}
	return v
}

func (v *two) same() {
	require.Equal(v.t, v.contents[0], v.bytes(v.large))
	require.Equal(v.t, v.contents[1], v.bytes(v.small))
}

// until calls do in the n-th driver call of a kind from now on, before it has an effect.
func (v *two) until(call string, n int, do func()) {
	first := v.m.Count(call)
	v.m.OnCall(func(c string) {
		if c == call && v.m.Count(call) == first+n {
			v.m.OnCall(nil)
			do()
		}
	})
}

// await waits for driver calls that other goroutines make meanwhile.
func (v *two) await(call string, n int) (do func()) {
	first := v.m.Count(call)
	return func() {
		for end := time.Now().Add(testTimeout); v.m.Count(call) < first+n; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				panic("no " + call + " meanwhile")
			}
		}
	}
}

// Memory that was copied goes while the rest is being copied. What then cannot be copied stays,
// with its bytes.
func TestACopyThatFailsAfterMemoryWent(t *testing.T) {
	v := newTwo(t)
	defer v.end()
	v.until("cuMemcpyDtoHAsync", 3, v.await("cuMemRelease", half))
	v.m.Inject(sim.Fault{Call: "cuMemcpyDtoHAsync", After: 2, Result: code})
	s := v.suspend(v.large, v.small)
	r := s.Report()
	require.Equal(t, []int{half * kib64, (half + 2) * kib64}, []int{r.Given, r.Held})
	require.Len(t, r.Memory[1].Rest, 1)
	require.Contains(t, r.Memory[1].Rest[0].Why, "could not be copied")
	require.Contains(t, r.Memory[1].Rest[0].Why, "cuMemcpyDtoHAsync")
	require.Equal(t, half*kib64, r.Host)
	require.NoError(t, s.Released().Wait(v.ctx()))
	require.ErrorIs(t, gputest.Err(v.small.Append(nil, []byte{1})), cuda.ErrSuspended)
	require.NoError(t, s.Resume(v.ctx(), v.small))
	require.NoError(t, s.Resume(v.ctx()))
	v.same()
	require.NoError(t, v.suspend(v.large, v.small).Resume(v.ctx()))
	v.same()
}

// The end of the context undoes a suspension until the first memory went. Then it goes on.
func TestTheContextEndsWhileMemoryGoes(t *testing.T) {
	v := newTwo(t)
	defer v.end()
	for _, went := range []bool{false, true} {
		ctx, cancel := context.WithCancel(v.ctx())
		if went {
			released := v.await("cuMemRelease", half)
			v.until("cuMemcpyDtoHAsync", 3, func() { released(); cancel() })
		} else {
			v.until("cuMemcpyDtoHAsync", 1, cancel)
		}
		s, err := vmm.Suspend(ctx, vmm.SuspendOptions{}, v.large, v.small)
		cancel()
		if went {
			require.NoError(t, err)
			require.Zero(t, s.Report().Held)
			require.NoError(t, s.Resume(v.ctx()))
		} else {
			require.ErrorIs(t, err, context.Canceled)
		}
		v.same()
		require.NoError(t, gputest.Err(v.small.Append(nil, nil)))
	}
}

// Bytes come back while the rest of the memory is being mapped. If that fails all of it sleeps
// on, and nothing is lost.
func TestAMappingThatFailsAfterBytesCameBack(t *testing.T) {
	v := newTwo(t)
	defer v.end()
	for _, call := range []string{"cuMemMap", "cuMemSetAccess"} {
		n := map[string]int{"cuMemMap": half + 1, "cuMemSetAccess": 5}[call]
		s := v.suspend(v.large, v.small)
		free := v.free(0)
		v.until(call, n, v.await("cuMemcpyHtoDAsync", 1))
		v.m.Inject(sim.Fault{Call: call, After: n - 1, Result: code})
		require.ErrorContains(t, s.Resume(v.ctx()), call)
		require.Equal(t, free, v.free(0))
		require.ErrorIs(t, gputest.Err(v.large.Append(nil, []byte{1})), cuda.ErrSuspended)
		require.NoError(t, s.Resume(v.ctx()))
		v.same()
	}
}

// All memory is made before any is mapped, so that a Resume which gets too little has moved nothing.
func TestResumeMakesAllMemoryFirst(t *testing.T) {
	v := newTwo(t)
	defer v.end()
	s := v.suspend(v.large, v.small)
	maps, copies := v.m.Count("cuMemMap"), v.m.Count("cuMemcpyHtoDAsync")
	v.m.Inject(sim.Fault{Call: "cuMemCreate", After: 2*half + 1, Times: -1, Result: cuda.Code(driver.OutOfMemory)})
	require.ErrorIs(t, s.Resume(v.ctx()), cuda.ErrOutOfMemory)
	require.Equal(t, [2]int{maps, copies}, [2]int{v.m.Count("cuMemMap"), v.m.Count("cuMemcpyHtoDAsync")})
	v.m.ClearFaults()
	require.NoError(t, s.Resume(v.ctx()))
	v.same()
}
