//go:build linux

package broker_test

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/testlog"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// publisher publishes memory of a broker at a socket.
type publisher struct {
	t      testing.TB
	kept   *broker.Kept
	l      *peer.Listener
	server *publish.Server
	p      *publish.Publication
}

func publisherOf(t testing.TB, kept *broker.Kept, dir string, incomplete bool) (*publisher, error) {
	l, err := peer.Listen(dir, "weights", peer.Options{})
	require.NoError(t, err)
	x := &publisher{t: t, kept: kept, l: l, server: publish.NewServer(publish.ServerOptions{})}
	go func() { _ = x.server.Serve(context.Background(), l) }()
	x.p, err = x.server.Publish("weights", kept.Buffer(), publish.PublishOptions{Page: kept.Page(), Incomplete: incomplete})
	return x, err
}

// announce fills the memory and shows it.
func (x *publisher) announce(seed int) {
	x.t.Helper()
	b := x.kept.Buffer()
	require.NoError(x.t, fill(b, pattern(b.Len(), seed)))
	require.NoError(x.t, x.p.Announce(peertest.Context(x.t), b.Len()))
}

func (x *publisher) end() { closed(x.t, x.l, x.server, x.kept) }

func keep(t testing.TB, k *broker.Client, d *cuda.Device, n int) *broker.Kept {
	t.Helper()
	// A client of a broker that was replaced tells the next one what it has closed as soon as it comes back.
	w, err := k.Keep(peertest.Context(t), d, "weights", broker.KeepOptions{Bytes: n, Wait: true})
	require.NoError(t, err)
	return w
}

// A publication goes on with the last complete generation, and followers keep what they have mapped.
func TestAPublicationOutlivesItsPublisher(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		peertest.NoLeak(t)
		h := newHouse(t, d, broker.Options{Return: time.Nanosecond})
		k, other := h.dial(), h.dial()
		ctx := peertest.Context(t)
		const n = 4 * mib
		dir := t.TempDir() + "/s"
		first, err := publisherOf(t, keep(t, k, d, n), dir, false)
		require.NoError(t, err)
		require.Zero(t, first.p.Stats().Generation, "nothing was announced")
		first.announce(1)
		client, err := publish.Dial(ctx, dir+"/weights", publish.DialOptions{ComeBack: &publish.ComeBack{First: time.Millisecond}})
		require.NoError(t, err)
		f, err := publish.Follow[byte](ctx, client, d, "weights", publish.FollowOptions{})
		require.NoError(t, err)
		next := func() error { return f.Next(ctx) }
		require.NoError(t, next())
		require.Equal(t, pattern(n, 1), read(t, f.Array().Buffer()))
		at := f.Array().Ptr()

		_, err = other.Keep(ctx, d, "weights", broker.KeepOptions{Bytes: n})
		require.ErrorIs(t, err, broker.ErrWriting)
		_, err = k.Keep(ctx, d, "weights", broker.KeepOptions{Bytes: n})
		require.ErrorIs(t, err, broker.ErrWriting)
		err = first.kept.Close()
		require.ErrorIs(t, err, cuda.ErrInUse)
		require.ErrorContains(t, err, "close its server first")
		h.replace()
		require.NoError(t, f.Release())
		require.NoError(t, first.p.Rewrite(ctx, publish.RewriteOptions{}))
		first.announce(2)
		generation := first.p.Stats().Generation
		first.end()

		second, err := publisherOf(t, keep(t, other, d, n), dir, false)
		require.NoError(t, err)
		require.Greater(t, second.p.Stats().Generation, generation)
		require.False(t, second.p.Stats().Rewriting)
		require.Equal(t, pattern(n, 2), read(t, second.kept.Buffer()))
		require.ErrorIs(t, next(), publish.ErrUnfinished, "what it showed was rewritten")
		require.NoError(t, next())
		require.Equal(t, pattern(n, 2), read(t, f.Array().Buffer()))
		require.NoError(t, f.Release())
		require.NoError(t, second.p.Rewrite(ctx, publish.RewriteOptions{}))
		require.NoError(t, fill(second.kept.Buffer(), pattern(mib, 9)))
		second.end() // in the midst of it

		w := keep(t, k, d, n)
		third, err := publisherOf(t, w, dir, false)
		require.ErrorIs(t, err, publish.ErrIncomplete)
		closed(t, third.l, third.server)
		third, err = publisherOf(t, w, dir, true)
		require.NoError(t, err)
		require.True(t, third.p.Stats().Rewriting)
		third.announce(3)
		for next() != nil {
			require.NoError(t, ctx.Err())
		}
		require.Equal(t, pattern(n, 3), read(t, f.Array().Buffer()))
		require.Equal(t, at, f.Array().Ptr())
		require.NoError(t, f.Release())

		for turns := range 3 { // what shows is whole, whoever dies
			half := publish.RewriteOptions{Turn: true}
			for range turns {
				require.NoError(t, third.p.Rewrite(ctx, half))
				from, to := publish.HalfOf(third.p.Stats().Generation+1, n)
				part, err := third.kept.Buffer().Slice(from, to)
				require.NoError(t, err)
				require.NoError(t, part.Zero(nil))
				require.NoError(t, third.p.Announce(ctx, n))
			}
			require.NoError(t, third.p.Rewrite(ctx, half))
			shown := third.p.Stats().Generation
			third.end()
			third, err = publisherOf(t, keep(t, other, d, n), dir, false)
			require.NoError(t, err)
			require.Equal(t, shown%2, third.p.Stats().Generation%2, "the half that was whole")
			require.NoError(t, third.p.Announce(ctx, n))
			require.Equal(t, shown%2, third.p.Stats().Generation%2, "and it is shown until the other half is rewritten")
			require.False(t, third.p.Stats().Rewriting)
		}
		third.end()
		closed(t, f, client)

		require.NoError(t, k.Remove(ctx, "weights", 0))
		require.Equal(t, 2, h.keeper.Len(), "the clients that published")
		_, _, err = d.MemoryInfo() // the software driver closes what others held until now
		require.NoError(t, err)
	})
}

func TestWhatIsRefusedOfAPublicationThatOutlives(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	log := &testlog.Log{}
	h := newHouse(t, d, broker.Options{Log: slog.New(slog.NewTextHandler(log, nil))})
	k := h.dial()
	ctx := peertest.Context(t)
	const n = 4 * mib
	w := keep(t, k, d, n)
	x, err := publisherOf(t, w, t.TempDir()+"/s", false)
	require.NoError(t, err)
	_, err = x.server.Publish("again", w.Buffer(), publish.PublishOptions{Page: w.Page()})
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorIs(t, x.p.Announce(ctx, n/2), cuda.ErrNotSupported)
	require.ErrorIs(t, x.p.AnnounceRange(ctx, 0, n/2), cuda.ErrNotSupported)
	require.NoError(t, x.p.AnnounceRange(ctx, n/2, n), "behind a gap")
	x.announce(1)
	require.ErrorIs(t, x.p.Shrink(n/2), cuda.ErrNotSupported)

	// Whatever could write while the next publisher has the memory.
	for _, o := range []publish.FollowOptions{{KeepDescriptors: true}, {KeepDescriptors: true, ReadOnly: true}} {
		client, err := publish.Dial(ctx, x.l.Path(), publish.DialOptions{})
		require.NoError(t, err)
		f, err := publish.Follow[byte](ctx, client, d, "weights", o)
		require.NoError(t, err)
		_, err = publish.TakeOver(ctx, x.server, f, publish.TakeOverOptions{Incomplete: true})
		require.ErrorIs(t, err, cuda.ErrNotPermitted)
		require.ErrorContains(t, err, "Client.Keep")
		closed(t, f, client)
	}
	here, there := peertest.Pair(t, peer.Options{})
	require.ErrorIs(t, handles.SendBuffer(ctx, here, w.Buffer()), cuda.ErrNotPermitted)
	_, err = handles.ReceiveBuffer(ctx, there, d, handles.ImportOptions{})
	require.ErrorIs(t, err, peer.ErrRefused)
	closed(t, here, there)
	_, err = handles.LeaseBuffer(w.Buffer(), handles.LeaseOptions{})
	require.ErrorIs(t, err, cuda.ErrNotPermitted)
	require.NoError(t, x.p.Withdraw())
	_, err = w.Buffer().Move(vmm.MoveOptions{})
	require.ErrorIs(t, err, cuda.ErrNotPermitted)
	_, err = x.server.Publish("again", w.Buffer())
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.ErrorContains(t, err, "PublishOptions.Page")
	<-x.p.Released().Done()
	_, err = x.server.Publish("weights", w.Buffer(), publish.PublishOptions{Page: &publish.Page{}})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	other, err := vmm.NewBuffer(d, vmm.BufferOptions{})
	require.NoError(t, err)
	require.NoError(t, other.Resize(nil, n))
	_, err = x.server.Publish("weights", other, publish.PublishOptions{Page: w.Page()})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.ErrorContains(t, err, "a page of other memory")
	require.NoError(t, other.Close())
	for _, bytes := range []int{0, n - 1, n + 1, 2 * n} {
		require.ErrorIs(t, w.Buffer().Resize(nil, bytes), cuda.ErrNotPermitted)
	}

	for _, o := range []broker.CreateOptions{{Bytes: n}, {Bytes: n, Alone: true}} {
		_, err = k.Create(ctx, d, "weights", o)
		require.ErrorIs(t, err, broker.ErrExists)
	}
	_, err = k.Attach(ctx, d, "weights", broker.AttachOptions{Wait: true})
	require.ErrorIs(t, err, broker.ErrUnknown)
	_, err = k.Ensure(ctx, d, "weights", broker.CreateOptions{Bytes: n}, func(context.Context, *broker.Writer) (*broker.Object, error) { return nil, nil })
	require.ErrorIs(t, err, broker.ErrExists)
	_, err = k.Keep(ctx, d, "weights", broker.KeepOptions{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	all, err := k.List(ctx)
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.True(t, all[0].Publication)
	require.Equal(t, 1, all[0].Holders)
	require.Equal(t, os.Getpid(), all[0].PID)
	s, err := k.Status(ctx)
	require.NoError(t, err)
	require.Equal(t, []int{0, 0, 1, n}, []int{s.Objects, s.Writing, s.Publications, s.Bytes})
	_, err = k.Keep(ctx, d, "weights", broker.KeepOptions{Bytes: n + 1, Wait: true})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument, "it waits for nothing")
	limited, cancel := context.WithCancel(ctx)
	limit := time.Millisecond
	require.Eventually(t, func() bool {
		limit *= 2 // until there is time to wait
		limited, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		_, err := k.Keep(limited, d, "weights", broker.KeepOptions{Bytes: n, Wait: true})
		return err != nil && strings.Contains(err.Error(), `a process still publishes "weights"`)
	}, peertest.Guard, time.Millisecond)
	cancel()
	_, err = k.Keep(limited, d, "weights", broker.KeepOptions{Bytes: n, Wait: true})
	require.ErrorContains(t, err, "the request was not sent")
	require.ErrorContains(t, k.Remove(ctx, "weights", 7), "which has no versions; remove version 0")
	_, err = vmm.Suspend(ctx, vmm.SuspendOptions{}, w.Buffer())
	require.ErrorContains(t, err, "see Client.Remove in package broker")
	x.end()
	require.Regexp(t, `a client publishes what is kept.*name=weights bytes=\d+ publisher=`, log.String())
	_, err = k.Keep(ctx, d, "weights", broker.KeepOptions{Bytes: n + 1})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.NoError(t, w.Page().Close(), "idempotent")

	o := write(t, k, d, "object", mib, 1, broker.CreateOptions{})
	_, err = k.Keep(ctx, d, "object", broker.KeepOptions{Bytes: n})
	require.ErrorIs(t, err, broker.ErrExists)
	v, err := k.Create(ctx, d, "written", broker.CreateOptions{Bytes: n})
	require.NoError(t, err)
	_, err = k.Keep(ctx, d, "written", broker.KeepOptions{Bytes: n})
	require.ErrorIs(t, err, broker.ErrWriting)
	closed(t, o, v)
}

// A publisher that withdrew may write what was shown, so that nothing of it is whole for the next one.
func TestNothingIsWholeOnceAPublicationWasWithdrawn(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		peertest.NoLeak(t)
		h := newHouse(t, d, broker.Options{})
		k := h.dial()
		const n = 2 * mib
		first, err := publisherOf(t, keep(t, k, d, n), t.TempDir()+"/s", false)
		require.NoError(t, err)
		first.announce(1)
		require.NoError(t, first.p.Withdraw())
		require.NoError(t, fill(first.kept.Buffer(), pattern(n/2, 2)))
		first.end()
		w := keep(t, k, d, n)
		second, err := publisherOf(t, w, t.TempDir()+"/s", false)
		require.ErrorIs(t, err, publish.ErrIncomplete)
		closed(t, second.l, second.server)
		second, err = publisherOf(t, w, t.TempDir()+"/s", true)
		require.NoError(t, err)
		require.True(t, second.p.Stats().Rewriting)
		second.announce(3)
		second.end()
		third, err := publisherOf(t, keep(t, k, d, n), t.TempDir()+"/s", false)
		require.NoError(t, err)
		require.Equal(t, pattern(n, 3), read(t, third.kept.Buffer()))
		third.end()
		require.NoError(t, k.Remove(peertest.Context(t), "weights", 0))
		_, _, err = d.MemoryInfo() // the software driver closes what others held until now
		require.NoError(t, err)
	})
}

// One client at a time has the memory, whoever gives it back and whichever broker serves: each random step is
// compared with who has it.
func TestOneClientAtATimePublishes(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{Return: time.Nanosecond})
	clients := []*broker.Client{h.dial(), h.dial(), h.dial()}
	ctx := peertest.Context(t)
	r := rand.New(rand.NewPCG(1, 2))
	var has *broker.Kept
	for range 80 {
		switch r.IntN(6) {
		case 0:
			h.replace()
		case 1, 2:
			if has != nil {
				closed(t, has)
				has = nil
			}
		default:
			limited, cancel := ctx, context.CancelFunc(func() {})
			if has != nil {
				limited, cancel = context.WithTimeout(ctx, time.Millisecond)
			}
			w, err := clients[r.IntN(len(clients))].Keep(limited, d, "weights", broker.KeepOptions{Bytes: mib, Wait: true})
			cancel()
			if has != nil {
				require.Error(t, err, "two clients have the memory")
				continue
			}
			require.NoError(t, err, "a client waits for one that has given the memory back")
			has = w
		}
	}
	if has != nil {
		closed(t, has)
	}
	require.NoError(t, clients[0].Remove(ctx, "weights", 0))
	_, _, err := d.MemoryInfo() // the software driver closes what others held until now
	require.NoError(t, err)
}

// The end of a publisher that nobody can watch is never taken for granted.
func TestAPublisherThatCannotBeWatchedGivesTheMemoryBackItself(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{Return: time.Nanosecond})
	k := h.dial()
	ctx := peertest.Context(t)
	inherited := func() (*broker.Client, *peer.Conn) {
		near, far := peertest.Pair(t, peer.Options{})
		go func() { _ = h.b.ServeConn(ctx, far) }()
		k, err := broker.NewClient(ctx, near)
		require.NoError(t, err)
		return k, near
	}
	unseen, _ := inherited()
	w := keep(t, unseen, d, mib)
	closed(t, w, unseen)
	closed(t, keep(t, k, d, mib))

	unseen, conn := inherited()
	w = keep(t, unseen, d, mib)
	waiting := make(chan error, 1)
	go func() {
		_, err := k.Keep(ctx, d, "weights", broker.KeepOptions{Bytes: mib, Wait: true})
		waiting <- err
	}()
	require.NoError(t, conn.Close())
	require.ErrorIs(t, <-waiting, cuda.ErrNotSupported)
	h.replace()
	_, err := k.Keep(ctx, d, "weights", broker.KeepOptions{Bytes: mib, Wait: true})
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.ErrorContains(t, err, "remove the publication")
	require.NoError(t, k.Remove(ctx, "weights", 0))
	s, err := k.Status(ctx)
	require.NoError(t, err)
	require.Zero(t, s.Bytes, "its memory counts no more, since nothing says when it has ended")
	closed(t, keep(t, k, d, mib), w, unseen)
	require.NoError(t, k.Remove(ctx, "weights", 0))
	_, _, err = d.MemoryInfo()
	require.NoError(t, err)
}

// Memory of a publication that is removed while it is made counts no more.
func TestAPublicationThatIsRemovedWhileItIsMade(t *testing.T) {
	peertest.NoLeak(t)
	m, sys := sim.Open(t, sim.Options{})
	d := sys.Devices()[0]
	h := newHouse(t, d, broker.Options{})
	k, other, ctx := h.dial(), h.dial(), peertest.Context(t)
	var once sync.Once
	m.OnCall(func(call string) {
		if call == "cuMemCreate" {
			once.Do(func() { require.NoError(t, other.Remove(ctx, "weights", 0)) })
		}
	})
	_, err := k.Keep(ctx, d, "weights", broker.KeepOptions{Bytes: mib})
	require.ErrorIs(t, err, broker.ErrLost)
	s, err := k.Status(ctx)
	require.NoError(t, err)
	require.Zero(t, s.Bytes)
	closed(t, keep(t, k, d, mib))
	require.NoError(t, k.Remove(ctx, "weights", 0))
	_, _, err = d.MemoryInfo() // the software driver closes what others held until now
	require.NoError(t, err)
}

// A client that gave up while its broker was replaced publishes nothing that it does not know of.
func TestAKeepWhoseReplyIsLost(t *testing.T) {
	for _, c := range []struct {
		name              string
		keptBefore, later bool
	}{{name: "new memory"}, {name: "memory kept before", keptBefore: true}, {name: "given up without a broker", later: true}} {
		t.Run(c.name, func(t *testing.T) {
			peertest.NoLeak(t)
			d := gputest.Software(t)
			var h *house
			limited, giveUp := context.WithCancel(t.Context())
			armed := make(chan struct{}, 1)
			ended, start, started := make(chan struct{}), make(chan struct{}), make(chan struct{})
			h = newHouse(t, d, broker.Options{Log: slog.New(logged(func(message string) {
				if !strings.Contains(message, "publishes what is kept") {
					return
				}
				select {
				case <-armed:
				default:
					return
				}
				b := h.b
				if !c.later {
					giveUp()
				}
				go func() {
					h.end()
					close(ended)
				}()
				for !b.Ending() {
					time.Sleep(time.Millisecond)
				}
			}))})
			k, ctx := h.dial(), peertest.Context(t)
			if c.keptBefore {
				closed(t, keep(t, k, d, mib))
			}
			armed <- struct{}{}
			go func() {
				<-ended
				giveUp()
				<-start
				h.start()
				close(started)
			}()
			_, err := k.Keep(limited, d, "weights", broker.KeepOptions{Bytes: mib})
			require.ErrorIs(t, err, context.Canceled)
			close(start)
			<-started
			closed(t, keep(t, k, d, mib))
			require.NoError(t, k.Remove(ctx, "weights", 0))
			_, _, err = d.MemoryInfo() // the software driver closes what others held until now
			require.NoError(t, err)
		})
	}
}

// What a policy says of objects alone does not concern publications, and what it does not grant is said in their words.
func TestAPolicyForPublications(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	may := broker.Grant{Access: publish.WriteAccess, EphemeralOnly: true}
	h := newHouse(t, d, broker.Options{Authorize: func(broker.Caller, string) broker.Grant { return may }})
	k, ctx := h.dial(), peertest.Context(t)
	_, err := k.Keep(ctx, d, "weights", broker.KeepOptions{Bytes: mib})
	require.ErrorIs(t, err, cuda.ErrNotPermitted)
	require.ErrorContains(t, err, `memory of publication "weights", where this client may write ephemeral objects only; have the broker's policy grant more`)
	h.end()
	may = broker.Grant{Access: publish.WriteAccess, Copy: true} // without Options.Copy
	h.start()
	closed(t, keep(t, k, d, mib))
	_, err = k.Create(ctx, d, "object", broker.CreateOptions{Bytes: mib})
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.NoError(t, k.Remove(ctx, "weights", 0))
}
