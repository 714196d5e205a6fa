//go:build linux

package publish_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// System.Close takes along what an operation left, without a Drain before: even a page, whose
// end is on a goroutine of its own because the driver may wait there.
func TestCloseGivesBackWhatAnOperationLeft(t *testing.T) {
	_, publishers := sim.Open(t)
	server, path := publishing(t, publish.ServerOptions{})
	published(t, server, publishers.Devices()[0])
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	sys, err := m.OpenOwned(cuda.Options{})
	require.NoError(t, err)
	for _, refused := range []string{"cuStreamDestroy", "cuMemHostUnregister"} {
		m.Inject(sim.Fault{Call: "cuMemAddressReserve", Result: cuda.Code(driver.OutOfMemory)})
		m.Inject(sim.Fault{Call: refused, Times: -1, Result: cuda.Code(driver.Unknown)})
		_, err := publish.Follow[uint32](peertest.Context(t), client(t, path), sys.Devices()[0], "numbers", publish.FollowOptions{})
		require.ErrorContains(t, err, refused)
		require.ErrorContains(t, sys.Close(), "none of it is yours to close")
		m.ClearFaults()
	}
	require.NoError(t, sys.Close())
	require.Empty(t, m.Leaks())
}

// Operations that fail when the driver has made something, and what the driver then refuses
// to take back: the System has it until the driver does.
func TestWhatAnOperationCannotUndoIsGivenBackLater(t *testing.T) {
	type theirs struct{ _ uint64 }
	type mine struct{ _ *uint64 } // which Go cannot keep outside of its memory
	devices := sim.Options{Devices: []sim.DeviceOptions{{Granularity: 64 << 10}}}
	_, publishers := sim.Open(t, devices)
	server, path := publishing(t, publish.ServerOptions{})
	a, err := vmm.NewArray[theirs](publishers.Devices()[0], vmm.BufferOptions{Reserve: 1 << 20, Chunks: vmm.FixedChunks(64 << 10)})
	require.NoError(t, err)
	closeLater(t, a)
	require.NoError(t, gputest.Err(a.Append(nil, make([]theirs, 20_000))))
	p, err := publish.Array(server, "cells", a)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Withdraw()) })
	require.NoError(t, p.Announce(peertest.Context(t), a.Len()))
	k := client(t, path)

	m, sys := sim.Open(t, devices)
	d := sys.Devices()[0]
	f, err := publish.Follow[theirs](peertest.Context(t), k, d, "cells", publish.FollowOptions{}) // what a device has from then on
	require.NoError(t, err)
	require.NoError(t, f.Close())
	other, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 1 << 20})
	require.NoError(t, err)
	closeLater(t, other)

	for _, c := range []struct {
		name    string
		refused []string
		do      func() error
		is      error
	}{
		{"Follow", []string{"cuMemHostUnregister", "cuStreamDestroy", "cuMemAddressFree"}, func() error {
			return gputest.Err(publish.Follow[mine](peertest.Context(t), k, d, "cells", publish.FollowOptions{}))
		}, cuda.ErrInvalidArgument},
		{"Open", []string{"cuMemUnmap", "cuMemRelease", "cuMemAddressFree"}, func() error {
			return gputest.Err(publish.Open[mine](peertest.Context(t), k, d, "cells", handles.ImportOptions{}))
		}, cuda.ErrInvalidArgument},
		{"Publish", []string{"cuStreamDestroy"}, func() error { return gputest.Err(server.Publish("cells", other)) }, cuda.ErrInUse},
	} {
		for _, refused := range c.refused {
			before := m.Live()
			m.Inject(sim.Fault{Call: refused, Times: -1, Result: cuda.Code(driver.Unknown)})
			err := c.do()
			require.ErrorIs(t, err, c.is, c.name)
			require.ErrorContains(t, err, refused, c.name)
			require.NotEmpty(t, sys.Leftovers(), c.name)
			require.ErrorContains(t, sys.Close(), "none of it is yours to close", c.name)
			m.ClearFaults()
			require.NoError(t, sys.Drain(t.Context()), c.name)
			require.Equal(t, before, m.Live(), "%s, %s", c.name, refused)
		}
	}
}
