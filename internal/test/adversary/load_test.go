//go:build linux

package adversary

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/load"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func init() { reexec.Register("adversary: load and be killed", loadAndBeKilled) }

// loadAndBeKilled publishes memory, announces nothing, and loads a model into it until it is killed at
// the driver call that it is told.
func loadAndBeKilled(c *reexec.Child) error {
	m, err := sim.New(sim.Options{Folder: c.Args[0]})
	if err != nil {
		return err
	}
	sys, err := m.Open(cuda.Options{})
	if err != nil {
		return err
	}
	model, err := load.OpenSafetensors(c.Args[2])
	if err != nil {
		return err
	}
	l, err := model.Layout(0)
	if err != nil {
		return err
	}
	memory, err := vmm.NewArray[byte](sys.Devices()[0], vmm.BufferOptions{Reserve: l.Bytes})
	if err != nil {
		return err
	}
	s, err := memory.Device().NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	server := publish.NewServer(publish.ServerOptions{})
	listener, err := peer.Listen(c.Args[1], "weights", peer.Options{})
	if err != nil {
		return err
	}
	_, err = publish.Array(server, "weights", memory)
	if err := errors.Join(err, memory.Resize(nil, l.Bytes)); err != nil {
		return err
	}
	go func() { _ = server.Serve(context.Background(), listener) }()
	var kill int
	if err := errors.Join(c.Send(true), c.Recv(&kill)); err != nil {
		return err
	}
	var calls atomic.Int64
	m.OnCall(func(string) {
		if calls.Add(1) == int64(kill) {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
	})
	for {
		if _, err := model.LoadAll(context.Background(), load.Options{Threads: 2}, s, l, memory.Ptr(), memory.Len()); err != nil {
			return err
		}
	}
}

// Whenever a process that loads is killed, its memory is free and nothing lies beside the model. A
// follower of the memory that it loaded into has seen none of it.
func TestAKilledLoad(t *testing.T) {
	const n = 9<<20 + 5
	path := filepath.Join(t.TempDir(), "model.safetensors")
	header := fmt.Sprintf(`{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, n, n)
	file := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
	require.NoError(t, os.WriteFile(path, append(file, make([]byte, n)...), 0o600))
	machine := filepath.Join(t.TempDir(), "machine")
	_, sys := sim.Open(t, sim.Options{Folder: machine})
	for round := range times(8) {
		dir, err := os.MkdirTemp("", "load") //nolint:usetesting // which makes longer paths than a socket's may be
		require.NoError(t, err)
		defer os.RemoveAll(dir)
		c := reexec.Command(t, "adversary: load and be killed", machine, dir, path)
		c.Start()
		var ready bool
		c.Recv(&ready)
		conn, err := peer.Dial(t.Context(), filepath.Join(dir, "weights"), peer.Options{})
		require.NoError(t, err)
		client := publish.NewClient(conn)
		f, err := publish.Follow[byte](t.Context(), client, sys.Devices()[0], "weights", publish.FollowOptions{})
		require.NoError(t, err)
		c.Send(1 + 9*round)
		err = f.Next(t.Context())
		require.ErrorIs(t, err, peer.ErrGone)
		require.Zero(t, f.Len())
		require.Error(t, c.Exit())
		require.NoError(t, f.Close())
		require.NoError(t, client.Close())
		require.Eventually(t, func() bool {
			u, err := sim.Inspect(machine)
			require.NoError(t, err)
			return len(u.Processes) == 1 && u.Devices[0].Taken < 2<<20 && len(u.Exported) == 0
		}, time.Minute, time.Millisecond)
		beside, err := os.ReadDir(filepath.Dir(path))
		require.NoError(t, err)
		require.Len(t, beside, 1)
	}
}
