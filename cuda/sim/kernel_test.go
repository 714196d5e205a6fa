package sim

import (
	"encoding/binary"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

const testPTX = `
// A comment with .entry not_one() in it.
.version 7.0
.target sm_70
.address_size 64

.visible .entry sim_test_scale(
	.param .u64 .ptr .global .align 4 values,
	.param .u32 n,
	.param .f32 factor
)
{ /* .entry nor_this() */ ret; }

.visible .entry sim_test_gate(.param .u64 word) { ret; }
.visible .entry sim_test_panic() { ret; }
.visible .entry sim_test_goexit() { ret; }
.visible .entry sim_test_misaligned(.param .u64 p, .param .u64 how) { ret; }
.visible .entry sim_test_wrong_param(.param .u32 p) { ret; }
.visible .entry sim_test_no_twin() { ret; }
`

// gate counts kernels that wait for their word to become 1.
var gate atomic.Int64

func init() {
	RegisterKernel("sim_test_scale", func(k *Kernel) {
		p, n := Param[uint64](k, 0), Param[uint32](k, 1)
		v := Load[float32](k, p, int(n))
		for i := range v {
			v[i] *= Param[float32](k, 2)
		}
		Store(k, p, v)
	})
	RegisterKernel("sim_test_gate", func(k *Kernel) {
		gate.Add(1)
		defer gate.Add(-1)
		p := Param[uint64](k, 0)
		for k.LoadWord(p) == 0 {
			k.Sleep(100 * time.Microsecond)
		}
		k.StoreWord(p+8, k.AddWord(p, 1))
	})
	RegisterKernel("sim_test_panic", func(k *Kernel) { panic("a defect of the kernel") })
	RegisterKernel("sim_test_goexit", func(k *Kernel) { runtime.Goexit() }) // as t.FailNow does
	RegisterKernel("sim_test_misaligned", func(k *Kernel) {
		p := Param[uint64](k, 0) + 2
		Store(k, p, []uint16{7}) // as they must be
		Load[[6]byte](k, p+1, 1)
		Load[uint64](k, p, 0)
		switch Param[uint64](k, 1) {
		case 0:
			k.LoadWord(p)
		case 1:
			k.LoadWord32(p)
		case 2:
			Load[float32](k, p, 1)
		case 3:
			Store(k, p+2, []float64{1})
		}
	})
	RegisterKernel("sim_test_wrong_param", func(k *Kernel) { Param[uint64](k, 0) })
}

func (r *rig) function(c driver.Context, name string) driver.Function {
	r.t.Helper()
	m, res := r.ModuleLoadData(c, []byte(testPTX+"\x00"))
	r.ok(res)
	f, res := r.ModuleGetFunction(c, m, name)
	r.ok(res)
	again, res := r.ModuleGetFunction(c, m, name)
	r.ok(res)
	require.Equal(r.t, f, again)
	r.t.Cleanup(func() { r.ModuleUnload(c, m) })
	return f
}

var one = driver.LaunchConfig{GridX: 1, GridY: 1, GridZ: 1, BlockX: 1, BlockY: 1, BlockZ: 1}

// scaleParams is the block of sim_test_scale: a pointer, an int and a float.
func scaleParams(p driver.Ptr, n uint32, factor uint32) []byte {
	b := binary.NativeEndian.AppendUint64(nil, uint64(p))
	b = binary.NativeEndian.AppendUint32(b, n)
	return binary.NativeEndian.AppendUint32(b, factor)
}

const floatTwo = 0x40000000

func TestKernelRunsItsTwin(t *testing.T) {
	r := start(t, Options{})
	p, s := r.mapped(2), r.stream(1)
	f := r.function(r.ctx, "sim_test_scale")
	at := p + chunk - 8 // across two mappings
	values := []byte{0, 0, 0x80, 0x3f, 0, 0, 0, 0x40, 0, 0, 0x40, 0x40, 0, 0, 0x80, 0x40}
	require.NoError(t, r.m.Poke(cuda.Ptr(at), values)) // 1, 2, 3, 4
	params := scaleParams(at, 4, floatTwo)
	r.m.Hold(uintptr(s))
	r.ok(r.LaunchKernel(r.ctx, f, one, params, s))
	clear(params) // they were read at the launch
	r.m.Release(uintptr(s))
	r.ok(r.StreamSynchronize(r.ctx, s))
	require.Equal(t, []byte{0, 0, 0, 0x40, 0, 0, 0x80, 0x40, 0, 0, 0xc0, 0x40, 0, 0, 0, 0x41}, r.bytes(at, 16))
}

func TestKernelInAGraph(t *testing.T) {
	r := start(t, Options{})
	p, s := r.mapped(1), r.stream(1)
	f := r.function(r.ctx, "sim_test_scale")
	require.NoError(t, r.m.Poke(cuda.Ptr(p), []byte{0, 0, 0x80, 0x3f}))
	r.begin(s)
	r.ok(r.LaunchKernel(r.ctx, f, one, scaleParams(p, 1, floatTwo), s))
	e := r.end(s)
	r.ok(r.GraphLaunch(r.ctx, e, s))
	r.ok(r.GraphLaunch(r.ctx, e, s))
	r.ok(r.StreamSynchronize(r.ctx, s))
	require.Equal(t, []byte{0, 0, 0x80, 0x40}, r.bytes(p, 4)) // 1 * 2 * 2
}

func TestKernelsRunBesideOtherWork(t *testing.T) {
	r := start(t, Options{})
	p, a, b := r.mapped(1), r.stream(1), r.stream(1)
	f := r.function(r.ctx, "sim_test_gate")
	r.ok(r.LaunchKernel(r.ctx, f, one, binary.NativeEndian.AppendUint64(nil, uint64(p)), a))
	require.Eventually(t, func() bool { return gate.Load() == 1 }, time.Minute, time.Millisecond)
	r.is(driver.NotReady, r.StreamQuery(r.ctx, a))
	// While it runs: virtual memory, other streams, and what lets it go on.
	q := r.mapped(1)
	r.ok(r.MemsetD8Async(r.ctx, q, 1, 8, b))
	r.ok(r.StreamSynchronize(r.ctx, b))
	r.ok(r.StreamWriteValue64(r.ctx, b, p, 41))
	r.ok(r.StreamSynchronize(r.ctx, a))
	require.Equal(t, byte(42), r.bytes(p+8, 1)[0])
}

func TestLaunchChecksWhatItIsGiven(t *testing.T) {
	r := start(t, Options{})
	f := r.function(r.ctx, "sim_test_scale")
	params := scaleParams(r.mapped(1), 1, floatTwo)
	launch := func(f driver.Function, l driver.LaunchConfig, params []byte) driver.Result {
		return r.LaunchKernel(r.ctx, f, l, params, driver.StreamNull)
	}
	r.is(driver.InvalidHandle, launch(99, one, params))
	r.is(driver.InvalidValue, launch(f, one, params[:15]))
	for _, bad := range []func(*driver.LaunchConfig){
		func(l *driver.LaunchConfig) { l.GridX = 0 },
		func(l *driver.LaunchConfig) { l.GridY = 1 << 16 },
		func(l *driver.LaunchConfig) { l.BlockZ = 65 },
		func(l *driver.LaunchConfig) { l.BlockX, l.BlockY = 64, 32 },
		func(l *driver.LaunchConfig) { l.SharedBytes = 1 << 20 },
	} {
		l := one
		bad(&l)
		r.is(driver.InvalidValue, launch(f, l, params))
	}
	r.ok(launch(f, one, params))
	other, res := r.CtxCreate(0, 0)
	r.ok(res)
	r.is(driver.InvalidHandle, r.LaunchKernel(other, f, one, params, driver.StreamNull))
	r.ok(r.CtxDestroy(other))
	r.ok(r.CtxSynchronize(r.ctx))
}

func misaligned(how uint64) func(r *rig) []byte {
	return func(r *rig) []byte {
		return binary.NativeEndian.AppendUint64(binary.NativeEndian.AppendUint64(nil, uint64(r.mapped(1))), how)
	}
}

func TestKernelFaults(t *testing.T) {
	for _, row := range []struct {
		kernel  string
		want    driver.Result
		culprit string
		params  func(r *rig) []byte
	}{
		{"sim_test_scale", driver.IllegalAddress, "kernel sim_test_scale: cuLaunchKernel on", func(r *rig) []byte {
			return scaleParams(r.mapped(1)+chunk-4, 2, floatTwo) // one value too many
		}},
		{"sim_test_panic", driver.LaunchFailed, "a defect of the kernel", func(*rig) []byte { return nil }},
		{"sim_test_misaligned", driver.MisalignedAddress, "2 is not aligned to 8", misaligned(0)},
		{"sim_test_misaligned", driver.MisalignedAddress, "2 is not aligned to 4", misaligned(1)},
		{"sim_test_misaligned", driver.MisalignedAddress, "2 is not aligned to 4", misaligned(2)},
		{"sim_test_misaligned", driver.MisalignedAddress, "4 is not aligned to 8", misaligned(3)},
		{"sim_test_wrong_param", driver.LaunchFailed, "is not what the PTX", func(*rig) []byte { return make([]byte, 4) }},
		{"sim_test_gate", driver.IllegalAddress, "allocated on device 1", func(r *rig) []byte {
			c, res := r.CtxCreate(0, 1)
			r.ok(res)
			p, res := r.MemAlloc(c, 16)
			r.ok(res)
			r.t.Cleanup(func() { r.ok(r.MemFree(c, p)); r.ok(r.CtxDestroy(c)) })
			return binary.NativeEndian.AppendUint64(nil, uint64(p))
		}},
	} {
		t.Run(row.kernel, func(t *testing.T) {
			faulty(t, row.want, row.culprit, func(r *rig, c driver.Context, s driver.Stream) {
				r.ok(r.LaunchKernel(c, r.function(c, row.kernel), one, row.params(r), s))
			})
		})
	}
}

func TestCloseEndsKernelsThatPoll(t *testing.T) {
	m, err := New(Options{})
	require.NoError(t, err)
	d := driver.Of(m)
	require.Zero(t, d.Init())
	c, _ := d.DevicePrimaryCtxRetain(0)
	mod, res := d.ModuleLoadData(c, []byte(testPTX))
	require.Zero(t, res)
	f, _ := d.ModuleGetFunction(c, mod, "sim_test_gate")
	p, _ := d.MemAlloc(c, 16)
	require.Zero(t, d.LaunchKernel(c, f, one, binary.NativeEndian.AppendUint64(nil, uint64(p)), 0))
	require.Eventually(t, func() bool { return gate.Load() == 1 }, time.Minute, time.Millisecond)
	require.Error(t, m.Close())
	require.Zero(t, gate.Load())
}

func TestRegisteringAKernelTwicePanics(t *testing.T) {
	require.Panics(t, func() { RegisterKernel("sim_test_scale", func(*Kernel) {}) })
	require.Panics(t, func() { RegisterKernel("sim_test_nil", nil) })
}

// A launch at each limit that the attributes tell is accepted, and one above it is not.
func TestTheAttributesTellTheLimitsOfLaunches(t *testing.T) {
	d := start(t, Options{})
	for attribute, set := range map[driver.DeviceAttribute]func(*driver.LaunchConfig, uint32){
		2: func(l *driver.LaunchConfig, n uint32) { l.BlockX = n },
		3: func(l *driver.LaunchConfig, n uint32) { l.BlockY = n },
		4: func(l *driver.LaunchConfig, n uint32) { l.BlockZ = n },
		5: func(l *driver.LaunchConfig, n uint32) { l.GridX = n },
		6: func(l *driver.LaunchConfig, n uint32) { l.GridY = n },
		7: func(l *driver.LaunchConfig, n uint32) { l.GridZ = n },
	} {
		limit, r := d.DeviceGetAttribute(attribute, 0)
		require.Equal(t, driver.Success, r)
		l := one
		set(&l, uint32(limit))
		require.True(t, launchable(l), "attribute %d", attribute)
		set(&l, uint32(limit)+1)
		require.False(t, launchable(l), "attribute %d", attribute)
	}
	threads, r := d.DeviceGetAttribute(1, 0)
	require.Equal(t, driver.Success, r)
	l := one
	l.BlockX, l.BlockY = uint32(threads)/2, 2
	require.True(t, launchable(l))
	l.BlockX++
	require.False(t, launchable(l))
}
