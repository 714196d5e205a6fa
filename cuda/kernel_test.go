package cuda_test

import (
	"bytes"
	"math"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/stretchr/testify/require"
)

const (
	argumentsKernel = "cuvmm_test_arguments"
	countKernel     = "cuvmm_test_count"
	orphanKernel    = "cuvmm_test_orphan"
	restKernel      = "cuvmm_test_rest"
)

// testText has a kernel that writes each of its parameters to where out points,
// one that adds one to a word for each launch, and one that no Go function
// stands for.
const testText = `.version 7.5
.target sm_70
.address_size 64

.visible .entry ` + argumentsKernel + `(
	.param .u64 out,
	.param .u8 p1,
	.param .u64 p2,
	.param .u16 p3,
	.param .u32 p4,
	.param .f32 p5,
	.param .f64 p6,
	.param .u8 p7,
	.param .align 8 .b8 p8[16]
)
{
	.reg .b64 %out, %wide;
	.reg .b32 %word;
	.reg .b16 %short;
	ld.param.u64 %out, [out];
	cvta.to.global.u64 %out, %out;
	ld.param.u8 %short, [p1];
	st.global.u8 [%out], %short;
	ld.param.u64 %wide, [p2];
	st.global.u64 [%out+8], %wide;
	ld.param.u16 %short, [p3];
	st.global.u16 [%out+16], %short;
	ld.param.u32 %word, [p4];
	st.global.u32 [%out+20], %word;
	ld.param.b32 %word, [p5];
	st.global.b32 [%out+24], %word;
	ld.param.b64 %wide, [p6];
	st.global.b64 [%out+32], %wide;
	ld.param.u8 %short, [p7];
	st.global.u8 [%out+40], %short;
	ld.param.u8 %short, [p8];
	st.global.u8 [%out+48], %short;
	ld.param.u64 %wide, [p8+8];
	st.global.u64 [%out+56], %wide;
	ret;
}

.visible .entry ` + countKernel + `(.param .u64 word)
{
	.reg .b64 %word;
	ld.param.u64 %word, [word];
	cvta.to.global.u64 %word, %word;
	red.global.add.u64 [%word], 1;
	ret;
}

.visible .entry ` + restKernel + `()
{
	ret;
}

.visible .entry ` + orphanKernel + `()
{
	ret;
}
`

// written is what the arguments kernel writes: its parameters.
type written struct {
	Flag   bool
	Wide   int64
	Short  uint16
	Word   uint32
	Single float32
	Double float64
	Last   uint8
	Pair   pair
}

type pair struct {
	Tag   int8
	Value uint64
}

func init() {
	sim.RegisterKernel(restKernel, func(*sim.Kernel) {})
	sim.RegisterKernel(argumentsKernel, func(k *sim.Kernel) {
		sim.Store(k, sim.Param[uint64](k, 0), []written{{
			Flag: sim.Param[bool](k, 1), Wide: sim.Param[int64](k, 2), Short: sim.Param[uint16](k, 3),
			Word: sim.Param[uint32](k, 4), Single: sim.Param[float32](k, 5), Double: sim.Param[float64](k, 6),
			Last: sim.Param[uint8](k, 7), Pair: sim.Param[pair](k, 8),
		}})
	})
	sim.RegisterKernel(countKernel, func(k *sim.Kernel) {
		threads := uint64(1)
		for i := range 3 {
			threads *= uint64(k.Grid[i]) * uint64(k.Block[i])
		}
		k.AddWord(sim.Param[uint64](k, 0), threads)
	})
}

// kernel is a kernel of the test's text, and a stream for it.
func kernel(t testing.TB, d *cuda.Device, name string) (*cuda.Kernel, *cuda.Stream) {
	t.Helper()
	m, err := d.LoadModule([]byte(testText))
	require.NoError(t, err)
	closed(t, m)
	k, err := m.Kernel(name)
	require.NoError(t, err)
	return k, stream(t, d)
}

// words is zeroed device memory of n bytes.
func words(t testing.TB, d *cuda.Device, n int) cuda.Ptr {
	t.Helper()
	p := memory(t, d, n)
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	require.NoError(t, s.Memset(p, 0, n))
	require.NoError(t, s.Close())
	return p
}

var once = cuda.Launch{Grid: [3]int{1, 1, 1}, Block: [3]int{1, 1, 1}}

func TestLaunchPassesItsArguments(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		k, s := kernel(t, d, argumentsKernel)
		require.Equal(t, argumentsKernel, k.Name())
		out := words(t, d, 64)
		for _, want := range []written{
			{true, -5_000_000_000, 0xabcd, 0xdeadbeef, 1.25, -2.5, 0xfe, pair{-7, 1 << 63}},
			{},
			{false, 1, 2, 3, 4, 5, 6, pair{7, 8}},
		} {
			require.NoError(t, k.Launch(s, once, out, want.Flag, want.Wide, want.Short, want.Word,
				want.Single, want.Double, want.Last, want.Pair))
			require.Equal(t, want, download[written](t, s, out))
		}
	})
}

func download[T any](t testing.TB, s *cuda.Stream, at cuda.Ptr) (v T) {
	t.Helper()
	require.NoError(t, s.Download(unsafe.Slice((*byte)(unsafe.Pointer(&v)), unsafe.Sizeof(v)), at))
	return v
}

func TestLaunchRunsTheWholeGrid(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		k, s := kernel(t, d, countKernel)
		word := words(t, d, 8)
		want := uint64(0)
		for _, l := range []cuda.Launch{
			once,
			{Grid: [3]int{5, 3, 2}, Block: [3]int{8, 4, 2}},
			{Grid: [3]int{1, 1, 1}, Block: [3]int{1024, 1, 1}, SharedBytes: 48 << 10},
			{Grid: [3]int{1, 65535, 1}, Block: [3]int{1, 1, 64}},
			cuda.Threads(1), cuda.Threads(256), cuda.Threads(257),
		} {
			require.NoError(t, k.Launch(s, l, word))
			n := uint64(1)
			for i := range 3 {
				n *= uint64(l.Grid[i] * l.Block[i])
			}
			want += n
			require.Equal(t, want, download[uint64](t, s, word), "%+v", l)
		}
		require.Equal(t, [3]int{1, 1, 1}, cuda.Threads(256).Grid)
		require.Equal(t, [3]int{2, 1, 1}, cuda.Threads(257).Grid)
	})
}

func TestLaunchOnACapturingStreamBecomesPartOfTheGraph(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		k, s := kernel(t, d, countKernel)
		word := words(t, d, 8)
		g, err := s.WithCapture(cuda.CaptureOptions{}, func() error { return k.Launch(s, once, word) })
		require.NoError(t, err)
		require.Zero(t, download[uint64](t, s, word), "nothing has run")
		require.NoError(t, g.Launch(s))
		require.NoError(t, g.Launch(s))
		require.Equal(t, uint64(2), download[uint64](t, s, word))
		require.NoError(t, g.Close())
	})
}

func TestLaunchRefusesBeforeTheDriverIsAsked(t *testing.T) {
	m, sys := sim.Open(t, sim.Options{Devices: make([]sim.DeviceOptions, 2)})
	d := sys.Devices()[0]
	k, s := kernel(t, d, countKernel)
	_, far := kernel(t, sys.Devices()[1], countKernel)
	_, foreign := kernel(t, gputest.Software(t), countKernel)
	gone, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	require.NoError(t, gone.Close())
	unloaded, err := d.LoadModule([]byte(testText))
	require.NoError(t, err)
	stale, err := unloaded.Kernel(countKernel)
	require.NoError(t, err)
	require.NoError(t, unloaded.Close())
	word := words(t, d, 8)
	m.ResetCounts()

	grid := func(x, y, z int) cuda.Launch { l := once; l.Grid = [3]int{x, y, z}; return l }
	block := func(x, y, z int) cuda.Launch { l := once; l.Block = [3]int{x, y, z}; return l }
	shared := func(n int) cuda.Launch { l := once; l.SharedBytes = n; return l }
	for _, row := range []struct {
		what string
		err  error
		is   error
		says string
	}{
		{"no stream", k.Launch(nil, once, word), cuda.ErrInvalidArgument, "NewStream"},
		{"a closed stream", k.Launch(gone, once, word), cuda.ErrClosed, "stream"},
		{"another System's stream", k.Launch(foreign, once, word), cuda.ErrForeign, "stream"},
		{"another device's stream", k.Launch(far, once, word), cuda.ErrInvalidArgument, "load the module with the Device"},
		{"a closed module", stale.Launch(s, once, word), cuda.ErrClosed, "module"},
		{"no launch", k.Launch(s, cuda.Launch{}, word), cuda.ErrInvalidArgument, "a grid of [0 0 0] blocks; the x dimension is 1 to 2147483647"},
		{"no threads", k.Launch(s, cuda.Threads(0), word), cuda.ErrInvalidArgument, ""},
		{"nothing to do", k.Launch(s, cuda.Threads(0), word), cuda.ErrInvalidArgument, "where there is nothing to do, launch nothing"},
		{"more than a grid has", k.Launch(s, cuda.Threads(math.MaxInt), word), cuda.ErrInvalidArgument, "let each thread do several elements"},
		{"fewer than none", k.Launch(s, cuda.Threads(-5000), word), cuda.ErrInvalidArgument, ""},
		{"grid x", k.Launch(s, grid(1<<31, 1, 1), word), cuda.ErrInvalidArgument, "2147483647"},
		{"grid y", k.Launch(s, grid(1, 65536, 1), word), cuda.ErrInvalidArgument, "the y dimension is 1 to 65535"},
		{"grid z", k.Launch(s, grid(1, 1, -1), word), cuda.ErrInvalidArgument, "the z dimension"},
		{"block x", k.Launch(s, block(1025, 1, 1), word), cuda.ErrInvalidArgument, "1024"},
		{"block y", k.Launch(s, block(1, 0, 1), word), cuda.ErrInvalidArgument, "blocks of [1 0 1] threads"},
		{"block z", k.Launch(s, block(1, 1, 65), word), cuda.ErrInvalidArgument, "1 to 64"},
		{"threads", k.Launch(s, block(32, 33, 1), word), cuda.ErrInvalidArgument, "1056 threads; a block has at most 1024"},
		{"shared memory", k.Launch(s, shared(227<<10+1), word), cuda.ErrInvalidArgument, "can ask for 0 to 232448 bytes"},
		{"negative shared memory", k.Launch(s, shared(-1), word), cuda.ErrInvalidArgument, "-1 bytes of shared memory"},
		{"an argument of Go's", k.Launch(s, once, word, []int32{1}), cuda.ErrInvalidArgument, `argument 1 of kernel "cuvmm_test_count"`},
	} {
		require.ErrorIs(t, row.err, row.is, row.what)
		require.ErrorContains(t, row.err, row.says, row.what)
	}
	require.Zero(t, m.Count("cuLaunchKernel"))

	require.NoError(t, k.Launch(s, once, word), "nothing was broken")
	require.Equal(t, uint64(1), download[uint64](t, s, word))
}

// Arguments are compared with what the kernel declares, where the driver tells.
func TestLaunchComparesArgumentsWithTheKernel(t *testing.T) {
	m, sys := sim.Open(t)
	d := sys.Devices()[0]
	k, s := kernel(t, d, argumentsKernel)
	out := words(t, d, 64)
	good := []any{out, true, int64(1), uint16(2), uint32(3), float32(4), float64(5), uint8(6), pair{7, 8}}
	for _, row := range []struct {
		what string
		args []any
		says string
	}{
		{"none", nil, `0 arguments for kernel "cuvmm_test_arguments", which declares 9; pass one for each parameter, in order`},
		{"too few", good[:8], "8 arguments"},
		{"too many", append(slices.Clone(good), uint8(1)), "10 arguments"},
		{"a smaller one", with(good, 2, int32(1)), `argument 2 of kernel "cuvmm_test_arguments", of type int32: it takes 4 bytes at offset 16, where the kernel declares 8 at offset 16; pass a type of the size`},
		{"a larger one", with(good, 1, [2]bool{}), "argument 1 of kernel \"cuvmm_test_arguments\", of type [2]bool: it takes 2 bytes at offset 8, where the kernel declares 1 at offset 8"},
		{"one that ends in the right place", with(good, 2, [4]uint32{}), "it takes 16 bytes at offset 16"},
		{"one byte", with(good, 8, uint8(1)), "it takes 1 byte at offset 56, where the kernel declares 16 at offset 56"},
	} {
		err := k.Launch(s, once, row.args...)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument, row.what)
		require.ErrorContains(t, err, row.says, row.what)
	}
	require.Zero(t, m.Count("cuLaunchKernel"))
	require.NoError(t, k.Launch(s, once, good...))
	require.NoError(t, k.Launch(s, once, with(good, 2, uint64(1))...), "of the same size")
	require.NoError(t, k.Launch(s, once, with(good, 2, [8]uint8{})...), "of another alignment")
	require.NoError(t, s.Synchronize())
}

func TestAKernelWithoutParametersTakesNoArguments(t *testing.T) {
	_, d := open(t)
	k, s := kernel(t, d, restKernel)
	require.NoError(t, k.Launch(s, once))
	for _, arg := range []any{uint8(1), 1, uint64(1)} {
		err := k.Launch(s, once, arg)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.ErrorContains(t, err, `1 argument for kernel "cuvmm_test_rest", which declares 0`)
	}
	require.ErrorContains(t, k.Launch(s, once, nil), "is nil")
}

// A binary whose kernels list no parameters may have left them out.
func TestAKernelOfABinaryWithoutAListTakesAnyArguments(t *testing.T) {
	text := []byte(testText)
	image := append(elfHeader(), text...)
	d := hearingDevice(t, deaf{loads: func(given []byte) []byte {
		if bytes.Equal(given, image) {
			return text
		}
		return given
	}})
	s := stream(t, d)
	for name, image := range map[string][]byte{"binary": image, "text": text} {
		m, err := d.LoadModule(image)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, m.Close()) })
		without, err := m.Kernel(restKernel)
		require.NoError(t, err)
		require.NoError(t, without.Launch(s, once))
		err = without.Launch(s, once, uint64(1))
		if name == "binary" {
			require.NoError(t, err)
			require.ErrorContains(t, without.Launch(s, once, 1), "convert it to int32 or int64")
		} else {
			require.ErrorContains(t, err, "which declares 0")
		}
		with, err := m.Kernel(countKernel)
		require.NoError(t, err)
		require.ErrorIs(t, with.Launch(s, once), cuda.ErrInvalidArgument, "what is listed is compared")
	}
}

// with is a list with another value in one place.
func with(args []any, i int, v any) []any {
	args = slices.Clone(args)
	args[i] = v
	return args
}

// Where the driver does not tell what a kernel declares, or tells what cannot
// be, it alone judges the arguments.
func TestLaunchWithoutKnowledgeOfTheKernel(t *testing.T) {
	m, err := sim.New(sim.OlderDriver(12030))
	require.NoError(t, err)
	older, err := m.OpenOwned(cuda.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, older.Close()) })
	k, s := kernel(t, older.Devices()[0], countKernel)
	err = k.Launch(s, once)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument, "what the driver refuses")
	require.ErrorContains(t, err, "with 0 bytes of arguments")
	require.ErrorContains(t, err, "compare the arguments with the kernel's parameters")
	require.Zero(t, m.Count("cuFuncGetParamInfo"))
	err = k.Launch(s, once, [4096]uint64{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.ErrorContains(t, err, "32768 bytes of arguments")

	for what, tells := range map[string]func(i uint64) (offset, size uint64, r driver.Result){
		"another error":           func(uint64) (uint64, uint64, driver.Result) { return 0, 0, driver.InvalidHandle },
		"offsets from another on": func(i uint64) (uint64, uint64, driver.Result) { return 352 + 8*i, 8, driver.Success },
		"all in one place":        func(uint64) (uint64, uint64, driver.Result) { return 0, 8, driver.Success },
		"no end":                  func(i uint64) (uint64, uint64, driver.Result) { return 8 * i, 8, driver.Success },
		"no size":                 func(uint64) (uint64, uint64, driver.Result) { return 0, 0, driver.Success },
		"absurd sizes":            func(i uint64) (uint64, uint64, driver.Result) { return 8 * i, math.MaxUint64, driver.Success },
	} {
		t.Run(what, func(t *testing.T) {
			k, s := kernel(t, deafDevice(t, tells), countKernel)
			require.NoError(t, k.Launch(s, once))
			require.NoError(t, k.Launch(s, once, uint8(1), uint64(2)))
		})
	}
}

// An argument goes where the kernel declares it, also where that is aligned
// more strictly than its Go type, as CUDA's vectors are.
func TestLaunchPutsArgumentsWhereTheKernelDeclaresThem(t *testing.T) {
	declared := [][2]uint64{{0, 4}, {16, 16}, {36, 8}}
	var got []byte
	k, s := kernel(t, hearingDevice(t, deaf{
		tells: func(i uint64) (uint64, uint64, driver.Result) {
			if i >= uint64(len(declared)) {
				return 0, 0, driver.InvalidValue
			}
			return declared[i][0], declared[i][1], driver.Success
		},
		hears: func(params []byte) { got = slices.Clone(params) },
	}), countKernel)
	type vector struct{ X, Y, Z, W uint8 }
	require.NoError(t, k.Launch(s, once, uint32(0x01010101), [4]vector{{2, 2, 2, 2}, {W: 3}}, [2]uint32{0x04040404, 5}))
	want := make([]byte, 44)
	copy(want, []byte{1, 1, 1, 1})
	copy(want[16:], []byte{2, 2, 2, 2, 0, 0, 0, 3})
	copy(want[36:], []byte{4, 4, 4, 4, 5})
	require.Equal(t, want, got)

	err := k.Launch(s, once, uint32(1), [2]uint64{}, uint64(1))
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.ErrorContains(t, err, "it takes 8 bytes at offset 40, where the kernel declares 8 at offset 36")
	require.ErrorContains(t, err, "an array of smaller elements")
}

// An int has the size that the kernel declares.
func TestLaunchConvertsInts(t *testing.T) {
	declared := [][2]uint64{{0, 1}, {2, 2}, {4, 4}, {8, 8}, {16, 12}}
	n := uint64(4)
	var got []byte
	k, s := kernel(t, hearingDevice(t, deaf{
		tells: func(i uint64) (uint64, uint64, driver.Result) {
			if i >= n {
				return 0, 0, driver.InvalidValue
			}
			return declared[i][0], declared[i][1], driver.Success
		},
		hears: func(params []byte) { got = slices.Clone(params) },
	}), countKernel)
	type count int
	require.NoError(t, k.Launch(s, once, 1, uint(2), count(-3), -4))
	require.Equal(t, []byte{1, 0, 2, 0, 0xfd, 0xff, 0xff, 0xff, 0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, got)
	require.NoError(t, k.Launch(s, once, 255, -32768, uint(math.MaxUint32), uint(math.MaxUint64)), "what fits as signed or unsigned")
	for _, args := range [][]any{
		{256, 0, 0, 0}, {-129, 0, 0, 0}, {0, 65536, 0, 0}, {0, 0, 1 << 32, 0}, {0, 0, math.MinInt32 - 1, 0}, {0, 0, uint(1 << 33), 0},
	} {
		err := k.Launch(s, once, args...)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument, "%v", args)
		require.ErrorContains(t, err, "pass a number that fits there")
	}
	require.ErrorContains(t, k.Launch(s, once, 0, 0, 0, [1]int{}), "int has another size in C")
	require.ErrorIs(t, k.Launch(s, once, 0, 0, 0, 0, 0), cuda.ErrInvalidArgument, "one too many")

	n = 5
	k, s = kernel(t, hearingDevice(t, deaf{tells: func(i uint64) (uint64, uint64, driver.Result) {
		if i >= n {
			return 0, 0, driver.InvalidValue
		}
		return declared[i][0], declared[i][1], driver.Success
	}}), countKernel)
	require.ErrorContains(t, k.Launch(s, once, 0, 0, 0, 0, 0), "of type int, where the kernel declares 12 bytes")
	k, s = kernel(t, hearingDevice(t, deaf{tells: func(uint64) (uint64, uint64, driver.Result) { return 0, 0, driver.NotSupported }}), countKernel)
	require.ErrorContains(t, k.Launch(s, once, 1), "convert it to int32 or int64")
}

// deaf is a driver that launches nothing. Its functions may be nil.
type deaf struct {
	driver.Driver
	tells func(i uint64) (offset, size uint64, r driver.Result) // what FuncGetParamInfo returns
	hears func(params []byte)                                   // is called with each launch
	loads func(image []byte) []byte                             // what is loaded instead
}

func (d deaf) ModuleLoadData(c driver.Context, image []byte) (driver.Module, driver.Result) {
	if d.loads != nil {
		image = d.loads(image)
	}
	return d.Driver.ModuleLoadData(c, image)
}

func (d deaf) FuncGetParamInfo(c driver.Context, f driver.Function, i uint64) (offset, size uint64, r driver.Result) {
	if d.tells == nil {
		return d.Driver.FuncGetParamInfo(c, f, i)
	}
	return d.tells(i)
}

func (d deaf) LaunchKernel(_ driver.Context, _ driver.Function, _ driver.LaunchConfig, params []byte, _ driver.Stream) driver.Result {
	if d.hears != nil {
		d.hears(params)
	}
	return driver.Success
}

// deafDevice is a device of a deaf driver.
func deafDevice(t *testing.T, tells func(i uint64) (offset, size uint64, r driver.Result)) *cuda.Device {
	return hearingDevice(t, deaf{tells: tells})
}

func hearingDevice(t *testing.T, d deaf) *cuda.Device {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	d.Driver = driver.Of(m)
	sys, err := gputest.Wrap(d, m.Close)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sys.Close()) })
	return sys.Devices()[0]
}

func TestLaunchAllocatesNothing(t *testing.T) {
	unknown := func(uint64) (uint64, uint64, driver.Result) { return 0, 0, driver.InvalidHandle }
	k, s := kernel(t, deafDevice(t, unknown), countKernel)
	known, its := kernel(t, deafDevice(t, nil), argumentsKernel)
	at, n, of := cuda.Ptr(1<<40), uint64(1<<40), pair{1, 1 << 40}
	for what, launch := range map[string]func() error{
		"the common types": func() error { return k.Launch(s, once, at, n, float32(n), float64(n), int32(n>>20)) },
		"a struct":         func() error { return k.Launch(s, once, at, of, uint8(n>>35), [2]int16{1, 2}) },
		"compared": func() error {
			return known.Launch(its, once, at, true, n, uint16(1), uint32(2), float32(3), float64(4), uint8(n>>35), of)
		},
	} {
		require.Zero(t, testing.AllocsPerRun(100, func() {
			if launch() != nil {
				t.Error("the launch failed")
			}
		}), what)
	}
}

func TestLoadModuleSaysWhatIsWrong(t *testing.T) {
	m, sys := sim.Open(t)
	d := sys.Devices()[0]
	for _, row := range []struct {
		what   string
		image  string
		result cuda.Code
		is     error
		says   string
	}{
		{"nothing", "", 0, cuda.ErrInvalidArgument, "an empty image"},
		{"no image", "hello", 0, cuda.ErrInvalidArgument, "5 bytes of PTX on device 0 (Software GPU), sm_90, by a driver for CUDA 13.0"},
		{"no image, of bytes", "\x01\x02", 0, cuda.ErrInvalidArgument, "pass PTX text, a cubin, or a fat binary"},
		{"zeros", strings.Repeat("\x00", 64), 0, cuda.ErrInvalidArgument, "an image of 64 bytes that begins with a NUL"},
		{"text and zeros", "hello" + strings.Repeat("\x00", 64), 0, cuda.ErrInvalidArgument, "5 bytes of PTX on device 0"},
		{"declarations far behind", "//" + strings.Repeat("x", 64<<10) + "\n.version 7.5 .target sm_120\n", 0, cuda.ErrInvalidArgument, "bytes of PTX on device 0"},
		{"bad PTX", ".version 7.5\n.target sm_x", 0, cuda.ErrInvalidArgument,
			"CUDA_ERROR_INVALID_PTX (218): the compiler says: missing .target sm_ directive behind the .version; correct the text"},
		{"PTX for a later GPU", ".version 8.7\n.target sm_120\n", 0, cuda.ErrInvalidArgument, "PTX (.version 8.7 .target sm_120) on device 0"},
		{"and why", ".version 8.7\n.target sm_120\n", 0, cuda.ErrInvalidArgument, "the compiler says: the .target sm_120 is higher than the device's, sm_90"},
		{"PTX of a version to come", ".version 99.0\n.target sm_90\n", 0, cuda.ErrNotSupported, "the compiler says: unsupported .version 99.0; the newest is 9.0; the PTX is of a version that the driver does not know"},
		{"PTX of a later version", testText, 222, cuda.ErrNotSupported, "write the .version of an older CUDA, or install a newer driver"},
		{"no memory", testText, 2, cuda.ErrOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY (2)"},
	} {
		t.Run(row.what, func(t *testing.T) {
			if row.result != 0 {
				m.Inject(sim.Fault{Call: "cuModuleLoadData", Result: row.result})
			}
			_, err := d.LoadModule([]byte(row.image))
			require.ErrorIs(t, err, row.is)
			require.ErrorContains(t, err, row.says)
			require.Empty(t, sys.Live())
		})
	}
}

// The driver refuses a module, but makes it when it is to say why, and then does not unload
// it: the System does that later.
func TestModuleOfTheCompilersWordsIsGivenBack(t *testing.T) {
	m, sys := sim.Open(t)
	m.Inject(sim.Fault{Call: "cuModuleLoadData", Result: cuda.Code(driver.InvalidPTX)})
	m.Inject(sim.Fault{Call: "cuModuleUnload", Result: cuda.Code(driver.Unknown)})
	_, err := sys.Devices()[0].LoadModule([]byte(testText))
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.Len(t, sys.Leftovers(), 1)
	require.Equal(t, "module", sys.Leftovers()[0].What)
	require.NoError(t, sys.Drain(t.Context()))
	require.Empty(t, sys.Leftovers())
}

// compiling is a driver that refuses every module, with words of its compiler.
type compiling struct {
	driver.Driver
	says   string
	result driver.Result
}

func (c compiling) ModuleLoadData(driver.Context, []byte) (driver.Module, driver.Result) {
	return 0, c.result
}

func (c compiling) ModuleLoadDataEx(_ driver.Context, _, log []byte) (driver.Module, driver.Result) {
	log[copy(log[:len(log)-1], c.says)] = 0
	return 0, c.result
}

// The compiler's words are in the error, on one line; a binary image has no
// compiler, and other failures are none of its business.
func TestTheCompilersWords(t *testing.T) {
	const says = "ptxas application ptx input, line 5; fatal   : Parsing error\r\n\nptxas fatal   : aborted\n"
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	for _, row := range []struct {
		what, image, says string
		result            driver.Result
		want              string
	}{
		{"text", testText, says, driver.InvalidPTX, ": the compiler says: ptxas application ptx input, line 5; fatal : Parsing error; ptxas fatal : aborted; correct"},
		{"a long one", testText, strings.Repeat("x", 10000), driver.InvalidPTX, strings.Repeat("x", 8000)},
		{"no words", testText, " \n", driver.InvalidPTX, "(218); correct"},
		{"a binary", string(elfHeader()), says, driver.NoBinaryForGPU, "(209); the image has no code"},
		{"no memory", testText, says, driver.OutOfMemory, "(2); "},
	} {
		sys, err := gputest.Wrap(compiling{driver.Of(m), row.says, row.result}, nil)
		require.NoError(t, err)
		_, err = sys.Devices()[0].LoadModule([]byte(row.image))
		require.ErrorContains(t, err, row.want, row.what)
		require.NotContains(t, err.Error(), "\n")
		require.NoError(t, sys.Close())
	}
}

// elfHeader is that of an image without tables.
func elfHeader() []byte { return append([]byte("\x7fELF"), make([]byte, 60)...) }

func TestKernelSaysWhatIsWrong(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		m, err := d.LoadModule([]byte(testText))
		require.NoError(t, err)
		require.Same(t, d, m.Device())
		for _, row := range []struct{ name, says string }{
			{"", `the name ""`},
			{countKernel + "\x00", "pass the name of a PTX entry"},
			{"absent", `kernel "absent": cuModuleGetFunction returned CUDA_ERROR_NOT_FOUND (500); the module has no entry of that name`},
		} {
			_, err := m.Kernel(row.name)
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
			require.ErrorContains(t, err, row.says)
		}
		_, err = m.Kernel(orphanKernel)
		if d.System().Driver().Software {
			require.ErrorIs(t, err, cuda.ErrNotSupported)
			require.ErrorContains(t, err, "sim.RegisterKernel")
		} else {
			require.NoError(t, err)
		}
		require.NoError(t, m.Close())
		require.NoError(t, m.Close(), "again does nothing")
		_, err = m.Kernel(countKernel)
		require.ErrorIs(t, err, cuda.ErrClosed)
	})
}

func TestModuleCloseAfterUnloadsWhenTheStreamHasPassed(t *testing.T) {
	m, sys := sim.Open(t)
	d := sys.Devices()[0]
	_, s := kernel(t, d, countKernel)
	word := words(t, d, 8)
	module, err := d.LoadModule([]byte(testText))
	require.NoError(t, err)
	k, err := module.Kernel(countKernel)
	require.NoError(t, err)
	require.ErrorIs(t, module.CloseAfter(), cuda.ErrInvalidArgument)
	require.NoError(t, k.Launch(s, once, word), "nothing has changed")
	m.Hold(s.Handle())
	require.NoError(t, k.Launch(s, once, word))
	require.NoError(t, module.CloseAfter(s))
	require.ErrorIs(t, k.Launch(s, once, word), cuda.ErrClosed)
	require.NoError(t, module.Close(), "closing again does nothing")
	require.Zero(t, m.Count("cuModuleUnload"))
	m.Release(s.Handle())
	require.NoError(t, sys.Drain(t.Context()))
	require.Equal(t, 1, m.Count("cuModuleUnload"))
	require.Equal(t, uint64(2), download[uint64](t, s, word))
}

func TestModuleCloseWaitsForTheDevicesWork(t *testing.T) {
	m, sys := sim.Open(t)
	d := sys.Devices()[0]
	_, s := kernel(t, d, countKernel)
	word := words(t, d, 8)
	module, err := d.LoadModule([]byte(testText))
	require.NoError(t, err)
	k, err := module.Kernel(countKernel)
	require.NoError(t, err)
	m.Hold(s.Handle())
	require.NoError(t, k.Launch(s, once, word))
	waiting := make(chan struct{})
	m.OnCall(func(call string) {
		if call == "cuEventSynchronize" {
			close(waiting)
		}
	})
	closed := make(chan error)
	go func() { closed <- module.Close() }()
	<-waiting
	m.OnCall(nil)
	require.Zero(t, m.Count("cuModuleUnload"))
	m.Release(s.Handle())
	require.NoError(t, <-closed)
	require.Equal(t, uint64(1), download[uint64](t, s, word))
}

func TestModuleCloseGoesOnAfterAFailure(t *testing.T) {
	m, sys := sim.Open(t)
	module, err := sys.Devices()[0].LoadModule([]byte(testText))
	require.NoError(t, err)
	require.Len(t, sys.Live(), 1)
	require.Contains(t, sys.Live()[0], "module of ")
	require.ErrorIs(t, sys.Close(), cuda.ErrInUse)
	m.Inject(sim.Fault{Call: "cuModuleUnload", Result: 999})
	require.ErrorContains(t, module.Close(), "cuModuleUnload returned CUDA_ERROR_UNKNOWN (999)")
	require.NoError(t, module.Close())
	require.Empty(t, sys.Live())
}

// A kernel that goes astray takes its context along; closing then is done.
func TestModuleAfterTheDeviceIsLost(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.Close() }) // a context that was lost stays for good
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	d := sys.Devices()[0]
	module, err := d.LoadModule([]byte(testText))
	require.NoError(t, err)
	k, err := module.Kernel(countKernel)
	require.NoError(t, err)
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	require.NoError(t, k.Launch(s, once, cuda.Ptr(0x1000)))
	require.ErrorIs(t, s.Synchronize(), cuda.ErrDeviceLost)
	require.Contains(t, m.Fault(), countKernel)
	require.ErrorIs(t, k.Launch(s, once, cuda.Ptr(0x1000)), cuda.ErrDeviceLost)
	_, err = module.Kernel(argumentsKernel)
	require.ErrorIs(t, err, cuda.ErrDeviceLost)
	require.NoError(t, module.CloseAfter(s))
	require.NoError(t, sys.Drain(t.Context()))
	require.NoError(t, s.Close())
	require.NoError(t, sys.Close())
}
