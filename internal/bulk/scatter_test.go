package bulk_test

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/bulk"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// apart returns count segments of about n bytes in an order of chance, with a gap behind each, and all
// bytes that they span.
func apart(r *rand.Rand, p driver.Ptr, count, n, unit int) (segments []bulk.Segment, span int) {
	for range count {
		size := unit * (1 + r.IntN(2*n/unit))
		segments = append(segments, bulk.Segment{Ptr: p + driver.Ptr(span), Bytes: uint64(size)})
		span += size + unit*(1+r.IntN(3))
	}
	r.Shuffle(count, func(i, j int) { segments[i], segments[j] = segments[j], segments[i] })
	return segments, span
}

// fillFrom is a Read of bytes that begin at an odd place of their piece.
func fillFrom(b []byte, skip int) bulk.Read {
	return func(_ context.Context, buf []byte, offset uint64, n int) (int, error) {
		copy(buf[skip:], b[offset:][:n])
		return skip, nil
	}
}

// Many small segments anywhere get their bytes, whatever the alignment, and what lies between them stays.
func TestSmallSegmentsAnywhere(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		g := on(t, d)
		for i, c := range []struct{ count, n, unit, skip int }{
			{1000, 4096, 1, 7}, {700, 8192, 16, 16}, {1500, 3000, 4, 8}, {130, 60_000, 1, 0}, {5000, 100, 1, 3}, {300, 40, 1, 1},
		} {
			r := rand.New(rand.NewPCG(uint64(i), 9))
			_, span := apart(rand.New(rand.NewPCG(uint64(i), 9)), 0, c.count, c.n, c.unit)
			p := g.memory(t, span)
			segments, _ := apart(r, p, c.count, c.n, c.unit)
			total := 0
			for _, s := range segments {
				total += int(s.Bytes)
			}
			before, b := random(span, 77), random(total, uint64(i))
			g.write(t, p, before)
			require.NoError(t, g.Fill(t.Context(), segments, fillFrom(b, c.skip), o))
			rest := b
			for _, s := range segments {
				copy(before[s.Ptr-p:], rest[:s.Bytes])
				rest = rest[s.Bytes:]
			}
			same(t, before, g.read(t, p, span), "scattered")
		}
	})
}

// A piece with many segments is one copy and a kernel. Few and large ones are copied in batches, as all are if
// the device takes no kernel or has no room.
func TestWhichSegmentsAreDistributed(t *testing.T) {
	for name, c := range map[string]struct {
		count, n    int
		without     string // which the driver refuses
		distributed bool
	}{
		"many":             {600, 4096, "", true},
		"few":              {127, 4096, "", false},
		"large":            {130, 70_000, "", false},
		"without kernels":  {600, 4096, "cuModuleLoadData", false},
		"without an entry": {600, 4096, "cuModuleGetFunction", false},
		"without room":     {600, 4096, "cuMemAllocAsync", false},
	} {
		t.Run(name, func(t *testing.T) {
			m, sys := sim.Open(t)
			g := on(t, sys.Devices()[0])
			p := g.memory(t, 2*c.count*c.n)
			var segments []bulk.Segment
			for i := range c.count {
				segments = append(segments, bulk.Segment{Ptr: p + driver.Ptr(2*i*c.n), Bytes: uint64(c.n)})
			}
			b := random(c.count*c.n, 3)
			if c.without != "" {
				m.Inject(sim.Fault{Call: c.without, Times: -1, Result: 801})
			}
			for range 2 { // the kernel is loaded once
				copies, batches, kernels := m.Count("cuMemcpyHtoDAsync"), m.Count("cuMemcpyBatchAsync"), m.Count("cuLaunchKernel")
				require.NoError(t, g.Fill(t.Context(), segments, fillFrom(b, 0), o))
				copies, kernels = m.Count("cuMemcpyHtoDAsync")-copies, m.Count("cuLaunchKernel")-kernels
				if c.distributed {
					require.Equal(t, copies, kernels)
					require.LessOrEqual(t, kernels, 6)
				} else {
					require.Zero(t, kernels)
					require.GreaterOrEqual(t, m.Count("cuMemcpyBatchAsync")-batches, c.count/bulk.MostCopies)
				}
			}
			require.LessOrEqual(t, m.Count("cuModuleLoadData"), 1)
			m.ClearFaults()
			for i, s := range segments {
				if i%17 == 0 {
					same(t, b[i*c.n:][:c.n], g.read(t, s.Ptr, c.n), "a segment")
				}
			}
		})
	}
}

// Addresses without memory are an error, as of copies, and the context lives on.
func TestSegmentsWithoutMemory(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		g := on(t, d)
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
		require.NoError(t, err)
		defer func() { require.NoError(t, b.Close()) }()
		require.NoError(t, b.Resize(nil, 4*mib))
		var segments []bulk.Segment
		for i := range 500 { // the last ones are behind what is mapped
			segments = append(segments, bulk.Segment{Ptr: driver.Ptr(b.Ptr()) + driver.Ptr(i*16<<10), Bytes: 4096})
		}
		data := random(500*4096, 1)
		require.ErrorIs(t, g.Fill(t.Context(), segments, fillFrom(data, 0), o), cuda.ErrInvalidArgument)
		err = g.Drain(t.Context(), segments, func(context.Context, []byte, uint64) error { return nil }, o)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.NoError(t, g.Fill(t.Context(), segments[:200], fillFrom(data, 0), o))
		same(t, data[:4096], g.read(t, segments[0].Ptr, 4096), "the first")
	})
}

// Segments whose table would be as long as they are copied each.
func TestTinySegmentsAreNotDistributed(t *testing.T) {
	for n, want := range map[uint64]bool{50: false, 100: true} {
		var segments []bulk.Segment
		for i := range uint64(25_000) {
			segments = append(segments, bulk.Segment{Ptr: driver.Ptr(1 + 2*i*n), Bytes: n})
		}
		require.Equal(t, want, bulk.Distributes(segments), "%d bytes", n)
	}
}
