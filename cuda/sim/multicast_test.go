package sim

import (
	"encoding/binary"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// member is a device of a team: its context, its stream, and its own memory.
type member struct {
	ctx    driver.Context
	stream driver.Stream
	module driver.Module
	handle driver.MemHandle
	own    driver.Ptr // the replica at the device's own address
	mc     driver.Ptr // the object at an address of the device's
}

// teamRig is a machine with a multicast object that is ready for use.
type teamRig struct {
	*rig
	object  driver.MemHandle
	members []*member
	never   uint64 // a word that stays 0: it ends no wait
}

func teamOf(devices int, size uint64) driver.MulticastProp {
	return driver.MulticastProp{NumDevices: uint32(devices), Size: size}
}

// newMember makes a device's context, and loads the kernels.
func (r *rig) newMember(device int32) *member {
	r.t.Helper()
	m := &member{}
	var res driver.Result
	m.ctx, res = r.DevicePrimaryCtxRetain(driver.Device(device))
	r.ok(res)
	r.t.Cleanup(func() { r.DevicePrimaryCtxRelease(driver.Device(device)) })
	m.stream, res = r.StreamCreate(m.ctx, driver.StreamNonBlocking)
	r.ok(res)
	r.t.Cleanup(func() { r.StreamDestroy(m.ctx, m.stream) })
	m.module, res = r.ModuleLoadData(m.ctx, append(append([]byte(nil), kernels.Multimem...), 0))
	r.ok(res)
	r.t.Cleanup(func() { r.ModuleUnload(m.ctx, m.module) })
	return m
}

// mapFor maps a handle of size bytes for a device.
func (r *rig) mapFor(device int32, h driver.MemHandle, size uint64) driver.Ptr {
	r.t.Helper()
	p := r.reserve(size)
	r.ok(r.MemMap(p, size, 0, h))
	r.allow(p, size, device)
	r.t.Cleanup(func() {
		r.ok(r.MemUnmap(p, size))
		r.ok(r.MemAddressFree(p, size))
	})
	return p
}

// startTeam makes a team of so many devices of one machine.
func startTeam(t *testing.T, o Options, size uint64) *teamRig {
	t.Helper()
	r := &teamRig{rig: start(t, o)}
	word, res := r.MemHostAlloc(r.ctx, 8, driver.HostAllocPortable)
	r.ok(res)
	t.Cleanup(func() { r.MemFreeHost(r.ctx, word) }) // also of a context that was lost
	r.never = uint64(uintptr(word))
	n := len(o.Devices)
	h, res := r.MulticastCreate(teamOf(n, size))
	r.ok(res)
	r.object = h
	t.Cleanup(func() { r.ok(r.MemRelease(h)) })
	for i := range n {
		r.ok(r.MulticastAddDevice(h, driver.Device(i)))
	}
	for i := range int32(n) {
		m := r.newMember(i)
		m.handle = r.create(size, on(i, 0))
		t.Cleanup(func() {
			if m.handle != 0 {
				r.ok(r.MemRelease(m.handle))
			}
		})
		m.own = r.mapFor(i, m.handle, size)
		r.ok(r.MulticastBindMemV1(h, 0, m.handle, 0, size))
		t.Cleanup(func() { r.MulticastUnbind(h, driver.Device(i), 0, size) })
		m.mc = r.mapFor(i, h, size)
		r.members = append(r.members, m)
	}
	return r
}

func params(values ...any) (b []byte) {
	for _, v := range values {
		var err error
		size := binary.Size(v)
		for len(b)%size != 0 {
			b = append(b, 0)
		}
		if b, err = binary.Append(b, binary.NativeEndian, v); err != nil {
			panic(err)
		}
	}
	return b
}

// launch runs a kernel of csrc/kernels on a member's stream.
func (r *rig) launch(m *member, name string, values ...any) {
	r.t.Helper()
	f, res := r.ModuleGetFunction(m.ctx, m.module, name)
	r.ok(res)
	one := driver.LaunchConfig{GridX: 1, GridY: 1, GridZ: 1, BlockX: 1, BlockY: 1, BlockZ: 1}
	r.ok(r.LaunchKernel(m.ctx, f, one, params(values...), m.stream))
}

func (r *rig) done(m *member) driver.Result { return r.StreamSynchronize(m.ctx, m.stream) }

func TestReplicasAreSeparate(t *testing.T) {
	r := startTeam(t, WithMulticast(3), chunk)
	for i, m := range r.members {
		r.ok(r.MemsetD8Async(m.ctx, m.own, uint8(i+1), chunk, m.stream))
		r.ok(r.done(m))
	}
	for i, m := range r.members {
		require.Equal(t, repeated(byte(i+1), chunk), r.bytes(m.own, chunk), "what a device writes at its own address stays there")
	}
	// A broadcast from the last device reaches all.
	last := r.members[2]
	extra := r.create(chunk, on(2, 0))
	src := r.mapFor(2, extra, chunk)
	r.ok(r.MemRelease(extra))
	require.NoError(t, r.m.Poke(cuda.Ptr(src), pattern(chunk)))
	r.launch(last, kernels.Broadcast, uint64(last.mc), uint64(src), uint64(1000))
	r.ok(r.done(last))
	for i, m := range r.members {
		require.Equal(t, pattern(4000), r.bytes(m.own, 4000))
		require.Equal(t, repeated(byte(i+1), chunk-4000), r.bytes(m.own+4000, chunk-4000))
	}
}

// The reductions of every element, against the same done one by one.
func TestReductions(t *testing.T) {
	const units = 300
	r := startTeam(t, WithMulticast(3), chunk)
	rng := rand.New(rand.NewPCG(1, 2))
	for _, e := range kernels.Elements() {
		t.Run(e.String(), func(t *testing.T) {
			unit := e.UnitBytes()
			add := adder(e)
			want := make([]uint64, units)
			for i, m := range r.members {
				b := exact(rng, e, units)
				require.NoError(t, r.m.Poke(cuda.Ptr(m.own), b))
				for j := range want {
					v := loadUnit(b[j*unit:], unit)
					if i == 0 {
						want[j] = v
					} else {
						want[j] = add(want[j], v)
					}
				}
			}
			first := r.members[0]
			r.launch(first, e.AllReduce(), uint64(first.mc), uint64(units))
			r.ok(r.done(first))
			check := func() {
				for _, m := range r.members {
					b := r.bytes(m.own, units*unit)
					for j := range want {
						mask := ^uint64(0) >> (64 - 8*unit)
						require.Equal(t, want[j]&mask, loadUnit(b[j*unit:], unit), "unit %d", j)
					}
				}
			}
			check()
			b := exact(rng, e, units)
			require.NoError(t, r.m.Poke(cuda.Ptr(first.own+chunk/2), b))
			for j := range want {
				want[j] = add(want[j], loadUnit(b[j*unit:], unit))
			}
			r.launch(first, e.Red(), uint64(first.mc), uint64(first.own+chunk/2), uint64(units))
			r.ok(r.done(first))
			check()
		})
	}
}

// exact are units whose sums are exact in every order.
func exact(rng *rand.Rand, e kernels.Element, units int) []byte {
	b := make([]byte, units*e.UnitBytes())
	for i := range units {
		v := rng.IntN(64) - 32
		at := b[i*e.UnitBytes():]
		switch e {
		case kernels.F16:
			storeUnit(at, 4, uint64(toHalf(float32(v)/4))|uint64(toHalf(float32(-v)))<<16)
		case kernels.BF16:
			storeUnit(at, 4, uint64(toBrain(float32(v)/4))|uint64(toBrain(float32(-v)))<<16)
		case kernels.F32:
			*(*float32)(unsafe.Pointer(&at[0])) = float32(v) / 8
		case kernels.F64:
			*(*float64)(unsafe.Pointer(&at[0])) = float64(v) / 8
		default:
			storeUnit(at, e.UnitBytes(), rng.Uint64())
		}
	}
	return b
}

func TestArrivalsAndNorms(t *testing.T) {
	r := startTeam(t, WithMulticast(4), chunk)
	const n, rounds = 1000, 3
	for range rounds {
		for _, m := range r.members {
			r.launch(m, kernels.Barrier, uint64(m.mc), uint64(m.own), uint32(0), r.never) // counts alone
		}
		for _, m := range r.members {
			r.ok(r.done(m))
		}
	}
	for _, m := range r.members {
		require.EqualValues(t, 4*rounds, binary.NativeEndian.Uint32(r.bytes(m.own, 4)))
	}
	// No process passes before all have arrived.
	const target = uint32(4*rounds + 4)
	for _, m := range r.members[1:] {
		r.launch(m, kernels.Barrier, uint64(m.mc), uint64(m.own), target, r.never)
	}
	time.Sleep(10 * time.Millisecond)
	for _, m := range r.members[1:] {
		r.is(driver.NotReady, r.StreamQuery(m.ctx, m.stream))
	}
	r.launch(r.members[0], kernels.Barrier, uint64(r.members[0].mc), uint64(r.members[0].own), target, r.never)
	for _, m := range r.members {
		r.ok(r.done(m))
	}

	const x, partial, arrived, out = 4096, 64, 128, 192
	for _, m := range r.members {
		r.ok(r.MemsetD32Async(m.ctx, m.own+x, 0x40000000, n, m.stream)) // 2.0
		r.launch(m, kernels.L2Norm, uint64(m.own+x), uint64(n), uint64(m.mc+partial), uint64(m.own+partial),
			uint64(m.mc+arrived), uint64(m.own+arrived), uint32(4), uint64(m.own+out), r.never)
	}
	for _, m := range r.members {
		r.ok(r.done(m))
		got := *(*float64)(unsafe.Pointer(unsafe.SliceData(r.bytes(m.own+out, 8))))
		require.InDelta(t, 126.49110640673517, got, 1e-9) // sqrt(4 * 1000 * 4)
	}
}

func init() {
	RegisterKernel("sim_test_mc_load", func(k *Kernel) { Load[uint32](k, Param[uint64](k, 0), 1) })
	RegisterKernel("sim_test_mc_store", func(k *Kernel) { Store(k, Param[uint64](k, 0), []uint32{1}) })
	RegisterKernel("sim_test_mc_atomic", func(k *Kernel) { k.AddWord(Param[uint64](k, 0), 1) })
	RegisterKernel("sim_test_mc_multimem", func(k *Kernel) { MultimemStore(k, Param[uint64](k, 0), []uint64{1}) })
	RegisterKernel("sim_test_mc_type", func(k *Kernel) {
		MultimemReduce(k, kernels.U32, Param[uint64](k, 0), []int64{1})
	})
}

const multicastPTX = `
.version 8.1
.target sm_90
.address_size 64
.visible .entry sim_test_mc_load(.param .u64 p) { ret; }
.visible .entry sim_test_mc_store(.param .u64 p) { ret; }
.visible .entry sim_test_mc_atomic(.param .u64 p) { ret; }
.visible .entry sim_test_mc_multimem(.param .u64 p) { ret; }
.visible .entry sim_test_mc_type(.param .u64 p) { ret; }
`

// What must not be done with a multicast address, or with another by multimem,
// destroys the context and names the culprit.
func TestMulticastAddressesTakeMultimemOnly(t *testing.T) {
	const undefined = "only multimem instructions may touch"
	kernel := func(name string, at func(m *member) driver.Ptr) func(r *teamRig, m *member) driver.Result {
		return func(r *teamRig, m *member) driver.Result {
			mod, res := r.ModuleLoadData(m.ctx, []byte(multicastPTX+"\x00"))
			r.ok(res)
			r.t.Cleanup(func() { r.ModuleUnload(m.ctx, mod) })
			f, res := r.ModuleGetFunction(m.ctx, mod, name)
			r.ok(res)
			one := driver.LaunchConfig{GridX: 1, GridY: 1, GridZ: 1, BlockX: 1, BlockY: 1, BlockZ: 1}
			return r.LaunchKernel(m.ctx, f, one, params(uint64(at(m))), m.stream)
		}
	}
	mc := func(m *member) driver.Ptr { return m.mc }
	for what, row := range map[string]struct {
		do   func(r *teamRig, m *member) driver.Result
		want driver.Result
		says string
	}{
		"memset": {func(r *teamRig, m *member) driver.Result { return r.MemsetD8Async(m.ctx, m.mc, 1, 64, m.stream) },
			driver.IllegalAddress, undefined},
		"copy to it": {func(r *teamRig, m *member) driver.Result {
			return r.MemcpyDtoDAsync(m.ctx, m.mc, m.own, 64, m.stream)
		}, driver.IllegalAddress, undefined},
		"copy from it": {func(r *teamRig, m *member) driver.Result {
			return r.MemcpyDtoDAsync(m.ctx, m.own, m.mc, 64, m.stream)
		}, driver.IllegalAddress, undefined},
		"write-value": {func(r *teamRig, m *member) driver.Result { return r.StreamWriteValue64(m.ctx, m.stream, m.mc, 1) },
			driver.IllegalAddress, undefined},
		"load":                         {kernel("sim_test_mc_load", mc), driver.IllegalAddress, undefined},
		"store":                        {kernel("sim_test_mc_store", mc), driver.IllegalAddress, undefined},
		"atomic":                       {kernel("sim_test_mc_atomic", mc), driver.IllegalAddress, undefined},
		"multimem of the device's own": {kernel("sim_test_mc_multimem", func(m *member) driver.Ptr { return m.own }), driver.IllegalAddress, "takes multicast addresses only"},
		"multimem behind the end":      {kernel("sim_test_mc_multimem", func(m *member) driver.Ptr { return m.mc + chunk - 4 }), driver.MisalignedAddress, "not aligned"},
		"multimem of nothing":          {kernel("sim_test_mc_multimem", func(m *member) driver.Ptr { return 8 }), driver.IllegalAddress, "no memory of this machine"},
		"an element of another size":   {kernel("sim_test_mc_type", mc), driver.LaunchFailed, "int64 is not a unit of u32"},
	} {
		t.Run(what, func(t *testing.T) {
			r := startTeam(t, WithMulticast(2), chunk)
			m := r.members[1]
			r.ok(row.do(r, m))
			r.is(row.want, r.done(m))
			require.Contains(t, r.m.Fault(), row.says)
			r.is(row.want, r.done(m))
			require.Error(t, r.m.Poke(cuda.Ptr(m.mc), []byte{1}))
		})
	}
}

func TestMulticastRules(t *testing.T) {
	o := WithMulticast(3)
	o.Devices[2].Attributes = nil // it has no multicast
	r := start(t, o)
	fd, fabric := uint64(driver.HandlePosixFD), uint64(driver.HandleFabric)
	for _, row := range []struct {
		what string
		prop driver.MulticastProp
		want driver.Result
	}{
		{"no devices", teamOf(0, chunk), driver.InvalidValue},
		{"too many devices", teamOf(1000, chunk), driver.InvalidValue},
		{"no bytes", teamOf(2, 0), driver.InvalidValue},
		{"half a unit", teamOf(2, chunk/2), driver.InvalidValue},
		{"flags", driver.MulticastProp{NumDevices: 2, Size: chunk, Flags: 1}, driver.InvalidValue},
		{"unknown types", driver.MulticastProp{NumDevices: 2, Size: chunk, HandleTypes: 16}, driver.InvalidValue},
		{"another system's types", driver.MulticastProp{NumDevices: 2, Size: chunk, HandleTypes: uint64(driver.HandleWin32)}, driver.NotSupported},
		{"fabric without a channel", driver.MulticastProp{NumDevices: 2, Size: chunk, HandleTypes: fabric | fd}, driver.NotPermitted},
	} {
		_, res := r.MulticastCreate(row.prop)
		require.Equal(t, row.want.String(), res.String(), row.what)
	}
	for _, option := range []driver.GranularityOption{driver.GranularityMinimum, driver.GranularityRecommended} {
		n, res := r.MulticastGetGranularity(teamOf(2, 0), option)
		r.ok(res)
		require.EqualValues(t, chunk, n)
	}
	_, res := r.MulticastGetGranularity(teamOf(2, 0), 2)
	r.is(driver.InvalidValue, res)
	_, res = r.MulticastGetGranularity(teamOf(0, 0), 0)
	r.is(driver.InvalidValue, res)
	plain := start(t, Options{})
	_, res = plain.MulticastCreate(teamOf(1, chunk))
	plain.is(driver.NotSupported, res)
	_, res = plain.MulticastGetGranularity(teamOf(1, 0), 0)
	plain.is(driver.NotSupported, res)
	reads, _ := plain.DeviceGetAttribute(driver.AttrMulticast, 0)
	require.Zero(t, reads)

	h, res := r.MulticastCreate(teamOf(2, 4*chunk))
	r.ok(res)
	require.Equal(t, 1, r.m.Live()[KindMulticast])
	memory := r.create(4*chunk, on(0, 0))
	r.is(driver.InvalidValue, r.MulticastAddDevice(memory, 0))
	r.is(driver.InvalidValue, r.MulticastAddDevice(77, 0))
	r.is(driver.InvalidDevice, r.MulticastAddDevice(h, 9))
	r.is(driver.InvalidDevice, r.MulticastAddDevice(h, 2))
	r.ok(r.MulticastAddDevice(h, 0))
	r.is(driver.InvalidValue, r.MulticastAddDevice(h, 0))
	r.ok(r.MulticastAddDevice(h, 1))
	r.is(driver.InvalidValue, r.MulticastAddDevice(h, 1))
	_, res = r.MemGetAllocationPropertiesFromHandle(h)
	r.is(driver.InvalidValue, res)
	_, res = r.MemExportToShareableHandle(h, driver.HandlePosixFD)
	r.is(driver.InvalidValue, res)

	foreign, host := r.create(4*chunk, on(2, 0)), r.create(4*chunk, at(driver.LocationHostNUMA, 0, 0))
	p := r.reserve(8 * chunk)
	r.ok(r.MemMap(p, 4*chunk, 0, memory))
	free := r.reserve(4 * chunk)
	bindings := []struct {
		what string
		do   func() driver.Result
		want driver.Result
	}{
		{"no object", func() driver.Result { return r.MulticastBindMemV1(memory, 0, memory, 0, chunk) }, driver.InvalidValue},
		{"no memory", func() driver.Result { return r.MulticastBindMemV1(h, 0, 77, 0, chunk) }, driver.InvalidValue},
		{"the object itself", func() driver.Result { return r.MulticastBindMemV1(h, 0, h, 0, chunk) }, driver.InvalidValue},
		{"no bytes", func() driver.Result { return r.MulticastBindMemV1(h, 0, memory, 0, 0) }, driver.InvalidValue},
		{"an odd size", func() driver.Result { return r.MulticastBindMemV1(h, 0, memory, 0, chunk/2) }, driver.InvalidValue},
		{"an odd offset", func() driver.Result { return r.MulticastBindMemV1(h, 4096, memory, 0, chunk) }, driver.InvalidValue},
		{"an odd memory offset", func() driver.Result { return r.MulticastBindMemV1(h, 0, memory, 4096, chunk) }, driver.InvalidValue},
		{"past the object", func() driver.Result { return r.MulticastBindMemV1(h, 2*chunk, memory, 0, 3*chunk) }, driver.InvalidValue},
		{"past the memory", func() driver.Result { return r.MulticastBindMemV1(h, 0, memory, 2*chunk, 3*chunk) }, driver.InvalidValue},
		{"overflow", func() driver.Result { return r.MulticastBindMemV1(h, ^uint64(0)-chunk+1, memory, 0, 2*chunk) }, driver.InvalidValue},
		{"memory of a device outside", func() driver.Result { return r.MulticastBindMemV1(h, 0, foreign, 0, chunk) }, driver.InvalidDevice},
		{"host memory", func() driver.Result { return r.MulticastBindMemV1(h, 0, host, 0, chunk) }, driver.InvalidValue},
		{"the later form, on an older driver", func() driver.Result { return r.MulticastBindMem(h, 0, 0, memory, 0, chunk) }, driver.MissingEntryPoint},
		{"no mapping", func() driver.Result { return r.MulticastBindAddrV1(h, 0, free, chunk) }, driver.InvalidValue},
		{"past the mapping", func() driver.Result { return r.MulticastBindAddrV1(h, 0, p+2*chunk, 3*chunk) }, driver.InvalidValue},
		{"an odd address", func() driver.Result { return r.MulticastBindAddrV1(h, 0, p+4096, chunk) }, driver.InvalidValue},
		{"a part by handle", func() driver.Result { return r.MulticastBindMemV1(h, chunk, memory, 2*chunk, 2*chunk) }, driver.Success},
		{"over it", func() driver.Result { return r.MulticastBindMemV1(h, 2*chunk, memory, 0, 2*chunk) }, driver.InvalidValue},
		{"a part by address", func() driver.Result { return r.MulticastBindAddrV1(h, 3*chunk, p+chunk, chunk) }, driver.Success},
		{"unbind half of a bind", func() driver.Result { return r.MulticastUnbind(h, 0, chunk, chunk) }, driver.InvalidValue},
		{"unbind two binds", func() driver.Result { return r.MulticastUnbind(h, 0, chunk, 3*chunk) }, driver.InvalidValue},
		{"unbind another device's", func() driver.Result { return r.MulticastUnbind(h, 1, chunk, 2*chunk) }, driver.InvalidValue},
		{"unbind of no device", func() driver.Result { return r.MulticastUnbind(h, 7, chunk, 2*chunk) }, driver.InvalidDevice},
		{"unbind no bytes", func() driver.Result { return r.MulticastUnbind(h, 0, chunk, 0) }, driver.InvalidValue},
		{"unbind", func() driver.Result { return r.MulticastUnbind(h, 0, chunk, 2*chunk) }, driver.Success},
		{"unbind twice", func() driver.Result { return r.MulticastUnbind(h, 0, chunk, 2*chunk) }, driver.InvalidValue},
		{"unbind the other", func() driver.Result { return r.MulticastUnbind(h, 0, 3*chunk, chunk) }, driver.Success},
	}
	for _, row := range bindings {
		require.Equal(t, row.want.String(), row.do().String(), row.what)
	}

	q := r.reserve(4 * chunk)
	r.is(driver.NotSupported, r.MemMap(q, 2*chunk, 0, h))
	r.is(driver.NotSupported, r.MemMap(q, 2*chunk, 2*chunk, h))
	r.ok(r.MemMap(q, 4*chunk, 0, h))
	access := func(l driver.LocationType, id int32) driver.Result {
		return r.MemSetAccess(q, 4*chunk, []driver.AccessDesc{grant(l, id, driver.AccessReadWrite)})
	}
	r.is(driver.InvalidDevice, access(driver.LocationDevice, 2))
	r.is(driver.NotSupported, access(driver.LocationHost, 0))
	r.ok(access(driver.LocationDevice, 1))
	again, res := r.MemRetainAllocationHandle(q)
	r.ok(res)
	require.Equal(t, h, again)
	r.ok(r.MemRelease(again))
	kind, res := r.PointerGetAttribute(r.ctx, driver.PointerMemoryType, q)
	r.ok(res)
	require.EqualValues(t, 2, kind)
	r.ok(r.MemRelease(h))
	r.ok(r.MemUnmap(q, 4*chunk)) // which ends the object
	r.ok(r.MemAddressFree(q, 4*chunk))
	r.ok(r.MemUnmap(p, 4*chunk))
	r.ok(r.MemAddressFree(p, 8*chunk))
	r.ok(r.MemAddressFree(free, 4*chunk))
	for _, h := range []driver.MemHandle{memory, foreign, host} {
		r.ok(r.MemRelease(h))
	}
	require.Empty(t, r.m.teams)
}

// The form with a device's name takes host memory near it as well.
func TestBindWithADevicesName(t *testing.T) {
	o := WithMulticast(2)
	o.DriverVersion = 13010
	r := start(t, o)
	h, res := r.MulticastCreate(teamOf(2, 2*chunk))
	r.ok(res)
	r.ok(r.MulticastAddDevice(h, 0))
	r.ok(r.MulticastAddDevice(h, 1))
	first, host := r.create(2*chunk, on(0, 0)), r.create(2*chunk, at(driver.LocationHostNUMA, 0, 0))
	r.is(driver.InvalidValue, r.MulticastBindMem(h, 1, 0, first, 0, chunk))
	r.is(driver.InvalidDevice, r.MulticastBindMem(h, 5, 0, first, 0, chunk))
	r.ok(r.MulticastBindMem(h, 0, 0, first, 0, 2*chunk))
	r.ok(r.MulticastBindMem(h, 1, 0, host, chunk, chunk))
	p, res := r.MemAllocAsync(r.ctx, 2*chunk, driver.StreamNull)
	r.ok(res)
	r.is(driver.InvalidValue, r.MulticastBindAddr(h, 1, chunk, p, chunk))
	r.ok(r.MulticastUnbind(h, 0, 0, 2*chunk))
	r.ok(r.MulticastBindAddr(h, 0, 0, p+chunk, chunk))
	r.ok(r.MulticastUnbind(h, 0, 0, chunk))
	r.ok(r.MulticastUnbind(h, 1, 0, chunk))
	r.ok(r.MemFreeAsync(r.ctx, p, driver.StreamNull))
	for _, h := range []driver.MemHandle{first, host, h} {
		r.ok(r.MemRelease(h))
	}
}

func TestBindAndMapBlockUntilAllDevicesAreAdded(t *testing.T) {
	r := start(t, WithMulticast(2))
	h, res := r.MulticastCreate(teamOf(2, chunk))
	r.ok(res)
	r.ok(r.MulticastAddDevice(h, 0))
	memory, p := r.create(chunk, on(0, 0)), r.reserve(chunk)
	results := make(chan driver.Result, 2)
	go func() { results <- r.MulticastBindMemV1(h, 0, memory, 0, chunk) }()
	go func() { results <- r.MemMap(p, chunk, 0, h) }()
	time.Sleep(20 * time.Millisecond)
	require.Empty(t, results)
	r.ok(r.MemRelease(r.create(chunk, on(0, 0)))) // the driver serves others
	// What is wrong is said at once.
	r.is(driver.InvalidValue, r.MulticastBindMemV1(h, 0, memory, 0, 1))
	r.ok(r.MulticastAddDevice(h, 1))
	r.ok(<-results)
	r.ok(<-results)
	r.ok(r.MulticastUnbind(h, 0, 0, chunk))
	r.ok(r.MemUnmap(p, chunk))
	r.ok(r.MemAddressFree(p, chunk))
	r.ok(r.MemRelease(h))
	r.ok(r.MemRelease(memory))
}

func TestClosingTheMachineEndsABlockedBind(t *testing.T) {
	m, err := New(WithMulticast(2))
	require.NoError(t, err)
	d := driver.Of(m)
	require.Zero(t, d.Init())
	h, res := d.MulticastCreate(teamOf(2, chunk))
	require.Zero(t, res)
	memory, res := d.MemCreate(chunk, on(0, 0))
	require.Zero(t, res)
	result := make(chan driver.Result)
	go func() { result <- d.MulticastBindMemV1(h, 0, memory, 0, chunk) }()
	time.Sleep(5 * time.Millisecond)
	require.ErrorContains(t, m.Close(), KindMulticast)
	require.Equal(t, driver.Deinitialized, <-result)
}

func TestSlotsOfTheSwitches(t *testing.T) { checkSlots(t, []Options{WithMulticast(1)}, 0) }

// checkSlots takes all slots on machines that share them, or on one.
func checkSlots(t *testing.T, all []Options, types driver.HandleTypes) {
	var rigs []*rig
	for _, o := range all {
		rigs = append(rigs, start(t, o))
	}
	type made struct {
		r *rig
		h driver.MemHandle
	}
	var objects []made
	memory := map[*rig]driver.MemHandle{}
	for _, r := range rigs {
		memory[r] = r.create(chunk, on(0, types))
	}
	another := func(r *rig) driver.Result {
		p := teamOf(1, chunk)
		p.HandleTypes = uint64(types)
		h, res := r.MulticastCreate(p)
		r.ok(res)
		objects = append(objects, made{r, h})
		r.ok(r.MulticastAddDevice(h, 0))
		return r.MulticastBindMemV1(h, 0, memory[r], 0, chunk)
	}
	for i := range multicastSlots {
		r := rigs[i%len(rigs)]
		r.ok(another(r))
	}
	last := rigs[len(rigs)-1]
	last.is(driver.OutOfMemory, another(last))
	first := objects[0]
	first.r.ok(first.r.MulticastUnbind(first.h, 0, 0, chunk))
	first.r.ok(first.r.MemRelease(first.h))
	objects = objects[1:]
	last.ok(another(last))
	for _, o := range objects {
		o.r.MulticastUnbind(o.h, 0, 0, chunk)
		o.r.ok(o.r.MemRelease(o.h))
	}
	for r, h := range memory {
		r.ok(r.MemRelease(h))
	}
}

func TestMemoryThatIsFreedWhileBoundIsMissed(t *testing.T) {
	r := startTeam(t, WithMulticast(2), 2*chunk)
	extra, m := r.create(chunk, on(1, 0)), r.members[1]
	r.ok(r.MulticastUnbind(r.object, 1, 0, 2*chunk))
	r.ok(r.MulticastBindMemV1(r.object, 0, extra, 0, chunk))
	r.ok(r.MemRelease(extra))
	require.Contains(t, strings.Join(r.m.Log(), "\n"), "freed while they are bound at offset 0x0")
	r.ok(r.MulticastUnbind(r.object, 1, 0, chunk))
	again := r.create(chunk, on(1, 0))
	r.ok(r.MulticastBindMemV1(r.object, 0, again, 0, chunk))
	r.ok(r.MemRelease(again))
	r.launch(m, kernels.Broadcast, uint64(m.mc), uint64(m.own), uint64(1))
	r.is(driver.IllegalAddress, r.done(m))
	require.Contains(t, r.m.Fault(), "was freed before it was unbound")
	// The other device's context lives, and finds the part that is not bound.
	first := r.members[0]
	r.launch(first, kernels.Broadcast, uint64(first.mc+chunk), uint64(first.own), uint64(1))
	r.is(driver.IllegalAddress, r.done(first))
	require.Contains(t, strings.Join(r.m.Log(), "\n"), "device 1 of the team has nothing bound at offset 0x200000")
}
