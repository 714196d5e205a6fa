package drivertest

import (
	"encoding/binary"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// launching are the rules of what launches are made of beside their arguments.
var launching = []Case{
	{
		Name: "cuFuncSetAttribute of the dynamic shared memory that attribute 97 of the device allows, and of a byte more; a launch with 100 KiB",
		Says: "success; INVALID_VALUE; every block reads back the last bytes that it wrote",
		Run: func(t *T) {
			most, r := t.D.DeviceGetAttribute(driver.AttrSharedPerBlockOptIn, t.Device)
			t.ok(r, "attribute 97")
			static, r := t.D.FuncGetAttribute(t.ctx, driver.FuncSharedBytes, t.kernels.meet)
			t.ok(r, "the kernel's static shared memory")
			allowed, r := t.D.FuncGetAttribute(t.ctx, driver.FuncMaxDynamicSharedBytes, t.kernels.meet)
			t.ok(r, "its dynamic shared memory")
			t.Logf("the device allows %d bytes; the kernel has %d static ones and may have %d dynamic ones", most, static, allowed)
			t.returns(driver.InvalidValue, t.setShared(most-static+1), "a byte too many")
			t.ok(t.setShared(most-static), "all that there is")
			t.meet(t.D.LaunchKernel, 1, 100<<10)
			t.ok(t.setShared(allowed), "as it was")
		},
	},
	{
		Name:  "cuLaunchKernelEx with the attribute for cooperation, of as many blocks as run at once, and of one more",
		Says:  "all blocks meet; COOPERATIVE_LAUNCH_TOO_LARGE (720)",
		Needs: needs(cooperation, entryPoints(driver.CallLaunchKernelEx)),
		Run: func(t *T) {
			const shared = 16
			each, r := t.D.OccupancyMaxActiveBlocksPerMultiprocessor(t.ctx, t.kernels.meet, 1, shared)
			t.ok(r, "blocks of a multiprocessor")
			units, r := t.D.DeviceGetAttribute(driver.AttrMultiprocessorCount, t.Device)
			t.ok(r, "multiprocessors")
			t.Logf("%d blocks on each of %d multiprocessors", each, units)
			all := uint32(each * units)
			t.meet(t.D.LaunchKernelEx, all, shared)
			l := oneThread
			l.GridX, l.SharedBytes = all+1, shared
			p := t.meetingAt()
			t.returns(driver.CooperativeTooLarge, t.D.LaunchKernelEx(t.ctx, t.kernels.meet, l, meetParams(p, all+1, shared), t.stream), "one block more")
		},
	},
	{
		Name:  "cuLaunchKernelEx with the attribute for cooperation on a capturing stream, with a list of parameters",
		Says:  "becomes a graph node",
		Needs: needs(cooperation, entryPoints(driver.CallLaunchKernelEx, driver.CallFuncGetParamInfo)),
		Run: func(t *T) {
			const blocks, shared = 4, 16
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			l, p := oneThread, t.meetingAt()
			l.GridX, l.SharedBytes = blocks, shared
			t.ok(t.D.StreamBeginCapture(t.ctx, s, driver.CaptureRelaxed), "begin")
			t.ok(t.D.LaunchKernelEx(t.ctx, t.kernels.meet, l, meetParams(p, blocks, shared), s), "launch")
			g, r := t.D.StreamEndCapture(t.ctx, s)
			t.ok(r, "end")
			e, r := t.D.GraphInstantiate(t.ctx, g)
			t.ok(r, "instantiate")
			t.ok(t.D.GraphLaunch(t.ctx, e, s), "launch of the graph")
			t.ok(t.D.StreamSynchronize(t.ctx, s), "the graph")
			t.met(blocks)
			t.ok(t.D.GraphExecDestroy(e), "destroy")
			t.ok(t.D.GraphDestroy(g), "destroy")
		},
	},
	{
		Name: "cuModuleGetGlobal of a global and a constant variable, of a name that the module has not, and cuMemFree of one",
		Says: "address, size and the value that the PTX gives; NOT_FOUND; INVALID_VALUE",
		Run: func(t *T) {
			for name, want := range map[string][]byte{CounterVariable: {7, 0, 0, 0, 0, 0, 0, 0}, BytesVariable: {1, 2, 3, 4, 0, 0, 0, 0}} {
				p, n, r := t.D.ModuleGetGlobal(t.ctx, t.kernels.module, name)
				t.ok(r, "%s", name)
				if n != 8 {
					t.Errorf("%s has %d bytes, want 8", name, n)
				}
				t.ok(t.D.MemcpyDtoHAsync(t.ctx, t.page, p, n, t.stream), "copy of %s", name)
				t.ok(t.D.StreamSynchronize(t.ctx, t.stream), "copy of %s", name)
				if got := unsafe.Slice((*byte)(t.page), 8); string(got) != string(want) {
					t.Errorf("%s reads %v, want %v", name, got, want)
				}
				t.returns(driver.InvalidValue, t.D.MemFree(t.ctx, p), "free of %s", name)
			}
			_, _, r := t.D.ModuleGetGlobal(t.ctx, t.kernels.module, "nothing")
			t.returns(driver.NotFound, r, "another name")
		},
	},
	{
		Name: "cuStreamCreateWithPriority of the greatest priority, of one beyond it, and of one below the least",
		Says: "success, and the stream has the nearest priority of the range",
		Run: func(t *T) {
			least, greatest, r := t.D.CtxGetStreamPriorityRange(t.ctx)
			t.ok(r, "the range")
			t.Logf("priorities %d to %d", greatest, least)
			for asked, want := range map[int32]int32{greatest: greatest, greatest - 1: greatest, least: least, least + 1: least} {
				s, r := t.D.StreamCreateWithPriority(t.ctx, driver.StreamNonBlocking, asked)
				t.ok(r, "a stream of priority %d", asked)
				t.own("stream", uint64(s), func() driver.Result { return t.D.StreamDestroy(t.ctx, s) })
				got, r := t.D.StreamGetPriority(t.ctx, s)
				t.ok(r, "its priority")
				if got != want {
					t.Errorf("a stream of priority %d has %d, want %d", asked, got, want)
				}
			}
		},
	},
}

func (t *T) setShared(n int32) driver.Result {
	return t.D.FuncSetAttribute(t.ctx, t.kernels.meet, driver.FuncMaxDynamicSharedBytes, n)
}

func meetParams(p driver.Ptr, blocks, shared uint32) []byte {
	b := binary.NativeEndian.AppendUint64(nil, uint64(p))
	b = binary.NativeEndian.AppendUint32(b, blocks)
	return binary.NativeEndian.AppendUint32(b, shared)
}

// meetingAt returns two words of zero.
func (t *T) meetingAt() driver.Ptr {
	t.Helper()
	t.fill(t.device, t.scratch, 8, 0)
	return t.scratch
}

// meet launches so many blocks, and requires that all met and read back what they
// wrote to their shared memory.
func (t *T) meet(launch func(driver.Context, driver.Function, driver.LaunchConfig, []byte, driver.Stream) driver.Result, blocks, shared uint32) {
	t.Helper()
	p := t.meetingAt()
	l := oneThread
	l.GridX, l.SharedBytes = blocks, shared
	t.ok(launch(t.ctx, t.kernels.meet, l, meetParams(p, blocks, shared), t.stream), "launch of %d blocks with %d bytes", blocks, shared)
	t.ok(t.D.StreamSynchronize(t.ctx, t.stream), "%d blocks with %d bytes", blocks, shared)
	t.met(blocks)
}

// met requires that so many blocks met.
func (t *T) met(blocks uint32) {
	t.Helper()
	t.ok(t.D.MemcpyDtoHAsync(t.ctx, t.page, t.scratch, 8, t.stream), "copy of the words")
	t.ok(t.D.StreamSynchronize(t.ctx, t.stream), "copy of the words")
	got := unsafe.Slice((*byte)(t.page), 8)
	if met, read := binary.NativeEndian.Uint32(got), binary.NativeEndian.Uint32(got[4:]); met != blocks || read != blocks {
		t.Errorf("%d blocks met and %d read back what they wrote, of %d", met, read, blocks)
	}
}
