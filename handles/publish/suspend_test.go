//go:build linux

package publish_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
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

// suspend suspends the array of a publisher, all of whose memory goes.
func (w *rewritten) suspend(t testing.TB, o vmm.SuspendOptions) *vmm.Suspension {
	t.Helper()
	before := w.array.Stats().Committed
	s, err := vmm.Suspend(peertest.Context(t), o, w.array)
	require.NoError(t, err)
	r := s.Report()
	require.Equal(t, before, r.Asked)
	require.Equal(t, before, r.Given, "%+v", r)
	require.NoError(t, s.Released().Wait(peertest.Context(t)))
	return s
}

// shortly is a context that ends while a Suspend waits for followers.
func shortly(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(peertest.Context(t), 200*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

// Published memory goes with its followers, and they have it again at their addresses.
func TestPublishedMemorySleepsWithItsFollowers(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 1_000_000)
		ctx := peertest.Context(t)
		k := client(t, w.path)
		f, idle := followed(t, k, d, publish.FollowOptions{}), followed(t, client(t, w.path), d, publish.FollowOptions{ReadOnly: true})
		s := stream(t, d)
		require.NoError(t, f.Next(ctx, s))
		at := f.Array().Ptr()
		require.NoError(t, f.Release(s))

		require.Eventually(t, func() bool { // once the memory was sent
			preview, err := vmm.Preview(vmm.SuspendOptions{}, w.array)
			return err == nil && preview.Asked > 0 && preview.Asked == preview.Given
		}, peertest.Guard, time.Millisecond)
		require.Equal(t, publish.Live, f.State())
		for cycle := range uint32(3) {
			asleep := w.suspend(t, vmm.SuspendOptions{})
			require.Equal(t, publish.Suspended, f.State())
			require.Equal(t, publish.Suspended, idle.State())
			require.Zero(t, f.Len())
			require.Zero(t, f.Array().Stats().Committed)
			require.NoError(t, f.Err())
			require.False(t, f.Intact(f.Generation()))
			st := w.p.Stats()
			require.True(t, st.Suspended)
			require.Zero(t, st.Pinned)
			require.ErrorIs(t, f.Next(briefly(t), s), peer.ErrTimeout, "there is nothing to show")

			// Who comes meanwhile waits.
			late := followed(t, k, d, publish.FollowOptions{})
			require.ErrorIs(t, late.Next(briefly(t)), peer.ErrTimeout)
			require.Equal(t, publish.Suspended, late.State())
			opened := make(chan *vmm.Array[uint32], 1)
			go func() {
				a, err := publish.Open[uint32](ctx, k, d, "numbers", handles.ImportOptions{})
				if err != nil {
					t.Error(err)
				}
				opened <- a
			}()

			next := make(chan error, 1)
			go func() { next <- f.Next(ctx, s) }()
			require.NoError(t, asleep.Resume(ctx))
			require.NoError(t, <-next)
			require.NoError(t, late.Next(ctx))
			for _, f := range []*publish.Follower[uint32]{f, late} {
				require.Equal(t, publish.Live, f.State())
				require.Equal(t, w.p.Stats().Generation, f.Generation())
				require.True(t, f.Intact(f.Generation()))
				version, err := versionOf(elementsOf(t, f.Array(), s))
				require.NoError(t, err)
				require.Equal(t, cycle+1, version)
			}
			require.Equal(t, at, f.Array().Ptr())
			require.False(t, w.p.Stats().Suspended)
			require.NoError(t, late.Release())
			require.NoError(t, f.Release(s))
			a := <-opened
			require.Equal(t, w.array.Len(), a.Len())
			require.NoError(t, a.Close())
			// It goes on as before.
			require.NoError(t, w.next(ctx, publish.RewriteOptions{}, w.writer))
			require.NoError(t, f.Next(ctx, s))
			require.NoError(t, f.Release(s))
		}
		require.NoError(t, idle.Next(ctx))
		require.NoError(t, w.p.Settle(ctx))
	})
}

// While the publisher suspends and resumes, readers that do what the documents say see whole
// versions, one after the other, and need to know nothing of it.
func TestReadersOfMemoryThatSleeps(t *testing.T) {
	const versions = 20
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 600_000)
		ctx := peertest.Context(t)
		var reads sync.WaitGroup
		defer reads.Wait()
		for name, read := range reading {
			f := followed(t, client(t, w.path), d, publish.FollowOptions{ReadOnly: true})
			on := []*cuda.Stream{stream(t, d), stream(t, d)}
			reads.Go(func() {
				for last := uint32(0); last < versions; {
					got, err := read(ctx, f, on)
					version, mixed := versionOf(got)
					if err = errors.Join(err, mixed); err != nil || version < last {
						t.Errorf("%s: version %d after %d: %v", name, version, last, err)
						return
					}
					last = version
				}
				if err := errors.Join(f.Release(on...), f.Release()); err != nil {
					t.Error(err)
				}
			})
		}
		for w.version < versions {
			require.NoError(t, w.next(ctx, publish.RewriteOptions{}, w.writer))
			require.NoError(t, w.suspend(t, vmm.SuspendOptions{}).Resume(ctx))
		}
	})
}

// What a publication and a suspension refuse of each other.
func TestWhatASuspendedPublicationPermits(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 1000)
		ctx := peertest.Context(t)
		f := followed(t, client(t, w.path), d, publish.FollowOptions{})
		require.NoError(t, f.Next(ctx))
		_, err := vmm.Suspend(ctx, vmm.SuspendOptions{}, f.Array())
		require.ErrorIs(t, err, cuda.ErrNotSupported)
		_, err = vmm.Suspend(ctx, vmm.SuspendOptions{ExcludeAfter: -1}, w.array)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)

		require.NoError(t, f.Release())
		require.NoError(t, w.p.Rewrite(ctx, publish.RewriteOptions{}))
		for _, try := range []func() error{
			func() error { _, err := vmm.Suspend(ctx, vmm.SuspendOptions{}, w.array); return err },
			func() error { _, err := vmm.Preview(vmm.SuspendOptions{}, w.array); return err },
		} {
			err := try()
			require.ErrorIs(t, err, cuda.ErrInUse)
			require.ErrorContains(t, err, "Announce ends that")
		}
		require.NoError(t, w.announce(w.writer))

		asleep := w.suspend(t, vmm.SuspendOptions{})
		for name, try := range map[string]func() error{
			"Announce":      func() error { return w.p.Announce(ctx, 1000) },
			"AnnounceRange": func() error { return w.p.AnnounceRange(ctx, 0, 1000) },
			"Shrink":        func() error { return w.p.Shrink(10) },
			"Rewrite":       func() error { return w.p.Rewrite(ctx, publish.RewriteOptions{}) },
			"Array":         func() error { _, err := publish.Array(w.server, "again", w.array); return err },
			"Suspend":       func() error { _, err := vmm.Suspend(ctx, vmm.SuspendOptions{}, w.array); return err },
		} {
			err := try()
			require.ErrorIs(t, err, cuda.ErrSuspended, name)
			require.ErrorContains(t, err, "Resume", name)
		}
		require.ErrorIs(t, w.array.Close(), cuda.ErrInUse)
		require.NoError(t, w.p.Settle(ctx))
		require.NoError(t, w.array.Resize(nil, 500), "memory that sleeps can be made shorter")
		require.NoError(t, asleep.Resume(ctx))
		require.NoError(t, f.Next(ctx))
		require.Equal(t, 500, f.Len())
		require.NoError(t, f.Release())

		w.suspend(t, vmm.SuspendOptions{})
		require.NoError(t, w.p.Withdraw())
		require.ErrorIs(t, f.Next(ctx), publish.ErrWithdrawn)
		require.NotErrorIs(t, f.Err(), publish.ErrUnfinished)
	})
}

// What has no tag can be suspended together in a process that follows: what is followed is the publisher's to suspend.
func TestNoTagNamesNothingThatIsFollowed(t *testing.T) {
	d := gputest.Software(t)
	w := newRewritten(t, d, 1000)
	ctx := peertest.Context(t)
	f := followed(t, client(t, w.path), d, publish.FollowOptions{})
	require.NoError(t, f.Next(ctx))
	require.NoError(t, f.Release())
	imported, err := publish.Open[uint32](ctx, client(t, w.path), d, "numbers", handles.ImportOptions{})
	require.NoError(t, err)
	all := vmm.Tagged(d.System(), "")
	require.Len(t, all, 1)
	require.Equal(t, w.array.Ptr(), all[0].(*vmm.Buffer).Ptr())
	require.NoError(t, imported.Close())
	s, err := vmm.Suspend(ctx, vmm.SuspendOptions{}, all...)
	require.NoError(t, err)
	require.Equal(t, publish.Suspended, f.State())
	require.NoError(t, s.Resume(ctx, vmm.Tagged(d.System(), "")...))
	require.NoError(t, f.Next(ctx))
	require.NoError(t, f.Release())
	_, err = vmm.Suspend(ctx, vmm.SuspendOptions{}, f.Array())
	require.ErrorIs(t, err, cuda.ErrNotSupported, "one that is named")
}

// Who followed memory may have it for ever once its publication is withdrawn, so that it stays.
func TestAReportNamesWithdrawnPublications(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 1000)
		f := followed(t, client(t, w.path), d, publish.FollowOptions{})
		require.NoError(t, f.Next(peertest.Context(t)))
		require.NoError(t, w.p.Withdraw())
		s, err := vmm.Suspend(peertest.Context(t), vmm.SuspendOptions{}, w.array)
		require.NoError(t, err)
		r := s.Report()
		require.Zero(t, r.Given)
		require.Contains(t, r.Memory[0].Rest[0].Why, `it was published as "numbers", until it was taken out of that at `)
		require.NoError(t, s.Resume(peertest.Context(t)))
	})
}

// A follower that reads is waited for within the context. Then nothing has changed but the number
// of the generation.
func TestSuspendWaitsForReaders(t *testing.T) {
	h := newHolder(t)
	_, err := vmm.Suspend(shortly(t), vmm.SuspendOptions{}, h.array)
	require.ErrorIs(t, err, peer.ErrTimeout)
	require.ErrorContains(t, err, "1 follower")
	require.ErrorContains(t, err, "vmm.SuspendOptions.ExcludeAfter")
	require.True(t, h.f.Intact(1))
	require.False(t, h.p.Stats().Suspended)
	require.NoError(t, h.f.Release(h.reader))
	over := make(chan error, 1)
	go func() {
		s, err := vmm.Suspend(peertest.Context(t), vmm.SuspendOptions{}, h.array)
		if err == nil {
			err = s.Resume(peertest.Context(t))
		}
		over <- err
	}()
	select {
	case err := <-over:
		t.Fatalf("%v, while the work is not done", err)
	case <-time.After(20 * time.Millisecond):
	}
	h.goOn()
	require.NoError(t, <-over)
	require.NoError(t, h.f.Next(peertest.Context(t), h.reader))
}

// A follower that is late is excluded, and named with the memory that it keeps. It reads on what
// was there, whatever the publisher does with the new memory.
func TestLateFollowersKeepWhatTheyRead(t *testing.T) {
	h := newHolder(t)
	ctx := peertest.Context(t)
	quick := followed(t, client(t, h.path), h.d, publish.FollowOptions{})
	require.NoError(t, quick.Next(ctx))
	require.NoError(t, quick.Release())
	// The driver waits for the device's work when it unmaps, so the follower's work is done before.
	h.goOn()
	require.NoError(t, h.reader.Synchronize())
	s, err := vmm.Suspend(ctx, vmm.SuspendOptions{ExcludeAfter: 20 * time.Millisecond}, h.array)
	require.NoError(t, err)
	r := s.Report()
	require.Equal(t, r.Asked, r.Held)
	require.Len(t, r.Memory[0].Rest, 1)
	require.Equal(t, r.Held, r.Memory[0].Rest[0].Bytes)
	require.Contains(t, r.Memory[0].Rest[0].Why, `which follows publication "numbers": what it read was not released within 20ms`)
	require.Zero(t, h.array.Stats().Committed-h.array.Stats().Suspended)
	require.NoError(t, s.Released().Wait(ctx))
	require.Eventually(t, func() bool { return h.f.Err() != nil }, peertest.Guard, time.Millisecond)
	require.ErrorIs(t, h.f.Err(), publish.ErrExcluded)

	require.NoError(t, s.Resume(ctx))
	require.NoError(t, h.next(ctx, publish.RewriteOptions{}, h.writer))
	for quick.Generation() < h.p.Stats().Generation {
		require.NoError(t, quick.Next(ctx))
	}
	version, err := versionOf(elementsOf(t, quick.Array(), h.writer))
	require.NoError(t, err)
	require.EqualValues(t, 2, version)
	version, err = versionOf(elementsOf(t, h.f.Array(), h.writer))
	require.NoError(t, err)
	require.EqualValues(t, 1, version)
}

// Who registered a follower's addresses elsewhere may refuse that they go, and is told when they
// have memory again.
func TestAFollowerRefuses(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 1000)
		ctx := peertest.Context(t)
		f, other := followed(t, client(t, w.path), d, publish.FollowOptions{}), followed(t, client(t, w.path), d, publish.FollowOptions{})
		for _, f := range []*publish.Follower[uint32]{f, other} {
			require.NoError(t, f.Next(ctx))
			require.NoError(t, f.Release())
		}
		var mu sync.Mutex
		refuses := errors.New("in a collective")
		var calls []string
		call := func(what string) error {
			mu.Lock()
			defer mu.Unlock()
			calls = append(calls, what)
			return refuses
		}
		remove, err := vmm.OnSuspend(f.Array(), func(context.Context) error { return call("leave") }, func() { _ = call(fmt.Sprintf("back with %d", f.Array().Stats().Committed/mib)) })
		require.NoError(t, err)
		defer remove()
		_, err = vmm.Suspend(ctx, vmm.SuspendOptions{}, w.array)
		require.ErrorIs(t, err, peer.ErrRefused)
		require.ErrorContains(t, err, "in a collective")
		require.False(t, w.p.Stats().Suspended)
		for _, f := range []*publish.Follower[uint32]{f, other} {
			require.NoError(t, f.Next(ctx), "the same elements, again")
			require.Equal(t, publish.Live, f.State())
			require.Equal(t, w.p.Stats().Generation, f.Generation())
			version, err := versionOf(elementsOf(t, f.Array(), nil))
			require.NoError(t, err)
			require.EqualValues(t, 1, version)
			require.NoError(t, f.Release())
		}
		require.NoError(t, w.p.Settle(ctx))
		mu.Lock()
		refuses = nil
		mu.Unlock()
		require.NoError(t, w.suspend(t, vmm.SuspendOptions{}).Resume(ctx))
		require.NoError(t, f.Next(ctx))
		mu.Lock()
		defer mu.Unlock()
		require.Equal(t, []string{"leave", "leave", "back with 2"}, calls)
	})
}

// A follower that says it has unmapped the memory and keeps it is not seen, but what it keeps is
// counted outside.
func TestAFollowerThatLies(t *testing.T) {
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	w := newRewritten(t, d, 1_000_000)
	ctx := peertest.Context(t)
	a, err := publish.Open[uint32](ctx, client(t, w.path), d, "numbers", handles.ImportOptions{}) // it has left, with the memory
	require.NoError(t, err)
	defer func() { require.NoError(t, a.Close()) }()
	before, err := vmm.Preview(vmm.SuspendOptions{}, w.array)
	require.NoError(t, err)
	s := w.suspend(t, vmm.SuspendOptions{})
	require.Equal(t, before.Outside[0].Free, s.Report().Outside[0].Free, "nothing is free")
	require.NoError(t, s.Resume(ctx))
	version, err := versionOf(elementsOf(t, a, nil))
	require.NoError(t, err)
	require.EqualValues(t, 1, version)
}

// Publications of one buffer, of a fork, and of halves that are rewritten in turn go in one call,
// beside other memory. Each chunk goes once.
func TestSeveralPublicationsSleepTogether(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 1_000_000)
		ctx := peertest.Context(t)
		s := stream(t, d)
		fork, err := w.array.Buffer().Fork(w.writer, 2*mib, vmm.ForkOptions{})
		require.NoError(t, err)
		closeLater(t, fork)
		other, err := vmm.NewBuffer(d, vmm.BufferOptions{Chunks: vmm.FixedChunks(2 * mib)})
		require.NoError(t, err)
		closeLater(t, other)
		require.NoError(t, other.Resize(s, 2*mib))
		require.NoError(t, s.Memset(other.Ptr(), 9, other.Len()))
		k := client(t, w.path)
		followers := []*publish.Follower[byte]{}
		for name, b := range map[string]*vmm.Buffer{"again": w.array.Buffer(), "a fork": fork} {
			p, err := w.server.Publish(name, b)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, p.Withdraw()) })
			require.NoError(t, p.Announce(ctx, 2*mib, w.writer))
			f, err := publish.Follow[byte](ctx, k, d, name, publish.FollowOptions{})
			require.NoError(t, err)
			closeLater(t, f)
			require.NoError(t, f.Next(ctx))
			require.NoError(t, f.Release())
			followers = append(followers, f)
		}
		f := followed(t, k, d, publish.FollowOptions{})
		require.NoError(t, f.Next(ctx, s))
		require.NoError(t, f.Release(s))

		// The fork shares the first chunk, which stays until both are named.
		asleep, err := vmm.Suspend(ctx, vmm.SuspendOptions{}, w.array)
		require.NoError(t, err)
		require.Equal(t, 2*mib, asleep.Report().Held)
		require.NoError(t, asleep.Resume(ctx))
		require.NoError(t, f.Next(ctx, s))
		require.NoError(t, f.Release(s))
		asleep, err = vmm.Suspend(ctx, vmm.SuspendOptions{}, w.array, other, fork)
		require.NoError(t, err)
		r := asleep.Report()
		require.Zero(t, r.Held, "%+v", r)
		require.Equal(t, 6*mib, r.Asked)
		require.NoError(t, asleep.Resume(ctx, other, fork))
		require.Equal(t, publish.Suspended, f.State())
		require.NoError(t, asleep.Resume(ctx))
		for _, f := range followers {
			for f.Len() == 0 || f.State() != publish.Live {
				require.NoError(t, f.Next(ctx))
			}
			got := make([]byte, f.Len())
			require.NoError(t, f.Array().All().CopyTo(s, got))
			require.Equal(t, bytes.Repeat([]byte{1}, 2*mib), got)
			require.NoError(t, f.Release())
		}
		require.NoError(t, f.Next(ctx, s))
		version, err := versionOf(elementsOf(t, f.Array(), s))
		require.NoError(t, err)
		require.EqualValues(t, 1, version)
	})
}

// Halves that are rewritten in turn go on where they were.
func TestHalvesThatSleep(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 1_000_000)
		ctx := peertest.Context(t)
		f := followed(t, client(t, w.path), d, publish.FollowOptions{})
		require.NoError(t, f.Next(ctx, w.writer))
		for cycle := range uint32(4) {
			require.NoError(t, f.Release(w.writer))
			if cycle != 2 { // twice between two turns
				require.NoError(t, w.turn(ctx, w.writer))
			}
			require.NoError(t, w.suspend(t, vmm.SuspendOptions{}).Resume(ctx))
			require.NoError(t, f.Next(ctx, w.writer))
			require.Equal(t, w.p.Stats().Generation, f.Generation())
			version, err := half(f, w.writer)
			require.NoError(t, err)
			require.Equal(t, w.version, version, "cycle %d", cycle)
			require.ErrorIs(t, w.p.Announce(ctx, 10), cuda.ErrInvalidArgument, "less than is shown")
		}
	})
}

// A stream that captures is refused before a follower is told, and what a follower's capture holds
// up is not forced.
func TestSuspendingBesideACapture(t *testing.T) {
	_, ours := sim.Open(t)
	_, theirs := sim.Open(t)
	w := newRewritten(t, ours.Devices()[0], 1000)
	ctx := peertest.Context(t)
	d := theirs.Devices()[0]
	s := stream(t, d)
	f := followed(t, client(t, w.path), d, publish.FollowOptions{Quiesce: func(int) []*cuda.Stream { return []*cuda.Stream{s} }})
	require.NoError(t, f.Next(ctx, s))
	require.NoError(t, f.Release(s))
	g, err := w.writer.WithCapture(cuda.CaptureOptions{}, func() error {
		_, err := vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{w.writer}, w.array)
		require.ErrorIs(t, err, cuda.ErrCapturing)
		require.Equal(t, publish.Live, f.State())
		require.EqualValues(t, 1, w.p.Stats().Generation)
		return nil
	})
	require.NoError(t, err)
	require.NoError(t, g.Close())
	g, err = s.WithCapture(cuda.CaptureOptions{}, func() error {
		_, err := vmm.Suspend(shortly(t), vmm.SuspendOptions{}, w.array)
		require.ErrorIs(t, err, peer.ErrTimeout)
		require.ErrorContains(t, err, "did not unmap")
		return nil
	})
	require.NoError(t, err)
	require.NoError(t, g.Close())
	require.NoError(t, f.Next(ctx, s), "the same elements, again")
	require.NoError(t, f.Release(s))
	require.NoError(t, w.suspend(t, vmm.SuspendOptions{}).Resume(ctx))
	require.NoError(t, f.Next(ctx, s))
}

// Suspensions leave nothing behind, neither where the memory is nor where it is followed.
func TestAHundredSuspensionsWithFollowers(t *testing.T) {
	const cycles = 100
	ours, publishers := sim.Open(t)
	theirs, sys := sim.Open(t)
	w := newRewritten(t, publishers.Devices()[0], 600_000)
	ctx := peertest.Context(t)
	f := followed(t, client(t, w.path), sys.Devices()[0], publish.FollowOptions{KeepDescriptors: true})
	type all struct {
		ours, theirs map[string]int
		free, files  int
	}
	now := func() all {
		free, _, err := w.d.MemoryInfo()
		require.NoError(t, err)
		return all{ours.Live(), theirs.Live(), free, peer.OpenFDs()}
	}
	var before all
	for i := range cycles {
		require.NoError(t, f.Next(ctx))
		version, err := versionOf(elementsOf(t, f.Array(), nil))
		require.NoError(t, err)
		require.EqualValues(t, 1, version)
		require.NoError(t, f.Release())
		require.NoError(t, w.p.Settle(ctx))
		switch {
		case i == 1:
			before = now()
			before.files = 1 // that of warm exports; others are closed a little later
		case i%10 == 9:
			require.Eventually(t, func() bool { return reflect.DeepEqual(before, now()) }, peertest.Guard, time.Millisecond, "%+v after %+v", now(), before)
		}
		require.NoError(t, w.suspend(t, vmm.SuspendOptions{}).Resume(ctx))
	}
}

// A publication that is withdrawn beside a Suspend that waits for followers ends that.
func TestAWithdrawBesideASuspend(t *testing.T) {
	h := newHolder(t)
	over := make(chan error, 1)
	go func() {
		_, err := vmm.Suspend(peertest.Context(t), vmm.SuspendOptions{}, h.array)
		over <- err
	}()
	require.Eventually(t, func() bool { return h.p.Stats().Suspended }, peertest.Guard, time.Millisecond)
	require.NoError(t, h.p.Withdraw())
	require.ErrorIs(t, <-over, cuda.ErrClosed)
	require.NoError(t, h.array.Resize(nil, 2000), "nothing has changed")
	h.goOn()
	s, err := vmm.Suspend(peertest.Context(t), vmm.SuspendOptions{}, h.array)
	require.NoError(t, err)
	r := s.Report()
	require.Equal(t, r.Asked, r.Held, "who followed it may have it for ever")
	require.NoError(t, s.Resume(peertest.Context(t)))
}

// Bytes that were dropped, or forgotten, are shown to no follower: it has the memory, and sees the
// next announcement.
func TestFollowersAreNotShownWhatWasDropped(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 1000)
		ctx := peertest.Context(t)
		f := followed(t, client(t, w.path), d, publish.FollowOptions{})
		for _, how := range []string{"dropped", "forgotten", "filled"} {
			require.NoError(t, f.Next(ctx))
			require.NoError(t, f.Release())
			o := vmm.SuspendOptions{}
			switch how {
			case "dropped":
				o.Keep = vmm.Drop
			case "filled":
				o.Source = vmm.SourceAt(bytes.NewReader(bytes.Repeat([]byte{7}, 4000)))
			}
			s := w.suspend(t, o)
			if how == "forgotten" {
				require.NoError(t, s.Forget(ctx))
			}
			require.NoError(t, s.Resume(ctx))
			require.Equal(t, how != "filled", w.p.Stats().Rewriting, how)
			if how == "filled" {
				require.NoError(t, f.Next(ctx))
				version, err := versionOf(elementsOf(t, f.Array(), nil))
				require.NoError(t, err)
				require.EqualValues(t, 7, version)
				continue
			}
			require.ErrorIs(t, f.Next(briefly(t)), peer.ErrTimeout)
			require.Equal(t, publish.Live, f.State())
			require.Zero(t, f.Len())
			require.ErrorIs(t, w.p.Rewrite(ctx, publish.RewriteOptions{}), cuda.ErrInUse)
			require.NoError(t, w.write(w.writer))
			require.NoError(t, w.announce(w.writer))
		}
	})
}
