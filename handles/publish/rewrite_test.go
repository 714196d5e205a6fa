//go:build linux

package publish_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// rewritten is an array of n elements that a publisher rewrites: in version v each byte is v.
type rewritten struct {
	d       *cuda.Device
	path    string
	server  *publish.Server
	array   *vmm.Array[uint32]
	p       *publish.Publication
	writer  *cuda.Stream
	version uint32
}

func newRewritten(t testing.TB, d *cuda.Device, n int) *rewritten {
	w := &rewritten{d: d, writer: stream(t, d), version: 1}
	w.server, w.path = publishing(t, publish.ServerOptions{})
	w.array, w.p = published(t, w.server, d)
	require.NoError(t, w.array.Resize(w.writer, n))
	require.NoError(t, w.write(w.writer))
	require.NoError(t, w.announce(w.writer))
	return w
}

// write submits the writes of a version: each half on a stream of its own.
func (w *rewritten) write(streams ...*cuda.Stream) error {
	half := w.array.Len() / 2
	for i := range 2 {
		at := w.array.Ptr() + cuda.Ptr(4*i*half)
		if err := streams[i%len(streams)].Memset(at, byte(w.version), 4*half); err != nil {
			return err
		}
	}
	return nil
}

func (w *rewritten) announce(streams ...*cuda.Stream) error {
	return w.p.Announce(context.Background(), w.array.Len(), streams...)
}

// next rewrites the array to the next version.
func (w *rewritten) next(ctx context.Context, o publish.RewriteOptions, streams ...*cuda.Stream) error {
	if err := w.p.Rewrite(ctx, o); err != nil {
		return err
	}
	w.version++
	if err := w.write(streams...); err != nil {
		return err
	}
	return w.announce(streams...)
}

// versionOf returns the version of which all elements are, or an error.
func versionOf(all []uint32) (uint32, error) {
	for i, v := range all {
		if v != all[0] {
			return 0, fmt.Errorf("element %d is of version %d, and the first of %d", i, v, all[0])
		}
	}
	return all[0] & 0xff, nil
}

// reading are the ways of a follower to read.
var reading = map[string]func(ctx context.Context, f *publish.Follower[uint32], s []*cuda.Stream) ([]uint32, error){
	"a stream": func(ctx context.Context, f *publish.Follower[uint32], s []*cuda.Stream) ([]uint32, error) {
		if err := f.Next(ctx, s[0]); err != nil {
			return nil, err
		}
		got := make([]uint32, f.Len())
		return got, f.Array().All().CopyTo(s[0], got)
	},
	"two streams": func(ctx context.Context, f *publish.Follower[uint32], s []*cuda.Stream) ([]uint32, error) {
		if err := f.Next(ctx, s...); err != nil {
			return nil, err
		}
		n := f.Len()
		got := make([]uint32, n)
		var errs []error
		for i, r := range s {
			part, err := f.Array().Slice(i*n/2, (i+1)*n/2)
			if err == nil {
				err = part.CopyTo(r, got[i*n/2:(i+1)*n/2])
			}
			errs = append(errs, err)
		}
		return got, errors.Join(errs...)
	},
	"two streams that are released": func(ctx context.Context, f *publish.Follower[uint32], s []*cuda.Stream) ([]uint32, error) {
		if err := f.Next(ctx, s[0]); err != nil {
			return nil, err
		}
		for {
			err := f.Order(s[1])
			if err == nil {
				break
			}
			if !errors.Is(err, publish.ErrRewriting) {
				return nil, err
			}
			if err := f.Next(ctx, s[0]); err != nil {
				return nil, err
			}
		}
		n := f.Len()
		got := make([]uint32, n)
		err := f.Array().All().CopyTo(s[1], got)
		return got, errors.Join(err, f.Release(s[0]), f.Release(s[1]))
	},
	"the host": func(ctx context.Context, f *publish.Follower[uint32], s []*cuda.Stream) ([]uint32, error) {
		if err := f.Next(ctx); err != nil {
			return nil, err
		}
		got := make([]uint32, f.Len())
		return got, f.Array().All().CopyTo(s[0], got)
	},
}

// No follower that does what the documents say reads a mixture of two versions, whatever it
// reads with, and each can prove what it read.
func TestNoReaderSeesAMixture(t *testing.T) {
	const versions = 150
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 200_000)
		other := stream(t, d)
		ctx := peertest.Context(t)
		var reads sync.WaitGroup
		defer reads.Wait()
		for name, read := range reading {
			f := followed(t, client(t, w.path), d, publish.FollowOptions{ReadOnly: true})
			on := []*cuda.Stream{stream(t, d), stream(t, d)}
			reads.Go(func() {
				for last := uint32(0); last < versions; {
					got, err := read(ctx, f, on)
					if err != nil {
						t.Errorf("%s: %v", name, err)
						return
					}
					intact := f.Intact(f.Generation())
					version, err := versionOf(got)
					switch {
					case err != nil:
						t.Errorf("%s: %v (intact: %v)", name, err, intact)
						return
					case version < last:
						t.Errorf("%s: version %d after %d", name, version, last)
						return
					case !intact && name != "two streams that are released": // those may be asked too late
						t.Errorf("%s: version %d is not intact while it is held", name, version)
						return
					}
					last = version
				}
			})
		}
		for w.version < versions {
			require.NoError(t, w.next(ctx, publish.RewriteOptions{}, w.writer, other))
		}
	})
}

// holder is a follower that reads the first version on a stream that does not finish.
type holder struct {
	*rewritten
	f      *publish.Follower[uint32]
	reader *cuda.Stream
	goOn   func()
	got    cuda.HostSlice
}

func newHolder(t *testing.T) *holder {
	m, sys := sim.Open(t)
	d := sys.Devices()[0]
	h := &holder{rewritten: newRewritten(t, d, 1000), reader: stream(t, d)}
	h.f = followed(t, client(t, h.path), d, publish.FollowOptions{})
	require.NoError(t, h.f.Next(peertest.Context(t), h.reader))
	host, err := d.NewHostBuffer(4000)
	require.NoError(t, err)
	closeLater(t, host)
	h.got = host.All()
	h.goOn = m.Hold(h.reader.Handle())
	t.Cleanup(h.goOn)
	require.NoError(t, h.f.Array().All().CopyToHost(h.reader, h.got))
	return h
}

// briefly is a context that ends while a Rewrite waits.
func briefly(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(peertest.Context(t), 20*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

// Rewrite waits for the work that a follower released, not for its call of Release.
func TestRewriteWaitsForReaders(t *testing.T) {
	h := newHolder(t)
	for _, released := range []bool{false, true} {
		if released {
			require.NoError(t, h.f.Release(h.reader))
		}
		err := h.p.Rewrite(briefly(t), publish.RewriteOptions{})
		require.ErrorIs(t, err, peer.ErrTimeout)
		require.ErrorContains(t, err, "1 follower")
		require.True(t, h.f.Intact(1), "nothing was written")
	}
	// A follower that would not show what was about to be rewritten is shown it again.
	late := followed(t, client(t, h.path), h.d, publish.FollowOptions{})
	require.NoError(t, late.Next(peertest.Context(t)))
	require.EqualValues(t, 3, late.Generation())
	require.NoError(t, late.Release())

	over := make(chan error, 1)
	go func() { over <- h.p.Rewrite(peertest.Context(t), publish.RewriteOptions{}) }()
	select {
	case err := <-over:
		t.Fatalf("%v, while the work is not done", err)
	case <-time.After(20 * time.Millisecond):
	}
	h.goOn()
	require.NoError(t, <-over)
	require.NoError(t, h.reader.Synchronize())
	require.False(t, h.f.Intact(1))
	require.EqualValues(t, 1, h.got.Bytes()[0])
	require.NoError(t, h.announce())
}

// Rewrite waits for the publisher's own work behind the last announcement: the next writes may
// be on another stream.
func TestRewriteWaitsForWhatWasAnnounced(t *testing.T) {
	m, sys := sim.Open(t)
	w := newRewritten(t, sys.Devices()[0], 1000)
	require.NoError(t, w.p.Rewrite(peertest.Context(t), publish.RewriteOptions{}))
	goOn := m.Hold(w.writer.Handle())
	defer goOn()
	require.NoError(t, w.write(w.writer))
	require.NoError(t, w.announce(w.writer))
	err := w.p.Rewrite(briefly(t), publish.RewriteOptions{})
	require.ErrorIs(t, err, peer.ErrTimeout)
	require.ErrorContains(t, err, "behind the last announcement")
	goOn()
	require.NoError(t, w.next(peertest.Context(t), publish.RewriteOptions{}, stream(t, w.d)))
}

// A follower's next Next releases what it read before, and what Next waits for may be the
// announcement behind the rewriting.
func TestNextReleasesBeforeItWaits(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 1000)
		f := followed(t, client(t, w.path), d, publish.FollowOptions{})
		s, u := stream(t, d), stream(t, d)
		ctx := peertest.Context(t)
		require.NoError(t, f.Next(ctx, s))
		for i, streams := range [][]*cuda.Stream{{s}, {s, u}, {s, u}} {
			over := make(chan error, 1)
			go func() { over <- f.Next(ctx, streams...) }()
			require.NoError(t, w.next(ctx, publish.RewriteOptions{}, w.writer))
			require.NoError(t, <-over, i)
		}
		// The caller holds until its next Next, whatever that names.
		require.NoError(t, f.Release(s, u))
		for i, streams := range [][]*cuda.Stream{{}, {}, {s, u}} {
			over := make(chan error, 1)
			go func() { over <- f.Next(ctx, streams...) }()
			require.NoError(t, w.next(ctx, publish.RewriteOptions{}, w.writer))
			require.NoError(t, <-over, i)
		}
		// Of two streams each holds for itself.
		over := make(chan error, 1)
		go func() { over <- f.Next(ctx, s) }()
		require.ErrorIs(t, w.p.Rewrite(briefly(t), publish.RewriteOptions{}), peer.ErrTimeout)
		require.NoError(t, <-over, "the same elements, again")
		require.NoError(t, f.Release(u))
		require.NoError(t, f.Release(u), "a stream that holds nothing")
		require.ErrorIs(t, w.p.Rewrite(briefly(t), publish.RewriteOptions{}), peer.ErrTimeout)
		require.NoError(t, f.Release(s))
		require.NoError(t, w.next(ctx, publish.RewriteOptions{}, w.writer))
	})
}

// A stream that was closed holds nothing once the follower looks again.
func TestAClosedStreamHoldsNothing(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 1000)
		f := followed(t, client(t, w.path), d, publish.FollowOptions{})
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		ctx := peertest.Context(t)
		require.NoError(t, f.Next(ctx, s))
		require.NoError(t, s.Close())
		require.NoError(t, f.Release())
		require.NoError(t, w.next(ctx, publish.RewriteOptions{}, w.writer))
	})
}

// What each operation does in each state: see the table at rewriting.
func TestWhatARewritingPermits(t *testing.T) {
	operations := map[string]func(h *holder, ctx context.Context) error{
		"Announce":      func(h *holder, ctx context.Context) error { return h.p.Announce(ctx, 1000) },
		"AnnounceRange": func(h *holder, ctx context.Context) error { return h.p.AnnounceRange(ctx, 0, 1000) },
		"Shrink":        func(h *holder, ctx context.Context) error { return h.p.Shrink(999, h.writer) },
		"Rewrite":       func(h *holder, ctx context.Context) error { return h.p.Rewrite(ctx, publish.RewriteOptions{}) },
		"Withdraw":      func(h *holder, ctx context.Context) error { return h.p.Withdraw() },
		"Settle":        func(h *holder, ctx context.Context) error { return h.p.Settle(ctx) },
	}
	permitted := map[string]string{"opening": "Withdraw Settle", "open": "Announce Withdraw Settle"}
	for state, those := range permitted {
		for name, do := range operations {
			t.Run(state+", "+name, func(t *testing.T) {
				h := newHolder(t)
				ctx := peertest.Context(t)
				opened := make(chan error, 1)
				go func() { opened <- h.p.Rewrite(ctx, publish.RewriteOptions{}) }()
				if state == "open" {
					require.NoError(t, h.f.Release(h.reader))
					h.goOn()
					require.NoError(t, <-opened)
				} else {
					require.Eventually(t, func() bool { return h.p.Stats().Rewriting }, peertest.Guard, time.Millisecond)
				}
				err := do(h, ctx)
				if strings.Contains(those, name) {
					require.NoError(t, err)
				} else {
					require.ErrorIs(t, err, cuda.ErrInUse)
				}
				if state == "open" {
					require.Equal(t, name != "Announce" && name != "Withdraw", h.p.Stats().Rewriting)
					return
				}
				h.goOn()
				require.NoError(t, h.f.Release(h.reader))
				if name == "Withdraw" {
					require.ErrorIs(t, <-opened, cuda.ErrClosed)
				} else {
					require.NoError(t, <-opened)
				}
			})
		}
	}
}

// A follower that is late is excluded: it is told, named, and can prove nothing.
func TestLateReadersAreExcluded(t *testing.T) {
	h := newHolder(t)
	quick := followed(t, client(t, h.path), h.d, publish.FollowOptions{})
	ctx := peertest.Context(t)
	require.NoError(t, quick.Next(ctx))
	require.NoError(t, quick.Release())
	var excluded []publish.FollowerStats
	o := publish.RewriteOptions{ExcludeAfter: 10 * time.Millisecond, Excluded: func(s publish.FollowerStats) { excluded = append(excluded, s) }}
	require.NoError(t, h.p.Rewrite(ctx, o))
	require.Len(t, excluded, 1)
	require.True(t, excluded[0].Reads)
	require.False(t, h.f.Intact(1))
	require.Eventually(t, func() bool { return h.f.Err() != nil }, peertest.Guard, time.Millisecond)
	require.ErrorIs(t, h.f.Err(), publish.ErrExcluded)
	for range 2 {
		err := h.f.Next(ctx, stream(t, h.d))
		require.ErrorIs(t, err, publish.ErrExcluded)
		require.NotErrorIs(t, err, publish.ErrUnfinished, "which a program may meet with another Next")
	}
	require.Zero(t, h.f.Len())
	require.NoError(t, quick.Err())
	h.version++
	require.NoError(t, h.announce())
	require.NoError(t, quick.Next(ctx))
	require.ErrorIs(t, h.p.Rewrite(ctx, publish.RewriteOptions{ExcludeAfter: -1}), cuda.ErrInvalidArgument)
	h.goOn()
}

// What proves a generation, and what no longer does.
func TestWhatIsIntact(t *testing.T) {
	ends := map[string]func(t *testing.T, w *rewritten, f *publish.Follower[uint32], k *publish.Client){
		"an announcement of more": nil,
		"a rewriting": func(t *testing.T, w *rewritten, f *publish.Follower[uint32], _ *publish.Client) {
			require.NoError(t, f.Release())
			require.NoError(t, w.p.Rewrite(peertest.Context(t), publish.RewriteOptions{}))
		},
		"elements that are taken back": func(t *testing.T, w *rewritten, f *publish.Follower[uint32], _ *publish.Client) {
			require.NoError(t, w.p.Shrink(10, w.writer))
		},
		"a publication that is withdrawn": func(t *testing.T, w *rewritten, f *publish.Follower[uint32], _ *publish.Client) {
			require.NoError(t, w.p.Withdraw())
		},
		"a follower that is closed": func(t *testing.T, w *rewritten, f *publish.Follower[uint32], _ *publish.Client) {
			require.NoError(t, f.Close())
		},
		"a client that is closed": func(t *testing.T, w *rewritten, f *publish.Follower[uint32], k *publish.Client) {
			require.NoError(t, k.Close())
		},
	}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			gputest.Each(t, func(t *testing.T, d *cuda.Device) {
				w := newRewritten(t, d, 1000)
				k := client(t, w.path)
				f := followed(t, k, d, publish.FollowOptions{})
				ctx := peertest.Context(t)
				require.False(t, f.Intact(0))
				require.False(t, f.Intact(1), "it is not shown yet")
				require.NoError(t, f.Next(ctx))
				require.True(t, f.Intact(1))
				require.False(t, f.Intact(2))
				if end == nil {
					require.NoError(t, w.array.Resize(w.writer, 2000))
					require.NoError(t, w.announce(w.writer))
					require.NoError(t, f.Next(ctx))
					require.True(t, f.Intact(1))
					require.True(t, f.Intact(2))
					return
				}
				end(t, w, f, k)
				require.False(t, f.Intact(1))
			})
		})
	}
}

// Who comes while the elements are rewritten sees them when they are announced.
func TestNothingIsShownWhileItIsRewritten(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 1000)
		ctx := peertest.Context(t)
		before := followed(t, client(t, w.path), d, publish.FollowOptions{})
		require.NoError(t, before.Next(ctx))
		require.NoError(t, before.Release())
		require.NoError(t, w.p.Rewrite(ctx, publish.RewriteOptions{}))
		k := client(t, w.path)
		late := followed(t, k, d, publish.FollowOptions{})
		require.ErrorIs(t, late.Next(briefly(t), stream(t, d)), peer.ErrTimeout)
		require.Zero(t, late.Len())
		require.ErrorIs(t, before.Order(stream(t, d)), publish.ErrRewriting)
		_, err := publish.Open[uint32](briefly(t), k, d, "numbers", handles.ImportOptions{})
		require.ErrorIs(t, err, peer.ErrTimeout)
		opened := make(chan error, 1)
		var copied *vmm.Array[uint32]
		go func() {
			var err error
			copied, err = publish.Open[uint32](ctx, k, d, "numbers", handles.ImportOptions{})
			opened <- err
		}()
		w.version++
		require.NoError(t, w.write(w.writer))
		require.NoError(t, w.announce(w.writer))
		require.NoError(t, late.Next(ctx))
		require.NoError(t, <-opened)
		for _, a := range []*vmm.Array[uint32]{late.Array(), copied} {
			version, err := versionOf(elementsOf(t, a, w.writer))
			require.NoError(t, err)
			require.EqualValues(t, 2, version)
		}
		require.NoError(t, copied.Close())
	})
}

// Followers of a publisher that withdraws while it rewrites show nothing.
func TestAWithdrawWhileItIsRewritten(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 1000)
		ctx := peertest.Context(t)
		f := followed(t, client(t, w.path), d, publish.FollowOptions{})
		require.NoError(t, f.Next(ctx))
		require.NoError(t, f.Release())
		require.NoError(t, w.p.Rewrite(ctx, publish.RewriteOptions{}))
		require.NoError(t, w.p.Withdraw())
		err := f.Next(ctx)
		require.ErrorIs(t, err, publish.ErrWithdrawn)
		require.ErrorIs(t, err, publish.ErrUnfinished)
		require.Zero(t, f.Len())
		require.ErrorIs(t, f.Err(), publish.ErrUnfinished)
	})
}

// A stream that captures is refused, without effect.
func TestReleasingBesideACapture(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 1000)
		f := followed(t, client(t, w.path), d, publish.FollowOptions{})
		s := stream(t, d)
		ctx := peertest.Context(t)
		require.NoError(t, f.Next(ctx, s))
		g, err := s.WithCapture(cuda.CaptureOptions{}, func() error {
			require.ErrorIs(t, f.Release(s), cuda.ErrCapturing)
			require.ErrorIs(t, w.p.Rewrite(briefly(t), publish.RewriteOptions{}), peer.ErrTimeout)
			return nil
		})
		require.NoError(t, err)
		require.NoError(t, g.Close())
		require.NoError(t, f.Release(s))
		require.NoError(t, w.next(ctx, publish.RewriteOptions{}, w.writer))
	})
}

// Memory that two publications show is not rewritten, since the followers of one are not asked by
// the other, and memory that is rewritten is not shown by another.
func TestMemoryThatTwoPublicationsShow(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		chunk, err := vmm.GranularityOf(d, vmm.Properties{})
		require.NoError(t, err)
		w := newRewritten(t, d, chunk/4)
		ctx := peertest.Context(t)
		fork, err := w.array.Buffer().Fork(w.writer, chunk, vmm.ForkOptions{})
		require.NoError(t, err)
		closeLater(t, fork)
		for name, b := range map[string]*vmm.Buffer{"again": w.array.Buffer(), "a fork": fork} {
			other, err := w.server.Publish(name, b)
			require.NoError(t, err)
			for range 2 {
				require.ErrorIs(t, other.Rewrite(ctx, publish.RewriteOptions{}), cuda.ErrInUse)
				require.NoError(t, w.p.Rewrite(ctx, publish.RewriteOptions{}), "the other shows nothing yet")
				require.ErrorIs(t, other.Rewrite(ctx, publish.RewriteOptions{}), cuda.ErrInUse)
				require.ErrorIs(t, other.Announce(ctx, chunk, w.writer), cuda.ErrInUse)
				require.NoError(t, w.announce(w.writer))
				require.NoError(t, other.Announce(ctx, 0, w.writer)) // which shows nothing either
			}
			require.NoError(t, other.Announce(ctx, chunk, w.writer))
			for _, p := range []*publish.Publication{w.p, other} {
				err = p.Rewrite(ctx, publish.RewriteOptions{})
				require.ErrorIs(t, err, cuda.ErrInUse)
				require.ErrorContains(t, err, `"numbers"`)
				require.ErrorContains(t, err, name)
			}
			require.NoError(t, other.Withdraw())
			require.NoError(t, w.next(ctx, publish.RewriteOptions{}, w.writer))
		}
		hidden, err := w.server.Publish("hidden", w.array.Buffer())
		require.NoError(t, err)
		require.NoError(t, w.p.Withdraw())
		require.NoError(t, hidden.Rewrite(ctx, publish.RewriteOptions{}))
		other, err := w.server.Publish("another", w.array.Buffer())
		require.NoError(t, err)
		require.ErrorIs(t, other.Announce(ctx, chunk, w.writer), cuda.ErrInUse)
		require.NoError(t, hidden.Announce(ctx, 0, w.writer))
		require.NoError(t, other.Announce(ctx, chunk, w.writer))
		require.NoError(t, hidden.Withdraw())
		require.NoError(t, other.Withdraw())
	})
}
