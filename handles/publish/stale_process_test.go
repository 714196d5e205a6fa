//go:build linux

package publish_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// A publisher dies, and followers in another process keep its memory: the one that starts in
// its place is told that others have what it lacks, until they give it back.
func TestARestartedPublisherLearnsWhoHasTheMemory(t *testing.T) {
	p := newPlace(t)
	p.Memory = 66 * mib
	publisher := startPublisher(t, p)
	follower := startFollower(t, p, 0)
	publisher.ask(task{Do: "grow", N: 40 * mib / 4})
	follower.ask(task{Do: "until", N: 40 * mib / 4})
	follower.ask(task{Do: "synchronize"}) // what it was shown is complete
	publisher.Kill()
	require.Equal(t, []string{"gone"}, follower.try(task{Do: "gone"}).Is)

	m, sys := sim.Open(t, p.machine())
	d := sys.Devices()[0]
	require.Equal(t, 40, p.taken(t)/mib, "the publisher that was killed has none, the follower all")
	const says = "other processes, contexts, graphs and libraries hold at least 40.00 MiB of the device's 66 MiB: cuvmm top lists the processes"
	create := func(bytes int) error {
		a, err := vmm.Create(d, bytes, vmm.Properties{})
		if err == nil {
			err = a.Close()
		}
		return err
	}
	grow := func(bytes int) error {
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 68 * mib, Chunks: vmm.FixedChunks(2 * mib)})
		require.NoError(t, err)
		defer func() { require.NoError(t, b.Close()) }()
		return b.Resize(nil, bytes)
	}
	alloc := func(bytes int) error {
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		q, err := pool.New(d, pool.Options{})
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()); require.NoError(t, s.Close()) }()
		block, err := q.Alloc(pool.Request{Stream: s, Bytes: bytes})
		if err == nil {
			err = q.Free(block)
		}
		return err
	}
	for name, try := range map[string]func(int) error{"vmm.Create": create, "vmm.Buffer": grow, "pool": alloc} {
		err := try(32 * mib)
		require.ErrorIs(t, err, cuda.ErrOutOfMemory, name)
		require.ErrorContains(t, err, says, name)
		err = try(68 * mib)
		require.NotContains(t, err.Error(), "other processes", "%s: the device never has that much", name)
	}
	require.ErrorContains(t, grow(60*mib), says, "pieces that were made lack no more")
	// What this process has lacks, not what the others do.
	own, err := vmm.Create(d, 24*mib, vmm.Properties{})
	require.NoError(t, err)
	require.ErrorContains(t, create(36*mib), says)
	require.NotContains(t, create(38*mib).Error(), "other processes")
	require.NoError(t, own.Close())

	m.Inject(sim.Fault{Call: "cuMemGetInfo", Result: cuda.Code(driver.Unknown), Times: -1})
	for name, try := range map[string]func(int) error{"vmm.Create": create, "vmm.Buffer": grow, "pool": alloc} {
		err := try(32 * mib)
		require.ErrorIs(t, err, cuda.ErrOutOfMemory, name)
		require.NotContains(t, err.Error(), "other processes", name)
		require.NotContains(t, err.Error(), "cuMemGetInfo", name)
	}
	m.ClearFaults()

	follower.Wait() // closes its follower
	require.Zero(t, p.taken(t)/mib)
	for name, try := range map[string]func(int) error{"vmm.Create": create, "vmm.Buffer": grow, "pool": alloc} {
		require.NoError(t, try(32*mib), name)
		require.NotContains(t, try(68*mib).Error(), "other processes", name)
	}
}
