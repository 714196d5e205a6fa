package etcd

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// machine is what a rank sees of the machine in a folder.
func machine(folder string) sim.Options {
	return sim.Options{Folder: folder, Fabric: sim.Fabric{Channels: []int{3}},
		Devices: []sim.DeviceOptions{{Memory: 64 << 20, Granularity: 64 << 10}}}
}

// share agrees on a type, shares a buffer that holds this rank's number, and
// reads the others'.
func share(ctx context.Context, g *rendezvous.Group, d *cuda.Device, types vmm.HandleTypes) (err error) {
	a, err := rendezvous.Agree(ctx, g, rendezvous.FactsOf(d, types))
	if err != nil {
		return err
	}
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 1 << 20, Chunks: vmm.FixedChunks(64 << 10), Memory: vmm.Properties{Handles: a.Handle}})
	if err == nil {
		_, err = b.Append(nil, fmt.Appendf(nil, "%200000d", g.Rank()))
	}
	if err != nil {
		g.Fail(err)
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	all, err := rendezvous.Share(ctx, g, a, d, b, rendezvous.ShareOptions{})
	if err != nil {
		return err
	}
	for r, o := range all {
		if o == nil {
			continue
		}
		got := make([]byte, 8)
		part, e := o.Slice(o.Len()-8, o.Len())
		err = errors.Join(err, e, part.CopyTo(nil, got))
		if want := fmt.Sprintf("%8d", r); string(got) != want {
			err = errors.Join(err, fmt.Errorf("read %q of rank %d", got, r))
		}
		err = errors.Join(err, o.Close())
	}
	if err != nil {
		g.Fail(err)
		return err
	}
	return g.Barrier(ctx, "read")
}

// Without descriptors, which do not travel by a server, it is the fabric or
// nothing, for all.
func TestShare(t *testing.T) {
	endpoint := server(t, "127.0.0.1")
	folder := t.TempDir()
	devices := make([]*cuda.Device, 3)
	for r := range devices {
		_, s := sim.Open(t, machine(folder))
		devices[r] = s.Devices()[0]
	}
	for _, err := range together(group(t, endpoint, "share", 3, Options{}), func(g *rendezvous.Group) error {
		return share(t.Context(), g, devices[g.Rank()], vmm.Fabric|vmm.PosixFD)
	}) {
		require.NoError(t, err)
	}
	require.Zero(t, handles.Leases().Open)
	for _, err := range together(group(t, endpoint, "share nothing", 3, Options{}), func(g *rendezvous.Group) error {
		types := vmm.PosixFD
		if g.Rank() != 1 {
			types |= vmm.Fabric
		}
		return share(t.Context(), g, devices[g.Rank()], types)
	}) {
		require.ErrorIs(t, err, rendezvous.ErrDisagree)
		require.ErrorContains(t, err, "rank 1")
		require.ErrorContains(t, err, "carries no files")
	}
}

func init() {
	reexec.Register("sharer over etcd", func(c *reexec.Child) error {
		rank, _ := strconv.Atoi(c.Args[3])
		client, err := newClient(c.Args[0])
		if err != nil {
			return err
		}
		m, err := sim.New(machine(c.Args[2]))
		if err != nil {
			return err
		}
		s, err := m.Open(cuda.Options{})
		if err != nil {
			return err
		}
		ctx := context.Background()
		g, err := Join(ctx, client, c.Args[1], rank, 3, Options{TTL: 3 * time.Second, Options: rendezvous.Options{Timeout: hostsLimit}})
		if err != nil {
			return err
		}
		var o outcome
		for i := 0; err == nil; i++ {
			if i == 1 {
				if err := c.Send("running"); err != nil {
					return err
				}
			}
			err = share(ctx, g, s.Devices()[0], vmm.Fabric)
		}
		o.Err, o.Gone = err.Error(), errors.Is(err, peer.ErrGone) || errors.Is(err, rendezvous.ErrFailed)
		_ = g.Close()
		_ = client.Close()
		if err := errors.Join(s.Drain(ctx), s.Close(), m.Close()); err != nil { // nothing of it is left
			return err
		}
		if n := handles.Leases().Open; n > 0 {
			return fmt.Errorf("%d leases are open", n)
		}
		return c.Send(o)
	})
}

// If a rank is killed while memory is shared the others name it when its lease ends. They
// keep nothing, and nothing of its memory is left.
func TestKilledSharers(t *testing.T) {
	endpoint := server(t, "127.0.0.1")
	const size = 3
	for _, victim := range rand.Perm(size)[:2] {
		folder := t.TempDir()
		children := make([]*reexec.Cmd, size)
		for r := range children {
			children[r] = reexec.Command(t, "sharer over etcd", endpoint, fmt.Sprint("killed ", victim), folder, strconv.Itoa(r))
			children[r].Start()
		}
		for _, c := range children {
			var running string
			c.Recv(&running)
		}
		time.Sleep(time.Duration(rand.IntN(50)) * time.Millisecond)
		children[victim].Kill()
		for r, c := range children {
			if r == victim {
				continue
			}
			var o outcome
			c.Recv(&o)
			c.Wait()
			require.True(t, o.Gone, "%+v", o)
			require.Contains(t, o.Err, fmt.Sprintf("rank %d", victim))
		}
		require.Eventually(t, func() bool {
			used, err := sim.Inspect(folder)
			require.NoError(t, err)
			return used.Devices[0].Taken == 0
		}, 30*time.Second, time.Millisecond, "memory is left")
	}
}
