package etcd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/stretchr/testify/require"
)

// joined is what a member of a team says of it.
type joined struct {
	Err     string
	Members int
	Data    []byte // of its replica, when all have stored
}

func init() {
	// A process with one device, which has joined a group in an order of its own.
	reexec.Register("member of a team over etcd", func(c *reexec.Child) error {
		var o sim.Options
		if err := json.Unmarshal([]byte(c.Args[0]), &o); err != nil {
			return err
		}
		rank, _ := strconv.Atoi(c.Args[2])
		size, _ := strconv.Atoi(c.Args[3])
		m, err := sim.New(o)
		if err != nil {
			return err
		}
		sys, err := m.Open(cuda.Options{TraceLeaks: true})
		if err != nil {
			return err
		}
		client, err := newClient(c.Args[1])
		if err != nil {
			return err
		}
		defer func() { _ = client.Close() }()
		for {
			var session string
			if c.Recv(&session) != nil {
				return errors.Join(sys.Close(), m.Close())
			}
			j, err := member(client.Ctx(), func(ctx context.Context) (*rendezvous.Group, error) {
				return Join(ctx, client, session, rank, size, Options{TTL: time.Second, Options: rendezvous.Options{Timeout: 20 * time.Second}})
			}, sys.Devices()[rank], session == "one dies", c)
			if err != nil {
				j.Err = err.Error()
			}
			if err := c.Send(j); err != nil {
				return err
			}
		}
	})
}

// member has a device take part in a team: each stores a word of its own in all
// replicas. Where one dies it is the last, when all have said that they have
// stored.
func member(ctx context.Context, join func(context.Context) (*rendezvous.Group, error), d *cuda.Device, dies bool, c *reexec.Child) (j joined, err error) {
	g, err := join(ctx)
	if err != nil {
		return j, err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	team, err := multicast.NewTeam(ctx, g, []*cuda.Device{d}, 1<<20, multicast.TeamOptions{})
	if err != nil {
		return j, err
	}
	defer func() { err = errors.Join(err, team.Close()) }()
	j.Members = team.Members()
	s, err := d.NewStream(cuda.StreamOptions{})
	if err != nil {
		return j, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	mod, err := d.LoadModule(kernels.Multimem)
	if err != nil {
		return j, err
	}
	defer func() { err = errors.Join(err, mod.Close()) }()
	k, err := mod.Kernel(kernels.Broadcast)
	if err != nil {
		return j, err
	}
	const word = 1024 // where each keeps what it stores
	at := cuda.Ptr(4 * team.First())
	if err := errors.Join(
		s.Upload(team.Replica(0)+word, bytes.Repeat([]byte{byte(team.First() + 1)}, 4)),
		k.Launch(s, cuda.Threads(1), team.Ptr()+at, team.Replica(0)+word, uint64(1)),
		s.Synchronize(), g.Barrier(ctx, "stored")); err != nil {
		return j, err
	}
	if dies {
		if err := c.Send(joined{Members: j.Members}); err != nil {
			return j, err
		}
		if team.First()+1 == team.Members() {
			select {} // until it is killed
		}
	}
	j.Data = make([]byte, 4*team.Members())
	return j, errors.Join(s.Download(j.Data, team.Replica(0)), team.Leave(ctx))
}

// Processes that share nothing but an etcd server and the fabric form a team, by
// fabric handles. When one dies the others are told, and form another.
func TestTeams(t *testing.T) {
	endpoint := server(t, "127.0.0.1")
	o := sim.WithMulticast(3)
	o.Folder, o.Fabric = t.TempDir(), sim.Fabric{Channels: []int{0}}
	options, err := json.Marshal(o)
	require.NoError(t, err)
	const size = 3
	hire := func(size int) (members []*reexec.Cmd) {
		for r := range size {
			c := reexec.Command(t, "member of a team over etcd", string(options), endpoint, strconv.Itoa(r), strconv.Itoa(size))
			c.Start()
			members = append(members, c)
		}
		return members
	}
	team := func(members []*reexec.Cmd, session string) {
		t.Helper()
		for _, c := range members {
			c.Send(session)
		}
		var want []byte
		for r := range members {
			want = append(want, bytes.Repeat([]byte{byte(r + 1)}, 4)...)
		}
		for r, c := range members {
			var j joined
			c.Recv(&j)
			require.Equal(t, joined{Members: len(members), Data: want}, j, "rank %d", r)
		}
	}
	members := hire(size)
	team(members, "first")
	team(members, "second")

	for _, c := range members {
		c.Send("one dies")
	}
	for _, c := range members {
		var j joined
		c.Recv(&j)
		require.Equal(t, size, j.Members)
	}
	members[2].Kill()
	for _, c := range members[:2] {
		var j joined
		c.Recv(&j)
		require.Contains(t, j.Err, "rank 2")
	}
	for _, c := range members[:2] {
		c.Wait()
	}
	members = hire(2)
	team(members, "third")
	for _, c := range members {
		c.Wait()
	}
	u, err := sim.Inspect(o.Folder)
	require.NoError(t, err)
	require.Empty(t, u.Exported)
}
