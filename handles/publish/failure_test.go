//go:build linux

package publish

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// walkFailures lets each driver call of an operation fail, one after the other: alone, and
// while the driver refuses one of the calls that undo. run makes the machine, and calls begin
// before the operation and end after it. Every machine is checked for leaks when its test ends.
func walkFailures(t *testing.T, undoing []string, run func(t *testing.T, begin func(*sim.Machine), end func())) {
	for k := 0; ; k++ {
		var calls atomic.Int64
		t.Run(fmt.Sprintf("call %d", k), func(t *testing.T) {
			for _, undo := range append([]string{""}, undoing...) {
				t.Run(undo, func(t *testing.T) {
					t.Parallel()
					var struck *sim.Machine
					var made atomic.Int64
					run(t, func(m *sim.Machine) {
						struck = m
						m.OnCall(func(string) { made.Add(1) })
						m.Inject(sim.Fault{After: k, Result: cuda.Code(driver.Unknown)})
						if undo != "" {
							m.Inject(sim.Fault{Call: undo, Times: -1, Result: cuda.Code(driver.Unknown)})
						}
					}, func() {
						struck.ClearFaults()
						struck.OnCall(nil)
					})
					if undo == "" {
						calls.Store(made.Load())
					}
				})
			}
		})
		if t.Failed() {
			return
		}
		if calls.Load() <= int64(k) {
			require.Greater(t, k, 3, "the walk struck nothing")
			return
		}
	}
}

// restarting is a publisher that restarts, on a machine of its own.
type restarting struct {
	t      *testing.T
	dev    *cuda.Device
	path   string
	l      *peer.Listener
	server *Server
	array  *vmm.Array[uint32]
	p      *Publication
	starts uint32
}

func newRestarting(t *testing.T, d *cuda.Device) *restarting {
	return &restarting{t: t, dev: d, path: filepath.Join(t.TempDir(), "d", "s")}
}

// client makes a client that comes back to the next start.
func (r *restarting) client(ctx context.Context) (*Client, error) {
	return Dial(ctx, r.path, DialOptions{ComeBack: &ComeBack{First: time.Millisecond, Most: time.Millisecond}})
}

// start serves 50,000 elements times n, in chunks of 64 KiB. They are announced behind the
// streams' work, before any follower comes.
func (r *restarting) start(n int, behind ...*cuda.Stream) {
	var err error
	r.l, err = peer.Listen(filepath.Dir(r.path), filepath.Base(r.path), peer.Options{})
	require.NoError(r.t, err)
	r.server = NewServer(ServerOptions{})
	r.array, err = vmm.NewArray[uint32](r.dev, vmm.BufferOptions{Reserve: 16 << 20, Chunks: vmm.FixedChunks(64 << 10)})
	require.NoError(r.t, err)
	require.NoError(r.t, r.array.Resize(nil, 50_000*n))
	r.p, err = Array(r.server, "numbers", r.array)
	require.NoError(r.t, err)
	for _, s := range behind {
		require.NoError(r.t, s.Memset(r.array.Ptr(), 0, 4))
	}
	require.NoError(r.t, r.p.Announce(peertest.Context(r.t), r.array.Len(), behind...))
	r.p.about.Exporter.PID += r.starts // as if each were a process of its own
	r.starts++
	go func(s *Server, l *peer.Listener) { _ = s.Serve(context.Background(), l) }(r.server, r.l)
}

func (r *restarting) stop() {
	require.NoError(r.t, r.l.Close())
	require.NoError(r.t, r.server.Close())
	require.NoError(r.t, r.array.Close())
}

var smallChunks = sim.Options{Devices: []sim.DeviceOptions{{Granularity: 64 << 10}}}

// Whatever fails in a follower's process while it follows, or comes back to a publisher
// that restarts: the follower shows what is published or says why not, its publisher goes
// on, and nothing is left.
func TestEveryFailureOfFollowing(t *testing.T) {
	for _, comesBack := range []bool{false, true} {
		t.Run(fmt.Sprintf("it comes back: %v", comesBack), func(t *testing.T) {
			undoing := []string{"cuMemUnmap", "cuMemRelease", "cuMemAddressFree", "cuMemHostUnregister", "cuStreamDestroy", "cuEventDestroy"}
			walkFailures(t, undoing, func(t *testing.T, begin func(*sim.Machine), end func()) {
				ctx := peertest.Context(t)
				_, publishers := sim.Open(t, smallChunks)
				m, sys := sim.Open(t, smallChunks)
				r := newRestarting(t, publishers.Devices()[0])
				r.start(2)
				k, err := r.client(ctx)
				require.NoError(t, err)
				defer func() { require.NoError(t, k.Close()) }()
				if !comesBack {
					begin(m)
				}
				f, err := Follow[uint32](ctx, k, sys.Devices()[0], "numbers", FollowOptions{})
				if err == nil {
					err = f.Next(ctx)
				}
				if comesBack {
					require.NoError(t, err)
					r.stop()
					begin(m)
					r.start(3)
					for err == nil && f.Len() != r.array.Len() {
						err = f.Next(ctx)
					}
				}
				end()
				if err == nil {
					require.Equal(t, r.array.Len(), f.Len())
				}
				if f != nil {
					require.NoError(t, f.Close())
				}
				var honest *Follower[uint32]
				for {
					honest, err = Follow[uint32](ctx, k, sys.Devices()[0], "numbers", FollowOptions{})
					if !comesBack || !errors.Is(err, peer.ErrGone) && !errors.Is(err, peer.ErrRefused) {
						break // the client has connected again, no more to the server that closes
					}
				}
				require.NoError(t, err)
				require.NoError(t, honest.Next(ctx))
				require.Equal(t, r.array.Len(), honest.Len())
				require.NoError(t, honest.Close())
				r.stop()
			})
		})
	}
}

// Whatever fails in a process that opens a publication: nothing is left, and the next attempt
// succeeds.
func TestEveryFailureOfOpening(t *testing.T) {
	walkFailures(t, []string{"cuMemUnmap", "cuMemRelease", "cuMemAddressFree"}, func(t *testing.T, begin func(*sim.Machine), end func()) {
		ctx := peertest.Context(t)
		_, publishers := sim.Open(t, smallChunks)
		m, sys := sim.Open(t, smallChunks)
		r := newRestarting(t, publishers.Devices()[0])
		r.start(2)
		defer r.stop()
		k, err := r.client(ctx)
		require.NoError(t, err)
		defer func() { require.NoError(t, k.Close()) }()
		begin(m)
		a, err := Open[uint32](ctx, k, sys.Devices()[0], "numbers", handles.ImportOptions{})
		end()
		if err != nil {
			a, err = Open[uint32](ctx, k, sys.Devices()[0], "numbers", handles.ImportOptions{})
		}
		require.NoError(t, err)
		require.Equal(t, r.array.Len(), a.Len())
		require.NoError(t, a.Close())
	})
}

// Whatever fails while a publication is taken over: the next attempt succeeds, and what
// it publishes can be followed.
func TestEveryFailureOfTakingOver(t *testing.T) {
	walkFailures(t, []string{"cuMemRelease", "cuStreamDestroy"}, func(t *testing.T, begin func(*sim.Machine), end func()) {
		ctx := peertest.Context(t)
		o := newOrphans(t)
		o.endPublisher()
		server := NewServer(ServerOptions{})
		begin(o.machine)
		p, err := TakeOver(ctx, server, o.numbers, TakeOverOptions{})
		end()
		if err != nil {
			require.Nil(t, p)
			require.Nil(t, server.taken[o.path], "the socket is free again")
			p, err = TakeOver(ctx, server, o.numbers, TakeOverOptions{})
		}
		require.NoError(t, err)
		require.Equal(t, 1000, o.numbers.Array().Len())
		require.Equal(t, []string{"numbers"}, o.names(t))
		require.NoError(t, o.numbers.Array().Resize(nil, 2000))
		require.NoError(t, p.Announce(ctx, 2000))
		require.NoError(t, server.Close())
		require.NoError(t, o.numbers.Close())
		require.NoError(t, o.numbers.Array().Close())
	})
}

// Whatever fails while a follower reads and releases what it read: once nothing fails, a
// Release ends what it holds, and the publisher rewrites.
func TestEveryFailureOfReading(t *testing.T) {
	undoing := []string{"cuEventDestroy", "cuStreamWaitEvent", "cuStreamWriteValue64"}
	walkFailures(t, undoing, func(t *testing.T, begin func(*sim.Machine), end func()) {
		ctx := peertest.Context(t)
		_, publishers := sim.Open(t, smallChunks)
		m, sys := sim.Open(t, smallChunks)
		r := newRestarting(t, publishers.Devices()[0])
		r.start(2)
		defer r.stop()
		k, err := r.client(ctx)
		require.NoError(t, err)
		defer func() { require.NoError(t, k.Close()) }()
		f, err := Follow[uint32](ctx, k, sys.Devices()[0], "numbers", FollowOptions{})
		require.NoError(t, err)
		defer func() { require.NoError(t, f.Close()) }()
		s, err := sys.Devices()[0].NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		defer func() { require.NoError(t, s.Close()) }()

		begin(m)
		err = f.Next(ctx, s)
		if err == nil {
			err = f.Release(s)
		}
		if err == nil {
			require.NoError(t, r.p.Announce(ctx, r.array.Len()))
			err = f.Next(ctx, s)
		}
		if err == nil { // there is nothing new, so it releases and waits
			briefly, cancel := context.WithTimeout(ctx, time.Millisecond)
			err = f.Next(briefly, s)
			cancel()
		}
		end()
		require.Error(t, err)
		require.NoError(t, f.Release(s))
		require.NoError(t, r.p.Rewrite(ctx, RewriteOptions{}))
		require.NoError(t, r.p.Announce(ctx, r.array.Len()))
		require.NoError(t, f.Next(ctx, s))
		require.Equal(t, r.p.Stats().Generation, f.Generation())
		require.True(t, f.Intact(f.Generation()))
	})
}

// Whatever fails in a publisher while it rewrites: a Rewrite that fails leaves what was there,
// and after one that succeeds nothing is shown until an Announce does.
func TestEveryFailureOfRewriting(t *testing.T) {
	walkFailures(t, []string{"cuEventDestroy"}, func(t *testing.T, begin func(*sim.Machine), end func()) {
		ctx := peertest.Context(t)
		m, publishers := sim.Open(t, smallChunks)
		_, sys := sim.Open(t, smallChunks)
		r := newRestarting(t, publishers.Devices()[0])
		r.start(2)
		defer r.stop()
		s, err := publishers.Devices()[0].NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		defer func() { require.NoError(t, s.Close()) }()
		k, err := r.client(ctx)
		require.NoError(t, err)
		defer func() { require.NoError(t, k.Close()) }()
		f, err := Follow[uint32](ctx, k, sys.Devices()[0], "numbers", FollowOptions{})
		require.NoError(t, err)
		defer func() { require.NoError(t, f.Close()) }()
		require.NoError(t, f.Next(ctx))
		require.NoError(t, f.Release())

		begin(m)
		opened := r.p.Rewrite(ctx, RewriteOptions{})
		if err = opened; err == nil {
			err = s.Memset(r.array.Ptr(), 1, 4)
		}
		if err == nil {
			err = r.p.Announce(ctx, r.array.Len(), s)
		}
		end()
		if opened != nil {
			require.False(t, r.p.Stats().Rewriting)
			require.NoError(t, f.Next(ctx), "the same elements, again")
			require.NoError(t, f.Release())
			require.NoError(t, r.p.Rewrite(ctx, RewriteOptions{}))
		}
		if err != nil {
			require.True(t, r.p.Stats().Rewriting)
			briefly, cancel := context.WithTimeout(ctx, time.Millisecond)
			require.ErrorIs(t, f.Next(briefly), peer.ErrTimeout)
			cancel()
			require.NoError(t, r.p.Announce(ctx, r.array.Len(), s))
		}
		require.False(t, r.p.Stats().Rewriting)
		require.NoError(t, f.Next(ctx))
		require.True(t, f.Intact(f.Generation()))
	})
}

// Whatever fails in a publisher, or in a follower, while the publisher's memory is suspended and
// resumed: what the publisher's Suspend and Resume return is what there is, nothing is lost, and
// once nothing fails a follower, this one or a new one, has the elements.
func TestEveryFailureOfSuspendingWithFollowers(t *testing.T) {
	for _, failing := range []string{"publisher", "follower"} {
		t.Run(failing, func(t *testing.T) {
			walkFailures(t, []string{"cuMemUnmap"}, func(t *testing.T, begin func(*sim.Machine), end func()) {
				ctx := peertest.Context(t)
				ours, publishers := sim.Open(t, smallChunks)
				theirs, sys := sim.Open(t, smallChunks)
				r := newRestarting(t, publishers.Devices()[0])
				r.start(1)
				defer r.stop()
				want := make([]uint32, r.array.Len())
				for i := range want {
					want[i] = uint32(i)
				}
				require.NoError(t, r.array.All().CopyFrom(nil, want))
				k, err := r.client(ctx)
				require.NoError(t, err)
				defer func() { require.NoError(t, k.Close()) }()
				follow := func() *Follower[uint32] {
					f, err := Follow[uint32](ctx, k, sys.Devices()[0], "numbers", FollowOptions{})
					require.NoError(t, err)
					return f
				}
				f := follow()
				defer func() { require.NoError(t, f.Close()) }()
				require.NoError(t, f.Next(ctx))
				require.NoError(t, f.Release())

				if failing == "publisher" {
					begin(ours)
				} else {
					begin(theirs)
				}
				s, err := vmm.Suspend(ctx, vmm.SuspendOptions{}, r.array)
				if err == nil {
					err = s.Resume(ctx)
				} else {
					require.Nil(t, s)
				}
				if failing == "follower" {
					for err == nil && f.Generation() < r.p.Stats().Generation {
						err = f.Next(ctx)
					}
				}
				end()
				if s != nil {
					require.NoError(t, s.Resume(ctx))
				}
				require.False(t, r.p.Stats().Suspended)
				require.NoError(t, r.p.Announce(ctx, len(want)), "or a follower that refused would wait for the next")
				got := make([]uint32, len(want))
				require.NoError(t, r.array.All().CopyTo(nil, got))
				require.Equal(t, want, got)
				reads := func(f *Follower[uint32]) (err error) {
					for f.Generation() < r.p.Stats().Generation {
						if err := f.Next(ctx); err != nil {
							return err
						}
					}
					clear(got)
					require.NoError(t, f.Array().All().CopyTo(nil, got[:f.Len()]))
					require.Equal(t, want, got)
					require.NoError(t, f.Release())
					return nil
				}
				if err := reads(f); err != nil { // it could not unmap, or map
					require.Equal(t, "follower", failing)
					require.NoError(t, f.Close())
					f = follow()
					require.NoError(t, reads(f))
				}
				s, err = vmm.Suspend(ctx, vmm.SuspendOptions{}, r.array)
				require.NoError(t, err)
				require.NoError(t, s.Resume(ctx))
				require.NoError(t, reads(f))
			})
		})
	}
}
