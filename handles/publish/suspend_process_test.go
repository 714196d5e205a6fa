//go:build linux

package publish_test

import (
	"context"
	"errors"
	"os"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// mortal is a process of a test that is killed at one of its driver calls.
type mortal struct {
	Place place
	N     int // elements
	Kill  int // the driver call of the software driver, from 1 on; 0 is none
}

// live opens the device, and does what is to be done from begin on until the kill. It returns how
// many driver calls that made.
func (do mortal) live(run func(d *cuda.Device, begin func()) error) (int, error) {
	sys, m, err := do.Place.openMachine()
	if err != nil {
		return 0, err
	}
	var calls atomic.Int64
	err = run(sys.Devices()[0], func() {
		if m == nil {
			return
		}
		m.OnCall(func(call string) {
			// How often a wait asks is chance, and what asks changes nothing.
			if call != "cuStreamQuery" && call != "cuEventQuery" && calls.Add(1) == int64(do.Kill) {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			}
		})
	})
	return int(calls.Load()), err
}

func init() {
	// A publisher suspends its memory twice.
	reexec.Register("sleeper", func(c *reexec.Child) error {
		var do mortal
		if err := c.Recv(&do); err != nil {
			return err
		}
		calls, err := do.live(func(d *cuda.Device, begin func()) error {
			w, streams, err := do.Place.rewritten(d, do.N, 1)
			if err != nil {
				return err
			}
			ctx := context.Background() // reexec bounds the child's life
			if err := errors.Join(c.Send("ready"), w.p.AwaitFollowers(ctx, 1), c.Recv(new(string))); err != nil {
				return err
			}
			begin()
			for range 2 {
				s, err := vmm.SuspendAfter(vmm.SuspendOptions{}, streams, w.array)
				if err == nil {
					err = errors.Join(s.Released().Wait(ctx), s.Resume(ctx))
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
		return errors.Join(err, c.Send(calls))
	})
	// A follower reads until it ends.
	reexec.Register("mortal follower", func(c *reexec.Child) error {
		var do mortal
		if err := c.Recv(&do); err != nil {
			return err
		}
		calls, err := do.live(func(d *cuda.Device, begin func()) error {
			ctx := context.Background()
			k, err := publish.Dial(ctx, do.Place.socket(), publish.DialOptions{})
			if err != nil {
				return err
			}
			f, err := publish.Follow[uint32](ctx, k, d, "numbers", publish.FollowOptions{})
			if err != nil {
				return err
			}
			read := func() error {
				if err := f.Next(ctx); err != nil {
					return err
				}
				got := make([]uint32, f.Len())
				if err := f.Array().All().CopyTo(nil, got); err != nil {
					return err
				}
				_, err := versionOf(got)
				return errors.Join(err, f.Release())
			}
			if err := errors.Join(read(), c.Send("ready"), c.Recv(new(string))); err != nil {
				return err
			}
			begin()
			return errors.Join(read(), f.Close(), k.Close())
		})
		return errors.Join(err, c.Send(calls))
	})
}

// start starts a mortal, and returns once it is ready.
func (do mortal) start(t *testing.T, role string) *reexec.Cmd {
	t.Helper()
	c := reexec.Command(t, role)
	c.Start()
	c.Send(do)
	var said string
	c.Recv(&said)
	require.Equal(t, "ready", said)
	return c
}

// deaths are how many calls of each run are struck; CUVMM_KILL_ROUNDS has all of them struck.
const deaths = 12

// stride is from one call that is struck to the next.
func stride(calls int) int {
	if os.Getenv("CUVMM_KILL_ROUNDS") != "" {
		return 1
	}
	return max(1, calls/deaths)
}

// A publisher that is killed at any moment of its suspensions leaves a follower with a whole version,
// which it can take over, or with nothing, which is refused with the reason.
func TestPublishersThatAreKilledAsleep(t *testing.T) {
	p := newPlace(t)
	_, sys := sim.Open(t, p.machine())
	d, ctx := sys.Devices()[0], peertest.Context(t)
	outcomes := map[bool]int{}
	calls := 0
	for kill := 0; kill <= calls; kill += stride(calls) {
		do := mortal{Place: p, N: 1_000_000, Kill: kill}
		c := do.start(t, "sleeper")
		k, err := publish.Dial(ctx, p.socket(), publish.DialOptions{})
		require.NoError(t, err)
		f, err := publish.Follow[uint32](ctx, k, d, "numbers", publish.FollowOptions{KeepDescriptors: true})
		require.NoError(t, err)
		read := func() error {
			if err := f.Next(ctx); err != nil {
				return err
			}
			_, err := versionOf(elementsOf(t, f.Array(), nil))
			require.NoError(t, err)
			require.Equal(t, do.N, f.Len())
			require.True(t, f.Intact(f.Generation()) || f.Err() != nil || kill > 0)
			return f.Release()
		}
		require.NoError(t, read())
		c.Send("go")
		if kill == 0 {
			done := make(chan error, 1)
			go func() {
				for f.Next(ctx) == nil {
					_ = f.Release()
				}
				done <- nil
			}()
			c.Recv(&calls)
			c.Kill()
			<-done
			require.Greater(t, calls, deaths)
		} else {
			for err = read(); err == nil; {
				err = read()
			}
			require.ErrorIs(t, err, peer.ErrGone)
			require.NotErrorIs(t, err, publish.ErrUnfinished)
			c.Kill()
		}
		server := publish.NewServer(publish.ServerOptions{})
		pub, err := publish.TakeOver(ctx, server, f, publish.TakeOverOptions{})
		outcomes[err == nil]++
		if err != nil {
			require.ErrorIs(t, err, cuda.ErrSuspended, "call %d", kill)
			require.ErrorContains(t, err, "load the elements anew")
			require.Zero(t, f.Len())
			require.NoError(t, f.Close())
		} else {
			require.Equal(t, do.N, f.Array().Len())
			version, err := versionOf(elementsOf(t, f.Array(), nil))
			require.NoError(t, err)
			require.EqualValues(t, 1, version)
			require.NoError(t, pub.Withdraw())
			require.NoError(t, f.Array().Close())
		}
		require.NoError(t, errors.Join(server.Close(), k.Close()))
	}
	require.Len(t, outcomes, 2, "%v", outcomes)
}

// A follower that is killed at any moment of its publisher's suspensions is not waited for, and
// keeps no memory.
func TestFollowersThatAreKilledAsleep(t *testing.T) {
	p := newPlace(t)
	_, sys := sim.Open(t, p.machine())
	w, streams, err := p.rewritten(sys.Devices()[0], 1_000_000, 1)
	require.NoError(t, err)
	taken := func() int {
		u, err := sim.Inspect(p.Folder)
		require.NoError(t, err)
		return u.Devices[0].Taken
	}
	before := taken()
	ctx := peertest.Context(t)
	calls := 0
	for kill := 0; kill <= calls; kill += stride(calls) {
		c := mortal{Place: p, Kill: kill}.start(t, "mortal follower")
		c.Send("go")
		asleep := w.suspend(t, vmm.SuspendOptions{})
		require.NoError(t, asleep.Resume(ctx))
		if kill == 0 {
			c.Recv(&calls)
			require.Greater(t, calls, deaths)
			continue
		}
		require.NoError(t, w.p.Settle(ctx))
		c.Kill()
		require.Equal(t, before, taken())
	}
	require.NoError(t, errors.Join(w.server.Close(), w.array.Close(), streams[0].Close(), streams[1].Close()))
}
