//go:build linux && (amd64 || arm64)

package sim

import (
	"os"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
)

// The other process has some memory when it replies, and waits.
func init() {
	reexec.Register("memory in a folder", func(c *reexec.Child) error {
		m, err := New(checkpointOptions(c.Args[0]))
		if err != nil {
			return err
		}
		d := driver.Of(m)
		_ = d.Init()
		ctx, _ := d.DevicePrimaryCtxRetain(0)
		p, r := d.MemAlloc(ctx, 15*chunk)
		h, _ := d.MemCreate(chunk, on(0, 0))
		for c.Send(r.String()) == nil { // each time the parent asks
			var ask bool
			if c.Recv(&ask) != nil {
				break
			}
			if r = d.MemcpyDtoDAsync(ctx, p, p+chunk, chunk, 0); r.Lost() {
				_ = d.MemRelease(h)
				h = 0
			}
		}
		if h != 0 {
			_ = d.MemRelease(h)
		}
		_ = d.MemFree(ctx, p)
		_ = d.DevicePrimaryCtxRelease(0)
		return m.Close()
	})
	reexec.Register("locker", func(c *reexec.Child) error {
		m, err := New(checkpointOptions(c.Args[0]))
		if err != nil {
			return err
		}
		d := driver.Of(m)
		_ = d.Init()
		var pid int32
		if err := c.Recv(&pid); err != nil {
			return err
		}
		_ = c.Send(d.CheckpointProcessLock(pid, driver.LockArgs{}).String())
		_ = c.Send(d.CheckpointProcessCheckpoint(pid).String())
		var never bool
		return c.Recv(&never)
	})
}

func checkpointOptions(folder string) Options {
	return Options{Folder: folder, Devices: []DeviceOptions{{Memory: 64 * chunk, ContextMemory: chunk}}}
}

// pair is a process with memory, beside this one on a machine.
func pair(t *testing.T) (r *rig, c *reexec.Cmd, pid int32) {
	folder := t.TempDir()
	r = start(t, checkpointOptions(folder))
	c = reexec.Command(t, "memory in a folder", folder)
	c.Start()
	var made string
	c.Recv(&made)
	require.Equal(t, driver.Success.String(), made)
	return r, c, int32(c.Process.Pid)
}

func TestAProcessCannotCheckpointItself(t *testing.T) {
	r := start(t, checkpointOptions(t.TempDir()))
	me := int32(os.Getpid())
	state, res := r.CheckpointProcessGetState(me)
	r.ok(res)
	require.Equal(t, driver.ProcessRunning, state)
	r.is(driver.NotSupported, r.CheckpointProcessLock(me, driver.LockArgs{TimeoutMS: 1}))
	r.is(driver.NotSupported, r.CheckpointProcessCheckpoint(me))
	r.is(driver.NotSupported, r.CheckpointProcessRestore(me))
	r.is(driver.NotSupported, r.CheckpointProcessUnlock(me))
	alone := start(t, Options{})
	alone.is(driver.InvalidValue, alone.CheckpointProcessUnlock(me+1))
}

// The process's calls wait until the unlock, and the memory is free meanwhile.
func TestCallsWaitForTheUnlock(t *testing.T) {
	r, c, pid := pair(t)
	before, _ := r.m.Memory(0)
	r.ok(r.CheckpointProcessLock(pid, driver.LockArgs{TimeoutMS: 5000}))
	r.ok(r.CheckpointProcessCheckpoint(pid))
	c.Send(true)
	called := make(chan string, 1)
	go func() {
		var s string
		c.Recv(&s)
		called <- s
	}()
	free, _ := r.m.Memory(0)
	require.Equal(t, before+17*chunk, free)
	select {
	case <-called:
		require.Fail(t, "the call does not wait")
	case <-time.After(20 * time.Millisecond):
	}
	r.ok(r.CheckpointProcessRestore(pid))
	free, _ = r.m.Memory(0)
	require.Equal(t, before, free)
	state, res := r.CheckpointProcessGetState(pid)
	r.ok(res)
	require.Equal(t, driver.ProcessLocked, state)
	r.ok(r.CheckpointProcessUnlock(pid))
	require.Equal(t, driver.Success.String(), <-called)
	c.Wait()
}

// A restore without room loses the process: its calls fail, it counts as nothing, and it ends
// in good order.
func TestARestoreWithoutRoomLosesTheProcess(t *testing.T) {
	r, c, pid := pair(t)
	r.ok(r.CheckpointProcessLock(pid, driver.LockArgs{TimeoutMS: 5000}))
	r.ok(r.CheckpointProcessCheckpoint(pid))
	p, res := r.MemAlloc(r.ctx, 60*chunk)
	r.ok(res)
	r.is(driver.OutOfMemory, r.CheckpointProcessRestore(pid))
	state, res := r.CheckpointProcessGetState(pid)
	r.ok(res)
	require.Equal(t, driver.ProcessFailed, state)
	r.is(driver.IllegalState, r.CheckpointProcessUnlock(pid))
	c.Send(true)
	var called string
	c.Recv(&called)
	require.Equal(t, driver.LaunchFailed.String(), called)
	free, _ := r.m.Memory(0)
	require.Equal(t, 3*chunk, free, "the process has nothing that it could free")
	r.ok(r.MemFree(r.ctx, p))
	c.Wait()
	free, _ = r.m.Memory(0)
	require.Equal(t, 63*chunk, free)
}

// What a killed caller began goes on, and another one ends it.
func TestTheCallerOfACheckpointIsKilled(t *testing.T) {
	r, c, pid := pair(t)
	helper := reexec.Command(t, "locker", r.m.options.Folder)
	helper.Start()
	helper.Send(pid)
	for range 2 {
		var res string
		helper.Recv(&res)
		require.Equal(t, driver.Success.String(), res)
	}
	helper.Kill()
	state, res := r.CheckpointProcessGetState(pid)
	r.ok(res)
	require.Equal(t, driver.ProcessCheckpointed, state)
	r.ok(r.CheckpointProcessRestore(pid))
	r.ok(r.CheckpointProcessUnlock(pid))
	c.Send(true)
	var called string
	c.Recv(&called)
	require.Equal(t, driver.Success.String(), called)
	c.Wait()
}
