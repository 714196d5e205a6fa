package main

import (
	"bytes"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/testlog"
	"github.com/stretchr/testify/require"
)

// An object outlives the broker's kill and replacement, and an upgrade of the keeper.
func TestServeKeepsWhatWasWritten(t *testing.T) {
	folder, path := t.TempDir(), t.TempDir()+"/s/broker"
	self, err := os.Executable()
	require.NoError(t, err)
	log := &testlog.Log{}
	c := exec.Command(self, "serve", "-socket", path, "-limit", "64", "-driver", "sim")
	c.Env = append(os.Environ(), asChild+"=1", `CUVMM_SIM={"Folder": "`+folder+`"}`)
	c.Stderr = log
	require.NoError(t, c.Start())
	defer func() {
		if t.Failed() {
			t.Log(log.String())
		}
		_ = c.Process.Kill()
	}()
	m, err := sim.New(sim.Options{Folder: folder})
	require.NoError(t, err)
	sys, err := m.OpenOwned(cuda.Options{})
	require.NoError(t, err)
	d := sys.Devices()[0]
	ctx := peertest.Context(t)
	k, err := broker.Dial(ctx, path, broker.DialOptions{Wait: true})
	require.NoError(t, err)
	w, err := k.Create(ctx, d, "w", broker.CreateOptions{Bytes: 3 << 20})
	require.NoError(t, err)
	part, err := w.Buffer().Slice(0, 5)
	require.NoError(t, err)
	require.NoError(t, part.CopyFrom(nil, []byte("bytes")))
	o, err := w.Commit(ctx, nil)
	require.NoError(t, err)
	require.NoError(t, o.Close())
	_, err = k.Create(ctx, d, "x", broker.CreateOptions{Bytes: 64 << 20})
	require.ErrorIs(t, err, broker.ErrLimit)

	started := func() int { return strings.Count(log.String(), "the broker was started") }
	for i, do := range []func() error{
		func() error { return syscall.Kill(childOf(t, c.Process.Pid), syscall.SIGKILL) },
		func() error { return c.Process.Signal(syscall.SIGHUP) },
		func() error { return c.Process.Signal(syscall.SIGUSR2) },
		func() error { return c.Process.Signal(syscall.SIGHUP) },
	} {
		before := started()
		require.NoError(t, do())
		require.Eventually(t, func() bool { return started() > before }, peertest.Guard, time.Millisecond, i)
		got, err := k.Attach(ctx, d, "w", broker.AttachOptions{})
		require.NoError(t, err)
		five := make([]byte, 5)
		part, err := got.Buffer().Slice(0, 5)
		require.NoError(t, err)
		require.NoError(t, part.CopyTo(nil, five))
		require.Equal(t, "bytes", string(five))
		require.NoError(t, got.Close())
	}
	require.NoError(t, k.Close())
	require.NoError(t, c.Process.Signal(syscall.SIGTERM))
	require.NoError(t, c.Wait(), log.String())
	free, total, err := d.MemoryInfo()
	require.NoError(t, err)
	require.Less(t, total-free, 3<<20, "what nobody has mapped is free")
	require.NoError(t, sys.Close())
}

// childOf returns the one child of a process.
func childOf(t *testing.T, pid int) int {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/task/" + strconv.Itoa(pid) + "/children")
	require.NoError(t, err)
	if len(bytes.Fields(text)) == 0 { // started by another thread
		tasks, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/task")
		require.NoError(t, err)
		for _, task := range tasks {
			more, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/task/" + task.Name() + "/children")
			require.NoError(t, err)
			text = append(text, more...)
		}
	}
	all := strings.Fields(string(text))
	require.Len(t, all, 1)
	child, err := strconv.Atoi(all[0])
	require.NoError(t, err)
	return child
}

// Without a driver there is nothing to serve, and nothing to try again.
func TestServeEndsWithoutADriver(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	c := exec.Command(self, "serve", "-socket", t.TempDir()+"/s/broker", "-driver", "real")
	c.Env = append(os.Environ(), asChild+"=1", "CUVMM_LIBCUDA=/nowhere/libcuda.so")
	said, err := c.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(said), "the broker ended before it began")
	require.Contains(t, string(said), "cuda.Open: no CUDA driver")
}

func TestServeRefusesWrongFlags(t *testing.T) {
	for _, args := range [][]string{{"serve", "-limit", "-1"}, {"serve", "-driver", "x"}, {"serve", "more"}} {
		var out, complaints bytes.Buffer
		require.Equal(t, exitUsage, run(args, &out, &complaints, thisHost()), args)
	}
	var out, complaints bytes.Buffer
	require.Equal(t, exitFailed, run([]string{brokerRole}, &out, &complaints, thisHost()), "it has no keeper")
	require.Contains(t, complaints.String(), "cuvmm serve")
}
