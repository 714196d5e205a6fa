//go:build linux

package broker_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// Every driver call of the broker and of its client fails, alone and with all releases behind it:
// whoever asked learns of it, the broker goes on, and nothing is left over.
func TestEveryFailure(t *testing.T) {
	peertest.NoLeak(t)
	folder := t.TempDir()
	brokers, sys := sim.Open(t, machine(folder))
	clients, own := sim.Open(t, machine(folder))
	d := own.Devices()[0]
	h := newHouse(t, sys.Devices()[0], broker.Options{})
	k := h.dial()
	ctx := peertest.Context(t)
	work := func() (err error) {
		w, err := k.Create(ctx, d, "w", broker.CreateOptions{Bytes: 3 * kib64, Ephemeral: true})
		if err != nil {
			return err
		}
		o, err := w.Commit(ctx, nil)
		if err != nil {
			return errors.Join(err, again(w.Close))
		}
		other, err := k.Attach(ctx, d, "w", broker.AttachOptions{})
		if err == nil {
			err = again(other.Close)
		}
		return errors.Join(err, again(o.Close))
	}
	require.NoError(t, work())
	taken := used(t, own)
	tried := 0
	for _, struck := range []*sim.Machine{brokers, clients} {
		before := struck.Counts()
		require.NoError(t, work())
		for call, n := range struck.Counts() {
			for i := range n - before[call] {
				for _, release := range []string{"", "cuMemRelease", "cuMemUnmap", "cuMemAddressFree"} {
					at := fmt.Sprintf("call %d of %s, and %q", i, call, release)
					if release != "" {
						struck.Inject(sim.Fault{Call: release, Times: 3, Result: cuda.Code(driver.Unknown)})
					}
					struck.Inject(sim.Fault{Call: call, After: i, Result: cuda.Code(driver.Unknown)})
					tried++
					_ = work()
					struck.ClearFaults()
					require.NoError(t, sys.Drain(ctx), at)
					require.NoError(t, own.Drain(ctx), at)
					require.NoError(t, work(), at)
					left, err := k.List(ctx)
					require.NoError(t, err, at)
					require.Empty(t, left, at)
					require.Equal(t, 2, h.keeper.Len(), at)
					require.Empty(t, sys.Leftovers(), at)
					require.Equal(t, taken, used(t, own), at)
				}
			}
		}
	}
	require.Greater(t, tried, 50)
	t.Logf("%d failures", tried)
}

// again calls a Close until it succeeds: it goes on where it stopped.
func again(close func() error) (err error) {
	for range 10 {
		if err = close(); err == nil {
			return nil
		}
	}
	return err
}
