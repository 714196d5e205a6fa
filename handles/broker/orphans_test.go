//go:build linux

package broker_test

import (
	"bufio"
	"context"
	"io"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// writerRole writes one object, publishes another, and says so: writer FOLDER SOCKET.
func writerRole(args []string) error {
	sys, err := open(args[0])
	if err != nil {
		return err
	}
	ctx := context.Background()
	k, err := broker.Dial(ctx, args[1], broker.DialOptions{})
	if err != nil {
		return err
	}
	if _, err := k.Create(ctx, sys.Devices()[0], "written", broker.CreateOptions{Bytes: kib64}); err != nil {
		return err
	}
	if _, err := k.Keep(ctx, sys.Devices()[0], "published", broker.KeepOptions{Bytes: kib64}); err != nil {
		return err
	}
	if _, err := os.Stdout.WriteString("done\n"); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// A broker knows of its predecessor's clients whether they live, and waits for none that has ended: brokers that
// die one after the other leave nothing behind.
func TestABrokerDoesNotWaitForClientsThatHaveEnded(t *testing.T) {
	peertest.NoLeak(t)
	folder := t.TempDir()
	sys, err := open(folder)
	require.NoError(t, err)
	d := sys.Devices()[0]
	h := newHouse(t, d, broker.Options{Return: time.Hour})
	k := h.dial()
	ctx := peertest.Context(t)
	for range 3 {
		c := as("writer", folder, h.socket.Path())
		in, err := c.StdinPipe()
		require.NoError(t, err)
		out, err := c.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, c.Start())
		_, err = bufio.NewReader(out).ReadString('\n')
		require.NoError(t, err)
		h.replace()
		_, err = k.Keep(ctx, d, "published", broker.KeepOptions{Bytes: kib64})
		require.ErrorIs(t, err, broker.ErrWriting, "its publisher lives")
		require.NoError(t, c.Process.Kill())
		_ = c.Wait()
		_ = in.Close()
		h.replace()
		w, err := k.Keep(ctx, d, "published", broker.KeepOptions{Bytes: kib64, Wait: true})
		require.NoError(t, err)
		closed(t, w)
		require.Eventually(t, func() bool {
			all, err := k.List(ctx)
			require.NoError(t, err)
			return len(all) == 1 && h.keeper.Len() == 2 // what is published, and who published it
		}, peertest.Guard, time.Millisecond)
	}
	require.NoError(t, k.Remove(ctx, "published", 0))
	t.Cleanup(func() { require.NoError(t, sys.Close()) })
}

// A client that closed while there was no broker leaves nothing in the next one's keeper, although its process lives.
func TestAClientThatClosesWithoutABroker(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{Return: time.Millisecond})
	k, err := broker.Dial(peertest.Context(t), h.socket.Path(), broker.DialOptions{})
	require.NoError(t, err)
	closed(t, write(t, k, d, "o", mib, 1, broker.CreateOptions{}))
	require.Equal(t, 3, h.keeper.Len(), "the object, the counter of versions, and the client")
	h.end()
	closed(t, k)
	h.start()
	require.Eventually(t, func() bool { return h.keeper.Len() == 2 }, peertest.Guard, time.Millisecond)
	require.NoError(t, h.dial().Remove(peertest.Context(t), "o", 0))
}

// Clients that come and go leave nothing in a broker, although their process lives.
func TestClientsOfAProcessLeaveNothing(t *testing.T) {
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{})
	ctx := peertest.Context(t)
	closed(t, write(t, h.dial(), d, "o", mib, 1, broker.CreateOptions{}))
	come := func(n int) {
		for range n {
			k, err := broker.Dial(ctx, h.socket.Path(), broker.DialOptions{})
			require.NoError(t, err)
			closed(t, attach(t, k, d, "o", broker.AttachOptions{}), k)
		}
	}
	come(3)
	running, files := runtime.NumGoroutine(), openFiles(t)
	come(30)
	require.Eventually(t, func() bool { return runtime.NumGoroutine() <= running+4 && openFiles(t) <= files+4 }, peertest.Guard, time.Millisecond)
	require.NoError(t, h.dial().Remove(ctx, "o", 0))
}

func openFiles(t *testing.T) int {
	all, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(all)
}

// A broker ends with its keeper.
func TestABrokerEndsWithItsKeeper(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	near, f, err := peer.Pair(peer.Options{})
	require.NoError(t, err)
	far, err := peer.Inherit(f, peer.Options{})
	require.NoError(t, err)
	k := keeper.New()
	served := make(chan error, 1)
	go func() { served <- k.Serve(context.Background(), far) }()
	b, err := broker.New(t.Context(), d.System(), broker.Options{Keeper: keeper.NewClient(near)})
	require.NoError(t, err)
	l, err := peer.Listen(t.TempDir()+"/s", "broker", peer.Options{})
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- b.Serve(context.Background(), l) }()
	require.NoError(t, far.Close())
	<-served
	require.ErrorIs(t, <-ended, peer.ErrGone)
	closed(t, b, l, near, k)
}
