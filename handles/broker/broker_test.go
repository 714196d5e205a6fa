//go:build linux

package broker_test

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/load"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

const mib = 1 << 20

// pattern is n bytes that differ from place to place.
func pattern(n, seed int) []byte {
	p := make([]byte, (n+7)/8*8)
	for i := 0; i < len(p); i += 8 {
		binary.LittleEndian.PutUint64(p[i:], uint64(i+seed+1)*0x9e3779b97f4a7c15)
	}
	return p[:n]
}

func read(t testing.TB, b *vmm.Buffer) []byte {
	t.Helper()
	got := make([]byte, b.Len())
	part, err := b.Slice(0, b.Len())
	require.NoError(t, err)
	require.NoError(t, part.CopyTo(nil, got))
	return got
}

func fill(b *vmm.Buffer, data []byte) error {
	part, err := b.Slice(0, len(data))
	if err != nil {
		return err
	}
	return part.CopyFrom(nil, data)
}

// house is a keeper, a broker that can be replaced, and its socket.
type house struct {
	t      testing.TB
	sys    *cuda.System
	keeper *keeper.Keeper
	socket *peer.Listener
	o      broker.Options
	b      *broker.Broker
	end    func()
}

func newHouse(t testing.TB, d *cuda.Device, o broker.Options, socket ...peer.Options) *house {
	l, err := peer.Listen(t.TempDir()+"/sockets", "broker", append(socket, peer.Options{})[0])
	require.NoError(t, err)
	h := &house{t: t, sys: d.System(), keeper: keeper.New(), socket: l, o: o}
	h.start()
	t.Cleanup(func() {
		h.end()
		require.NoError(t, l.Close())
		require.NoError(t, h.keeper.Close())
	})
	return h
}

// start starts a broker.
func (h *house) start() {
	near, f, err := peer.Pair(peer.Options{MaxFDs: 4096})
	require.NoError(h.t, err)
	far, err := peer.Inherit(f, peer.Options{MaxFDs: 4096})
	require.NoError(h.t, err)
	kept := make(chan error, 1)
	go func() { kept <- h.keeper.Serve(context.Background(), far) }()
	h.o.Keeper = keeper.NewClient(near)
	b, err := broker.New(peertest.Context(h.t), h.sys, h.o)
	require.NoError(h.t, err)
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- b.Serve(ctx, h.socket) }()
	h.b = b
	h.end = func() {
		stop()
		require.NoError(h.t, <-served)
		require.NoError(h.t, b.Close())
		require.NoError(h.t, near.Close())
		require.NoError(h.t, <-kept)
		require.NoError(h.t, far.Close())
	}
}

// replace ends the broker, and starts another.
func (h *house) replace() {
	h.end()
	h.start()
}

func (h *house) dial() *broker.Client {
	k, err := broker.Dial(peertest.Context(h.t), h.socket.Path(), broker.DialOptions{ComeBack: publish.ComeBack{Most: 20 * time.Millisecond}})
	require.NoError(h.t, err)
	h.t.Cleanup(func() { require.NoError(h.t, k.Close()) })
	return k
}

func closed(t testing.TB, all ...io.Closer) {
	t.Helper()
	for _, c := range all {
		require.NoError(t, c.Close())
	}
}

// write commits an object of n bytes.
func write(t testing.TB, k *broker.Client, d *cuda.Device, name string, n, seed int, o broker.CreateOptions) *broker.Object {
	t.Helper()
	o.Bytes = n
	w, err := k.Create(peertest.Context(t), d, name, o)
	require.NoError(t, err)
	require.NoError(t, fill(w.Buffer(), pattern(n, seed)))
	got, err := w.Commit(peertest.Context(t), nil)
	require.NoError(t, err)
	require.NoError(t, w.Close(), "does nothing")
	return got
}

func attach(t testing.TB, k *broker.Client, d *cuda.Device, name string, o broker.AttachOptions) *broker.Object {
	t.Helper()
	got, err := k.Attach(peertest.Context(t), d, name, o)
	require.NoError(t, err)
	return got
}

func TestAnObjectOutlivesItsWriterAndTheBroker(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		peertest.NoLeak(t)
		h := newHouse(t, d, broker.Options{})
		const n = 3*mib + 5
		writer, reader := h.dial(), h.dial()
		_, err := reader.Attach(peertest.Context(t), d, "w", broker.AttachOptions{})
		require.ErrorIs(t, err, broker.ErrUnknown)
		w, err := writer.Create(peertest.Context(t), d, "w", broker.CreateOptions{Bytes: n})
		require.NoError(t, err)
		_, err = reader.Attach(peertest.Context(t), d, "w", broker.AttachOptions{})
		require.ErrorIs(t, err, broker.ErrWriting)

		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		part, err := w.Buffer().Slice(0, n)
		require.NoError(t, err)
		require.NoError(t, part.CopyFrom(s, pattern(n, 1)))
		m := &handles.Manifest{Bytes: n, Tensors: []handles.Tensor{{Name: "t", Element: handles.Uint8, Shape: []int{5}, Offset: 3 * mib}}}
		o, err := w.Commit(peertest.Context(t), m, s)
		require.NoError(t, err)
		require.EqualValues(t, 1, o.About().Version)
		require.ErrorIs(t, part.Zero(nil), cuda.ErrNotPermitted, "nobody writes it any more")
		_, err = w.Commit(peertest.Context(t), m, s)
		require.ErrorIs(t, err, cuda.ErrInUse)
		closed(t, w, o, s)

		for range 2 {
			got := attach(t, reader, d, "w", broker.AttachOptions{})
			require.Equal(t, pattern(n, 1), read(t, got.Buffer()))
			require.Equal(t, m, got.Manifest())
			tensor, bytes, err := got.Tensor("t")
			require.NoError(t, err)
			require.Equal(t, m.Tensors[0], tensor)
			five := make([]byte, 5)
			require.NoError(t, bytes.CopyTo(nil, five))
			require.Equal(t, pattern(n, 1)[3*mib:], five)
			_, _, err = got.Tensor("u")
			require.ErrorIs(t, err, broker.ErrUnknown)
			whole, err := got.Buffer().Slice(0, n)
			require.NoError(t, err)
			require.ErrorIs(t, whole.Zero(nil), cuda.ErrNotPermitted)
			closed(t, got)
			h.replace()
		}
		all, err := reader.List(peertest.Context(t))
		require.NoError(t, err)
		require.Len(t, all, 1)
		require.Equal(t, "w", all[0].Name)
		require.Zero(t, all[0].Holders)
		require.NoError(t, reader.Remove(peertest.Context(t), "w", 0))
		require.ErrorIs(t, reader.Remove(peertest.Context(t), "w", 0), broker.ErrUnknown)
		require.Equal(t, 2, h.keeper.Len(), "the counter of versions, and the client that wrote")
		_, _, err = d.MemoryInfo() // the software driver closes what others held until now
		require.NoError(t, err)
	})
}

// A broker needs no context, and what it makes is free when its object ends.
// What is committed is read-only in its writer for good, and elsewhere a write is found.
func TestWhatIsCommittedDoesNotChange(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		peertest.NoLeak(t)
		h := newHouse(t, d, broker.Options{})
		k := h.dial()
		ctx := peertest.Context(t)
		const n = 3*mib + 5
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		m := &handles.Manifest{Bytes: n, Tensors: []handles.Tensor{
			{Name: "a", Element: handles.Uint8, Shape: []int{mib}}, {Name: "b", Element: handles.Uint8, Shape: []int{5}, Offset: 3 * mib},
		}}
		writes := func(b *vmm.Buffer) error {
			return b.SetAccess(vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite})
		}
		write := func(m *handles.Manifest) *broker.Object {
			w, err := k.Create(ctx, d, "w", broker.CreateOptions{Bytes: n})
			require.NoError(t, err)
			require.NoError(t, fill(w.Buffer(), pattern(n, 1)))
			require.NoError(t, writes(w.Buffer()), "until it is committed")
			if m != nil && m.Tensors[0].Digest == "" {
				m, err = load.Verify(ctx, load.Options{}, s, m, w.Buffer().Ptr())
				require.NoError(t, err)
			}
			o, err := w.Commit(ctx, m, s)
			require.NoError(t, err)
			return o
		}
		o := write(m)
		err = writes(o.Buffer())
		require.ErrorIs(t, err, cuda.ErrNotPermitted)
		require.ErrorContains(t, err, `read-write access to the memory of object "w", which was committed; what others read never changes`)
		require.NoError(t, o.Verify(ctx))
		closed(t, o)

		reader, writer := attach(t, k, d, "w", broker.AttachOptions{}), func() *broker.Object {
			o, err := k.AttachWriting(ctx, d, "w")
			require.NoError(t, err)
			return o
		}()
		require.NoError(t, reader.Verify(ctx))
		part, err := writer.Buffer().Slice(3*mib, n)
		require.NoError(t, err)
		require.NoError(t, part.Zero(nil))
		err = reader.Verify(ctx)
		require.ErrorIs(t, err, load.ErrDigest)
		require.ErrorContains(t, err, `broker.Object.Verify: object "w": load.Verify: digest mismatch: tensor "b": crc32c:`)
		closed(t, reader, writer)
		require.ErrorIs(t, reader.Verify(ctx), cuda.ErrClosed)

		for _, m := range []*handles.Manifest{nil, {Bytes: n, Tensors: []handles.Tensor{{Name: "a", Element: handles.Uint8, Shape: []int{1}, Digest: "crc32c:00000000"}, {Name: "b", Element: handles.Uint8, Shape: []int{5}, Offset: 3 * mib}}}} {
			o := write(m)
			require.ErrorIs(t, o.Verify(ctx), cuda.ErrNotSupported, "a tensor without a digest, or none")
			closed(t, o)
		}

		w, err := k.Create(ctx, d, "w", broker.CreateOptions{Bytes: n})
		require.NoError(t, err)
		moved, err := w.Buffer().Move(vmm.MoveOptions{})
		require.NoError(t, err)
		_, err = w.Commit(ctx, nil, s)
		require.ErrorIs(t, err, cuda.ErrMoved, "its memory is writable at another address")
		closed(t, moved, w, s)
		require.NoError(t, k.Remove(ctx, "w", 0))
		_, _, err = d.MemoryInfo() // the software driver closes what others held until now
		require.NoError(t, err)
	})
}

func TestWhatIsRemovedIsFree(t *testing.T) {
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{})
	k := h.dial()
	used := func() int {
		free, total, err := d.MemoryInfo()
		require.NoError(t, err)
		return total - free
	}
	before := used()
	o := write(t, k, d, "w", 10*mib, 1, broker.CreateOptions{})
	require.Equal(t, before+10*mib, used())
	require.NoError(t, k.Remove(peertest.Context(t), "w", 0))
	require.Equal(t, before+10*mib, used(), "it is mapped here")
	require.Equal(t, pattern(10*mib, 1), read(t, o.Buffer()))
	closed(t, o)
	require.Equal(t, before, used())

	w, err := k.Create(peertest.Context(t), d, "w", broker.CreateOptions{Bytes: 10 * mib})
	require.NoError(t, err)
	closed(t, w)
	require.Equal(t, before, used(), "nobody commits it")
	_, err = k.Attach(peertest.Context(t), d, "w", broker.AttachOptions{})
	require.ErrorIs(t, err, broker.ErrUnknown)
}

// Readers go on with the version that they have, and the next ones get the newest.
func TestVersions(t *testing.T) {
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{Return: time.Hour})
	k, other := h.dial(), h.dial()
	closed(t, write(t, k, d, "w", mib, 1, broker.CreateOptions{}))
	first := attach(t, other, d, "w", broker.AttachOptions{})
	again := attach(t, other, d, "w", broker.AttachOptions{})
	closed(t, write(t, k, d, "w", mib, 2, broker.CreateOptions{}))
	second := attach(t, other, d, "w", broker.AttachOptions{})
	require.EqualValues(t, 2, second.About().Version)
	old := attach(t, k, d, "w", broker.AttachOptions{Version: 1})
	require.Equal(t, pattern(mib, 1), read(t, old.Buffer()))
	require.Equal(t, pattern(mib, 1), read(t, first.Buffer()))
	require.Equal(t, pattern(mib, 2), read(t, second.Buffer()))
	closed(t, old, first)
	closed(t, attach(t, k, d, "w", broker.AttachOptions{Version: 1}))
	closed(t, again)
	_, err := k.Attach(peertest.Context(t), d, "w", broker.AttachOptions{Version: 1})
	require.ErrorIs(t, err, broker.ErrUnknown, "its last holder has gone")
	require.ErrorContains(t, err, "version 2 now")
	closed(t, second)
	closed(t, attach(t, k, d, "w", broker.AttachOptions{}))

	// Versions are given once, also by another broker and after a removal.
	require.NoError(t, k.Remove(peertest.Context(t), "w", 2))
	h.replace()
	o := write(t, k, d, "v", mib, 3, broker.CreateOptions{Ephemeral: true})
	require.EqualValues(t, 3, o.About().Version)
	h.replace()
	require.Eventually(t, func() bool { // the client has come back, and holds it
		all, err := k.List(peertest.Context(t))
		return err == nil && len(all) == 1 && all[0].Holders == 1
	}, peertest.Guard, time.Millisecond)
	closed(t, o)
	h.o.Return = time.Millisecond
	h.replace()
	require.Eventually(t, func() bool { // once no other client can come back that holds it
		all, err := k.List(peertest.Context(t))
		return err == nil && len(all) == 0
	}, peertest.Guard, time.Millisecond)
}

// What the clients of an earlier broker do not come back for ends.
func TestWhoDoesNotComeBack(t *testing.T) {
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{Return: 50 * time.Millisecond})
	near, far := peertest.Pair(t, peer.Options{})
	go func() { _ = h.b.ServeConn(context.Background(), far) }()
	lost, err := broker.NewClient(peertest.Context(t), near)
	require.NoError(t, err)
	fleeting := write(t, lost, d, "e", mib, 1, broker.CreateOptions{Ephemeral: true})
	stays := write(t, lost, d, "s", mib, 2, broker.CreateOptions{})
	w, err := lost.Create(peertest.Context(t), d, "w", broker.CreateOptions{Bytes: mib})
	require.NoError(t, err)
	k := h.dial()
	names := func() (names []string) {
		all, err := k.List(peertest.Context(t))
		require.NoError(t, err)
		for _, l := range all {
			names = append(names, l.Name)
		}
		return names
	}
	require.Equal(t, []string{"e", "s", "w"}, names())
	h.replace()
	require.Eventually(t, func() bool { return len(names()) == 1 }, peertest.Guard, time.Millisecond)
	require.Equal(t, []string{"s"}, names())
	require.Equal(t, pattern(mib, 1), read(t, fleeting.Buffer()), "what is mapped stays")
	_, err = w.Commit(peertest.Context(t), nil)
	require.ErrorIs(t, err, peer.ErrGone)
	closed(t, fleeting, stays, w, lost)
}

func TestOneLoadsAndTheOthersWait(t *testing.T) {
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{})
	var group errgroup.Group
	fills := make(chan int, 8)
	broken := errors.New("broken")
	for i := range 8 {
		k := h.dial()
		group.Go(func() error {
			for {
				o, err := k.Ensure(peertest.Context(t), d, "w", broker.CreateOptions{Bytes: mib}, func(ctx context.Context, w *broker.Writer) (*broker.Object, error) {
					fills <- i
					if len(fills) < 3 { // and the next takes its place
						return nil, broken
					}
					if err := fill(w.Buffer(), pattern(mib, 9)); err != nil {
						return nil, err
					}
					return w.Commit(ctx, nil)
				})
				if errors.Is(err, broken) {
					continue
				}
				if err != nil {
					return err
				}
				if got := read(t, o.Buffer()); string(got) != string(pattern(mib, 9)) {
					return errors.New("other bytes")
				}
				return o.Close()
			}
		})
	}
	require.NoError(t, group.Wait())
	require.Len(t, fills, 3)
}

func TestLimitsAndRights(t *testing.T) {
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{Limit: 8 * mib, Authorize: func(c broker.Caller, name string) broker.Grant {
		require.True(t, c.Known)
		require.Equal(t, os.Getpid(), c.PID)
		require.Contains(t, c.Groups, c.GID)
		switch name {
		case "hidden":
			return broker.Grant{}
		case "theirs":
			return broker.Grant{Access: publish.ReadAccess}
		case "cache":
			return broker.Grant{Access: publish.WriteAccess, EphemeralOnly: true}
		case "panics":
			panic("policy")
		}
		return broker.Grant{Access: publish.WriteAccess, Quota: broker.Quota{Bytes: 6 * mib, Objects: 2, Counts: func(name string) bool { return name < "c" }}}
	}})
	k := h.dial()
	ctx := peertest.Context(t)
	o := write(t, k, d, "a", 4*mib, 1, broker.CreateOptions{})
	create := func(name string, n int, alone bool) error {
		return gputest.Err(k.Create(ctx, d, name, broker.CreateOptions{Bytes: n, Alone: alone}))
	}
	require.ErrorIs(t, create("b", 4*mib, false), broker.ErrLimit)
	require.ErrorContains(t, create("b", 4*mib, false), "4 MiB of 6 MiB")
	require.ErrorIs(t, create("a", mib, true), broker.ErrExists)
	require.NoError(t, k.Remove(ctx, "a", 0))
	require.ErrorIs(t, create("b", 4*mib, false), broker.ErrLimit, "it counts while it is held")
	closed(t, o)
	w, err := k.Create(ctx, d, "b", broker.CreateOptions{Bytes: 4 * mib})
	require.NoError(t, err)
	require.ErrorIs(t, create("b", mib, true), broker.ErrWriting)
	closed(t, w)

	one, two := write(t, k, d, "a", mib, 1, broker.CreateOptions{}), write(t, k, d, "b", mib, 1, broker.CreateOptions{})
	require.ErrorContains(t, create("a", mib, false), "another object of user "+strconv.Itoa(os.Geteuid())+", who has 2 of 2")
	cached := write(t, k, d, "cache", mib, 1, broker.CreateOptions{Ephemeral: true})
	err = create("cache", mib, false)
	require.ErrorIs(t, err, cuda.ErrNotPermitted)
	require.ErrorContains(t, err, "that is not ephemeral")
	closed(t, one, two, cached)

	require.ErrorIs(t, create("hidden", mib, false), cuda.ErrNotPermitted)
	require.ErrorIs(t, create("theirs", mib, false), cuda.ErrNotPermitted)
	require.ErrorIs(t, create("panics", mib, false), cuda.ErrNotPermitted)
	require.ErrorIs(t, gputest.Err(k.Attach(ctx, d, "hidden", broker.AttachOptions{})), broker.ErrUnknown)
	require.ErrorIs(t, gputest.Err(k.Attach(ctx, d, "theirs", broker.AttachOptions{})), broker.ErrUnknown)
	require.ErrorIs(t, k.Remove(ctx, "theirs", 0), cuda.ErrNotPermitted)
	for _, name := range []string{"", string(make([]byte, 256)), "\xff"} {
		require.ErrorIs(t, create(name, mib, false), cuda.ErrInvalidArgument)
	}
	require.ErrorIs(t, create("n", 0, false), cuda.ErrInvalidArgument)
}

// An error names what failed, and Close refuses while objects are open.
func TestAClientWithOpenObjectsDoesNotClose(t *testing.T) {
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{})
	k := h.dial()
	o := write(t, k, d, "w", mib, 1, broker.CreateOptions{})
	err := k.Close()
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorContains(t, err, `"w"`)
	closed(t, o, o, k)
	require.ErrorIs(t, gputest.Err(k.List(peertest.Context(t))), cuda.ErrClosed)
}

// A wait ends with its context, and when the writer gives up.
func TestWaits(t *testing.T) {
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{})
	k := h.dial()
	w, err := k.Create(peertest.Context(t), d, "w", broker.CreateOptions{Bytes: mib})
	require.NoError(t, err)
	for range 100 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		_, err = k.Attach(ctx, d, "w", broker.AttachOptions{Wait: true})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		cancel()
	}
	done := make(chan error, 1)
	go func() {
		_, err := k.Attach(peertest.Context(t), d, "w", broker.AttachOptions{Wait: true})
		done <- err
	}()
	time.Sleep(10 * time.Millisecond)
	closed(t, w)
	require.ErrorIs(t, <-done, broker.ErrUnknown)
}

// What a call is given that it cannot take is refused before memory is on its way, and the client goes on.
func TestArgumentsThatCannotBe(t *testing.T) {
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{})
	k := h.dial()
	ctx := peertest.Context(t)
	closed(t, write(t, k, d, "w", mib, 1, broker.CreateOptions{}))
	require.ErrorIs(t, gputest.Err(k.Attach(ctx, nil, "w", broker.AttachOptions{})), cuda.ErrInvalidArgument)
	require.ErrorIs(t, gputest.Err(k.Attach(ctx, &cuda.Device{}, "w", broker.AttachOptions{})), cuda.ErrInvalidArgument)
	require.ErrorIs(t, gputest.Err(k.Create(ctx, nil, "v", broker.CreateOptions{Bytes: 1})), cuda.ErrInvalidArgument)
	closed(t, attach(t, k, d, "w", broker.AttachOptions{}))

	w, err := k.Create(ctx, d, "v", broker.CreateOptions{Bytes: mib})
	require.NoError(t, err)
	require.NoError(t, w.Buffer().Resize(nil, 10))
	require.ErrorContains(t, gputest.Err(w.Commit(ctx, nil)), "a buffer of 10 bytes, which had 1 MiB")
	closed(t, w)
	require.ErrorIs(t, gputest.Err(w.Commit(ctx, nil)), cuda.ErrClosed)
	_, err = k.Attach(ctx, d, string(make([]byte, 1<<20)), broker.AttachOptions{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.Less(t, len(err.Error()), 300)
}

// A fill that panics, or fails after its commit, leaves nothing open.
func TestAFillThatFails(t *testing.T) {
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{})
	k := h.dial()
	ctx := peertest.Context(t)
	o := broker.CreateOptions{Bytes: mib}
	require.Panics(t, func() {
		_, _ = k.Ensure(ctx, d, "w", o, func(context.Context, *broker.Writer) (*broker.Object, error) { panic("fill") })
	})
	require.ErrorIs(t, gputest.Err(k.Attach(ctx, d, "w", broker.AttachOptions{})), broker.ErrUnknown)
	failed := errors.New("failed")
	_, err := k.Ensure(ctx, d, "w", o, func(ctx context.Context, w *broker.Writer) (*broker.Object, error) {
		_, err := w.Commit(ctx, nil)
		return nil, errors.Join(err, failed)
	})
	require.ErrorIs(t, err, failed)
	_, err = k.Ensure(ctx, d, "v", o, func(context.Context, *broker.Writer) (*broker.Object, error) { return nil, nil })
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	all, err := k.List(ctx)
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Zero(t, all[0].Holders)
}
