//go:build linux

package handles_test

import (
	"bytes"
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/diagnose"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

const fdAndFabric = vmm.PosixFD | vmm.Fabric

// inClique is a place on a fabric with channel 3 open.
var inClique = sim.Fabric{Channels: []int{3}, Cluster: [16]byte{1}, Clique: 7}

// elsewhere is that place, but for something.
func elsewhere(change func(*sim.Fabric)) sim.Fabric {
	f := inClique
	change(&f)
	return f
}

var (
	noChannel      = elsewhere(func(f *sim.Fabric) { f.Channels = nil })
	anotherChannel = elsewhere(func(f *sim.Fabric) { f.Channels = []int{4} })
	anotherClique  = elsewhere(func(f *sim.Fabric) { f.Clique = 8 })
)

// onFabric opens the machine of a folder as processes at these places see it.
func onFabric(t testing.TB, folder string, places ...sim.Fabric) (devices []*cuda.Device, machines []*sim.Machine) {
	for _, f := range places {
		m, s := sim.Open(t, sim.Options{Folder: folder, Fabric: f, Devices: []sim.DeviceOptions{{Memory: 256 * mib}}})
		devices, machines = append(devices, s.Devices()[0]), append(machines, m)
	}
	return devices, machines
}

// shareable is a buffer of chunks chunks with these handle types.
func shareable(t testing.TB, d *cuda.Device, types vmm.HandleTypes, chunks, seed int) *vmm.Buffer {
	t.Helper()
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 256 * mib, Chunks: vmm.FixedChunks(2 * mib), Memory: vmm.Properties{Handles: types}})
	require.NoError(t, err)
	closeLater(t, b)
	require.NoError(t, gputest.Err(b.AppendUndefined(chunks*2*mib)))
	if chunks == 0 {
		return b
	}
	require.NoError(t, spots(b, func(part vmm.Slice[byte]) error { return part.CopyFrom(nil, pattern(part.Len(), seed)) }))
	return b
}

func holds(t testing.TB, b *vmm.Buffer, seed int) {
	t.Helper()
	if b.Len() == 0 {
		return
	}
	require.NoError(t, spots(b, func(part vmm.Slice[byte]) error {
		got := make([]byte, part.Len())
		if err := part.CopyTo(nil, got); err != nil {
			return err
		}
		require.Equal(t, pattern(len(got), seed), got)
		return nil
	}))
}

// loggedPair is a connection of which both ends log.
func loggedPair(t testing.TB) (near, far *peer.Conn, nearLog, farLog *bytes.Buffer) {
	t.Helper()
	nearLog, farLog = new(bytes.Buffer), new(bytes.Buffer)
	near, f, err := peer.Pair(peer.Options{Log: slog.New(slog.NewTextHandler(nearLog, nil))})
	require.NoError(t, err)
	closeLater(t, near)
	far, err = peer.Inherit(f, peer.Options{Log: slog.New(slog.NewTextHandler(farLog, nil))})
	require.NoError(t, err)
	closeLater(t, far)
	return near, far, nearLog, farLog
}

// Memory travels by descriptor if it has one, and otherwise by fabric handle: a place on the
// fabric matters to the latter alone.
func TestMemoryTravelsByDescriptorIfItHasOne(t *testing.T) {
	for _, row := range []struct {
		what     string
		types    vmm.HandleTypes
		receiver sim.Fabric
	}{
		{"both, and a receiver on the channel", fdAndFabric, inClique},
		{"both, and a receiver without a channel", fdAndFabric, noChannel},
		{"both, and a receiver of another clique", fdAndFabric, anotherClique},
		{"descriptors alone", vmm.PosixFD, inClique},
		{"fabric alone", vmm.Fabric, inClique},
	} {
		t.Run(row.what, func(t *testing.T) {
			for _, chunks := range []int{0, 1, 70} { // none, one message, several
				devices, _ := onFabric(t, t.TempDir(), inClique, row.receiver)
				from, to := peertest.Pair(t, peer.Options{})
				b := shareable(t, devices[0], row.types, chunks, 5)
				files := peer.OpenFDs()
				i := passBuffer(t, from, to, b, devices[1], handles.ImportOptions{})
				closeLater(t, i)
				holds(t, i, 5)
				require.Eventually(t, func() bool { return peer.OpenFDs() == files }, peertest.Guard, time.Millisecond)
			}
		})
	}
}

// Where only the fabric would do, or its result is not one to fall back on, the
// transfer fails on both sides with the receiver's reason and nothing is kept.
func TestNoWay(t *testing.T) {
	for _, row := range []struct {
		what     string
		types    vmm.HandleTypes
		receiver sim.Fabric
		want     error
		says     string
	}{
		{"fabric alone, no channel", vmm.Fabric, noChannel, cuda.ErrNotSupported, "mknod"},
		{"fabric alone, another channel", vmm.Fabric, anotherChannel, cuda.ErrNotPermitted, "channel 4"},
		{"fabric alone, another clique", vmm.Fabric, anotherClique, cuda.ErrInvalidArgument, "clique 01000000-0000-0000-0000-000000000000.8"},
	} {
		t.Run(row.what, func(t *testing.T) {
			devices, _ := onFabric(t, t.TempDir(), inClique, row.receiver)
			from, to, fromLog, toLog := loggedPair(t)
			b := shareable(t, devices[0], row.types, 2, 5)
			var group errgroup.Group
			ctx := peertest.Context(t)
			group.Go(func() error { return handles.SendBuffer(ctx, from, b) })
			_, err := handles.ReceiveBuffer(ctx, to, devices[1], handles.ImportOptions{})
			require.ErrorIs(t, err, row.want)
			if row.receiver.Channels == nil {
				var why *diagnose.Error
				require.ErrorAs(t, err, &why)
				require.NotEmpty(t, why.Findings)
			} else {
				require.ErrorContains(t, err, row.says)
			}
			sent := group.Wait()
			require.ErrorIs(t, sent, peer.ErrRefused)
			require.Zero(t, devices[1].System().Stats().Allocations)
			require.Empty(t, fromLog.String()+toLog.String())
			// The connection goes on.
			i := passBuffer(t, from, to, filled(t, devices[0], 100, 1), devices[1], handles.ImportOptions{})
			require.NoError(t, i.Close())
		})
	}
}

// Memory that has neither type, and arrays by fabric.
func TestObjectsByFabric(t *testing.T) {
	devices, _ := onFabric(t, t.TempDir(), inClique, inClique)
	from, to, _, _ := loggedPair(t)
	require.ErrorIs(t, handles.SendBuffer(peertest.Context(t), from, shareable(t, devices[0], vmm.NoHandles, 1, 5)), cuda.ErrNotSupported)
	_, err := handles.ReceiveBuffer(peertest.Context(t), to, devices[1], handles.ImportOptions{})
	require.ErrorIs(t, err, peer.ErrRefused)

	a, err := vmm.NewArray[int32](devices[0], vmm.BufferOptions{Reserve: 8 * mib, Memory: vmm.Properties{Handles: vmm.Fabric}})
	require.NoError(t, err)
	closeLater(t, a)
	require.NoError(t, gputest.Err(a.Append(nil, []int32{1, 2, 3})))
	got := passed(t, func(ctx context.Context) error { return handles.SendArray(ctx, from, a) },
		func(ctx context.Context) (*vmm.Array[int32], error) {
			return handles.ReceiveArray[int32](ctx, to, devices[1], handles.ImportOptions{})
		})
	closeLater(t, got)
	read := make([]int32, 3)
	require.NoError(t, got.All().CopyTo(nil, read))
	require.Equal(t, []int32{1, 2, 3}, read)
	again := passed(t, func(ctx context.Context) error { return handles.SendArray(ctx, from, a) },
		func(ctx context.Context) (*vmm.Array[int32], error) {
			return handles.ReceiveArray[int32](ctx, to, devices[1], handles.ImportOptions{})
		})
	closeLater(t, again)

}

// If any driver call fails on either side, both get an error and nothing is left.
func TestFabricFailures(t *testing.T) {
	devices, machines := onFabric(t, t.TempDir(), inClique, inClique)
	for _, row := range []struct {
		at   int
		call string
	}{{0, "cuMemExportToShareableHandle"}, {1, "cuMemImportFromShareableHandle"}, {1, "cuMemMap"}, {1, "cuMemSetAccess"}} {
		for _, after := range []int{0, 1} {
			for _, code := range []cuda.Code{2, 400, 999} {
				from, to, _, _ := loggedPair(t)
				b := shareable(t, devices[0], vmm.Fabric, 2, 5)
				remove := machines[row.at].Inject(sim.Fault{Call: row.call, After: after, Result: code})
				ctx := peertest.Context(t)
				var group errgroup.Group
				group.Go(func() error { return handles.SendBuffer(ctx, from, b) })
				i, err := handles.ReceiveBuffer(ctx, to, devices[1], handles.ImportOptions{})
				remove()
				sent := group.Wait()
				require.Equal(t, err == nil, sent == nil, "%v and %v", err, sent)
				if err == nil { // there was no second call
					require.NoError(t, i.Close())
				}
				require.NoError(t, devices[1].System().Drain(t.Context()))
				require.Zero(t, devices[1].System().Stats().Allocations)
			}
		}
	}
}
