//go:build linux

package adversary

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// expected are what operations may return that run beside each other's ends.
var expected = []error{
	cuda.ErrClosed, cuda.ErrInUse, cuda.ErrInvalidArgument, cuda.ErrCapacity, cuda.ErrOutOfRange,
	peer.ErrGone, publish.ErrWithdrawn, publish.ErrUnknown, peer.ErrRefused, publish.ErrUnfinished, peer.ErrTimeout, peer.ErrTooLarge,
	context.DeadlineExceeded,
}

// odd returns the errors that no race explains.
func odd(what string, errs ...error) error {
	var all []error
	for _, err := range errs {
		known := err == nil
		for _, e := range expected {
			known = known || errors.Is(err, e)
		}
		if !known {
			all = append(all, fmt.Errorf("%s: %w", what, err))
		}
	}
	return errors.Join(all...)
}

// Publishers and followers of one process do everything in random order: changes
// beside changes, ends beside ends. Nothing hangs, nothing fails in an unexpected
// way, and nothing is left.
func TestEverythingBesideEverything(t *testing.T) {
	// Goroutines announce what others' streams still fill, and append where followers may
	// still read what a Shrink took back.
	gputest.Unordered(t)
	_, err := everything(t, &racing{})
	require.NoError(t, err)
}

// The same where the publishers order their work: each makes one change after the other, on
// one stream, and takes nothing back. If nothing orders a follower's work behind the
// publisher's, an end released it, and the follower's Err says so once that work is done.
func TestWhatAFollowerReadsIsCompleteOrUnfinished(t *testing.T) {
	how := &racing{ordered: true, unfinished: map[uintptr]bool{}}
	m, err := everything(t, how)
	races := m.Races()
	for _, race := range races {
		require.True(t, how.unfinished[race.First.Stream] || how.unfinished[race.Second.Stream], "%v", race)
	}
	if len(races) == 0 { // or the error lists them
		require.NoError(t, err)
	}
}

// racing is how publishers and followers run beside each other.
type racing struct {
	ordered bool
	// unfinished are the streams of followers whose Err matched ErrUnfinished after their work.
	mu         sync.Mutex
	unfinished map[uintptr]bool
}

// read notes what a follower says of the work that its stream has done.
func (how *racing) read(f *publish.Follower[uint64], s *cuda.Stream) {
	if how.ordered && errors.Is(f.Err(), publish.ErrUnfinished) {
		how.mu.Lock()
		defer how.mu.Unlock()
		how.unfinished[s.Handle()] = true
	}
}

// everything runs publishers and followers on a machine, and closes that.
func everything(t *testing.T, how *racing) (m *sim.Machine, closing error) {
	t.Helper()
	m, err := sim.New(sim.Options{Devices: []sim.DeviceOptions{{Granularity: chunk}, {Granularity: chunk}}})
	require.NoError(t, err)
	sys, err := m.OpenOwned(cuda.Options{})
	require.NoError(t, err)
	dir, files, open, lost := filepath.Join(t.TempDir(), "sockets"), openFiles("self"), peer.OpenFDs(), peer.LostFDs()
	require.NoError(t, within(t, "everything", func() error {
		publishing, over := context.WithCancel(context.Background())
		var clients errgroup.Group
		for n := range uint64(6) {
			clients.Go(func() error { return how.clients(publishing, sys, dir, rand.New(rand.NewPCG(n, 2))) })
		}
		var servers errgroup.Group
		for n := range uint64(3) {
			servers.Go(func() error {
				r := rand.New(rand.NewPCG(n, 1))
				for range times(2) {
					if err := how.server(sys.Devices()[n%2], dir, fmt.Sprint(n), r); err != nil {
						return err
					}
				}
				return nil
			})
		}
		err := servers.Wait()
		over()
		return errors.Join(err, clients.Wait(), sys.Drain(context.Background()))
	}))
	closing = sys.Close()
	require.Equal(t, lost, peer.LostFDs())
	require.Eventually(t, func() bool { return openFiles("self") <= files && peer.OpenFDs() <= open }, testTimeout, time.Millisecond)
	return m, closing
}

// server is the life of one server, with some publications of one array.
func (how *racing) server(d *cuda.Device, dir, name string, r *rand.Rand) error {
	l, err := peer.Listen(dir, name, peer.Options{})
	if err != nil {
		return err
	}
	server := publish.NewServer(publish.ServerOptions{MaxPinned: 64 * chunk})
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	serving := make(chan error, 1)
	go func() { serving <- server.Serve(ctx, l) }()
	array, err := vmm.NewArray[uint64](d, vmm.BufferOptions{Reserve: 32 * chunk, Chunks: vmm.FixedChunks(chunk)})
	if err != nil {
		return err
	}
	streams := make([]*cuda.Stream, 2)
	for i := range streams {
		if streams[i], err = d.NewStream(cuda.StreamOptions{}); err != nil {
			return err
		}
	}
	for range 1 + r.IntN(3) {
		p, err := publish.Array(server, "p", array)
		if err != nil {
			return err
		}
		var work errgroup.Group
		producing := streams
		if how.ordered {
			producing = streams[:1]
		}
		for _, s := range producing {
			seed := r.Uint64()
			work.Go(func() error { return how.changes(p, array, s, streams, rand.New(rand.NewPCG(seed, 3))) })
		}
		if r.IntN(2) == 0 {
			err = work.Wait()
		}
		if err := errors.Join(err, odd("withdraw", p.Withdraw()), work.Wait()); err != nil {
			return err
		}
	}
	var ends errgroup.Group
	if r.IntN(2) == 0 {
		stop()
	}
	ends.Go(func() error { return odd("Server.Close", server.Close()) })
	ends.Go(func() error { return odd("Listener.Close", l.Close()) })
	err = ends.Wait()
	if e := <-serving; !errors.Is(e, context.Canceled) {
		err = errors.Join(err, odd("Serve", e))
	}
	return errors.Join(err, array.Close(), streams[0].Close(), streams[1].Close())
}

// changes changes a publication and its array, beside another goroutine that does so.
func (how *racing) changes(p *publish.Publication, array *vmm.Array[uint64], s *cuda.Stream, all []*cuda.Stream, r *rand.Rand) (err error) {
	for range 20 {
		n := 1 + r.IntN(32*chunk/8)
		kind := r.IntN(4)
		if how.ordered {
			kind = 1 + kind%3 // no Shrink
		}
		switch kind {
		case 0:
			err = errors.Join(err, odd("Shrink", p.Shrink(min(n, array.Len()), all[:2*r.IntN(2)]...)))
		case 1:
			err = errors.Join(err, odd("Grow", array.Grow(n)))
		case 2:
			err = errors.Join(err, odd("Resize", array.Resize(s, max(n, array.Len()))))
		default:
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			err = errors.Join(err, odd("Announce", p.Announce(ctx, array.Len(), s)))
			cancel()
		}
		p.Stats()
	}
	return err
}

// clients are the lives of clients, until the servers are gone.
func (how *racing) clients(publishing context.Context, sys *cuda.System, dir string, r *rand.Rand) error {
	for publishing.Err() == nil {
		c, err := peer.Dial(publishing, filepath.Join(dir, fmt.Sprint(r.IntN(3))), peer.Options{})
		if err != nil {
			time.Sleep(time.Millisecond) // no server has the name now
			continue
		}
		k := publish.NewClient(c)
		var work errgroup.Group
		for range 1 + r.IntN(3) {
			d, seed := sys.Devices()[r.IntN(2)], r.Uint64()
			work.Go(func() error { return how.follower(publishing, k, d, rand.New(rand.NewPCG(seed, 4))) })
		}
		if r.IntN(2) == 0 {
			time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
			err = odd("Client.Close", k.Close())
		}
		if err := errors.Join(err, work.Wait(), odd("Client.Close", k.Close())); err != nil {
			return err
		}
	}
	return nil
}

func (how *racing) follower(publishing context.Context, k *publish.Client, d *cuda.Device, r *rand.Rand) error {
	ctx, cancel := context.WithTimeout(publishing, time.Duration(r.IntN(500))*time.Millisecond)
	defer cancel()
	if r.IntN(3) == 0 {
		a, err := publish.Open[uint64](ctx, k, d, "p", handles.ImportOptions{})
		if err != nil {
			return oddUnlessOver(publishing, "Open", err)
		}
		return a.Close()
	}
	f, err := publish.Follow[uint64](ctx, k, d, "p", publish.FollowOptions{ReadOnly: r.IntN(2) == 0})
	if err != nil {
		return oddUnlessOver(publishing, "Follow", err)
	}
	s, err := d.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	for range r.IntN(20) {
		if f.Next(ctx, s) != nil {
			break
		}
		got := make([]uint64, f.Len())
		if part, err := f.Array().Slice(0, len(got)); err == nil {
			err = part.CopyTo(s, got)
			if err := odd("CopyTo", err); err != nil {
				return err
			}
			how.read(f, s)
		}
	}
	var closing sync.WaitGroup
	closing.Go(func() { err = f.Close() })
	again := f.Close()
	closing.Wait()
	return errors.Join(odd("Follower.Close", err, again), s.Close())
}

// oddUnlessOver is odd for a call that ends with the servers.
func oddUnlessOver(publishing context.Context, what string, err error) error {
	if publishing.Err() != nil && errors.Is(err, context.Canceled) {
		return nil
	}
	return odd(what, err)
}
