//go:build linux

package publish_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// heir is a process that publishes, follows, and takes over, as it is told: an array of
// which element i is i.
type heir struct {
	place  place
	sys    *cuda.System
	d      *cuda.Device
	l      *peer.Listener
	server *publish.Server
	client *publish.Client
	f      *publish.Follower[uint32]
	array  *vmm.Array[uint32]
	p      *publish.Publication
	taking chan error // the outcome of a TakeOver that waits for the publisher's end
}

// standing is the state of an heir after a task.
type standing struct {
	Err        string
	InUse      bool
	By         int // the process that has the socket
	Len        int
	Generation uint64
	Ptr        uint64
	State      publish.State
}

func init() {
	reexec.Register("heir", func(c *reexec.Child) error {
		h := &heir{}
		err := c.Recv(&h.place)
		if err == nil {
			h.sys, h.d, err = h.place.open()
		}
		if err != nil {
			return err
		}
		for {
			var do task
			if err := c.Recv(&do); errors.Is(err, io.EOF) {
				return h.close()
			} else if err != nil {
				return err
			}
			var is standing
			if err := h.obey(do); err != nil {
				is.Err, is.InUse = err.Error(), errors.Is(err, cuda.ErrInUse)
				var served *peer.ServedError
				if errors.As(err, &served) {
					is.By = served.By.PID
				}
			}
			switch {
			case h.array != nil:
				is.Len, is.Ptr, is.Generation = h.array.Len(), uint64(h.array.Ptr()), h.p.Stats().Generation
			case h.f != nil:
				is.Len, is.Ptr, is.Generation, is.State = h.f.Len(), uint64(h.f.Array().Ptr()), h.f.Generation(), h.f.State()
			}
			if err := c.Send(is); err != nil {
				return err
			}
		}
	})
}

func (h *heir) obey(do task) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), peertest.Guard)
	defer cancel()
	switch do.Do {
	case "publish":
		if h.l, err = peer.Listen(h.place.Dir, "s", peer.Options{}); err != nil {
			return err
		}
		h.server = publish.NewServer(publish.ServerOptions{Heir: func(peer.Credentials, bool, string) bool { return do.N > 0 }})
		go func() { _ = h.server.Serve(context.Background(), h.l) }()
		if h.array, err = vmm.NewArray[uint32](h.d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)}); err != nil {
			return err
		}
		h.p, err = publish.Array(h.server, "numbers", h.array, publish.PublishOptions{Description: []byte("counted from 0")})
	case "append":
		if _, err := h.array.Append(nil, counting(h.array.Len(), do.N)); err != nil {
			return err
		}
		if err := h.p.Announce(ctx, h.array.Len()); err != nil {
			return err
		}
		// What is complete is so by a write of the GPU, which a kill would overtake.
		return core.SystemOf(h.d).WaitAll("append")
	case "unfinished": // work of this process that is never done
		s, err := h.d.NewStream(cuda.StreamOptions{})
		if err != nil {
			return err
		}
		word, err := h.d.NewHostBuffer(8)
		if err != nil {
			return err
		}
		first, err := word.Slice(0, 8)
		if err != nil {
			return err
		}
		if err := stuck(h.d, s, first); err != nil {
			return err
		}
		if _, err := h.array.AppendUndefined(do.N); err != nil {
			return err
		}
		return h.p.Announce(ctx, h.array.Len(), s)
	case "flood": // the GPU has work for a while, which no announcement mentions
		s, err := h.d.NewStream(cuda.StreamOptions{})
		for i := 0; err == nil && i < do.N; i++ {
			err = s.Memset(h.array.Ptr(), byte(i), 4*h.array.Len())
		}
		return err
	case "still": // nothing writes the memory any more
		first, then := make([]uint32, h.array.Len()), make([]uint32, h.array.Len())
		if err := h.array.All().CopyTo(nil, first); err != nil {
			return err
		}
		time.Sleep(100 * time.Millisecond)
		if err := h.array.All().CopyTo(nil, then); err != nil {
			return err
		}
		if !slices.Equal(first, then) {
			return errors.New("the memory changes")
		}
	case "settle":
		if err := h.p.AwaitFollowers(ctx, do.N); err != nil {
			return err
		}
		return h.p.Settle(ctx)
	case "follow", "follow once", "follow relative", "follow to read":
		path, o := h.place.socket(), publish.DialOptions{ComeBack: &publish.ComeBack{}}
		switch do.Do {
		case "follow once": // so that it learns of no later publisher
			o.ComeBack = nil
		case "follow relative": // and then moves to a folder that looks alike
			above, dir := filepath.Split(h.place.Dir)
			path = filepath.Join(dir, "s")
			elsewhere := filepath.Join(above, "elsewhere")
			defer func() { err = errors.Join(err, os.MkdirAll(filepath.Join(elsewhere, dir), 0o700), os.Chdir(elsewhere)) }()
			if err := os.Chdir(above); err != nil {
				return err
			}
		}
		h.client, err = publish.Dial(ctx, path, o)
		if err == nil {
			h.f, err = publish.Follow[uint32](ctx, h.client, h.d, "numbers", publish.FollowOptions{KeepDescriptors: true, ReadOnly: do.Do == "follow to read"})
		}
		if err == nil && string(h.f.Description()) != "counted from 0" { // which each publisher passes on
			err = fmt.Errorf("a description %q", h.f.Description())
		}
	case "until":
		for err == nil && h.f.Len() != do.N {
			err = h.f.Next(ctx)
		}
	case "stale":
		for h.f.State() != publish.Stale {
			time.Sleep(time.Millisecond)
		}
	case "publish more":
		a, err := vmm.NewArray[uint32](h.d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
		if err != nil {
			return err
		}
		if _, err := a.Append(nil, counting(0, do.N)); err != nil {
			return err
		}
		p, err := publish.Array(h.server, "more", a)
		if err != nil {
			return err
		}
		return p.Announce(ctx, do.N)
	case "take over":
		return h.takeOver(ctx, publish.TakeOverOptions{})
	case "take over incomplete":
		return h.takeOver(ctx, publish.TakeOverOptions{Incomplete: true})
	case "rewrite":
		return h.p.Rewrite(ctx, publish.RewriteOptions{})
	case "wait to take over": // until this process waits for the publisher's end
		h.taking = make(chan error, 1)
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), peertest.Guard)
			defer cancel()
			h.taking <- h.takeOver(ctx, publish.TakeOverOptions{})
		}()
		stacks := make([]byte, 1<<20)
		for !bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte("publish.awaitEnd")) {
			select {
			case err := <-h.taking:
				return fmt.Errorf("it waits for no process: %w", err)
			case <-time.After(time.Millisecond):
			}
		}
	case "taken over":
		return <-h.taking
	case "end": // in order; the process has the memory still
		return h.server.Close()
	case "check":
		a := h.array
		if a == nil {
			a = h.f.Array()
		}
		got := make([]uint32, a.Len())
		if err := a.All().CopyTo(nil, got); err != nil {
			return err
		}
		for i, v := range got {
			if v != uint32(i) {
				return fmt.Errorf("element %d of %d is %d", i, len(got), v)
			}
		}
	}
	return err
}

func (h *heir) takeOver(ctx context.Context, o publish.TakeOverOptions) (err error) {
	if h.server == nil {
		h.server = publish.NewServer(publish.ServerOptions{})
	}
	if h.p, err = publish.TakeOver(ctx, h.server, h.f, o); err == nil {
		h.array, h.f = h.f.Array(), nil
	}
	return err
}

func (h *heir) close() error {
	var errs []error
	if h.f != nil {
		errs = append(errs, h.f.Close())
	}
	if h.client != nil {
		errs = append(errs, h.client.Close())
	}
	if h.server != nil {
		errs = append(errs, h.server.Close())
	}
	if h.l != nil {
		errs = append(errs, h.l.Close())
	}
	if h.array != nil {
		errs = append(errs, h.array.Close())
	}
	return errors.Join(append(errs, h.sys.Close())...)
}

// kin is an heir from the test's side.
type kin struct {
	*reexec.Cmd
	t *testing.T
}

func newKin(t *testing.T, p place) *kin {
	t.Helper()
	k := &kin{reexec.Command(t, "heir"), t}
	k.Start()
	k.Send(p)
	return k
}

func (k *kin) try(do string, n int) (is standing) {
	k.t.Helper()
	k.Send(task{Do: do, N: n})
	k.Recv(&is)
	return is
}

func (k *kin) do(do string, n int) standing {
	k.t.Helper()
	is := k.try(do, n)
	require.Empty(k.t, is.Err, do)
	return is
}

// One process after the other is killed and succeeded by another, and a reader goes on
// at its address all the time.
func TestAPublicationOutlivesItsPublishers(t *testing.T) {
	const step = 700_000 // elements: more than a chunk
	places(t, func(t *testing.T, p place, _ *cuda.Device) {
		publisher, reader := newKin(t, p), newKin(t, p)
		publisher.do("publish", 0)
		publisher.do("append", step)
		reader.do("follow", 0)
		was := reader.do("until", step)
		reader.do("check", 0)
		for round := 2; round < 5; round++ {
			heir := newKin(t, p)
			heir.do("follow", 0)
			at := heir.do("until", (round-1)*step).Ptr
			publisher.do("settle", 2)
			publisher.Kill()
			reader.do("stale", 0)
			reader.do("check", 0)
			is := heir.do("take over", 0)
			require.Equal(t, at, is.Ptr)
			require.Equal(t, (round-1)*step, is.Len)
			require.Greater(t, is.Generation, was.Generation)
			heir.do("append", step)
			heir.do("check", 0)
			now := reader.do("until", round*step)
			require.Equal(t, was.Ptr, now.Ptr)
			require.Greater(t, now.Generation, was.Generation)
			require.Equal(t, publish.Live, now.State)
			reader.do("check", 0)
			heir.do("settle", 1)
			publisher, was = heir, now
		}
		reader.Wait()
		publisher.Wait()
	})
}

// One that only reads hands on what is there, if the publisher named it an heir, and changes nothing.
func TestAFollowerThatOnlyReadsHandsMemoryOn(t *testing.T) {
	const step = 700_000
	places(t, func(t *testing.T, p place, _ *cuda.Device) {
		for named := range 2 {
			publisher, reader, heir := newKin(t, p), newKin(t, p), newKin(t, p)
			publisher.do("publish", named)
			publisher.do("append", step)
			reader.do("follow", 0)
			reader.do("until", step)
			heir.do("follow to read", 0)
			at := heir.do("until", step)
			publisher.do("settle", 2)
			publisher.Kill()
			if named == 0 {
				require.Contains(t, heir.try("take over", 0).Err, "names no heir")
				reader.Wait()
				heir.Wait()
				continue
			}
			is := heir.do("take over", 0)
			require.Equal(t, []any{at.Ptr, step}, []any{is.Ptr, is.Len})
			late := newKin(t, p)
			late.do("follow", 0)
			late.do("until", step)
			late.do("check", 0)
			reader.do("check", 0)
			heir.do("settle", 2)
			require.NotEmpty(t, heir.try("append", 1).Err)
			require.Contains(t, heir.try("rewrite", 0).Err, "only reads")
			require.Empty(t, reader.do("check", 0).Err)
			reader.Wait()
			late.Wait()
			heir.Wait()
		}
	})
}

// A successor has the memory for itself: the publisher's GPU work ends with its process,
// which is waited for.
func TestWorkOfADeadPublisherIsOver(t *testing.T) {
	const n = 15 << 20
	places(t, func(t *testing.T, p place, _ *cuda.Device) {
		flood := 50_000 // on a GPU for about a second
		if p.Folder != "" {
			flood = 200
		}
		publisher, heir := newKin(t, p), newKin(t, p)
		publisher.do("publish", 0)
		publisher.do("append", n)
		heir.do("follow", 0)
		heir.do("until", n)
		publisher.do("settle", 1)
		publisher.Send(task{Do: "flood", N: flood})
		time.Sleep(100 * time.Millisecond) // well under way
		publisher.Kill()
		heir.do("take over", 0)
		heir.do("still", 0)
		heir.do("append", 1000)
		heir.Wait()
	})
}

// What was announced and is not complete when its publisher dies is not published on.
func TestUnfinishedWorkIsNotTakenOver(t *testing.T) {
	const n = 100_000
	p := newPlace(t)
	publisher, heir := newKin(t, p), newKin(t, p)
	publisher.do("publish", 0)
	publisher.do("append", n)
	heir.do("follow", 0)
	heir.do("until", n)
	publisher.do("append", n) // which the follower has, and has not shown
	publisher.do("settle", 1)
	publisher.do("unfinished", 20*n)
	publisher.do("settle", 1)
	publisher.Kill()
	is := heir.do("take over", 0)
	require.Equal(t, 2*n, is.Len)
	heir.do("check", 0)
	heir.do("append", 20*n)
	heir.do("check", 0)
	heir.Wait()
}

// Of several that want to take over, one does, and the others follow it.
func TestOneTakesOver(t *testing.T) {
	const n = 100_000
	p := newPlace(t)
	publisher := newKin(t, p)
	publisher.do("publish", 0)
	publisher.do("append", n)
	heirs := []*kin{newKin(t, p), newKin(t, p), newKin(t, p)}
	for _, h := range heirs {
		h.do("follow", 0)
		h.do("until", n)
	}
	publisher.do("settle", len(heirs))
	for _, h := range heirs {
		h.do("wait to take over", 0)
	}
	publisher.Kill()
	var winner *kin
	by := 0
	for _, h := range heirs {
		if is := h.try("taken over", 0); is.Err == "" {
			require.Nil(t, winner)
			winner = h
		} else {
			require.True(t, is.InUse, is.Err)
			by = is.By
		}
	}
	require.NotNil(t, winner)
	require.Equal(t, winner.Process.Pid, by, "the others are told by which process")
	winner.do("append", n)
	for _, h := range heirs {
		if h != winner {
			h.do("until", 2*n)
			h.do("check", 0)
		}
	}
	// A publisher that returns is told which process superseded it.
	late := newKin(t, p)
	is := late.try("publish", 0)
	require.True(t, is.InUse, is.Err)
	require.Equal(t, winner.Process.Pid, is.By)
	require.Contains(t, is.Err, fmt.Sprintf("process %d ", winner.Process.Pid))
	late.Wait()
	for _, h := range heirs {
		if h != winner {
			h.Wait()
		}
	}
	winner.Wait()
}

// A follower that slept through any number of take-overs waits for the process that took
// over last, even if that gave the socket back in order: it has the memory still.
func TestASleeperWaitsForWhoTookOver(t *testing.T) {
	p := newPlace(t)
	first, second, third, fourth := newKin(t, p), newKin(t, p), newKin(t, p), newKin(t, p)
	sleepers := []*kin{newKin(t, p), newKin(t, p)}
	first.do("publish", 0)
	first.do("append", 1000)
	for _, k := range []*kin{second, third, fourth} {
		k.do("follow", 0)
		k.do("until", 1000)
	}
	for _, k := range sleepers {
		k.do("follow once", 0)
		k.do("until", 1000)
	}
	first.Kill()
	second.do("take over", 0)
	second.do("end", 0)
	sleepers[0].do("wait to take over", 0)
	second.Kill()
	sleepers[0].do("taken over", 0)
	sleepers[0].do("append", 500)
	sleepers[0].do("check", 0)

	third.do("until", 1500)
	fourth.do("until", 1500)
	sleepers[0].do("settle", 2)
	sleepers[0].Kill()
	third.do("take over", 0)
	fourth.do("stale", 0)
	third.do("append", 500)
	fourth.do("until", 2000)
	third.do("settle", 1)
	third.do("end", 0)
	sleepers[1].do("wait to take over", 0)
	third.Kill()
	sleepers[1].do("taken over", 0)
	sleepers[1].do("check", 0)
	sleepers[1].Wait()
	fourth.Wait()
}

// A relative path is that of the folder that was dialled, wherever the process goes.
func TestATakeOverThroughARelativePath(t *testing.T) {
	p := newPlace(t)
	publisher, heir, reader := newKin(t, p), newKin(t, p), newKin(t, p)
	publisher.do("publish", 0)
	publisher.do("append", 1000)
	heir.do("follow relative", 0)
	heir.do("until", 1000)
	reader.do("follow", 0)
	reader.do("until", 1000)
	publisher.Kill()
	heir.do("take over", 0)
	heir.do("append", 500)
	reader.do("until", 1500)
	require.FileExists(t, p.socket())
	above, dir := filepath.Split(p.Dir)
	require.NoFileExists(t, filepath.Join(above, "elsewhere", dir, "s"))
	reader.Wait()
	heir.Wait()
}

// A publication that nothing was announced of is taken over as one: no follower is shown an
// array without elements.
func TestATakeOverBeforeTheFirstAnnouncement(t *testing.T) {
	p := newPlace(t)
	publisher, heir, reader := newKin(t, p), newKin(t, p), newKin(t, p)
	publisher.do("publish", 0)
	heir.do("follow", 0)
	publisher.Kill()
	before := host.Uptime()
	require.Zero(t, heir.do("take over", 0).Generation)
	reader.do("follow", 0)
	heir.do("append", 500)
	require.Greater(t, reader.do("until", 500).Generation, before, "later than all of its predecessor")
	reader.do("check", 0)
	reader.Wait()
	heir.Wait()
}

// neverComplete is a follower for which nothing was complete when its publisher was killed, beside others that
// follow before if they are to have what was complete.
func neverComplete(t *testing.T, p place, whole ...*kin) *kin {
	publisher, late := newKin(t, p), newKin(t, p)
	publisher.do("publish", 0)
	publisher.do("append", 1000)
	for _, k := range whole {
		k.do("follow", 0)
		k.do("until", 1000)
	}
	publisher.do("unfinished", 1000)
	late.do("follow", 0)
	publisher.do("settle", 1+len(whole))
	publisher.Kill()
	require.Contains(t, late.try("take over", 0).Err, publish.ErrIncomplete.Error())
	return late
}

// What was announced and was never complete for this follower is taken over to be written anew, and not as if there were
// nothing: another follower may have an earlier generation whole. Its generation is not used again.
func TestATakeOverOfNothingComplete(t *testing.T) {
	p := newPlace(t)
	reader, late := newKin(t, p), neverComplete(t, p)
	before := host.Uptime()
	is := late.do("take over incomplete", 0)
	require.Equal(t, 2000, is.Len)
	late.do("append", 500)
	reader.do("follow", 0)
	require.Greater(t, reader.do("until", 2500).Generation, before, "later than all of its predecessor")
	reader.Wait()
	late.Wait()
}

// Who has a complete generation takes that over when one who has none was refused.
func TestATakeOverAfterARefusedOne(t *testing.T) {
	p := newPlace(t)
	first := newKin(t, p)
	late := neverComplete(t, p, first)
	require.Equal(t, 1000, first.do("take over", 0).Len)
	first.do("check", 0)
	first.Wait()
	late.Wait()
}
