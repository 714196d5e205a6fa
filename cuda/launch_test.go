package cuda_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/stretchr/testify/require"
)

const (
	meetKernel    = "cuvmm_test_meet"
	crowdedKernel = "cuvmm_test_crowded"
	launchGlobal  = "cuvmm_test_scale"
)

// launchText has a kernel in which each block writes its number to the end of its
// dynamic shared memory, waits for all blocks at the word, and adds to the next
// word the module's variable if it reads its number back. Its static shared memory
// is 16 bytes.
const launchText = `.version 6.0
.target sm_50
.address_size 64

.visible .global .align 4 .u32 ` + launchGlobal + ` = 3;
.extern .shared .align 16 .b8 dynamic[];

.visible .entry ` + meetKernel + `(.param .u64 address, .param .u32 blocks, .param .u32 bytes)
{
	.shared .align 4 .b32 fixed[4];
	.reg .b64 %word, %scale;
	.reg .b32 %all, %value, %last, %base, %block;
	.reg .pred %is;
	ld.param.u64 %word, [address];
	ld.param.u32 %all, [blocks];
	ld.param.u32 %last, [bytes];
	mov.u32 %base, dynamic;
	add.u32 %last, %last, %base;
	mov.u32 %block, %ctaid.x;
	st.volatile.shared.u32 [fixed], %block;
	st.volatile.shared.u32 [%last+-4], %block;
	atom.global.add.u32 %value, [%word], 1;
meet:
	ld.volatile.global.u32 %value, [%word];
	setp.lt.u32 %is, %value, %all;
	@%is bra meet;
	ld.volatile.shared.u32 %value, [%last+-4];
	setp.ne.u32 %is, %value, %block;
	@%is bra done;
	ld.volatile.shared.u32 %value, [fixed];
	setp.ne.u32 %is, %value, %block;
	@%is bra done;
	mov.u64 %scale, ` + launchGlobal + `;
	ld.volatile.global.u32 %value, [%scale];
	atom.global.add.u32 %all, [%word+4], %value;
done:
	ret;
}
`

func init() {
	sim.RegisterKernel(crowdedKernel, func(*sim.Kernel) {})
	sim.RegisterKernel(meetKernel, func(k *sim.Kernel) {
		scale := sim.Load[uint32](k, k.Global(launchGlobal), 1)[0]
		if k.SharedBytes == int(sim.Param[uint32](k, 2)) {
			sim.Store(k, sim.Param[uint64](k, 0), []uint32{uint32(k.Grid[0]), scale * uint32(k.Grid[0])})
		}
	})
}

// launching has what the tests of launches need.
type launching struct {
	t      *testing.T
	dev    *cuda.Device
	module *cuda.Module
	kernel *cuda.Kernel
	stream *cuda.Stream
	words  cuda.Ptr
}

func newLaunching(t *testing.T, d *cuda.Device) *launching {
	t.Helper()
	l := &launching{t: t, dev: d, words: words(t, d, 8)}
	var err error
	l.module, err = d.LoadModule([]byte(launchText))
	require.NoError(t, err)
	l.kernel, err = l.module.Kernel(meetKernel)
	require.NoError(t, err)
	l.stream, err = d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, errors.Join(l.stream.Close(), l.module.Close())) })
	return l
}

// meets launches, and requires that all blocks met and read back what they wrote.
func (l *launching) meets(shape cuda.Launch, scale uint32) {
	l.t.Helper()
	require.NoError(l.t, l.stream.Memset(l.words, 0, 8))
	n := uint32(shape.Grid[0])
	require.NoError(l.t, l.kernel.Launch(l.stream, shape, l.words, n, uint32(shape.SharedBytes)))
	require.Equal(l.t, [2]uint32{n, scale * n}, download[[2]uint32](l.t, l.stream, l.words))
}

func shape(blocks, shared int) cuda.Launch {
	return cuda.Launch{Grid: [3]int{blocks, 1, 1}, Block: [3]int{1, 1, 1}, SharedBytes: shared}
}

func TestSharedMemoryUpToWhatTheDeviceHas(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		l := newLaunching(t, d)
		most, err := l.kernel.MaxShared()
		require.NoError(t, err)
		t.Logf("the kernel can have %d bytes", most)
		for _, n := range []int{4, 48<<10 - 16, 48 << 10, 64 << 10, 100 << 10, most} {
			if n <= most {
				l.meets(shape(1, n), 3)
			}
		}
		l.meets(shape(1, 4), 3)
		err = l.kernel.Launch(l.stream, shape(1, most+1), l.words, uint32(1), uint32(most+1))
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.ErrorContains(t, err, "16 static ones")
	})
}

// Only a launch that needs more than 48 KiB has the driver asked to allow it, once.
func TestSharedMemoryIsRaisedOnce(t *testing.T) {
	m, sys := sim.Open(t)
	l := newLaunching(t, sys.Devices()[0])
	l.meets(shape(1, 48<<10-16), 3)
	require.Zero(t, m.Count("cuFuncSetAttribute"))
	l.meets(shape(1, 48<<10), 3)
	l.meets(shape(1, 100<<10), 3)
	require.Equal(t, 1, m.Count("cuFuncSetAttribute"))
	require.Equal(t, 1, m.Count("cuFuncGetAttribute"))
}

func TestCooperativeLaunch(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		l := newLaunching(t, d)
		one := shape(1, 60<<10)
		all, err := l.kernel.BlocksAtOnce(one)
		require.NoError(t, err)
		t.Logf("%d blocks at once", all)
		require.Positive(t, all)
		grid := one
		grid.Grid[0], grid.Cooperative = all, true
		l.meets(grid, 3)
		grid.Grid[0]++
		err = l.kernel.Launch(l.stream, grid, l.words, uint32(all+1), uint32(grid.SharedBytes))
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.ErrorContains(t, err, "Kernel.BlocksAtOnce")
		require.NoError(t, l.stream.Synchronize(), "nothing was broken")

		// In a graph, too.
		if d.System().Driver().Version < 12040 {
			t.Skip("drivers before CUDA 12.4 do not list the parameters")
		}
		grid.Grid[0] = all
		require.NoError(t, l.stream.Memset(l.words, 0, 8))
		g, err := l.stream.WithCapture(cuda.CaptureOptions{}, func() error {
			return l.kernel.Launch(l.stream, grid, l.words, uint32(all), uint32(grid.SharedBytes))
		})
		require.NoError(t, err)
		require.NoError(t, g.Launch(l.stream))
		require.Equal(t, [2]uint32{uint32(all), 3 * uint32(all)}, download[[2]uint32](t, l.stream, l.words))
		require.NoError(t, g.Close())
	})
}

// An older driver cannot be told the parameters in the one form that it takes while
// the stream captures. The capture goes on.
func TestAnOlderDriverCapturesNoCooperativeLaunch(t *testing.T) {
	_, sys := sim.Open(t, sim.OlderDriver(12030))
	l := newLaunching(t, sys.Devices()[0])
	grid := shape(1, 4)
	grid.Cooperative = true
	var refused error
	g, err := l.stream.WithCapture(cuda.CaptureOptions{}, func() error {
		refused = l.kernel.Launch(l.stream, grid, l.words, uint32(1), uint32(4))
		return nil
	})
	require.NoError(t, err)
	require.ErrorIs(t, refused, cuda.ErrCapturing)
	require.NoError(t, g.Close())
	l.meets(grid, 3)
}

func TestADeviceOrADriverWithoutCooperation(t *testing.T) {
	_, sys := sim.Open(t, sim.Options{Devices: []sim.DeviceOptions{{Attributes: map[int]int{int(driver.AttrCooperativeLaunch): 0}}}})
	l := newLaunching(t, sys.Devices()[0])
	grid := shape(1, 4)
	grid.Cooperative = true
	err := l.kernel.Launch(l.stream, grid, l.words, uint32(1), uint32(4))
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.ErrorContains(t, err, "a cooperative launch on device 0")
}

// A capture survives the launches of kernels whose parameters are not passed as a list.
func TestACooperativeLaunchWithManyParametersIsNotCaptured(t *testing.T) {
	_, d := open(t)
	s, grid := stream(t, d), shape(1, 0)
	grid.Cooperative = true
	for _, n := range []int{256, 257} {
		parameters, args := make([]string, n), make([]any, n)
		for i := range n {
			parameters[i], args[i] = fmt.Sprintf(".param .u32 p%d", i), uint32(i)
		}
		text := fmt.Sprintf(".version 6.0\n.target sm_60\n.address_size 64\n.visible .entry %s(%s)\n{\nret;\n}\n", crowdedKernel, strings.Join(parameters, ", "))
		m, err := d.LoadModule([]byte(text))
		require.NoError(t, err)
		closed(t, m)
		k, err := m.Kernel(crowdedKernel)
		require.NoError(t, err)
		require.NoError(t, k.Launch(s, grid, args...))
		captured(t, s, func() error {
			if err := k.Launch(s, grid, args...); n > 256 {
				require.ErrorIs(t, err, cuda.ErrCapturing)
			} else {
				require.NoError(t, err)
			}
			return nil
		})
	}
}

func TestModuleVariables(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		l := newLaunching(t, d)
		p, n, err := l.module.Global(launchGlobal)
		require.NoError(t, err)
		require.Equal(t, 4, n)
		l.meets(shape(1, 4), 3)
		require.NoError(t, l.stream.Upload(p, binary.NativeEndian.AppendUint32(nil, 5)))
		l.meets(shape(2, 4), 5)
		for name, says := range map[string]string{"": `the name ""`, "a\x00b": "pass the name of a variable", "nothing": "has no variable of that name"} {
			_, _, err = l.module.Global(name)
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
			require.ErrorContains(t, err, says)
		}
	})
}

func TestStreamPriorities(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		least, greatest, err := d.StreamPriorities()
		require.NoError(t, err)
		t.Logf("priorities %d to %d", greatest, least)
		require.LessOrEqual(t, greatest, least)
		for p := greatest; p <= least; p++ {
			s, err := d.NewStream(cuda.StreamOptions{Priority: p})
			require.NoError(t, err)
			got, err := s.Priority()
			require.NoError(t, err)
			require.Equal(t, p, got)
			require.NoError(t, s.Close())
			_, err = s.Priority()
			require.ErrorIs(t, err, cuda.ErrClosed)
		}
		for _, p := range []int{least + 1, greatest - 1} {
			_, err := d.NewStream(cuda.StreamOptions{Priority: p})
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
			require.ErrorContains(t, err, "its priorities are")
		}
	})
}

// A device that does not say once how much shared memory it has says it the next time.
func TestSharedMemoryThatIsNotReadAtOnce(t *testing.T) {
	m, sys := sim.Open(t)
	l := newLaunching(t, sys.Devices()[0])
	undo := m.Inject(sim.Fault{Call: "cuDeviceGetAttribute", Result: 999})
	_, err := l.kernel.MaxShared()
	require.ErrorContains(t, err, "cuDeviceGetAttribute")
	undo()
	most, err := l.kernel.MaxShared()
	require.NoError(t, err)
	require.Greater(t, most, 100<<10)
}

// Whatever call of a launch fails: it is named, and the next launch works.
func TestLaunchesThatFail(t *testing.T) {
	m, sys := sim.Open(t)
	l := newLaunching(t, sys.Devices()[0])
	for call, do := range map[string]func() error{
		"cuFuncGetAttribute": func() error { _, err := l.kernel.MaxShared(); return err },
		"cuFuncSetAttribute": func() error {
			return l.kernel.Launch(l.stream, shape(1, 100<<10), l.words, uint32(1), uint32(100<<10))
		},
		"cuOccupancyMaxActiveBlocksPerMultiprocessor": func() error { _, err := l.kernel.BlocksAtOnce(shape(1, 0)); return err },
		"cuLaunchKernelEx": func() error {
			grid := shape(1, 4)
			grid.Cooperative = true
			return l.kernel.Launch(l.stream, grid, l.words, uint32(1), uint32(4))
		},
		"cuModuleGetGlobal":           func() error { _, _, err := l.module.Global(launchGlobal); return err },
		"cuCtxGetStreamPriorityRange": func() error { _, _, err := l.dev.StreamPriorities(); return err },
		"cuStreamGetPriority":         func() error { _, err := l.stream.Priority(); return err },
		"cuStreamCreateWithPriority":  func() error { _, err := l.dev.NewStream(cuda.StreamOptions{Priority: -1}); return err },
	} {
		var err error
		l.kernel, err = l.module.Kernel(meetKernel) // which has asked for nothing yet
		require.NoError(t, err)
		undo := m.Inject(sim.Fault{Call: call, Result: 999})
		require.ErrorContains(t, do(), call)
		undo()
	}
	l.meets(shape(1, 100<<10), 3)
}
