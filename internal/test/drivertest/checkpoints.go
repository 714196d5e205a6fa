package drivertest

import (
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
)

// together is the need for checkpoints of another process.
var together = Need{"checkpoints, and processes of the suite on one machine", func(s *suite) bool {
	return s.D.Has(driver.CallCheckpointProcessLock) && (!s.software || s.env.Machine.Together)
}}

// sleeper is what a process has that is taken off the device.
type sleeper struct {
	Size                             uint64
	Exports, Imports, Managed, Waits bool
}

const (
	lockTimeout = 200 // milliseconds
	sleeperByte = 0x5a
)

// checkpointed are the rules of the calls that take a process off the device. The process is
// always another one, so that one that is lost does no harm.
var checkpointed = []Case{
	{
		Name:  "a process with a stream, a graph, a chunk that is mapped many times, and registered host memory, private and of a memory file: lock, checkpoint, restore, unlock",
		Says:  "success: what it had of the device is free meanwhile; afterwards its memory has its bytes, and its graph works",
		Needs: needs(together),
		Run: func(t *T) {
			before := t.free(t.device)
			c, size := t.sleeper(sleeper{})
			taken := before - t.free(t.device)
			t.sleep(c)
			if meanwhile := t.free(t.device); meanwhile+t.tolerance() < before {
				t.Errorf("%d bytes were free before the process, and %d are while it is checkpointed", before, meanwhile)
			}
			t.wake(c)
			if now := before - t.free(t.device); now+t.tolerance() < taken || now > taken+t.tolerance() {
				t.Errorf("the process takes %d bytes after the restore, and took %d", now, taken)
			}
			t.intact(c, size)
		},
	},
	{
		Name:  "the same of a process that has an exported descriptor open",
		Says:  "success, but the memory is not freed meanwhile, and exists twice after the restore",
		Needs: needs(together, shareableByFD),
		Run: func(t *T) {
			before := t.free(t.device)
			c, size := t.sleeper(sleeper{Exports: true})
			taken := before - t.free(t.device)
			t.sleep(c)
			if meanwhile := before - t.free(t.device); meanwhile < size {
				t.Errorf("%d bytes of the device are taken meanwhile, want the %d that are exported", meanwhile, size)
			}
			t.wake(c)
			if now := before - t.free(t.device); now+t.tolerance() < taken+size {
				t.Errorf("the process takes %d bytes after the restore, and took %d, want %d more", now, taken, size)
			}
			t.intact(c, size)
		},
	},
	{
		Name:  "the same of a process with imported memory",
		Says:  "the checkpoint succeeds and the restore returns NOT_SUPPORTED: the process is lost",
		Needs: needs(together, shareableByFD),
		Run: func(t *T) {
			c, _ := t.sleeper(sleeper{Imports: true})
			t.sleep(c)
			t.returns(driver.NotSupported, t.D.CheckpointProcessRestore(int32(c.Process.Pid)), "restore")
			c.Kill()
		},
	},
	{
		Name:  "cuCheckpointProcessCheckpoint of a process with managed memory",
		Says:  "refuses it",
		Needs: needs(together),
		Run: func(t *T) {
			c, _ := t.sleeper(sleeper{Managed: true})
			t.ok(t.lock(c), "lock")
			if r := t.D.CheckpointProcessCheckpoint(int32(c.Process.Pid)); r == driver.Success {
				t.Errorf("the checkpoint succeeds")
			}
			c.Kill()
		},
	},
	{
		Name:  "cuCheckpointProcessLock, with a timeout, of a process with a stream that waits for a value",
		Says:  "NOT_READY after the timeout",
		Needs: needs(together, streamMemoryOps),
		Run: func(t *T) {
			c, _ := t.sleeper(sleeper{Waits: true})
			begun := time.Now()
			t.returns(driver.NotReady, t.lock(c), "lock")
			if took := time.Since(begun); took < lockTimeout*time.Millisecond {
				t.Errorf("the lock fails after %v, want %d ms", took, lockTimeout)
			}
			c.Kill()
		},
	},
	{
		Name:  "cuCheckpointProcessGetState of a process at each step, and after its end",
		Says:  "running (0), locked (1), checkpointed (2), locked (1), running (0); OPERATING_SYSTEM",
		Needs: needs(together),
		Run: func(t *T) {
			c, size := t.sleeper(sleeper{})
			pid := int32(c.Process.Pid)
			for _, step := range []struct {
				call  func() driver.Result
				state driver.ProcessState
			}{
				{func() driver.Result { return driver.Success }, driver.ProcessRunning},
				{func() driver.Result { return t.lock(c) }, driver.ProcessLocked},
				{func() driver.Result { return t.D.CheckpointProcessCheckpoint(pid) }, driver.ProcessCheckpointed},
				{func() driver.Result { return t.D.CheckpointProcessRestore(pid) }, driver.ProcessLocked},
				{func() driver.Result { return t.D.CheckpointProcessUnlock(pid) }, driver.ProcessRunning},
			} {
				t.ok(step.call(), "the step to state %d", step.state)
				state, r := t.D.CheckpointProcessGetState(pid)
				t.ok(r, "the state")
				if state != step.state {
					t.Errorf("the state is %d, want %d", state, step.state)
				}
			}
			t.intact(c, size)
			_, r := t.D.CheckpointProcessGetState(pid)
			t.returns(driver.OperatingSystem, r, "the state after its end")
		},
	},
	{
		Name:  "the calls for checkpoints out of their order",
		Says:  "ILLEGAL_STATE, and nothing changes",
		Needs: needs(together),
		Run: func(t *T) {
			c, size := t.sleeper(sleeper{})
			pid := int32(c.Process.Pid)
			t.returns(driver.IllegalState, t.D.CheckpointProcessCheckpoint(pid), "checkpoint without a lock")
			t.returns(driver.IllegalState, t.D.CheckpointProcessRestore(pid), "restore of what runs")
			t.returns(driver.IllegalState, t.D.CheckpointProcessUnlock(pid), "unlock of what runs")
			t.sleep(c)
			t.returns(driver.IllegalState, t.lock(c), "lock of what is checkpointed")
			t.returns(driver.IllegalState, t.D.CheckpointProcessCheckpoint(pid), "checkpoint twice")
			t.returns(driver.IllegalState, t.D.CheckpointProcessUnlock(pid), "unlock of what is checkpointed")
			t.wake(c)
			t.intact(c, size)
		},
	},
}

// tolerance is by how much the device's free memory may differ: the real driver keeps
// some for itself.
func (t *T) tolerance() uint64 {
	if t.software {
		return 0
	}
	return t.sleeperSize() / 2
}

func (t *T) sleeperSize() uint64 { return roundUp(64<<20, t.chunk) }

// sleeper starts a process, which is ready when this returns.
func (t *T) sleeper(s sleeper) (*reexec.Cmd, uint64) {
	t.Helper()
	s.Size = t.sleeperSize()
	c := t.child("have memory")
	if s.Imports {
		p, h := t.memory(s.Size, shared(onDevice(t.Device), driver.HandlePosixFD))
		t.fill(t.device, p, s.Size, sleeperByte)
		c.ExtraFiles = []*os.File{os.NewFile(uintptr(t.export(h)), "memory")}
	}
	c.Start()
	c.Send(s)
	var ready bool
	c.Recv(&ready)
	return c, s.Size
}

func (t *T) lock(c *reexec.Cmd) driver.Result {
	return t.D.CheckpointProcessLock(int32(c.Process.Pid), driver.LockArgs{TimeoutMS: lockTimeout})
}

func (t *T) sleep(c *reexec.Cmd) {
	t.Helper()
	t.ok(t.lock(c), "lock")
	t.ok(t.D.CheckpointProcessCheckpoint(int32(c.Process.Pid)), "checkpoint")
}

func (t *T) wake(c *reexec.Cmd) {
	t.Helper()
	t.ok(t.D.CheckpointProcessRestore(int32(c.Process.Pid)), "restore")
	t.ok(t.D.CheckpointProcessUnlock(int32(c.Process.Pid)), "unlock")
}

// intact has the process compare its memory, and end.
func (t *T) intact(c *reexec.Cmd, size uint64) {
	t.Helper()
	c.Send(true)
	var same uint64
	c.Recv(&same)
	if same != size {
		t.Errorf("after the unlock %d bytes of the process's memory are as before, want %d", same, size)
	}
	c.Wait()
}

func init() { roles["have memory"] = haveMemory }

func haveMemory(c *child) {
	var s sleeper
	c.recv(&s)
	dev, ctx := c.device(0)
	stream := c.stream(ctx)
	h := c.sleeperMemory(dev, s)
	p := c.mapped(h, s.Size, dev)
	for range 20 {
		c.alias(h, s.Size, dev)
	}
	c.registered(ctx)
	c.ok(c.d.MemsetD8Async(ctx, p, sleeperByte, s.Size, stream), "write")
	c.ok(c.d.StreamSynchronize(ctx, stream), "write")
	graph := c.memsetGraph(ctx, stream, p, s.Size)
	if s.Managed {
		m, r := c.d.MemAllocManaged(ctx, s.Size, driver.AttachGlobal)
		c.ok(r, "managed memory")
		c.later("free", func() driver.Result { return c.d.MemFree(ctx, m) })
	}
	if s.Waits {
		word, r := c.d.MemHostAlloc(ctx, pageSize, driver.HostAllocPortable|driver.HostAllocDeviceMap)
		c.ok(r, "host alloc")
		at, r := c.d.MemHostGetDevicePointer(ctx, word)
		c.ok(r, "device pointer")
		(*atomic.Uint64)(word).Store(0)
		c.ok(c.d.StreamWaitValue64(ctx, stream, at, 1), "wait for a value")
	}
	c.send(true)
	var goOn bool
	c.recv(&goOn)
	same := c.count(ctx, stream, p, s.Size, sleeperByte)
	c.ok(c.d.GraphLaunch(ctx, graph, stream), "launch the graph")
	c.ok(c.d.StreamSynchronize(ctx, stream), "launch the graph")
	c.send(min(same, c.count(ctx, stream, p, s.Size, sleeperByte+1)))
}

func (c *child) sleeperMemory(dev driver.Device, s sleeper) driver.MemHandle {
	if s.Imports {
		h, r := c.d.MemImportFromShareableHandle(fromFD(int(c.Files[0].Fd())), driver.HandlePosixFD)
		c.ok(r, "import")
		c.check(c.Files[0].Close())
		return h
	}
	prop := onDevice(dev)
	if s.Exports {
		prop = shared(prop, driver.HandlePosixFD)
	}
	h, r := c.d.MemCreate(s.Size, prop)
	c.ok(r, "create")
	if s.Exports {
		_, r = c.d.MemExportToShareableHandle(h, driver.HandlePosixFD) // open until the process ends
		c.ok(r, "export")
	}
	return h
}

// alias maps memory at one more address.
func (c *child) alias(h driver.MemHandle, size uint64, dev driver.Device) {
	p, r := c.d.MemAddressReserve(size, 0, 0)
	c.ok(r, "reserve")
	c.later("address free", func() driver.Result { return c.d.MemAddressFree(p, size) })
	c.ok(c.d.MemMap(p, size, 0, h), "map")
	c.later("unmap", func() driver.Result { return c.d.MemUnmap(p, size) })
	c.ok(c.d.MemSetAccess(p, size, grant(driver.AccessReadWrite, deviceLocation(dev))), "set access")
}

// registered registers a page of private memory, and one of a memory file.
func (c *child) registered(ctx driver.Context) {
	private, err := pageable(pageSize)
	c.check(err)
	file, err := memoryFile(pageSize)
	c.check(err)
	mapped, err := mapFile(file, pageSize)
	c.check(err)
	for _, page := range [][]byte{private, mapped} {
		p := unsafe.Pointer(&page[0])
		c.ok(c.d.MemHostRegister(ctx, p, pageSize, driver.HostRegisterPortable|driver.HostRegisterDeviceMap), "register")
		c.later("unregister", func() driver.Result { return c.d.MemHostUnregister(ctx, p) })
	}
}

// memsetGraph captures a memset to another byte.
func (c *child) memsetGraph(ctx driver.Context, s driver.Stream, p driver.Ptr, n uint64) driver.GraphExec {
	c.ok(c.d.StreamBeginCapture(ctx, s, driver.CaptureRelaxed), "begin a capture")
	c.ok(c.d.MemsetD8Async(ctx, p, sleeperByte+1, n, s), "capture a memset")
	g, r := c.d.StreamEndCapture(ctx, s)
	c.ok(r, "end the capture")
	exec, r := c.d.GraphInstantiate(ctx, g)
	c.ok(r, "instantiate")
	c.ok(c.d.GraphDestroy(g), "destroy the graph")
	c.later("destroy the graph", func() driver.Result { return c.d.GraphExecDestroy(exec) })
	return exec
}

// count returns how many bytes of memory have a value.
func (c *child) count(ctx driver.Context, s driver.Stream, p driver.Ptr, n uint64, v byte) (same uint64) {
	host, r := c.d.MemHostAlloc(ctx, n, driver.HostAllocPortable)
	c.ok(r, "host alloc")
	c.ok(c.d.MemcpyDtoHAsync(ctx, host, p, n, s), "read")
	c.ok(c.d.StreamSynchronize(ctx, s), "read")
	for _, b := range unsafe.Slice((*byte)(host), n) {
		if b == v {
			same++
		}
	}
	c.ok(c.d.MemFreeHost(ctx, host), "host free")
	return same
}
