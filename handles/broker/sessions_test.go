//go:build linux

package broker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// clientOf returns a client of a broker, on a connection of their own.
func clientOf(t *testing.T, b *Broker) *Client {
	near, far := peertest.Pair(t, peer.Options{})
	go func() { _ = b.ServeConn(context.Background(), far) }()
	k, err := NewClient(peertest.Context(t), near)
	require.NoError(t, err)
	return k
}

// A user who connects as often as it can leaves room for the others.
func TestAUserLeavesRoomForOthers(t *testing.T) {
	b := &Broker{ofUser: map[uint32]int{}}
	const other, another = 4242, 4243
	entered := 0
	for b.enter(other) == nil {
		entered++
	}
	require.ErrorIs(t, b.enter(other), ErrLimit)
	require.LessOrEqual(t, entered, maxSessions/othersShare)
	require.NoError(t, b.enter(another))
	for _, uid := range []uint32{0, uint32(os.Geteuid())} {
		for range entered + 1 {
			require.NoError(t, b.enter(uid))
		}
	}
	b.leave(other)
	require.NoError(t, b.enter(other))
	b.leave(another)
	require.NotContains(t, b.ofUser, uint32(another))
}

// A client counts once, also after it held something without a connection.
func TestAClientCountsOnce(t *testing.T) {
	peertest.NoLeak(t)
	b, d := newBroker(t)
	l, err := peer.Listen(t.TempDir()+"/s", "broker", peer.Options{})
	require.NoError(t, err)
	go func() { _ = b.Serve(context.Background(), l) }()
	ctx := peertest.Context(t)
	k, err := Dial(ctx, l.Path(), DialOptions{ComeBack: publish.ComeBack{First: 50 * time.Millisecond}})
	require.NoError(t, err)
	w, err := k.Create(ctx, d, "w", CreateOptions{Bytes: 1})
	require.NoError(t, err)
	clients := func(n int) {
		t.Helper()
		require.Eventually(t, func() bool { return b.status().Clients == n }, peertest.Guard, time.Millisecond)
	}
	for range 2 {
		require.NoError(t, k.line().c.Close())
		_, err = k.List(ctx)
		require.NoError(t, err)
		clients(1)
	}
	require.NoError(t, w.Close())
	require.NoError(t, k.Close())
	clients(0)
	require.NoError(t, l.Close())
}

// As many calls of one client may wait as it likes.
func TestManyCallsWait(t *testing.T) {
	peertest.NoLeak(t)
	b, d := newBroker(t)
	k := clientOf(t, b)
	ctx := peertest.Context(t)
	w, err := k.Create(ctx, d, "w", CreateOptions{Bytes: 1})
	require.NoError(t, err)
	var calls errgroup.Group
	for range 3 * maxAwaits {
		calls.Go(func() error {
			o, err := k.Attach(ctx, d, "w", AttachOptions{Wait: true})
			if err != nil {
				return err
			}
			return o.Close()
		})
	}
	limited, cancel := context.WithCancel(ctx)
	for range maxAwaits {
		calls.Go(func() error {
			if err := k.await(limited, "test", "w", "it"); err != nil && limited.Err() == nil {
				return err
			}
			return nil
		})
	}
	_, err = k.List(ctx)
	require.NoError(t, err)
	cancel()
	_, err = k.List(ctx)
	require.NoError(t, err)
	o, err := w.Commit(ctx, nil)
	require.NoError(t, err)
	require.NoError(t, calls.Wait())
	require.NoError(t, o.Close())
	require.NoError(t, k.Close())
}

// As many objects of one client may be committed at once, and copied.
func TestManyCommits(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	b, err := New(t.Context(), d.System(), Options{
		Authorize: func(Caller, string) Grant { return Grant{Access: publish.WriteAccess, Copy: true} },
		Copy:      func() *exec.Cmd { return exec.Command("sh", "-c", "sleep 0.02; exit 1") },
	})
	require.NoError(t, err)
	k := clientOf(t, b)
	ctx := peertest.Context(t)
	var all [maxAwaits + 8]*Writer
	for i := range all {
		all[i], err = k.Create(ctx, d, "w", CreateOptions{Bytes: 1})
		require.NoError(t, err)
	}
	var commits errgroup.Group
	for _, w := range all {
		commits.Go(func() error {
			if _, err := w.Commit(ctx, nil); err == nil || !strings.Contains(err.Error(), "the process that copies ended") {
				return fmt.Errorf("another error, or none: %w", err)
			}
			return w.Close()
		})
	}
	require.NoError(t, commits.Wait())
	require.NoError(t, k.Close())
	require.NoError(t, b.Close())
}

// A commit may be given up and tried again as often, while the object is copied.
func TestACommitThatIsTriedAgain(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	fail := t.TempDir() + "/fail"
	b, err := New(t.Context(), d.System(), Options{
		Authorize: func(Caller, string) Grant { return Grant{Access: publish.WriteAccess, Copy: true} },
		Copy:      func() *exec.Cmd { return failsOnce(fail) },
	})
	require.NoError(t, err)
	k := clientOf(t, b)
	ctx := peertest.Context(t)
	w, err := k.Create(ctx, d, "w", CreateOptions{Bytes: 1})
	require.NoError(t, err)
	for range 2 * maxAwaits {
		limited, cancel := context.WithTimeout(ctx, 2*time.Millisecond)
		_, err = w.Commit(limited, nil)
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	require.NoError(t, os.WriteFile(fail, nil, 0o600))
	_, err = w.Commit(ctx, nil)
	require.ErrorContains(t, err, "the process that copies ended")
	require.NoError(t, w.Close())
	require.NoError(t, k.Close())
	require.NoError(t, b.Close())
}

// failsOnce returns a process that fails once a file is there.
func failsOnce(file string) *exec.Cmd {
	return exec.Command("sh", "-c", `until test -e "$0"; do sleep 0.01; done; exit 1`, file)
}

// A client beyond the most that a broker takes learns why it is not served, from Dial or from its calls.
func TestAClientTooManyLearnsWhy(t *testing.T) {
	peertest.NoLeak(t)
	b, err := New(t.Context(), gputest.Software(t).System(), Options{})
	require.NoError(t, err)
	b.mu.Lock()
	b.sessions = maxSessions
	b.mu.Unlock()
	l, err := peer.Listen(t.TempDir()+"/s", "broker", peer.Options{})
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- b.Serve(context.Background(), l) }()
	ctx := peertest.Context(t)
	call := func() error {
		late, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
		defer cancel()
		k, err := Dial(ctx, l.Path(), DialOptions{ComeBack: publish.ComeBack{Most: 10 * time.Millisecond}})
		if err != nil {
			return err
		}
		defer func() { require.NoError(t, k.Close()) }()
		_, err = k.List(late)
		return err
	}
	// The end of a call's context may come before the refusal of the connection that it is on.
	for err = call(); !errors.Is(err, peer.ErrRefused); err = call() {
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NoError(t, ctx.Err())
	}
	require.ErrorContains(t, err, fmt.Sprintf("the broker at %q", l.Path()))
	require.Regexp(t, `refused by the peer: "limit reached: \d+ clients, where \d+ are the most; try again when another has left"`, err.Error())
	require.NoError(t, b.Close())
	require.NoError(t, <-served)
	require.NoError(t, l.Close())
}

// The error of a call whose context has ended names the call, and the broker.
func TestErrorsOfEndedContexts(t *testing.T) {
	peertest.NoLeak(t)
	l, err := peer.Listen(t.TempDir()+"/s", "broker", peer.Options{})
	require.NoError(t, err)
	greeted := make(chan *peer.Conn, 1)
	go func() {
		c, _ := l.Accept(context.Background())
		greeted <- c
	}()
	ctx, d := peertest.Context(t), gputest.Software(t)
	k, err := Dial(ctx, l.Path(), DialOptions{})
	require.NoError(t, err)
	ended, end := context.WithCancel(ctx)
	end()
	zero, cancel := context.WithTimeout(ctx, 0)
	defer cancel()
	for _, c := range []context.Context{ended, zero} {
		for op, err := range map[string]error{
			"List": gputest.Err(k.List(c)), "Status": gputest.Err(k.Status(c)), "Remove": k.Remove(c, "x", 0),
			"Attach": gputest.Err(k.Attach(c, d, "x", AttachOptions{})),
			"Create": gputest.Err(k.Create(c, d, "x", CreateOptions{Bytes: 1})),
			"Keep":   gputest.Err(k.Keep(c, d, "x", KeepOptions{Bytes: 1})),
		} {
			require.ErrorIs(t, err, c.Err())
			require.ErrorContains(t, err, "broker.Client."+op+": ")
			require.ErrorContains(t, err, fmt.Sprintf("the broker at %q", l.Path()))
		}
	}
	require.NoError(t, (<-greeted).Close())
	require.NoError(t, k.Close())
	// Nothing accepts now: a process that does not greet is named.
	var served *peer.ServedError // unless the context ends before it is connected to
	for limit := 10 * time.Millisecond; served == nil; limit *= 2 {
		require.Less(t, limit, peertest.Guard, err)
		short, cancel := context.WithTimeout(ctx, limit)
		_, err = Dial(short, l.Path(), DialOptions{})
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, peer.ErrTimeout)
		errors.As(err, &served)
	}
	require.ErrorContains(t, err, fmt.Sprintf("no greeting: process %d of user %d, group %d serves %q", os.Getpid(), os.Geteuid(), os.Getegid(), l.Path()))
	require.NoError(t, l.Close())
}
