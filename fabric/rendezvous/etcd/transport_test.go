package etcd

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// joining is a limit within which a group assembles even on a busy machine.
const joining = 3 * time.Second

// group joins all ranks of a group, each with a client of its own.
func group(t *testing.T, endpoint, session string, size int, o Options) []*rendezvous.Group {
	t.Helper()
	groups := make([]*rendezvous.Group, size)
	for r := range groups {
		g, err := Join(t.Context(), client(t, endpoint), session, r, size, o)
		require.NoError(t, err)
		t.Cleanup(func() { _ = g.Close() })
		groups[r] = g
	}
	return groups
}

// expire ends a rank's lease, as the server does when it has not heard of the
// rank for too long.
func expire(t *testing.T, endpoint, session string, rank int) {
	t.Helper()
	c := client(t, endpoint)
	key, err := c.Get(t.Context(), fmt.Sprintf("%s%s/rank/%d", DefaultPrefix, session, rank))
	require.NoError(t, err)
	require.Len(t, key.Kvs, 1)
	_, err = c.Revoke(t.Context(), clientv3.LeaseID(key.Kvs[0].Lease))
	require.NoError(t, err)
}

func together(groups []*rendezvous.Group, f func(g *rendezvous.Group) error) []error {
	errs := make([]error, len(groups))
	var all sync.WaitGroup
	for r, g := range groups {
		all.Go(func() { errs[r] = f(g) })
	}
	all.Wait()
	return errs
}

func TestGroup(t *testing.T) {
	endpoint := server(t, "127.0.0.1")
	t.Run("gathers", func(t *testing.T) {
		groups := group(t, endpoint, "gathers", 4, Options{})
		for _, err := range together(groups, func(g *rendezvous.Group) error {
			for step := range 10 {
				all, err := g.AllGather(t.Context(), fmt.Sprint("step ", step), fmt.Appendf(nil, "%d of %d", g.Rank(), step))
				if err != nil {
					return err
				}
				for r, b := range all {
					if want := fmt.Sprintf("%d of %d", r, step); string(b) != want {
						return fmt.Errorf("read %q, want %q", b, want)
					}
				}
			}
			return nil
		}) {
			require.NoError(t, err)
		}
	})
	t.Run("a rank that leaves is named, and what it said before counts", func(t *testing.T) {
		groups := group(t, endpoint, "leaves", 3, Options{})
		for _, err := range together(groups, func(g *rendezvous.Group) error {
			if err := g.Barrier(t.Context(), "first"); err != nil || g.Rank() != 2 {
				return err
			}
			return g.Close()
		}) {
			require.NoError(t, err)
		}
		for _, err := range together(groups[:2], func(g *rendezvous.Group) error { return g.Barrier(t.Context(), "second") }) {
			require.ErrorIs(t, err, peer.ErrGone)
			require.ErrorContains(t, err, "rank 2: left")
		}
	})
	t.Run("a rank that gives up ends the group", func(t *testing.T) {
		groups := group(t, endpoint, "gives up", 3, Options{})
		for _, err := range together(groups, func(g *rendezvous.Group) error {
			if g.Rank() == 1 {
				g.Fail(errors.New("no memory"))
			}
			return g.Barrier(t.Context(), "bind")
		}) {
			require.ErrorIs(t, err, rendezvous.ErrFailed)
			require.ErrorContains(t, err, "rank 1")
			require.ErrorContains(t, err, "no memory")
		}
	})
	t.Run("a rank that does not come is named", func(t *testing.T) {
		groups := group(t, endpoint, "does not come", 3, Options{Options: rendezvous.Options{Timeout: joining}})
		for _, err := range together(groups[:2], func(g *rendezvous.Group) error { return g.Barrier(t.Context(), "create") }) {
			require.ErrorIs(t, err, peer.ErrTimeout)
			require.ErrorContains(t, err, "rank 2")
			require.ErrorContains(t, err, `"create"`)
		}
	})
	t.Run("files do not travel", func(t *testing.T) {
		groups := group(t, endpoint, "files", 1, Options{})
		require.False(t, groups[0].CarriesFiles())
		_, err := groups[0].Exchange(t.Context(), "files", rendezvous.Contribution{Files: make([]*peer.FD, 1)})
		require.ErrorIs(t, err, cuda.ErrNotSupported)
	})
	t.Run("large contributions", func(t *testing.T) {
		groups := group(t, endpoint, "large", 2, Options{})
		for _, err := range together(groups, func(g *rendezvous.Group) error {
			all, err := g.AllGather(t.Context(), strings.Repeat("n", rendezvous.MaxName), make([]byte, rendezvous.MaxBody))
			if err == nil && len(all[1-g.Rank()]) != rendezvous.MaxBody {
				err = fmt.Errorf("%d bytes arrived", len(all[1-g.Rank()]))
			}
			return err
		}) {
			require.NoError(t, err)
		}
	})
	t.Run("a rank that is taken", func(t *testing.T) {
		group(t, endpoint, "taken", 1, Options{})
		_, err := Join(t.Context(), client(t, endpoint), "taken", 0, 1, Options{})
		require.ErrorIs(t, err, cuda.ErrInUse)
	})
	t.Run("groups of different sizes", func(t *testing.T) {
		for i, rank := range []int{1, 2} { // a rank that this group has, and another
			session := fmt.Sprint("sizes ", i)
			a, err := Join(t.Context(), client(t, endpoint), session, 0, 2, Options{})
			require.NoError(t, err)
			defer func() { _ = a.Close() }()
			_, err = Join(t.Context(), client(t, endpoint), session, rank, 3, Options{})
			require.ErrorIs(t, err, rendezvous.ErrDisagree)
			require.ErrorContains(t, err, "rank 0 has joined a group of 2")
			err = a.Barrier(t.Context(), "go")
			require.ErrorContains(t, err, fmt.Sprint("rank ", rank))
			require.ErrorContains(t, err, "a group of 3")
		}
	})
	t.Run("many steps keep no more on the server than few", func(t *testing.T) {
		groups := group(t, endpoint, "many", 2, Options{})
		for _, err := range together(groups, func(g *rendezvous.Group) error {
			for i := range 20 {
				if err := g.Barrier(t.Context(), fmt.Sprint("step ", i)); err != nil {
					return err
				}
			}
			return nil
		}) {
			require.NoError(t, err)
		}
		reply, err := client(t, endpoint).Get(t.Context(), DefaultPrefix+"many/", clientv3.WithPrefix(), clientv3.WithKeysOnly())
		require.NoError(t, err)
		require.LessOrEqual(t, reply.Count, int64(2*3), "%v", reply.Kvs)
	})
	t.Run("a late rank learns why the others have gone", func(t *testing.T) {
		o := Options{Options: rendezvous.Options{Timeout: time.Minute}}
		a, err := Join(t.Context(), client(t, endpoint), "late", 0, 2, o)
		require.NoError(t, err)
		a.Fail(errors.New("no memory"))
		require.NoError(t, a.Close())
		b, err := Join(t.Context(), client(t, endpoint), "late", 1, 2, o)
		require.NoError(t, err)
		err = b.Barrier(t.Context(), "go")
		require.ErrorIs(t, err, rendezvous.ErrFailed)
		require.ErrorContains(t, err, "rank 0")
		require.ErrorContains(t, err, "no memory")
		require.NoError(t, b.Close())

		a, err = Join(t.Context(), client(t, endpoint), "late too", 0, 2, o)
		require.NoError(t, err)
		require.NoError(t, a.Close())
		b, err = Join(t.Context(), client(t, endpoint), "late too", 1, 2, o)
		require.NoError(t, err)
		defer func() { require.NoError(t, b.Close()) }()
		err = b.Barrier(t.Context(), "go")
		require.ErrorIs(t, err, peer.ErrGone)
		require.ErrorContains(t, err, "rank 0: left the group")
	})
	t.Run("a late rank learns which rank died, and not which one told", func(t *testing.T) {
		o := Options{Options: rendezvous.Options{Timeout: time.Minute}}
		groups := make([]*rendezvous.Group, 2)
		for r := range groups {
			g, err := Join(t.Context(), client(t, endpoint), "died", r, 3, o)
			require.NoError(t, err)
			t.Cleanup(func() { _ = g.Close() })
			groups[r] = g
		}
		expire(t, endpoint, "died", 1)
		early := groups[0].Barrier(t.Context(), "go")
		require.ErrorIs(t, early, peer.ErrGone)
		require.ErrorContains(t, early, "rank 1")
		require.NoError(t, groups[0].Close())
		late, err := Join(t.Context(), client(t, endpoint), "died", 2, 3, o)
		require.NoError(t, err)
		defer func() { require.NoError(t, late.Close()) }()
		require.EqualError(t, late.Barrier(t.Context(), "go"), early.Error())
	})
	t.Run("secrets", func(t *testing.T) {
		right := Options{Options: rendezvous.Options{Timeout: time.Minute}, Secret: Secret("0123456789abcdef")}
		a, err := Join(t.Context(), client(t, endpoint), "secret", 0, 2, right)
		require.NoError(t, err)
		for _, s := range []Secret{nil, Secret("0123456789abcdeF")} {
			wrong := right
			wrong.Secret = s
			_, err = Join(t.Context(), client(t, endpoint), "secret", 1, 2, wrong)
			require.ErrorIs(t, err, peer.ErrPeer)
		}
		// The ranks that had joined learn of it.
		err = a.Barrier(t.Context(), "go")
		require.ErrorIs(t, err, rendezvous.ErrFailed)
		require.ErrorContains(t, err, "rank 1 does not prove the group's secret")
		require.NoError(t, a.Close())

		groups := group(t, endpoint, "secret too", 2, right)
		for _, err := range together(groups, func(g *rendezvous.Group) error { return g.Barrier(t.Context(), "go") }) {
			require.NoError(t, err)
		}
		// A value of another key is not one of this key.
		c := client(t, endpoint)
		kv, err := c.Get(t.Context(), DefaultPrefix+"secret too/event/1/0")
		require.NoError(t, err)
		_, err = c.Put(t.Context(), DefaultPrefix+"secret too/event/0/1", string(kv.Kvs[0].Value))
		require.NoError(t, err)
		for _, err := range together(groups, func(g *rendezvous.Group) error { return g.Barrier(t.Context(), "on") }) {
			require.ErrorIs(t, err, peer.ErrGone)
			require.ErrorContains(t, err, "rank 0: its keys have what no rank writes: they do not prove the group's secret")
		}
		_, err = Join(t.Context(), client(t, endpoint), "short", 0, 1, Options{Secret: Secret("short")})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	})
	t.Run("a member that speaks for another rank", func(t *testing.T) {
		o := Options{Prefix: DefaultPrefix, TTL: DefaultTTL, Options: rendezvous.Options{Timeout: time.Minute}, Secret: Secret("0123456789abcdef")}
		posted := rendezvous.Event{Kind: rendezvous.Posted, Rank: 0, Step: rendezvous.Step{Name: "go"}, Contribution: rendezvous.Contribution{Body: []byte("forged")}}
		for name, row := range map[string]struct {
			lie  func(liar *transport) error
			says string
		}{
			"as its own end": {func(liar *transport) error {
				return liar.write(t.Context(), "end", posted, liar.lease)
			}, `rank 2: its keys have what no rank writes: an event "posted" of rank 0`},
			"that the other's transport ended": {func(liar *transport) error {
				return liar.write(t.Context(), "end", rendezvous.Event{Kind: rendezvous.Ended, Rank: 0}, liar.lease)
			}, `rank 2: its keys have what no rank writes: an event "ended" of rank 0`},
		} {
			t.Run(name, func(t *testing.T) {
				session := "liar " + strings.ReplaceAll(name, " ", "-")
				groups := make([]*rendezvous.Group, 2)
				for r := range groups {
					g, err := Join(t.Context(), client(t, endpoint), session, r, 3, o)
					require.NoError(t, err)
					t.Cleanup(func() { _ = g.Close() })
					groups[r] = g
				}
				liar := newTransport(client(t, endpoint), session, 2, 3, o)
				require.NoError(t, liar.enter(t.Context()))
				t.Cleanup(func() { _ = liar.Close(nil) })
				require.NoError(t, row.lie(liar))
				require.NoError(t, liar.Post(t.Context(), rendezvous.Step{Name: "go"}, rendezvous.Contribution{}))
				all, err := groups[1].AllGather(t.Context(), "go", nil)
				require.ErrorIs(t, err, peer.ErrGone, "%q", all)
				require.ErrorContains(t, err, row.says)
			})
		}
	})
	t.Run("a session with keys of no group", func(t *testing.T) {
		c := client(t, endpoint)
		for _, key := range []string{"comment", "rank/x", "rank/01", "rank/7", "rank/0/1", "event/0/2", "event/7/0", "other/0/0"} {
			_, err := c.Put(t.Context(), DefaultPrefix+"strange/"+key, "made by hand")
			require.NoError(t, err)
		}
		for _, err := range together(group(t, endpoint, "strange", 2, Options{}), func(g *rendezvous.Group) error { return g.Barrier(t.Context(), "go") }) {
			require.NoError(t, err)
		}
		_, err := c.Delete(t.Context(), DefaultPrefix+"strange/", clientv3.WithPrefix())
		require.NoError(t, err)
	})
	t.Run("an old value that another client writes again", func(t *testing.T) {
		groups := group(t, endpoint, "replayed", 2, Options{Secret: Secret("0123456789abcdef")})
		step := func(name string) {
			for _, err := range together(groups, func(g *rendezvous.Group) error { return g.Barrier(t.Context(), name) }) {
				require.NoError(t, err)
			}
		}
		step("first")
		c := client(t, endpoint)
		for _, key := range []string{"replayed/event/0/0", "replayed/rank/1"} {
			old, err := c.Get(t.Context(), DefaultPrefix+key)
			require.NoError(t, err)
			_, err = c.Put(t.Context(), DefaultPrefix+key, string(old.Kvs[0].Value), clientv3.WithLease(clientv3.LeaseID(old.Kvs[0].Lease)))
			require.NoError(t, err)
		}
		step("second")
		step("third")
	})
	t.Run("a session whose group has begun", func(t *testing.T) {
		groups := group(t, endpoint, "begun", 2, Options{})
		for _, err := range together(groups, func(g *rendezvous.Group) error {
			return errors.Join(g.Barrier(t.Context(), "first"), g.Barrier(t.Context(), "second"))
		}) {
			require.NoError(t, err)
		}
		expire(t, endpoint, "begun", 0)
		_, err := Join(t.Context(), client(t, endpoint), "begun", 0, 2, Options{})
		require.ErrorIs(t, err, cuda.ErrInUse)
		require.ErrorContains(t, err, "rank 1")
		require.ErrorContains(t, err, "a session that no group has used")
	})
	t.Run("a rank whose lease ends", func(t *testing.T) {
		groups := group(t, endpoint, "expired", 3, Options{})
		expire(t, endpoint, "expired", 1)
		for r, err := range together(groups, func(g *rendezvous.Group) error { return g.Barrier(t.Context(), "go") }) {
			require.ErrorContains(t, err, "rank 1", "rank %d", r)
			require.ErrorContains(t, err, "lease", "rank %d", r)
			var e *rendezvous.Error
			require.ErrorAs(t, err, &e)
			if r == 1 {
				require.Equal(t, []int{1}, e.Ranks)
			}
		}
	})
	t.Run("what no rank writes", func(t *testing.T) {
		groups := group(t, endpoint, "junk", 2, Options{})
		c := client(t, endpoint)
		// Keys of no rank are ignored.
		for _, kv := range [][2]string{{"event/7/0", "junk"}, {"event/x/0", ""}, {"rank/x/y", "2"}, {"rank/9", "2"}, {"other", ""}, {"event/1/0", "junk"}} {
			_, err := c.Put(t.Context(), DefaultPrefix+"junk/"+kv[0], kv[1])
			require.NoError(t, err)
		}
		err := groups[0].Barrier(t.Context(), "go")
		require.ErrorIs(t, err, peer.ErrGone)
		require.ErrorContains(t, err, "rank 1: its keys have what no rank writes")
		_, err = c.Delete(t.Context(), DefaultPrefix+"junk/", clientv3.WithPrefix())
		require.NoError(t, err)
	})
	t.Run("arguments", func(t *testing.T) {
		for _, c := range []struct {
			session    string
			rank, size int
		}{{"", 0, 1}, {"a/b", 0, 1}, {"s", 1, 1}, {"s", -1, 1}, {"s", 0, 0}} {
			_, err := Join(t.Context(), client(t, endpoint), c.session, c.rank, c.size, Options{})
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		}
	})
	t.Run("nothing is left on the server but for late ranks, for a time", func(t *testing.T) {
		c := client(t, endpoint)
		reply, err := c.Get(t.Context(), DefaultPrefix, clientv3.WithPrefix())
		require.NoError(t, err)
		for _, kv := range reply.Kvs {
			require.Regexp(t, DefaultPrefix+"(late|late too|died|secret|sizes [01])/event/[0-2]/end", string(kv.Key))
			lease, err := c.TimeToLive(t.Context(), clientv3.LeaseID(kv.Lease))
			require.NoError(t, err)
			require.LessOrEqual(t, lease.TTL, int64(60))
		}
	})
}

func TestJoinNeedsAClient(t *testing.T) {
	_, err := Join(t.Context(), nil, "session", 0, 1, Options{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.ErrorContains(t, err, "make one with clientv3.New")
}
