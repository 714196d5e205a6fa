//go:build linux

package handles_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// BenchmarkShare shares and maps 1, 128 and 3,435 allocations with another
// process, until both sides have returned. Promised: at most 1.1 of the driver
// calls alone, which are taken in turn in the same run: the exports here, the
// imports, maps and the grant there, one process after the other. Both begin with
// processes that had nothing to do for a moment.
//
// The library keeps a descriptor open, beside which the driver is quicker. So
// there are two of each: first-ratio is of the first memory that a process
// shares, when none is kept yet, and beside-ratio is the library's time over that of
// the driver's calls beside a descriptor that is open.
func BenchmarkShare(b *testing.B) {
	for _, n := range []int{1, 128, 3435} {
		b.Run(fmt.Sprintf("%d allocations", n), func(b *testing.B) {
			b.Run("software", func(b *testing.B) {
				folder := b.TempDir()
				m, err := sim.New(folderOptions(folder, 1<<30))
				require.NoError(b, err)
				peertest.WithCosts(m)
				s, err := m.OpenOwned(cuda.Options{})
				require.NoError(b, err)
				b.Cleanup(func() { require.NoError(b, s.Close()) })
				benchShare(b, s.Devices()[0], folder, n, 64<<10)
			})
			b.Run("real", func(b *testing.B) { benchShare(b, gputest.RealWith(b, cuda.Options{}), "", n, 2*mib) })
		})
	}
}

func benchShare(b *testing.B, d *cuda.Device, folder string, n, chunk int) {
	conn, far, err := peer.Pair(peer.Options{})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, conn.Close()) })
	child := reexec.Command(b, "party")
	child.ExtraFiles = []*os.File{far}
	child.Timeout = 10 * time.Minute
	child.Start()
	far.Close()
	ask := func(o order) (r report) {
		child.Send(o)
		child.Recv(&r)
		require.Empty(b, r.Err)
		return r
	}
	ask(order{Do: "open", Folder: folder, Memory: 1 << 30, Fast: true, Costs: true})
	ask(order{Do: "inherit"})
	buf, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: n * chunk, Chunks: vmm.FixedChunks(chunk)})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, buf.Close()) })
	require.NoError(b, gputest.Err(buf.AppendUndefined(n*chunk)))
	received := 0
	ours := func() time.Duration {
		child.Send(order{Do: "receive"})
		time.Sleep(2 * time.Millisecond) // it waits by now
		start := peertest.Monotonic()
		require.NoError(b, handles.SendBuffer(context.Background(), conn, buf))
		end := peertest.Monotonic()
		var r report
		child.Recv(&r)
		require.Empty(b, r.Err)
		ask(order{Do: "close", Nth: received})
		received++
		return time.Duration(max(end, r.At) - start)
	}
	theirs := func() time.Duration {
		time.Sleep(2 * time.Millisecond)
		fds, took := exportRaw(b, buf)
		child.Send(order{Do: "import raw", N: n, Chunk: chunk})
		require.NoError(b, conn.Send(context.Background(), peer.Message{Kind: 1, FDs: fds}))
		for _, f := range fds {
			require.NoError(b, f.Close())
		}
		var r report
		child.Recv(&r)
		require.Empty(b, r.Err)
		return took + time.Duration(r.Nanos)
	}
	ours()
	theirs()
	for b.Loop() {
		ours()
	}
	var first, again, beside, alone []time.Duration
	for range max(5, min(101, 1000/n)) {
		exchange.Warm.Drop()
		first, again, beside = append(first, ours()), append(again, ours()), append(beside, theirs())
		exchange.Warm.Drop()
		alone = append(alone, theirs())
	}
	ratio := func(a, b []time.Duration) float64 { return float64(median(a)) / float64(median(b)) }
	b.ReportMetric(float64(median(again).Microseconds()), "share-us")
	b.ReportMetric(float64(median(alone).Microseconds()), "driver-us")
	b.ReportMetric(ratio(again, alone), "ratio")
	b.ReportMetric(ratio(first, alone), "first-ratio")
	b.ReportMetric(ratio(again, beside), "beside-ratio")
	child.Wait()
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// exportRaw is the driver calls of the exporter alone.
func exportRaw(b *testing.B, buf *vmm.Buffer) (fds []*peer.FD, took time.Duration) {
	v, err := share.Of(buf).View("bench", uint64(buf.Len()))
	require.NoError(b, err)
	defer func() { require.NoError(b, v.Release()) }()
	drv := core.SystemOf(buf.Device()).Drv
	all := make([]driver.ShareableHandle, len(v.Chunks))
	start := time.Now()
	for i, c := range v.Chunks {
		h, err := c.Handle.Use("bench")
		require.NoError(b, err)
		var r driver.Result
		all[i], r = drv.MemExportToShareableHandle(h, driver.HandlePosixFD)
		c.Handle.Done()
		if r != driver.Success {
			b.Fatal(r)
		}
	}
	took = time.Since(start)
	for _, s := range all {
		f, err := peer.NewFD(int(int32(binary.NativeEndian.Uint32(s[:]))))
		require.NoError(b, err)
		fds = append(fds, f)
	}
	return fds, took
}

// importRaw is the driver calls of the importer alone.
func (p *party) importRaw(ctx context.Context, chunk int) (time.Duration, error) {
	m, err := p.conn.Receive(ctx)
	if err != nil {
		return 0, err
	}
	defer m.Close()
	return peertest.ImportRaw(p.d, m.FDs, uint64(chunk))
}

// BenchmarkShareInOneProcess has both sides of a share in this process, so that its
// allocations are counted.
func BenchmarkShareInOneProcess(b *testing.B) {
	for _, n := range []int{1, 128} {
		b.Run(fmt.Sprintf("%d allocations", n), func(b *testing.B) {
			_, s := sim.Open(b)
			d, chunk := s.Devices()[0], 2*mib
			near, far := peertest.Pair(b, peer.Options{})
			buf, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: n * chunk, Chunks: vmm.FixedChunks(chunk)})
			require.NoError(b, err)
			defer func() { require.NoError(b, buf.Close()) }()
			require.NoError(b, gputest.Err(buf.AppendUndefined(n*chunk)))
			due, done := make(chan struct{}), make(chan error)
			defer close(due)
			go func() {
				for range due {
					got, err := handles.ReceiveBuffer(context.Background(), far, d, handles.ImportOptions{})
					if err == nil {
						err = got.Close()
					}
					done <- err
				}
			}()
			b.ReportAllocs()
			for b.Loop() {
				due <- struct{}{}
				require.NoError(b, handles.SendBuffer(context.Background(), near, buf))
				require.NoError(b, <-done)
			}
		})
	}
}
