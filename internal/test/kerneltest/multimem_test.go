package kerneltest

import (
	"encoding/binary"
	"math"
	"math/big"
	"math/rand/v2"
	"regexp"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// entries are all that the text declares.
func entries() (names []string) {
	for _, found := range regexp.MustCompile(`(?m)^\.visible \.entry (\w+)\(`).FindAllSubmatch(kernels.Multimem, -1) {
		names = append(names, string(found[1]))
	}
	return names
}

// On a real GPU the module is loaded, and nothing of it runs: multicast objects
// are made on the software driver only. There every entry has its twin.
func TestMultimemLoads(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		caps, err := d.Capabilities()
		require.NoError(t, err)
		m, err := d.LoadModule(kernels.Multimem)
		if caps.ComputeMajor < 9 && !d.System().Driver().Software {
			require.ErrorIs(t, err, cuda.ErrNotSupported)
			return
		}
		require.NoError(t, err)
		closed(t, m)
		require.Len(t, entries(), 2*len(kernels.Elements())+3)
		for _, name := range entries() {
			_, err := m.Kernel(name)
			require.NoError(t, err)
		}
	})
}

// troupe is an object with a replica on each of several software devices.
type troupe struct {
	t       *testing.T
	m       *sim.Machine
	devices []*cuda.Device
	streams []*cuda.Stream
	modules []*cuda.Module
	own     []cuda.Ptr
	mc      cuda.Ptr
	size    int
	abort   *cuda.HostBuffer // the word that ends waits
}

func newTroupe(t *testing.T, devices int) *troupe {
	m, sys := sim.Open(t, sim.WithMulticast(devices))
	r := &troupe{t: t, m: m, devices: sys.Devices(), size: 2 << 20}
	o, err := multicast.Create(sys, r.size, multicast.Properties{Devices: devices})
	require.NoError(t, err)
	closed(t, o)
	var all []vmm.Access
	for _, d := range r.devices {
		require.NoError(t, o.AddDevice(d))
		all = append(all, vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite})
	}
	for i, d := range r.devices {
		a, err := vmm.Create(d, r.size, vmm.Properties{})
		require.NoError(t, err)
		closed(t, a)
		r.own = append(r.own, r.mapped(a, all[i]))
		b, err := o.Bind(d, 0, a, 0, r.size)
		require.NoError(t, err)
		closed(t, b)
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		closed(t, s)
		r.streams = append(r.streams, s)
		mod, err := d.LoadModule(kernels.Multimem)
		require.NoError(t, err)
		closed(t, mod)
		r.modules = append(r.modules, mod)
	}
	r.mc = r.mapped(o, all...)
	r.abort, err = r.devices[0].NewHostBuffer(4)
	require.NoError(t, err)
	closed(t, r.abort)
	r.setAbort(0)
	return r
}

func (r *troupe) mapped(p vmm.Physical, access ...vmm.Access) cuda.Ptr {
	res, err := vmm.Reserve(r.devices[0], p.Size(), vmm.ReserveOptions{})
	require.NoError(r.t, err)
	closed(r.t, res)
	m, err := res.Map(0, p)
	require.NoError(r.t, err)
	closed(r.t, m)
	require.NoError(r.t, m.SetAccess(access...))
	return m.Ptr()
}

func (r *troupe) setAbort(v uint32) {
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&r.abort.Bytes()[0])), v)
}

// launch runs a kernel on a device.
func (r *troupe) launch(device int, name string, args ...any) {
	r.t.Helper()
	k, err := r.modules[device].Kernel(name)
	require.NoError(r.t, err)
	require.NoError(r.t, k.Launch(r.streams[device], cuda.Launch{Grid: [3]int{1, 1, 1}, Block: [3]int{32, 1, 1}}, args...))
}

func (r *troupe) wait() {
	r.t.Helper()
	for _, s := range r.streams {
		require.NoError(r.t, s.Synchronize())
	}
}

func (r *troupe) write(device, off int, b []byte) {
	r.t.Helper()
	require.NoError(r.t, r.m.Poke(r.own[device]+cuda.Ptr(off), b))
}

func (r *troupe) read(device, off, n int) []byte {
	r.t.Helper()
	b, err := r.m.Bytes(r.own[device]+cuda.Ptr(off), n)
	require.NoError(r.t, err)
	return b
}

// values are numbers of one element, as bits.
type values []uint64

// format says how an element's bits are a number: of so many bits after the
// leading one, with so many of exponent; integers have none.
type format struct {
	bits             int
	mantissa, expLow int // 0 for integers; expLow is the exponent of the smallest step
}

func formatOf(e kernels.Element) format {
	switch e {
	case kernels.U32:
		return format{bits: 32}
	case kernels.F16:
		return format{bits: 16, mantissa: 10, expLow: -24}
	case kernels.BF16:
		return format{bits: 16, mantissa: 7, expLow: -133}
	case kernels.F32:
		return format{bits: 32, mantissa: 23, expLow: -149}
	}
	return format{bits: 64, mantissa: 52, expLow: -1074}
}

// number is what the bits mean, exactly. This is the test's own arithmetic: it
// shares nothing with the twins.
func (f format) number(bits uint64) *big.Rat {
	if f.mantissa == 0 {
		return new(big.Rat).SetInt(new(big.Int).SetUint64(bits))
	}
	fraction := bits & (1<<f.mantissa - 1)
	exponent := int(bits >> f.mantissa & (1<<(f.bits-1-f.mantissa) - 1))
	if exponent > 0 {
		fraction |= 1 << f.mantissa
		exponent--
	}
	v := new(big.Rat).SetInt(new(big.Int).SetUint64(fraction))
	scale := f.expLow + exponent
	step := new(big.Rat).SetInt(new(big.Int).Lsh(big.NewInt(1), uint(max(scale, -scale))))
	if scale < 0 {
		step.Inv(step)
	}
	v.Mul(v, step)
	if bits>>(f.bits-1) == 1 {
		v.Neg(v)
	}
	return v
}

// random is any finite number, not too large for sums of eight.
func (f format) random(rng *rand.Rand) uint64 {
	v := rng.Uint64() & (^uint64(0) >> (64 - f.bits))
	if f.mantissa == 0 {
		return v
	}
	width := f.bits - 1 - f.mantissa
	half := uint64(1) << (width - 1)
	exponent := half - 6 + rng.Uint64N(10) // about 2^-5 to 2^4
	return v&(1<<f.mantissa-1) | exponent<<f.mantissa | v>>(f.bits-1)<<(f.bits-1)
}

// exact is a number whose sums with its like are exact in every order: a small
// multiple of an eighth.
func (f format) exact(rng *rand.Rand) uint64 {
	if f.mantissa == 0 {
		return f.random(rng)
	}
	n := rng.IntN(15) - 7 // sixteen of them fit into the eight bits of a bfloat16
	d := float64(n) / 8
	switch f.bits {
	case 64:
		return math.Float64bits(d)
	case 32:
		return uint64(math.Float32bits(float32(d)))
	}
	if f.mantissa == 7 {
		return uint64(math.Float32bits(float32(d)) >> 16)
	}
	if n == 0 {
		return 0
	}
	b := math.Float64bits(d)
	return b>>63<<15 | (b>>52&0x7ff-1023+15)<<10 | b>>42&0x3ff
}

func (f format) put(to []byte, i int, v uint64) {
	switch f.bits {
	case 16:
		binary.NativeEndian.PutUint16(to[2*i:], uint16(v))
	case 32:
		binary.NativeEndian.PutUint32(to[4*i:], uint32(v))
	default:
		binary.NativeEndian.PutUint64(to[8*i:], v)
	}
}

func (f format) get(from []byte, i int) uint64 {
	switch f.bits {
	case 16:
		return uint64(binary.NativeEndian.Uint16(from[2*i:]))
	case 32:
		return uint64(binary.NativeEndian.Uint32(from[4*i:]))
	}
	return binary.NativeEndian.Uint64(from[8*i:])
}

// check compares what a reduction gave with what its parts say.
func check(t *testing.T, e kernels.Element, got uint64, parts values, exact bool) {
	t.Helper()
	f := formatOf(e)
	want, sum, size := uint64(0), new(big.Rat), new(big.Rat)
	for _, p := range parts {
		want += p // for integers
		sum.Add(sum, f.number(p))
		size.Add(size, new(big.Rat).Abs(f.number(p)))
	}
	if f.mantissa == 0 {
		require.Equal(t, want&(^uint64(0)>>(64-f.bits)), got, "of %#x", parts)
		return
	}
	off := new(big.Rat).Sub(f.number(got), sum)
	if exact {
		require.Zero(t, off.Sign(), "%#x of %#x", got, parts)
		return
	}
	// Each addition rounds by at most half a step of the largest sum; 16-bit
	// elements add up in 32 bits where they are loaded, and round once.
	bound := new(big.Rat).Mul(size, new(big.Rat).SetFrac64(int64(len(parts)), 1<<(f.mantissa+1)))
	require.LessOrEqual(t, off.Abs(off).Cmp(bound), 0, "%#x of %#x", got, parts)
}

// The reductions of every element, against exact arithmetic where the numbers allow it in every
// order, and within the type's rounding on random ones.
func TestMultimemReductions(t *testing.T) {
	const units = 50
	for _, devices := range []int{1, 2, 5, 8} {
		r := newTroupe(t, devices)
		rng := rand.New(rand.NewPCG(uint64(devices), 2))
		for _, e := range kernels.Elements() {
			f := formatOf(e)
			elements := units * e.UnitBytes() * 8 / f.bits
			for _, exact := range []bool{true, false} {
				draw := f.random
				if exact {
					draw = f.exact
				}
				parts := make([]values, elements)
				fill := func() []byte {
					b := make([]byte, units*e.UnitBytes())
					for i := range parts {
						v := draw(rng)
						parts[i] = append(parts[i], v)
						f.put(b, i, v)
					}
					return b
				}
				for d := range devices {
					r.write(d, 0, fill())
				}
				by := rng.IntN(devices)
				r.launch(by, e.AllReduce(), r.mc, uint64(units))
				r.wait()
				first := r.read(0, 0, units*e.UnitBytes())
				for i, p := range parts {
					check(t, e, f.get(first, i), p, exact)
				}
				for d := range devices {
					require.Equal(t, first, r.read(d, 0, len(first)), "all replicas are the same")
				}
				// Into what is there, from every device at once.
				parts = make([]values, elements)
				for i := range parts {
					parts[i] = values{f.get(first, i)}
				}
				for d := range devices {
					r.write(d, r.size/2, fill())
				}
				for d := range devices {
					r.launch(d, e.Red(), r.mc, r.own[d]+cuda.Ptr(r.size/2), uint64(units))
				}
				r.wait()
				for d := range devices {
					got := r.read(d, 0, len(first))
					for i, p := range parts {
						check(t, e, f.get(got, i), p, exact)
					}
				}
			}
		}
	}
}

// Sums of 16-bit elements round once, not after each addition: 256 and four
// ones, in a type whose steps are 2 there.
func TestSumsOf16BitsAddUpIn32(t *testing.T) {
	r := newTroupe(t, 5)
	// In bf16: 256 is 0x4380, 1 is 0x3f80; 256 + 1 rounds back to 256, and
	// 256 + 4 is 0x4382.
	for d := range r.devices {
		v := uint32(0x3f803f80)
		if d == 2 {
			v = 0x43804380
		}
		for i := range 5 { // every order of units
			r.write(d, 4*i, binary.NativeEndian.AppendUint32(nil, v))
		}
	}
	r.launch(0, kernels.BF16.AllReduce(), r.mc, uint64(5))
	r.wait()
	for i := range 5 {
		require.Equal(t, uint32(0x43824382), binary.NativeEndian.Uint32(r.read(3, 4*i, 4)), "unit %d", i)
	}
}

func TestBroadcastBarrierAndNorm(t *testing.T) {
	for _, devices := range []int{1, 3, 8} {
		r := newTroupe(t, devices)
		rng := rand.New(rand.NewPCG(3, uint64(devices)))
		// Each broadcasts a part of its own.
		const n = 1003
		for d := range devices {
			b := make([]byte, 4*n)
			for i := range b {
				b[i] = byte(rng.Uint32())
			}
			r.write(d, r.size/2, b)
			r.launch(d, kernels.Broadcast, r.mc+cuda.Ptr(d*8192), r.own[d]+cuda.Ptr(r.size/2), uint64(n))
		}
		r.wait()
		for d := range devices {
			for part := range devices {
				require.Equal(t, r.read(part, r.size/2, 4*n), r.read(d, part*8192, 4*n))
			}
		}
		// The norm of all, twice: the counter goes on.
		const partial, arrived, out, x = 1 << 17, 1<<17 + 64, 1<<17 + 128, 1 << 18
		var sum float64
		for d := range devices {
			b := make([]byte, 4*n)
			for i := range n {
				v := float32(rng.NormFloat64())
				sum += float64(v) * float64(v)
				binary.NativeEndian.PutUint32(b[4*i:], math.Float32bits(v))
			}
			r.write(d, x, b)
		}
		for round := range 2 {
			for d := range devices {
				r.write(d, partial, make([]byte, 8))
			}
			for d := range devices {
				r.launch(d, kernels.L2Norm, r.own[d]+x, uint64(n), r.mc+partial, r.own[d]+partial,
					r.mc+arrived, r.own[d]+arrived, uint32((round+1)*devices), r.own[d]+out, r.abort.Ptr())
			}
			r.wait()
			for d := range devices {
				got := math.Float64frombits(binary.NativeEndian.Uint64(r.read(d, out, 8)))
				require.InEpsilon(t, math.Sqrt(sum), got, 1e-12)
			}
		}
		for d := range devices {
			r.launch(d, kernels.Barrier, r.mc+arrived, r.own[d]+arrived, uint32(3*devices), r.abort.Ptr())
		}
		r.wait()
		for d := range devices {
			require.EqualValues(t, 3*devices, binary.NativeEndian.Uint32(r.read(d, arrived, 4)))
		}
	}
}

// The word at abort ends a wait for a device that never arrives, and lets none begin.
func TestWaitsAreAborted(t *testing.T) {
	const partial, arrived, out = 1 << 17, 1<<17 + 64, 1<<17 + 128
	r := newTroupe(t, 2)
	for _, kernel := range []struct {
		name string
		args func(d int) []any
	}{
		{kernels.Barrier, func(d int) []any { return []any{r.mc + arrived, r.own[d] + arrived, uint32(2), r.abort.Ptr()} }},
		{kernels.L2Norm, func(d int) []any {
			return []any{r.own[d], uint64(10), r.mc + partial, r.own[d] + partial, r.mc + arrived, r.own[d] + arrived, uint32(2), r.own[d] + out, r.abort.Ptr()}
		}},
	} {
		r.setAbort(0)
		for d := range r.devices {
			r.write(d, arrived, make([]byte, 4))
			r.write(d, out, []byte{1, 2, 3, 4, 5, 6, 7, 8})
		}
		r.launch(0, kernel.name, kernel.args(0)...)
		require.Eventually(t, func() bool { return r.read(1, arrived, 1)[0] == 1 }, time.Minute, time.Millisecond)
		done, err := r.streams[0].Done()
		require.NoError(t, err)
		require.False(t, done, "it waits for the other device")
		r.setAbort(1)
		r.launch(1, kernel.name, kernel.args(1)...)
		r.wait()
		for d := range r.devices {
			require.Equal(t, []byte{1, 0, 0, 0}, r.read(d, arrived, 4), "%s: the second did not arrive", kernel.name)
			require.Equal(t, []byte{1, 2, 3, 4, 5, 6, 7, 8}, r.read(d, out, 8), "%s: there is no result", kernel.name)
		}
	}
}
