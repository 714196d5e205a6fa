//go:build amd64 || arm64

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/inspect/serve"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

func init() { reexec.Register("sleeper", sleeperProcess) }

// What a process has besides, by the argument of sleeperProcess.
const (
	plainMemory = "memory"
	hasNoSocket = "no socket"
	hasMap      = "a socket for its map"
	hasManaged  = "managed memory"
	hasExport   = "an exported descriptor"
	hasWait     = "a stream that waits"
	refuses     = "no wish to sleep"
)

const sleeperBytes = 24 << 20

// sleeperProcess has a buffer with contents, and a pool with a block. Each time it is asked it
// replies how many bytes are as they were, and how often it woke.
func sleeperProcess(c *reexec.Child) (err error) {
	sys, err := auto.Open(auto.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	d := sys.Devices()[0]
	b, err := vmm.NewArray[byte](d, vmm.BufferOptions{Reserve: 1 << 30, Chunks: vmm.FixedChunks(4 << 20), Name: "weights", Tag: "model"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	contents := bytes.Repeat([]byte{1, 2, 3, 4}, sleeperBytes/4)
	s, err := d.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if _, err := b.Append(s, contents); err != nil {
		return err
	}
	p, err := pool.New(d, pool.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	block, err := p.Alloc(pool.Request{Bytes: 6 << 20, Stream: s})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Free(block)) }()
	end, err := burden(sys, d, c.Args[0])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	var woke atomic.Int64
	offer := serve.OfferSleep
	switch c.Args[0] {
	case hasNoSocket:
		offer = func(*cuda.System, serve.SleepOptions) (*serve.Offered, error) { return new(serve.Offered), nil }
	case hasMap:
		offer = func(sys *cuda.System, _ serve.SleepOptions) (*serve.Offered, error) { return serve.Offer(sys) }
	}
	o, err := offer(sys, serve.SleepOptions{
		Before: func(context.Context) error {
			if c.Args[0] == refuses {
				return errors.New("a request is being served")
			}
			return nil
		},
		After: func(context.Context) error { woke.Add(1); return nil },
	})
	if err != nil {
		return err
	}
	if c.Args[0] != hasNoSocket {
		defer func() { err = errors.Join(err, o.Close()) }()
	}
	for {
		got := make([]byte, len(contents))
		if err := b.All().CopyTo(s, got); err != nil {
			return err
		}
		if !bytes.Equal(got, contents) {
			return errors.New("the buffer has other contents")
		}
		if err := c.Send(woke.Load()); err != nil {
			return err
		}
		var again bool
		if c.Recv(&again) != nil {
			return nil
		}
	}
}

// burden makes what keeps a process awake.
func burden(sys *cuda.System, d *cuda.Device, kind string) (end func() error, err error) {
	switch kind {
	case hasManaged:
		m, err := managed.New(d, 4<<20, managed.Options{})
		if err != nil {
			return nil, err
		}
		return m.Close, nil
	case hasExport:
		m, err := vmm.Create(d, 4<<20, vmm.Properties{Handles: vmm.PosixFD})
		if err != nil {
			return nil, err
		}
		fd, err := phys.Of(m).Export("test")
		if err != nil {
			return nil, err
		}
		return func() error { return errors.Join(syscall.Close(fd), m.Close()) }, nil
	case hasWait:
		return waitingStream(core.SystemOf(sys).Drv)
	}
	return func() error { return nil }, nil
}

// waitingStream has a stream wait for a value that comes at the end.
func waitingStream(d driver.Driver) (end func() error, err error) {
	const portable = driver.HostAllocPortable | driver.HostAllocDeviceMap
	ctx, _ := d.DevicePrimaryCtxRetain(0)
	s, _ := d.StreamCreate(ctx, driver.StreamNonBlocking)
	word, _ := d.MemHostAlloc(ctx, 4096, portable)
	at, _ := d.MemHostGetDevicePointer(ctx, word)
	if r := d.StreamWaitValue64(ctx, s, at, 1); r != driver.Success {
		return nil, fmt.Errorf("wait: %v", r)
	}
	return func() error {
		(*atomic.Uint64)(word).Store(1)
		_ = d.StreamSynchronize(ctx, s)
		_ = d.StreamDestroy(ctx, s)
		_ = d.MemFreeHost(ctx, word)
		_ = d.DevicePrimaryCtxRelease(0)
		return nil
	}, nil
}

// slumber is a machine with a process that has called OfferSleep, and this test's host on it.
type slumber struct {
	t      *testing.T
	folder string
	c      *reexec.Cmd
	pid    int
	h      host
}

func newSlumber(t *testing.T, kind string) *slumber {
	folder := filepath.Join(t.TempDir(), "machine")
	t.Setenv(auto.DriverEnv, string(auto.Software))
	t.Setenv(sim.MachineEnv, fmt.Sprintf(`{"Folder": %q, "Devices": [{"Memory": %d, "ContextMemory": %d}]}`, folder, 256<<20, 16<<20))
	s := startSlumber(t, kind)
	s.folder = folder
	return s
}

// startSlumber starts the process on the driver that the environment says.
func startSlumber(t *testing.T, kind string) *slumber {
	dir, err := os.MkdirTemp("", "sleep") //nolint:usetesting // which makes longer paths than a socket's may be
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	s := &slumber{t: t, h: thisHost()}
	t.Setenv("XDG_RUNTIME_DIR", dir)
	s.c = reexec.Command(t, "sleeper", kind)
	s.c.Start()
	s.woke(0)
	s.pid = s.c.Process.Pid
	t.Setenv(asChild, "1") // for the helper
	return s
}

// woke has the process compare its contents, and say how often it woke.
func (s *slumber) woke(times int64) {
	s.t.Helper()
	var n int64
	s.c.Recv(&n)
	require.Equal(s.t, times, n)
}

// runs runs a command on the process.
func (s *slumber) runs(code int, command string, args ...string) (out string) {
	s.t.Helper()
	var printed, complaints bytes.Buffer
	got := run(append(append([]string{command}, args...), strconv.Itoa(s.pid)), &printed, &complaints, s.h)
	require.Equal(s.t, code, got, "%s%s", printed.String(), complaints.String())
	return printed.String() + complaints.String()
}

func (s *slumber) taken() int {
	u, err := sim.Inspect(s.folder)
	require.NoError(s.t, err)
	return u.Devices[0].Taken
}

// All that the process has of the device is free while it sleeps.
func TestSleepAndWake(t *testing.T) {
	s := newSlumber(t, plainMemory)
	awake := s.taken()
	require.Greater(t, awake, sleeperBytes+16<<20)
	require.Contains(t, s.runs(exitOK, "sleep"), fmt.Sprintf("process %d sleeps: it suspended ", s.pid))
	require.Zero(t, s.taken())
	s.runs(exitOK, "sleep") // sleeps already
	require.Contains(t, s.runs(exitFailed, "map"), "has been asleep since")
	var listed bytes.Buffer
	require.Zero(t, run([]string{"top"}, &listed, &listed, s.h))
	require.Contains(t, listed.String(), fmt.Sprintf("sleeps off the GPUs: cuvmm wake %d puts it back", s.pid))
	require.Contains(t, fmt.Sprint(suspended(s.h)), fmt.Sprintf("process %d (", s.pid))
	require.Equal(t, fmt.Sprintf("process %d is awake\n", s.pid), s.runs(exitOK, "wake"))
	require.Equal(t, awake, s.taken())
	s.runs(exitOK, "wake") // is awake already
	s.c.Send(true)
	s.woke(1)
	s.c.Wait()
}

// On a GPU the memory in use is what it was before the process, within 2 MiB, while that sleeps.
func TestSleepToZeroOnAGPU(t *testing.T) {
	if _, err := csrc.Open(csrc.Options{}); err != nil {
		if os.Getenv("CUVMM_REQUIRE_GPU") != "" {
			t.Fatalf("a GPU is required: %v", err)
		}
		t.Skipf("no real driver: %v", err)
	}
	t.Setenv(auto.DriverEnv, string(auto.Real))
	used := func() int {
		out, err := runProgram("nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
		require.NoError(t, err)
		n, err := strconv.Atoi(strings.TrimSpace(out))
		require.NoError(t, err)
		return n
	}
	before := used()
	s := startSlumber(t, plainMemory)
	awake := used()
	begun := time.Now()
	s.runs(exitOK, "sleep")
	out := time.Since(begun)
	asleep := used()
	begun = time.Now()
	s.runs(exitOK, "wake")
	t.Logf("MiB in use: %d before the process, %d with it, %d while it sleeps; sleep took %v, wake %v", before, awake, asleep, out, time.Since(begun))
	require.InDelta(t, before, asleep, 2)
	s.c.Send(true)
	s.woke(1)
	s.c.Wait()
}

// A process that offers nothing, or its map alone, is taken if that is demanded.
func TestSleepUnprepared(t *testing.T) {
	for _, kind := range []string{hasNoSocket, hasMap} {
		t.Run(kind, func(t *testing.T) {
			s := newSlumber(t, kind)
			awake := s.taken()
			require.Contains(t, s.runs(exitFailed, "sleep"), "has not called serve.OfferSleep: have it do that in place of serve.Offer, or add -unprepared")
			require.Equal(t, awake, s.taken())
			require.Contains(t, s.runs(exitOK, "sleep", "-unprepared"), "sleeps: the driver took what it had")
			require.Zero(t, s.taken())
			require.Equal(t, fmt.Sprintf("process %d is awake\n", s.pid), s.runs(exitOK, "wake"))
			require.Equal(t, awake, s.taken())
			s.c.Send(true)
			s.woke(0)
			s.c.Wait()
		})
	}
}

// What keeps a process awake is named with a remedy, and changes nothing.
func TestWhatKeepsAProcessAwake(t *testing.T) {
	for kind, says := range map[string]string{
		hasManaged: "managed memory (1): close it: a checkpoint refuses it",
		hasExport:  "4 MiB of memory that was exported, which would stay on the GPU and be there twice afterwards: close it",
		hasWait:    "returned CUDA_ERROR_NOT_READY (600)",
		refuses:    "the program refuses to sleep: a request is being served",
	} {
		t.Run(kind, func(t *testing.T) {
			s := newSlumber(t, kind)
			awake := s.taken()
			require.Contains(t, s.runs(exitFailed, "sleep", "-timeout", "50ms"), says)
			require.Equal(t, awake, s.taken())
			s.c.Send(true)
			s.woke(map[bool]int64{true: 0, false: 1}[kind == refuses])
			s.c.Wait()
		})
	}
}

// A helper that is killed leaves the process in some state, which wake ends.
func TestTheHelperIsKilled(t *testing.T) {
	s := newSlumber(t, hasWait)
	c, err := s.h.child("", sleepHelper, "sleep", strconv.Itoa(s.pid), "500ms", "1m")
	require.NoError(t, err)
	require.NoError(t, c.Start())
	time.Sleep(100 * time.Millisecond) // it waits for the stream, or has not begun
	require.NoError(t, c.Process.Signal(syscall.SIGKILL))
	require.Error(t, c.Wait())
	s.c.Send(true) // waits for the lock to end, if there is one
	s.woke(0)
	s.runs(exitOK, "wake")
	s.c.Wait()

	s = newSlumber(t, plainMemory)
	c, err = s.h.child("", sleepHelper, "sleep", strconv.Itoa(s.pid), "500ms", "1m")
	require.NoError(t, err)
	require.NoError(t, c.Run()) // and the command that started it is gone
	require.Zero(t, s.taken())
	s.runs(exitOK, "wake")
	s.c.Send(true)
	s.woke(1)
	s.c.Wait()
}

// A helper that is not done in time goes on, and wake ends what it did.
func TestAHelperIsLeftToItself(t *testing.T) {
	s := newSlumber(t, hasWait)
	said := s.runs(exitFailed, "sleep", "-timeout", "1s", "-wait", "300ms")
	require.Contains(t, said, "goes on; when it has ended, cuvmm wake")
	require.Eventually(t, func() bool {
		return run([]string{"wake", strconv.Itoa(s.pid)}, &bytes.Buffer{}, &bytes.Buffer{}, s.h) == exitOK
	}, 10*time.Second, 50*time.Millisecond)
	s.c.Send(true)
	s.woke(1)
	s.c.Wait()
}

// A restore without room loses the process, which says so.
func TestWakeWithoutRoom(t *testing.T) {
	s := newSlumber(t, plainMemory)
	s.runs(exitOK, "sleep")
	machine, err := sim.NewFromEnvironment()
	require.NoError(t, err)
	sys, err := machine.OpenOwned(cuda.Options{})
	require.NoError(t, err)
	m, err := vmm.Create(sys.Devices()[0], 236<<20, vmm.Properties{})
	require.NoError(t, err)
	require.Contains(t, s.runs(exitFailed, "wake"), "out of memory")
	require.Contains(t, s.runs(exitFailed, "wake"), "a restore failed, so it cannot use its devices any more; end the process")
	require.NoError(t, m.Close())
	require.NoError(t, sys.Close())
	s.c.Kill()
}

func TestSleepIsRefusedToOthers(t *testing.T) {
	program(t) // which called Offer
	t.Setenv(asChild, "1")
	h := thisHost()
	h.env = none
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"sleep"}, exitUsage, "name one process"},
		{[]string{"wake", "-4"}, exitUsage, "-4"},
		{[]string{"sleep", "x"}, exitUsage, `"x" is not the number of a process`},
		{[]string{"sleep", "-timeout", "0s", "1"}, exitUsage, "-timeout 0s"},
		{[]string{"sleep", "-wait", "0s", "1"}, exitUsage, "-wait 0s"},
		{[]string{"sleep", "-driver", "x", "1"}, exitUsage, `-driver "x"`},
		{[]string{"sleep", "2147483647"}, exitFailed, "there is no process 2147483647: cuvmm top lists those that offer a socket"},
		{[]string{"wake", "2147483647"}, exitFailed, "there is no process 2147483647"},
		{[]string{"sleep", "1"}, exitFailed, "process 1 has not called serve.OfferSleep"},
		{[]string{"sleep", strconv.Itoa(os.Getpid())}, exitFailed, "has not called serve.OfferSleep: have it do that"},
	} {
		var out, complaints bytes.Buffer
		require.Equal(t, c.code, run(c.args, &out, &complaints, h), complaints.String())
		require.Contains(t, complaints.String(), c.says)
	}
}
