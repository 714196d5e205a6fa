//go:build linux

package broker_test

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// A request waits for holders whom another one has asked.
func TestPressureOfTwo(t *testing.T) {
	peertest.NoLeak(t)
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	h := newHouse(t, d, broker.Options{Limit: 16 * mib, Ask: peertest.Guard})
	ctx := peertest.Context(t)
	holder := h.dial()
	cache := write(t, holder, d, "cache", 16*mib, 1, broker.CreateOptions{Ephemeral: true})
	made := make(chan error, 2)
	create := func(name string) {
		k := h.dial()
		go func() {
			w, err := k.Create(ctx, d, name, broker.CreateOptions{Bytes: 4 * mib})
			if err == nil {
				err = w.Close()
			}
			made <- err
		}()
	}
	create("first")
	<-cache.Wanted()
	create("second")
	select {
	case err := <-made:
		require.NoError(t, err)
		require.Fail(t, "there was no room yet")
	case <-time.After(50 * time.Millisecond):
	}
	closed(t, cache)
	require.NoError(t, <-made)
	require.NoError(t, <-made)
}

// Who holds what ends with its holders is asked before a request is refused, and a refusal says who has the
// memory.
func TestPressure(t *testing.T) {
	peertest.NoLeak(t)
	_, sys := sim.Open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 64 * mib}}})
	d := sys.Devices()[0]
	scarce := func(t *testing.T, o broker.Options, says string, size int) {
		o.Return, o.Ask = 100*time.Millisecond, 100*time.Millisecond
		h := newHouse(t, d, o)
		holder, k := h.dial(), h.dial()
		ctx := peertest.Context(t)
		create := func() error {
			w, err := k.Create(ctx, d, "w", broker.CreateOptions{Bytes: size})
			if err == nil {
				err = w.Close()
			}
			return err
		}
		require.NoError(t, create(), "there is room")
		stays := write(t, holder, d, "stays", 4*mib, 1, broker.CreateOptions{})
		cache := write(t, holder, d, "cache", 8*mib, 1, broker.CreateOptions{Ephemeral: true})
		also := attach(t, holder, d, "cache", broker.AttachOptions{})
		select {
		case <-cache.Wanted():
			require.Fail(t, "nobody lacks room")
		default:
		}
		err := gputest.Err(k.Create(ctx, d, "w", broker.CreateOptions{Bytes: 1 << 40}))
		require.Error(t, err)
		select {
		case <-cache.Wanted():
			require.Fail(t, "it would not fit anyway")
		default:
		}
		err = create()
		require.ErrorContains(t, err, says)
		require.ErrorContains(t, err, fmt.Sprintf(`"cache", 8 MiB, is held by 1 client, process %d of user %d; "stays", 4 MiB, is held by 1 client`, os.Getpid(), os.Geteuid()))
		<-cache.Wanted()
		<-also.Wanted()
		select {
		case <-stays.Wanted():
			require.Fail(t, "it stays without holders, too")
		default:
		}
		closed(t, cache, also)
		require.NoError(t, create())

		// One that lets go when it is asked. A slow machine may take longer than the broker waits.
		for range 2 {
			cache = write(t, holder, d, "cache", 8*mib, 1, broker.CreateOptions{Ephemeral: true})
			let := make(chan error)
			go func() {
				<-cache.Wanted()
				let <- cache.Close()
			}()
			if err := create(); err != nil {
				require.ErrorContains(t, err, says)
				require.NoError(t, <-let)
				require.NoError(t, create())
			} else {
				require.NoError(t, <-let)
			}
			h.replace() // and so does the next broker, once no other holder can come back
			_, err := holder.List(ctx)
			require.NoError(t, err)
			require.Eventually(t, func() bool {
				s, err := k.Status(ctx)
				return err == nil && s.Ready
			}, peertest.Guard, time.Millisecond)
		}
		closed(t, stays)
		require.NoError(t, k.Remove(ctx, "stays", 0))
	}
	t.Run("limit", func(t *testing.T) {
		scarce(t, broker.Options{Limit: 16 * mib}, "12 MiB, where 12 MiB of 16 MiB are taken", 12*mib)
	})
	t.Run("quota", func(t *testing.T) {
		scarce(t, broker.Options{Authorize: func(broker.Caller, string) broker.Grant {
			return broker.Grant{Access: publish.WriteAccess, Quota: broker.Quota{Bytes: 16 * mib}}
		}}, "who has 12 MiB of 16 MiB", 12*mib)
	})
	t.Run("device", func(t *testing.T) {
		free, _, err := d.MemoryInfo()
		require.NoError(t, err)
		size := (free - 8*mib) / (2 * mib) * (2 * mib)
		scarce(t, broker.Options{}, "out of memory", size)
	})
	t.Run("a name that may not be read", func(t *testing.T) {
		var hidden atomic.Bool
		h := newHouse(t, d, broker.Options{Limit: 8 * mib, Authorize: func(_ broker.Caller, name string) broker.Grant {
			if hidden.Load() && name == "secret" {
				return broker.Grant{}
			}
			return broker.Grant{Access: publish.WriteAccess}
		}})
		k := h.dial()
		secret := write(t, k, d, "secret", 8*mib, 1, broker.CreateOptions{})
		hidden.Store(true)
		_, err := k.Create(peertest.Context(t), d, "w", broker.CreateOptions{Bytes: 1})
		require.ErrorIs(t, err, broker.ErrLimit)
		require.ErrorContains(t, err, "objects that this client may not read have 8 MiB")
		require.NotContains(t, err.Error(), "secret")
		hidden.Store(false)
		closed(t, secret)
		require.NoError(t, k.Remove(peertest.Context(t), "secret", 0))
	})
}

// Memory of a publication that a device had no room for counts no more, also while clients of the last broker may
// come back: it is made once a holder has let go.
func TestPressureOfAPublication(t *testing.T) {
	peertest.NoLeak(t)
	_, sys := sim.Open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 64 * mib}}})
	d := sys.Devices()[0]
	h := newHouse(t, d, broker.Options{Return: time.Hour, Ask: peertest.Guard})
	k, ctx := h.dial(), peertest.Context(t)
	w, err := k.Create(ctx, d, "written", broker.CreateOptions{Bytes: mib})
	require.NoError(t, err)
	h.replace()
	closed(t, w)
	cache := write(t, k, d, "cache", 40*mib, 1, broker.CreateOptions{Ephemeral: true})
	let := make(chan error)
	go func() {
		<-cache.Wanted()
		let <- errors.Join(cache.Close(), k.Remove(ctx, "cache", 0))
	}()
	other := h.dial()
	kept, err := other.Keep(ctx, d, "weights", broker.KeepOptions{Bytes: 40 * mib})
	require.NoError(t, err)
	require.NoError(t, <-let)
	closed(t, kept)
	require.NoError(t, k.Remove(ctx, "weights", 0))
	s, err := k.Status(ctx)
	require.NoError(t, err)
	require.Zero(t, s.Objects+s.Publications)
}

// A broker says how it is.
func TestStatus(t *testing.T) {
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{Limit: 16 * mib, Return: time.Hour})
	k := h.dial()
	ctx := peertest.Context(t)
	s, err := k.Status(ctx)
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), s.Since, time.Minute)
	s.Since = time.Time{}
	require.Equal(t, broker.Status{Ready: true, Clients: 1, Limit: 16 * mib}, s)
	o := write(t, k, d, "o", 2*mib, 1, broker.CreateOptions{})
	again := attach(t, k, d, "o", broker.AttachOptions{})
	w, err := k.Create(ctx, d, "w", broker.CreateOptions{Bytes: 4 * mib})
	require.NoError(t, err)
	_, err = k.Attach(ctx, d, "none", broker.AttachOptions{})
	require.ErrorIs(t, err, broker.ErrUnknown)
	s, err = k.Status(ctx)
	require.NoError(t, err)
	s.Since = time.Time{}
	require.Equal(t, broker.Status{Ready: true, Clients: 1, Objects: 1, Writing: 1, Bytes: 6 * mib, Limit: 16 * mib, Commits: 1, Attaches: 1, Refusals: 1}, s)
	h.replace()
	ready := func() bool {
		s, err = k.Status(ctx)
		require.NoError(t, err)
		return s.Ready
	}
	require.False(t, ready(), "clients have yet to come back")
	require.Equal(t, []int{1, 1, 0}, []int{s.Objects, s.Writing, s.Commits})
	closed(t, o, again, w)
	h.o.Return = time.Millisecond
	h.replace()
	require.Eventually(t, ready, peertest.Guard, time.Millisecond)
	require.NoError(t, k.Remove(ctx, "o", 0))
}
