//go:build linux

package handles_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// memoryFiles counts the descriptors of memory that are open. The software
// driver has one of each chunk that was exported.
func memoryFiles() (n int) {
	for _, link := range ownFiles() {
		if strings.HasPrefix(link, "/memfd:cuvmm") {
			n++
		}
	}
	return n
}

// One descriptor stays open while there is a connection, so that the driver
// does not set up and take down its exports each time.
func TestOneDescriptorIsKeptWhileSomebodyShares(t *testing.T) {
	noLeak(t)
	m, sys := sim.Open(t)
	d := sys.Devices()[0]
	near, far := pair(t, handles.Options{})
	a, b, c := filled(t, d, 6*mib, 1), filled(t, d, 2*mib, 2), filled(t, d, 2*mib, 3)
	pass := func(b *vmm.Buffer) *vmm.Buffer { return passBuffer(t, near, far, b, d, handles.ImportOptions{}) }
	ia := pass(a)
	require.Equal(t, 3+1, memoryFiles())
	ib := pass(b)
	require.Equal(t, 4+1, memoryFiles(), "one is enough")

	// It pins nothing: it is closed before the memory is given back.
	require.NoError(t, ia.Close())
	atRelease := -1
	m.OnCall(func(call string) {
		if call == "cuMemRelease" && atRelease < 0 {
			atRelease = memoryFiles()
		}
	})
	require.NoError(t, a.Close())
	m.OnCall(nil)
	require.Equal(t, 4, atRelease)
	require.Equal(t, 1, memoryFiles())

	ic := pass(c)
	require.Equal(t, 2+1, memoryFiles(), "the next takes its place")
	require.NoError(t, near.Close())
	require.Equal(t, 2+1, memoryFiles())
	require.NoError(t, far.Close())
	require.Equal(t, 2, memoryFiles(), "nobody shares any more")
	require.NoError(t, ib.Close())
	require.NoError(t, ic.Close())
}

// A publication without followers keeps one for those that come.
func TestAPublicationKeepsADescriptor(t *testing.T) {
	noLeak(t)
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	s := handles.NewServer(handles.ServerOptions{})
	a, err := vmm.NewArray[byte](d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	p, err := handles.PublishArray(s, "x", a)
	require.NoError(t, err)
	require.NoError(t, gputest.Err(a.AppendUndefined(4*mib)))
	require.NoError(t, p.Announce(within(t), a.Len(), nil))
	require.Zero(t, memoryFiles(), "nobody was sent anything")

	near, far := pair(t, handles.Options{})
	served := make(chan error, 1)
	go func() { served <- s.ServeConn(context.Background(), near) }()
	k := handles.NewClient(far)
	got, err := handles.Open[byte](within(t), k, d, "x", handles.ImportOptions{})
	require.NoError(t, err)
	require.NoError(t, got.Close())
	require.NoError(t, k.Close())
	require.NoError(t, near.Close())
	<-served
	// Whoever sent it closes its own in its own time.
	require.Eventually(t, func() bool { return memoryFiles() == 2+1 }, handles.Guard, time.Millisecond)
	require.Never(t, func() bool { return memoryFiles() != 2+1 }, 20*time.Millisecond, time.Millisecond)
	require.NoError(t, p.Withdraw())
	require.Equal(t, 2, memoryFiles())
	require.NoError(t, s.Close())
	require.NoError(t, a.Close())
}
