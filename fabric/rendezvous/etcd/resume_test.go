package etcd

import (
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// relay passes connections on to a server, and can cut them.
type relay struct {
	listener net.Listener
	mu       sync.Mutex // held while no connection is taken
	conns    []net.Conn
	work     sync.WaitGroup
}

func newRelay(t *testing.T, endpoint string) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r := &relay{listener: l}
	r.work.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			r.mu.Lock()
			out, err := net.Dial("tcp", endpoint[len("http://"):])
			if err != nil {
				_ = in.Close()
			} else {
				r.conns = append(r.conns, in, out)
				for _, pair := range [][2]net.Conn{{in, out}, {out, in}} {
					r.work.Go(func() {
						_, _ = io.Copy(pair[0], pair[1])
						_ = pair[0].Close()
					})
				}
			}
			r.mu.Unlock()
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		r.cut(func() {})
		r.work.Wait()
	})
	return r
}

// cut ends all connections, and calls f before it takes others.
func (r *relay) cut(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.conns {
		_ = c.Close()
	}
	r.conns = nil
	f()
}

// A group outlives a client that connects again after the server compacted the history
// that it had yet to see: other programs write to the server, too.
func TestAReconnectAfterACompaction(t *testing.T) {
	endpoint := server(t, "127.0.0.1")
	r := newRelay(t, endpoint)
	other := client(t, endpoint)
	o := Options{TTL: time.Minute, Options: rendezvous.Options{Timeout: 30 * time.Second}}
	groups := make([]*rendezvous.Group, 2)
	for rank, c := range []*clientv3.Client{client(t, "http://"+r.listener.Addr().String()), other} {
		var err error
		groups[rank], err = Join(t.Context(), c, "compacted", rank, 2, o)
		require.NoError(t, err)
		t.Cleanup(func() { _ = groups[rank].Close() })
	}
	step := func(name string) []error {
		return together(groups, func(g *rendezvous.Group) error {
			all, err := g.AllGather(t.Context(), name, fmt.Append(nil, name, g.Rank()))
			for rank := range all {
				if want := fmt.Sprint(name, rank); string(all[rank]) != want {
					return fmt.Errorf("read %q, want %q", all[rank], want)
				}
			}
			return err
		})
	}
	write := func() (revision int64) {
		for i := range 20 {
			reply, err := other.Put(t.Context(), "others", fmt.Sprint(i))
			require.NoError(t, err)
			revision = reply.Header.Revision
		}
		return revision
	}
	for _, name := range []string{"before", "after", "after that"} {
		for _, err := range step(name) {
			require.NoError(t, err)
		}
		last := write()
		r.cut(func() {
			_, err := other.Compact(t.Context(), last)
			require.NoError(t, err)
		})
	}
	// So is a rank noticed that ends in between.
	last := write()
	r.cut(func() {
		expire(t, endpoint, "compacted", 1)
		_, err := other.Compact(t.Context(), last)
		require.NoError(t, err)
	})
	err := groups[0].Barrier(t.Context(), "the end")
	require.ErrorIs(t, err, peer.ErrGone)
	require.ErrorContains(t, err, "rank 1: its lease ended")
}

// A watch that the server cancels, because it has lost its leader, is made again, and what
// happened meanwhile is delivered once and in order. A rank whose key is another process's
// counts as gone.
func TestAWatchThatTheServerEnds(t *testing.T) {
	endpoint := server(t, "127.0.0.1")
	o := Options{Prefix: DefaultPrefix, TTL: time.Minute, Options: rendezvous.Options{Timeout: 30 * time.Second}}
	join := func(rank int) *transport {
		t.Helper()
		tr := newTransport(client(t, endpoint), "cancelled", rank, 2, o)
		require.NoError(t, tr.enter(t.Context()))
		t.Cleanup(func() { _ = tr.Close(nil) })
		return tr
	}
	there := join(1)
	post := func(number uint64) {
		t.Helper()
		require.NoError(t, there.Post(t.Context(), rendezvous.Step{Number: number, Name: "go"}, rendezvous.Contribution{}))
	}

	here := newTransport(client(t, endpoint), "cancelled", 0, 2, o)
	defer here.end()
	next := func() rendezvous.Event {
		t.Helper()
		e, err := here.Next(t.Context())
		require.NoError(t, err)
		return e
	}
	ended := make(chan clientv3.WatchResponse)
	close(ended)
	post(0)
	here.work.Go(func() { here.listen(here.life, ended) })
	require.Equal(t, uint64(0), next().Step.Number)
	post(1)
	require.Equal(t, uint64(1), next().Step.Number)
	here.end()
	here.work.Wait()

	here.life, here.end = t.Context(), func() {}
	watch := here.resume(t.Context()) // reads both again, and delivers neither
	require.NotNil(t, watch)
	require.Empty(t, here.events)

	require.NoError(t, there.revoke())
	join(1)
	require.NotNil(t, here.resume(t.Context()))
	require.Equal(t, rendezvous.Event{Kind: rendezvous.Lost, Rank: 1, Reason: "another process took its rank"}, next())
}
