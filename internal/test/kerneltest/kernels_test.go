package kerneltest

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// lengths are around the sizes of a block, of a twin's piece and of a chunk of
// memory.
var lengths = []int{0, 1, 257, 1 << 16, 1<<16 + 1, 1<<19 + 3}

// launches of a few threads, of about one for each element, and of more.
func launches(n int) []cuda.Launch {
	return []cuda.Launch{
		{Grid: [3]int{1, 1, 1}, Block: [3]int{96, 1, 1}},
		{Grid: [3]int{7, 1, 1}, Block: [3]int{33, 1, 1}},
		cuda.Threads(max(n, 1)),
		cuda.Threads(2*n + 1000),
	}
}

// each runs a test of one kernel on both drivers: the PTX and its twin must
// give what the test computes.
func each(t *testing.T, name string, test func(t *testing.T, r *rig)) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		m, err := d.LoadModule(kernels.Basic)
		require.NoError(t, err)
		closed(t, m)
		k, err := m.Kernel(name)
		require.NoError(t, err)
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		closed(t, s)
		test(t, &rig{d, s, k, rand.New(rand.NewPCG(1, 2))})
	})
}

type rig struct {
	*cuda.Device
	stream *cuda.Stream
	kernel *cuda.Kernel
	rng    *rand.Rand
}

func closed(t *testing.T, c interface{ Close() error }) {
	t.Helper()
	t.Cleanup(func() { require.NoError(t, c.Close()) })
}

// array is GPU memory that holds v.
func array[T any](t *testing.T, r *rig, v []T) *vmm.Array[T] {
	t.Helper()
	a, err := vmm.NewArray[T](r.Device, vmm.BufferOptions{Reserve: 8 << 20})
	require.NoError(t, err)
	closed(t, a)
	require.NoError(t, gputest.Err(a.Append(r.stream, v)))
	return a
}

func contents[T any](t *testing.T, r *rig, a *vmm.Array[T]) []T {
	t.Helper()
	v := make([]T, a.Len())
	require.NoError(t, a.All().CopyTo(r.stream, v))
	return v
}

func (r *rig) launch(t *testing.T, l cuda.Launch, args ...any) {
	t.Helper()
	require.NoError(t, r.kernel.Launch(r.stream, l, args...))
}

func (r *rig) words(n int) []uint32 {
	v := make([]uint32, n)
	for i := range v {
		v[i] = r.rng.Uint32()
	}
	return v
}

// floats are of every kind but NaN, whose bits are not the same everywhere.
func (r *rig) floats(n int) []float32 {
	v := make([]float32, n)
	for i := range v {
		for v[i] = float32(math.NaN()); v[i] != v[i]; {
			v[i] = math.Float32frombits(r.rng.Uint32())
		}
	}
	copy(v, []float32{0, float32(math.Copysign(0, -1)), float32(math.Inf(1)), math.MaxFloat32, math.SmallestNonzeroFloat32, 0x1p-126})
	return v
}

// beyond are the elements behind the n of each test that must stay as they are.
const beyond = 5

func TestVectorAdd(t *testing.T) {
	each(t, kernels.VectorAdd, func(t *testing.T, r *rig) {
		for _, n := range lengths {
			a, b := r.floats(n+beyond), r.floats(n+beyond)
			ga, gb := array(t, r, a), array(t, r, b)
			for _, l := range launches(n) {
				before := r.floats(n + beyond)
				gc := array(t, r, before)
				r.launch(t, l, ga.Ptr(), gb.Ptr(), gc.Ptr(), uint64(n))
				requireSums(t, a[:n], b[:n], contents(t, r, gc)[:n])
				require.Equal(t, before[n:], contents(t, r, gc)[n:])
			}
			r.launch(t, cuda.Threads(max(n, 1)), ga.Ptr(), gb.Ptr(), ga.Ptr(), uint64(n))
			requireSums(t, a[:n], b[:n], contents(t, r, ga)[:n])
		}
	})
}

// requireSums compares bits, except of NaN (from the sum of two infinities).
func requireSums(t *testing.T, a, b, got []float32) {
	t.Helper()
	for i := range got {
		want := a[i] + b[i]
		if math.Float32bits(want) != math.Float32bits(got[i]) && (want == want || got[i] == got[i]) {
			require.Fail(t, "wrong sum", "element %d of %d: %v + %v is %v, not %v", i, len(got), a[i], b[i], want, got[i])
		}
	}
}

func TestFill(t *testing.T) {
	each(t, kernels.Fill, func(t *testing.T, r *rig) {
		for _, n := range lengths {
			for _, l := range launches(n) {
				for _, row := range [][2]uint32{{0, 1}, {7, 0}, {r.rng.Uint32(), r.rng.Uint32()}} {
					want := r.words(n + beyond)
					g := array(t, r, want)
					r.launch(t, l, g.Ptr(), uint64(n), row[0], row[1])
					for i := range want[:n] {
						want[i] = row[0] + uint32(i)*row[1]
					}
					require.Equal(t, want, contents(t, r, g))
				}
			}
		}
	})
}

func TestSum(t *testing.T) {
	each(t, kernels.Sum, func(t *testing.T, r *rig) {
		for _, n := range lengths {
			v := r.words(n + beyond)
			g := array(t, r, v)
			for _, l := range launches(n) {
				want := r.rng.Uint64() | 1<<63
				total := array(t, r, []uint64{want, 42})
				r.launch(t, l, g.Ptr(), uint64(n), total.Ptr())
				r.launch(t, l, g.Ptr(), uint64(n), total.Ptr())
				for _, x := range v[:n] {
					want += 2 * uint64(x)
				}
				require.Equal(t, []uint64{want, 42}, contents(t, r, total))
			}
		}
	})
}

// The two addresses are of one memory, so the write through one is what the
// read through the other must find.
func TestAliasAdd(t *testing.T) {
	each(t, kernels.AliasAdd, func(t *testing.T, r *rig) {
		for _, n := range lengths {
			for _, l := range launches(n) {
				v, before := r.words(n+beyond), r.words(n+beyond)
				first, out := array(t, r, v), array(t, r, before)
				buffer, err := first.Buffer().Move(vmm.MoveOptions{Reserve: 16 << 20})
				require.NoError(t, err)
				second, err := vmm.ArrayOf[uint32](buffer)
				require.NoError(t, err)
				delta := r.rng.Uint32()
				r.launch(t, l, first.Ptr(), second.Ptr(), out.Ptr(), uint64(n), delta)
				for i := range v[:n] {
					v[i] += delta
				}
				require.Equal(t, v, contents(t, r, first))
				require.Equal(t, v, contents(t, r, second))
				require.Equal(t, append(v[:n:n], before[n:]...), contents(t, r, out))
				require.NoError(t, second.Close())
			}
		}
	})
}
