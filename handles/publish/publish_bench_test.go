//go:build linux

package publish_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

const benchChunk = 2 * mib

func init() {
	// The follower of the benchmark tells when each generation had reached its
	// mapping, and how long the driver calls alone take.
	reexec.Register("follower of the benchmark", func(c *reexec.Child) (err error) {
		sys, d, err := openFast(c.Args[0])
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, sys.Close()) }()
		conn, err := peer.Inherit(c.Files[0], peer.Options{})
		if err != nil {
			return err
		}
		raw, err := peer.Inherit(c.Files[1], peer.Options{})
		if err != nil {
			return err
		}
		defer raw.Close()
		k := publish.NewClient(conn)
		defer k.Close()
		ctx := context.Background()
		f, err := publish.Follow[byte](ctx, k, d, "grows", publish.FollowOptions{})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		s, err := d.NewStream(cuda.StreamOptions{})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.Close()) }()
		drv := core.SystemOf(d).Drv
		base, r := drv.MemAddressReserve(benchChunk, 0, 0)
		if r != driver.Success {
			return fmt.Errorf("%v", r)
		}
		defer drv.MemAddressFree(base, benchChunk)
		for {
			var what string
			if c.Recv(&what) != nil {
				return nil
			}
			var arrived int64
			switch what {
			case "next":
				err, arrived = f.Next(ctx, s), peertest.Monotonic()
			case "raw":
				arrived, err = importOne(ctx, drv, raw, base, d)
			}
			if err == nil {
				err = c.Send(arrived)
			}
			if err != nil {
				return err
			}
		}
	})
}

// openFast opens a driver without leak tracing: the real one, or a software
// machine of the process's own.
func openFast(which string) (sys *cuda.System, d *cuda.Device, err error) {
	if which == "software" {
		var m *sim.Machine
		if m, err = sim.New(sim.Options{}); err == nil {
			peertest.WithCosts(m)
			sys, err = m.OpenOwned(cuda.Options{})
		}
	} else {
		sys, err = cuda.Open(cuda.Options{})
	}
	if err != nil {
		return nil, nil, err
	}
	return sys, sys.Devices()[0], nil
}

// importOne is the driver calls of an importer, and how long they took.
func importOne(ctx context.Context, drv driver.Driver, c *peer.Conn, base driver.Ptr, d *cuda.Device) (int64, error) {
	m, err := c.Receive(ctx)
	if err != nil {
		return 0, err
	}
	defer m.Close()
	var took int64
	err = m.FDs[0].Use(func(n int) error {
		var from driver.ShareableHandle
		binary.NativeEndian.PutUint32(from[:], uint32(int32(n)))
		access := []driver.AccessDesc{{Location: driver.Location{Type: driver.LocationDevice, ID: int32(d.Ordinal())}, Flags: driver.AccessReadWrite}}
		start := peertest.Monotonic()
		h, r := drv.MemImportFromShareableHandle(from, driver.HandlePosixFD)
		if r == driver.Success {
			r = drv.MemMap(base, benchChunk, 0, h)
		}
		if r == driver.Success {
			r = drv.MemSetAccess(base, benchChunk, access)
		}
		took = peertest.Monotonic() - start
		if r == driver.Success {
			r = drv.MemUnmap(base, benchChunk)
		}
		if r == driver.Success {
			r = drv.MemRelease(h)
		}
		if r != driver.Success {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
	return took, err
}

// BenchmarkGrowthReachesAFollower announces one more chunk to a follower in
// another process, until Next has shown it there. Promised: at most 100 µs above
// the driver calls alone (export here; import, map and access there), which are
// taken in turn in the same run: above-µs. The same beside a descriptor that is
// open, as the library keeps one, is beside-µs.
func BenchmarkGrowthReachesAFollower(b *testing.B) {
	b.Run("software", func(b *testing.B) {
		m, s := sim.Open(b)
		peertest.WithCosts(m)
		benchGrowth(b, s.Devices()[0], "software")
	})
	b.Run("real", func(b *testing.B) { benchGrowth(b, gputest.RealWith(b, cuda.Options{}), "real") })
}

func benchGrowth(b *testing.B, d *cuda.Device, which string) {
	conn, far, err := peer.Pair(peer.Options{})
	require.NoError(b, err)
	raw, farRaw, err := peer.Pair(peer.Options{})
	require.NoError(b, err)
	defer raw.Close()
	server := publish.NewServer(publish.ServerOptions{})
	a, err := vmm.NewArray[byte](d, vmm.BufferOptions{Reserve: 8 << 30, Chunks: vmm.FixedChunks(benchChunk)})
	require.NoError(b, err)
	defer func() { require.NoError(b, a.Close()) }()
	p, err := publish.Array(server, "grows", a)
	require.NoError(b, err)
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(b, err)
	defer func() { require.NoError(b, s.Close()) }()
	child := reexec.Command(b, "follower of the benchmark", which)
	child.ExtraFiles = []*os.File{far, farRaw}
	child.Timeout = 10 * time.Minute
	child.Start()
	require.NoError(b, errors.Join(far.Close(), farRaw.Close()))
	served := make(chan error, 1)
	go func() { served <- server.ServeConn(context.Background(), conn) }()
	defer func() {
		require.NoError(b, server.Close())
		require.NoError(b, <-served)
	}()
	ctx := context.Background()
	require.NoError(b, p.AwaitFollowers(ctx, 1))
	drv := core.SystemOf(d).Drv

	ours := func() time.Duration {
		require.NoError(b, gputest.Err(a.AppendUndefined(benchChunk)))
		child.Send("next")
		time.Sleep(2 * time.Millisecond) // it waits by now
		start := peertest.Monotonic()
		require.NoError(b, p.Announce(ctx, a.Len(), s))
		var there int64
		child.Recv(&there)
		return time.Duration(there - start)
	}
	theirs := func() time.Duration {
		one, err := vmm.Create(d, benchChunk, vmm.Properties{})
		require.NoError(b, err)
		defer func() { require.NoError(b, one.Close()) }()
		start := peertest.Monotonic()
		exported, r := drv.MemExportToShareableHandle(rawHandle(one), driver.HandlePosixFD)
		took := peertest.Monotonic() - start
		require.Equal(b, driver.Success, r)
		f, err := peer.NewFD(int(int32(binary.NativeEndian.Uint32(exported[:]))))
		require.NoError(b, err)
		child.Send("raw")
		require.NoError(b, raw.Send(ctx, peer.Message{Kind: 1, FDs: []*peer.FD{f}}))
		require.NoError(b, f.Close())
		var there int64
		child.Recv(&there)
		return time.Duration(took + there)
	}
	ours()
	theirs()
	for b.Loop() {
		ours()
	}
	var all, calls, above, beside []time.Duration
	for range 101 {
		ours() // a descriptor is kept again
		o, t := ours(), theirs()
		all, beside = append(all, o), append(beside, o-t)
		exchange.Warm.Drop()
		t = theirs()
		calls, above = append(calls, t), append(above, o-t)
	}
	b.ReportMetric(0, "ns/op") // the setting up of each round is in it
	b.ReportMetric(micros(middle(all)), "growth-µs")
	b.ReportMetric(micros(middle(calls)), "driver-µs")
	b.ReportMetric(micros(middle(above)), "above-µs")
	b.ReportMetric(micros(middle(beside)), "beside-µs")
	child.Wait()
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }

func middle(all []time.Duration) time.Duration {
	slices.Sort(all)
	return all[len(all)/2]
}

func rawHandle(a *vmm.Allocation) driver.MemHandle {
	h := phys.Of(a)
	defer h.Done()
	raw, err := h.Use("bench")
	if err != nil {
		panic(err)
	}
	return raw
}
