//go:build linux && (amd64 || arm64)

package serve_test

import (
	"context"
	"errors"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/inspect/serve"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// offered returns the socket of a System that sleeps on request.
func offered(t *testing.T, sys *cuda.System, o serve.SleepOptions) serve.Socket {
	runtime(t)
	offer, err := serve.OfferSleep(sys, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, offer.Close()) })
	found, err := serve.Find(t.Context())
	require.NoError(t, err)
	require.Len(t, found, 1)
	return found[0]
}

func closing(t *testing.T, c interface{ Close() error }) {
	t.Cleanup(func() { require.NoError(t, c.Close()) })
}

// The memory of all tags goes, and comes back; requests come in their order, and may be made
// again.
func TestTheStepsToSleep(t *testing.T) {
	m, sys := sim.Open(t)
	d := sys.Devices()[0]
	for _, tag := range []cuda.Tag{"", "weights"} {
		a, err := vmm.NewArray[byte](d, vmm.BufferOptions{Reserve: 64 << 20, Tag: tag})
		require.NoError(t, err)
		closing(t, a)
		_, err = a.AppendUndefined(4 << 20)
		require.NoError(t, err)
		if tag == "" {
			s, err := vmm.Suspend(t.Context(), vmm.SuspendOptions{}, a) // sleeps already, and goes on to
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, s.Resume(context.Background())) })
		}
	}
	p, err := pool.New(d, pool.Options{})
	require.NoError(t, err)
	closing(t, p)
	var calls []string
	socket := offered(t, sys, serve.SleepOptions{
		Before: func(context.Context) error { calls = append(calls, "before"); return nil },
		After:  func(context.Context) error { calls = append(calls, "after"); return nil },
	})
	_, err = socket.Suspend(t.Context())
	require.ErrorContains(t, err, "the process is awake")
	require.NoError(t, socket.Wake(t.Context()))
	before, _ := m.Memory(0)
	for range 2 {
		for range 2 {
			all, err := socket.Prepare(t.Context())
			require.NoError(t, err)
			require.Empty(t, all)
		}
		_, err = socket.Snapshot(t.Context())
		require.NoError(t, err)
		for range 2 {
			n, err := socket.Suspend(t.Context())
			require.NoError(t, err)
			require.Equal(t, 4<<20, n)
		}
		asleep, _ := m.Memory(0)
		require.Equal(t, before+4<<20, asleep)
		_, err = socket.Summary(t.Context())
		require.ErrorIs(t, err, cuda.ErrSuspended)
		require.ErrorContains(t, err, "has been asleep since")
		require.NoError(t, socket.Wake(t.Context()))
		awake, _ := m.Memory(0)
		require.Equal(t, before, awake)
	}
	require.Equal(t, []string{"before", "after", "before", "after"}, calls)
}

// Each blocker is named; the program goes on.
func TestWhatKeepsAwake(t *testing.T) {
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	exported, err := vmm.Create(d, 2<<20, vmm.Properties{Handles: vmm.PosixFD})
	require.NoError(t, err)
	closing(t, exported)
	fd, err := phys.Of(exported).Export("test")
	require.NoError(t, err)
	closing(t, fdOf(fd))
	m, err := managed.New(d, 1<<20, managed.Options{})
	require.NoError(t, err)
	closing(t, m)
	after := 0
	socket := offered(t, sys, serve.SleepOptions{After: func(context.Context) error { after++; return nil }})
	all, err := socket.Prepare(t.Context())
	require.NoError(t, err)
	require.Len(t, all, 2)
	require.Contains(t, all[0].What, "2 MiB of memory that was exported")
	require.Equal(t, "managed memory (1)", all[1].What)
	require.Equal(t, 1, after)
	_, err = socket.Suspend(t.Context())
	require.ErrorContains(t, err, "awake")
}

// A program that knows better lets memory sleep that was exported; one that is busy refuses.
func TestTheProgramDecides(t *testing.T) {
	_, sys := sim.Open(t)
	exported, err := vmm.Create(sys.Devices()[0], 2<<20, vmm.Properties{Handles: vmm.PosixFD})
	require.NoError(t, err)
	closing(t, exported)
	fd, err := phys.Of(exported).Export("test")
	require.NoError(t, err)
	require.NoError(t, fdOf(fd).Close())
	busy := errors.New("a request is being served")
	socket := offered(t, sys, serve.SleepOptions{Shared: true, Before: func(context.Context) error { return busy }})
	_, err = socket.Prepare(t.Context())
	require.ErrorContains(t, err, "409 Conflict: the program refuses to sleep: a request is being served")
	busy = nil
	all, err := socket.Prepare(t.Context())
	require.NoError(t, err)
	require.Empty(t, all)
	require.NoError(t, socket.Wake(t.Context()))
	_, err = serve.OfferSleep(nil, serve.SleepOptions{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
}

// A process that offers its map alone refuses the requests.
func TestOfferAloneDoesNotSleep(t *testing.T) {
	runtime(t)
	_, sys := sim.Open(t)
	offer, err := serve.Offer(sys)
	require.NoError(t, err)
	closing(t, offer)
	found, err := serve.Find(t.Context())
	require.NoError(t, err)
	_, err = found[0].Prepare(t.Context())
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.ErrorContains(t, err, "has not called serve.OfferSleep")
}

// fdOf is a descriptor to close.
type fdOf int

func (f fdOf) Close() error { return unix.Close(int(f)) }
