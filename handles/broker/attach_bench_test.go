//go:build linux

package broker_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// benchRole is a broker for its parent, on the machine in a folder or, without one, on the real driver.
func benchRole(args []string) error {
	open := func() (*cuda.System, error) { return cuda.Open(cuda.Options{}) }
	if len(args) > 0 {
		open = func() (*cuda.System, error) { return openBench(args[0]) }
	}
	sys, err := open()
	if err != nil {
		return err
	}
	c, err := peer.Inherit(os.NewFile(3, "parent"), peer.Options{})
	if err != nil {
		return err
	}
	b, err := broker.New(context.Background(), sys, broker.Options{})
	if err != nil {
		return err
	}
	return errors.Join(b.ServeConn(context.Background(), c), b.Close(), sys.Close())
}

func openBench(folder string) (*cuda.System, error) {
	m, err := sim.New(sim.Options{Folder: folder, Devices: []sim.DeviceOptions{{Memory: 4 << 30}}})
	if err != nil {
		return nil, err
	}
	peertest.WithCosts(m)
	return m.OpenOwned(cuda.Options{})
}

// BenchmarkAttach attaches objects in chunks of 1 GiB, beside the driver calls alone that import, map
// and grant the same chunks in this process, in turn. Promised for 64 GiB: at most 1.1 of those, or
// 1 ms more. tensors-ms is for an object of so many tensors, found by name, beside none. Of an object on another
// device reads are copied from there.
func BenchmarkAttach(b *testing.B) {
	b.Run("software/1GiB", func(b *testing.B) { // which has a file for each chunk
		folder := b.TempDir()
		sys, err := openBench(folder)
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, sys.Close()) })
		benchAttach(b, sys.Devices()[0], sys.Devices()[0], 1, folder)
	})
	for _, gib := range []int{1, 16, 64} {
		b.Run(fmt.Sprintf("real/%dGiB", gib), func(b *testing.B) {
			d := gputest.RealWith(b, cuda.Options{})
			benchAttach(b, d, d, gib)
		})
	}
	b.Run("other-device/16GiB", func(b *testing.B) {
		far := gputest.RealWith(b, cuda.Options{})
		if len(far.System().Devices()) < 2 {
			b.Skipf("one GPU here (%v): a pair is needed", far)
		}
		benchAttach(b, far, far.System().Devices()[1], 16)
	})
}

// benchAttach has objects made on one device, and attaches them for one.
func benchAttach(b *testing.B, on, d *cuda.Device, gib int, args ...string) {
	near, file, err := peer.Pair(peer.Options{})
	require.NoError(b, err)
	server := as("bench", args...)
	server.ExtraFiles, server.Stderr = []*os.File{file}, os.Stderr
	require.NoError(b, server.Start())
	require.NoError(b, file.Close())
	ctx := peertest.Context(b)
	k, err := broker.NewClient(ctx, near)
	require.NoError(b, err)
	b.Cleanup(func() {
		require.NoError(b, k.Close())
		require.NoError(b, server.Wait())
	})
	const tensors = 1000
	m := &handles.Manifest{Bytes: gib << 30}
	for i := range tensors {
		m.Tensors = append(m.Tensors, handles.Tensor{Name: "layer." + strconv.Itoa(i), Element: handles.Uint8, Shape: []int{gib << 20}, Offset: i * gib << 20})
	}
	var plain, described *broker.Object
	for _, x := range []struct {
		name string
		m    *handles.Manifest
		to   **broker.Object
	}{{"plain", nil, &plain}, {"described", m, &described}} {
		if x.m != nil { // one at a time is on the device
			require.NoError(b, k.Remove(ctx, "plain", 0))
			require.NoError(b, plain.Close())
		}
		w, err := k.Create(ctx, on, x.name, broker.CreateOptions{Bytes: gib << 30})
		require.NoError(b, err)
		*x.to, err = w.Commit(ctx, x.m)
		require.NoError(b, err)
		benchOne(b, k, d, x.name, x.m, gib)
	}
	if on != d {
		benchReads(b, k, d, "described")
	}
	require.NoError(b, described.Close())
}

// benchReads copies 1 GiB of an object to memory of the device, in turn with 1 GiB of that.
func benchReads(b *testing.B, k *broker.Client, d *cuda.Device, name string) {
	const n = 1 << 30
	o, err := k.Attach(peertest.Context(b), d, name, broker.AttachOptions{})
	require.NoError(b, err)
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(b, err)
	near, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 2 * n})
	require.NoError(b, err)
	require.NoError(b, near.Resize(nil, 2*n))
	for name, from := range map[string]cuda.Ptr{"far": o.Buffer().Ptr(), "near": near.Ptr() + n} {
		var times []time.Duration
		for range 11 {
			start := time.Now()
			require.NoError(b, s.Copy(near.Ptr(), from, n))
			require.NoError(b, s.Synchronize())
			times = append(times, time.Since(start))
		}
		slices.Sort(times)
		b.ReportMetric(n/times[len(times)/2].Seconds()/1e9, "reads-"+name+"-GB/s")
	}
	require.NoError(b, errors.Join(near.Close(), s.Close(), o.Close()))
}

func benchOne(b *testing.B, k *broker.Client, d *cuda.Device, name string, m *handles.Manifest, gib int) {
	ctx := peertest.Context(b)
	kept, err := k.AttachKeeping(ctx, d, name)
	require.NoError(b, err)
	v, err := share.Of(kept.Buffer()).View("bench", uint64(gib<<30))
	require.NoError(b, err)
	var fds []*peer.FD
	for _, c := range v.Chunks {
		n, err := c.Handle.Export("bench")
		require.NoError(b, err)
		f, err := peer.NewFD(n)
		require.NoError(b, err)
		fds = append(fds, f)
	}
	require.NoError(b, v.Release())
	require.NoError(b, kept.Close())
	require.Len(b, fds, gib)
	var ours, raw []time.Duration
	for range 11 {
		start := time.Now()
		o, err := k.Attach(ctx, d, name, broker.AttachOptions{})
		require.NoError(b, err)
		if m != nil {
			for i := range m.Tensors {
				_, _, err := o.Tensor(m.Tensors[i].Name)
				require.NoError(b, err)
			}
		}
		ours = append(ours, time.Since(start))
		require.NoError(b, o.Close())
		took, err := peertest.ImportRaw(d, fds, 1<<30)
		require.NoError(b, err)
		raw = append(raw, took)
	}
	require.NoError(b, peer.CloseAll(fds))
	slices.Sort(ours)
	slices.Sort(raw)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	if m != nil {
		b.ReportMetric(ms(ours[5]), "tensors-ms")
		return
	}
	b.ReportMetric(ms(ours[5]), "attach-ms")
	b.ReportMetric(ms(raw[5]), "driver-ms")
	b.ReportMetric(float64(ours[5])/float64(raw[5]), "ratio")
	b.ReportMetric(0, "ns/op")
}
