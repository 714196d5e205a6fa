package vmm_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/bulk"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/limits"
	"github.com/cuvmm/cuvmm/internal/suspend"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

const (
	gib = 1 << 30
	// sleepChunk is the size of the chunks: with smaller ones the driver's time for each counts.
	sleepChunk = 32 << 20
	rawPiece   = 4 << 20
	// rawHost is how much pinned memory raw copies use, again and again.
	rawHost = 4 * gib
	rounds  = 7
)

// benchSleeper is a full buffer to suspend, with its context for raw driver calls.
type benchSleeper struct {
	*testing.B
	d   *cuda.Device
	ctx *core.Context
	b   *vmm.Buffer
	n   int
}

// sleepers runs a benchmark with buffers of 1, 16 and 40 GiB, which takes so many bytes of host
// memory for each of theirs, and raw more.
func sleepers(b *testing.B, host, raw int, f func(s *benchSleeper)) {
	for _, n := range []int{gib, 16 * gib, 40 * gib} {
		b.Run(fmt.Sprintf("%dGiB", n/gib), func(b *testing.B) {
			d := gputest.RealWith(b, cuda.Options{NamedStreamsOnly: true})
			h, _ := limits.OfHost()
			if err := h.Check(uint64(host*n + raw)); err != nil {
				b.Skip(err)
			}
			ctx, err := core.ContextOf(testOp, d)
			require.NoError(b, err)
			if free, _, err := d.MemoryInfo(); err == nil && free < n+gib {
				b.Skipf("the device has %d MiB free", free>>20)
			}
			buffer, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: n, Chunks: vmm.FixedChunks(sleepChunk)})
			require.NoError(b, err)
			defer func() { require.NoError(b, buffer.Close()) }()
			require.NoError(b, buffer.Resize(nil, n))
			f(&benchSleeper{b, d, ctx, buffer, n})
		})
	}
}

// cycle suspends and resumes, and returns how long each took.
func (s *benchSleeper) cycle(o vmm.SuspendOptions) (out, in time.Duration) {
	start := time.Now()
	z, err := vmm.Suspend(context.Background(), o, s.b)
	out = time.Since(start)
	require.NoError(s, err)
	start = time.Now()
	require.NoError(s, z.Resume(context.Background()))
	return out, time.Since(start)
}

// prop returns the properties of the buffer's memory: that which RDMA can use costs more.
func (s *benchSleeper) prop() driver.AllocationProp {
	return suspend.Of(s.b).Mappings()[0].Memory.Asked
}

func middle(times []time.Duration) time.Duration {
	times = slices.Sorted(slices.Values(times))
	return times[len(times)/2]
}

// rawCopies copies a sleeper's memory by pieces on two streams, to and from pinned memory.
type rawCopies struct {
	*benchSleeper
	host    *cuda.HostBuffer
	streams [2]*cuda.Stream
}

func newRawCopies(s *benchSleeper) *rawCopies {
	host, err := s.d.NewHostBuffer(min(s.n, rawHost))
	require.NoError(s, err)
	r := &rawCopies{benchSleeper: s, host: host}
	for i := range r.streams {
		r.streams[i], err = s.d.NewStream(cuda.StreamOptions{})
		require.NoError(s, err)
	}
	return r
}

func (r *rawCopies) close() {
	for _, st := range r.streams {
		require.NoError(r, st.Close())
	}
	require.NoError(r, r.host.Close())
}

func (r *rawCopies) out() time.Duration {
	return r.copy(func(st *cuda.Stream, part cuda.HostSlice, at cuda.Ptr) error { return st.CopyToHost(part, at) })
}

func (r *rawCopies) in() time.Duration {
	return r.copy(func(st *cuda.Stream, part cuda.HostSlice, at cuda.Ptr) error { return st.CopyFromHost(at, part) })
}

func (r *rawCopies) copy(way func(st *cuda.Stream, part cuda.HostSlice, at cuda.Ptr) error) time.Duration {
	start := time.Now()
	for at := 0; at < r.n; at += rawPiece {
		in := at % r.host.Len()
		part, err := r.host.Slice(in, in+rawPiece)
		require.NoError(r, err)
		require.NoError(r, way(r.streams[at/rawPiece%2], part, r.b.Ptr()+cuda.Ptr(at)))
	}
	for _, st := range r.streams {
		require.NoError(r, st.Synchronize())
	}
	return time.Since(start)
}

// BenchmarkSuspend keeps the bytes in host memory that is pinned already. Promised: all of Suspend
// and all of Resume reach 0.97 of the rate of raw copies by pieces of 4 MiB on two streams (ratio).
// Beside each a copy of 4 KiB on another stream, either way, takes 0.1 ms at most at the 99th
// percentile, and a launch 1.15 of what it takes alone.
func BenchmarkSuspend(b *testing.B) {
	sleepers(b, 1, rawHost, func(s *benchSleeper) {
		bulk.Of(s.ctx).Retain(uint64(s.n))
		raw := newRawCopies(s)
		defer raw.close()
		s.cycle(vmm.SuspendOptions{}) // pins
		var out, in, copyOut, copyIn, rawOut, rawIn []time.Duration
		rates := &s.ctx.System().Rates
		round := func() {
			o, i := s.cycle(vmm.SuspendOptions{})
			out, in = append(out, o), append(in, i)
			copyOut, copyIn = append(copyOut, rates.Out.Expected(uint64(s.n))), append(copyIn, rates.In.Expected(uint64(s.n)))
			rawOut, rawIn = append(rawOut, raw.out()), append(rawIn, raw.in())
		}
		round() // warms the raw copies up
		out, in, copyOut, copyIn, rawOut, rawIn = nil, nil, nil, nil, nil, nil
		for s.Loop() {
			s.cycle(vmm.SuspendOptions{})
		}
		for range rounds {
			round()
		}
		report := func(name string, whole, copies, raw []time.Duration) {
			s.ReportMetric(float64(s.n)/middle(whole).Seconds()/1e9, name+"-GB/s")
			s.ReportMetric(float64(middle(raw))/float64(middle(whole)), name+"-ratio")
			s.ReportMetric(float64(middle(raw))/float64(middle(copies)), name+"-copy-ratio")
			s.ReportMetric(float64((middle(whole)-middle(copies)).Microseconds())/1e3, name+"-rest-ms")
		}
		report("out", out, copyOut, rawOut)
		report("in", in, copyIn, rawIn)
		probe := newProbe(s)
		defer probe.close()
		alone := p99(probe.launches(func() { time.Sleep(300 * time.Millisecond) }))
		s.ReportMetric(alone, "launch-alone-p99-µs")
		var err error
		for name, times := range map[string]func(during func()) []time.Duration{"4KiB-out": probe.out, "4KiB-in": probe.in, "launch": probe.launches} {
			var out, in []time.Duration
			for range 3 {
				var z *vmm.Suspension
				out = append(out, times(func() { z, err = vmm.Suspend(context.Background(), vmm.SuspendOptions{}, s.b) })...)
				require.NoError(s, err)
				in = append(in, times(func() { err = z.Resume(context.Background()) })...)
				require.NoError(s, err)
			}
			s.ReportMetric(p99(out), "out-beside-"+name+"-p99-µs")
			s.ReportMetric(p99(in), "in-beside-"+name+"-p99-µs")
		}
	})
}

// BenchmarkSuspendTwoDevices suspends 16 GiB of each of two devices in one call, in turn with one device alone and with raw
// copies by pieces of 4 MiB on two streams of each device, side by side. Promised: 0.97 of those (raw-ratio). What the
// machine's memory gives to two links at once is theirs, too (alone-ratio, raw-alone-ratio).
func BenchmarkSuspendTwoDevices(b *testing.B) {
	const n = 16 * gib
	near, far := gputest.RealPair(b)
	h, _ := limits.OfHost()
	if err := h.Check(2 * (n + rawHost)); err != nil {
		b.Skip(err)
	}
	var all []vmm.Memory
	var raw []*rawCopies
	for _, d := range []*cuda.Device{near, far} {
		ctx, err := core.ContextOf(testOp, d)
		require.NoError(b, err)
		bulk.Of(ctx).Retain(2 * n)
		buffer, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: n, Chunks: vmm.FixedChunks(sleepChunk), Access: []vmm.Access{
			{Location: near.Location(), Mode: vmm.ReadWrite}, {Location: far.Location(), Mode: vmm.ReadWrite}}})
		require.NoError(b, err)
		defer func() { require.NoError(b, buffer.Close()) }()
		require.NoError(b, buffer.Resize(nil, n))
		r := newRawCopies(&benchSleeper{b, d, ctx, buffer, n})
		defer r.close()
		all, raw = append(all, buffer), append(raw, r)
	}
	cycle := func(all ...vmm.Memory) (out, in time.Duration) {
		start := time.Now()
		z, err := vmm.Suspend(b.Context(), vmm.SuspendOptions{}, all...)
		out = time.Since(start)
		require.NoError(b, err)
		start = time.Now()
		require.NoError(b, z.Resume(b.Context()))
		return out, time.Since(start)
	}
	side := func(way func(*rawCopies) time.Duration, some ...*rawCopies) time.Duration {
		start := time.Now()
		var wg sync.WaitGroup
		for _, r := range some {
			wg.Go(func() { way(r) })
		}
		wg.Wait()
		return time.Since(start)
	}
	cycle(all...) // pins
	side((*rawCopies).out, raw...)
	times := map[string][]time.Duration{}
	add := func(name string, d time.Duration) { times[name] = append(times[name], d) }
	for range rounds {
		for name, some := range map[string][]vmm.Memory{"both": all, "alone": all[:1]} {
			o, i := cycle(some...)
			add("out-"+name, o)
			add("in-"+name, i)
		}
		for name, some := range map[string][]*rawCopies{"both": raw, "alone": raw[:1]} {
			add("raw-out-"+name, side((*rawCopies).out, some...))
			add("raw-in-"+name, side((*rawCopies).in, some...))
		}
	}
	for b.Loop() {
		cycle(all...)
	}
	ratio := func(of, to string) float64 { return float64(middle(times[of])) / float64(middle(times[to])) }
	for _, way := range []string{"out", "in"} {
		b.ReportMetric(2*n/middle(times[way+"-both"]).Seconds()/1e9, way+"-GB/s")
		b.ReportMetric(ratio("raw-"+way+"-both", way+"-both"), way+"-raw-ratio")
		b.ReportMetric(ratio(way+"-alone", way+"-both"), way+"-alone-ratio")
		b.ReportMetric(ratio("raw-"+way+"-alone", "raw-"+way+"-both"), way+"-raw-alone-ratio")
	}
}

// BenchmarkSuspendSmallChunks suspends 16 GiB in chunks of 2 MiB. It promises nothing, and shows what
// chunks of that size cost: beside raw copies by pieces of 4 MiB on two streams (ratio).
func BenchmarkSuspendSmallChunks(b *testing.B) {
	const n, chunk = 16 * gib, 2 << 20
	d := gputest.RealWith(b, cuda.Options{NamedStreamsOnly: true})
	h, _ := limits.OfHost()
	if err := h.Check(n + rawHost); err != nil {
		b.Skip(err)
	}
	ctx, err := core.ContextOf(testOp, d)
	require.NoError(b, err)
	buffer, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: n, Chunks: vmm.FixedChunks(chunk)})
	require.NoError(b, err)
	defer func() { require.NoError(b, buffer.Close()) }()
	require.NoError(b, buffer.Resize(nil, n))
	s := &benchSleeper{b, d, ctx, buffer, n}
	bulk.Of(ctx).Retain(n)
	raw := newRawCopies(s)
	defer raw.close()
	s.cycle(vmm.SuspendOptions{}) // pins
	for b.Loop() {
		s.cycle(vmm.SuspendOptions{})
	}
	var out, in, rawOut, rawIn []time.Duration
	for range rounds {
		o, i := s.cycle(vmm.SuspendOptions{})
		out, in = append(out, o), append(in, i)
		rawOut, rawIn = append(rawOut, raw.out()), append(rawIn, raw.in())
	}
	b.ReportMetric(float64(middle(rawOut))/float64(middle(out)), "out-ratio")
	b.ReportMetric(float64(middle(rawIn))/float64(middle(in)), "in-ratio")
	b.ReportMetric(float64(middle(out).Microseconds())/1e3, "out-ms")
	b.ReportMetric(float64(middle(in).Microseconds())/1e3, "in-ms")
}

// BenchmarkSuspendGuard lays a guard under what was dropped. Promised: 34 ms for 64 GiB (guard-ms-64GiB),
// which is what the raw calls take (ratio): mapping 64 MiB again and again, and granting it once.
func BenchmarkSuspendGuard(b *testing.B) {
	sleepers(b, 0, 0, func(s *benchSleeper) {
		const piece = 64 << 20
		drv, n, prop := s.ctx.System().Drv, uint64(s.n), s.prop()
		ok := func(r driver.Result) { require.Equal(s, driver.Success, r) }
		var plain, guarded, raw, in, guardedIn []time.Duration
		for s.Loop() {
			s.cycle(vmm.SuspendOptions{Keep: vmm.Drop, Guard: true})
		}
		for range rounds {
			time.Sleep(200 * time.Millisecond)
			o, i := s.cycle(vmm.SuspendOptions{Keep: vmm.Drop})
			plain, in = append(plain, o), append(in, i)
			time.Sleep(200 * time.Millisecond)
			o, i = s.cycle(vmm.SuspendOptions{Keep: vmm.Drop, Guard: true})
			guarded, guardedIn = append(guarded, o), append(guardedIn, i)

			base, r := drv.MemAddressReserve(n, 0, 0)
			ok(r)
			h, r := drv.MemCreate(piece, prop)
			ok(r)
			start := time.Now()
			for at := uint64(0); at < n; at += piece {
				ok(drv.MemMap(base+driver.Ptr(at), piece, 0, h))
			}
			ok(drv.MemSetAccess(base, n, []driver.AccessDesc{{Location: prop.Location, Flags: driver.AccessReadWrite}}))
			raw = append(raw, time.Since(start))
			ok(drv.MemUnmap(base, n))
			ok(drv.MemRelease(h))
			ok(drv.MemAddressFree(base, n))
		}
		guard := middle(guarded) - middle(plain)
		s.ReportMetric(guard.Seconds()*1e3*64*gib/float64(n), "guard-ms-64GiB")
		s.ReportMetric(middle(raw).Seconds()*1e3*64*gib/float64(n), "raw-ms-64GiB")
		s.ReportMetric(float64(guard)/float64(middle(raw)), "ratio")
		s.ReportMetric((middle(guardedIn)-middle(in)).Seconds()*1e3*64*gib/float64(n), "in-ms-64GiB")
	})
}

// BenchmarkSuspendDropped keeps nothing. Promised: 1.1 of the time of raw unmapping and releasing,
// and of creating, mapping and granting.
func BenchmarkSuspendDropped(b *testing.B) {
	sleepers(b, 0, 0, func(s *benchSleeper) {
		drv, n := s.ctx.System().Drv, uint64(s.n)
		prop := s.prop()
		ok := func(r driver.Result) { require.Equal(s, driver.Success, r) }
		var out, in, rawOut, rawIn []time.Duration
		settle := func() { time.Sleep(200 * time.Millisecond) }
		for s.Loop() {
			s.cycle(vmm.SuspendOptions{Keep: vmm.Drop})
		}
		for range rounds {
			// The raw memory takes the place of the buffer's, which sleeps. Before each measurement
			// the driver has time to clean what was released, and memory is as old as the other.
			settle()
			start := time.Now()
			z, err := vmm.Suspend(context.Background(), vmm.SuspendOptions{Keep: vmm.Drop}, s.b)
			out = append(out, time.Since(start))
			require.NoError(s, err)

			base, r := drv.MemAddressReserve(n, 0, 0)
			ok(r)
			handles := make([]driver.MemHandle, n/sleepChunk)
			settle()
			start = time.Now()
			for i := range handles {
				handles[i], r = drv.MemCreate(sleepChunk, prop)
				ok(r)
			}
			for i, h := range handles {
				ok(drv.MemMap(base+driver.Ptr(i*sleepChunk), sleepChunk, 0, h))
			}
			ok(drv.MemSetAccess(base, n, []driver.AccessDesc{{Location: prop.Location, Flags: driver.AccessReadWrite}}))
			rawIn = append(rawIn, time.Since(start))
			settle()
			start = time.Now()
			ok(drv.MemUnmap(base, n))
			for _, h := range handles {
				ok(drv.MemRelease(h))
			}
			rawOut = append(rawOut, time.Since(start))
			ok(drv.MemAddressFree(base, n))

			settle()
			start = time.Now()
			require.NoError(s, z.Resume(context.Background()))
			in = append(in, time.Since(start))
		}
		for _, c := range []struct {
			name      string
			ours, raw []time.Duration
		}{{"out", out, rawOut}, {"in", in, rawIn}} {
			s.ReportMetric(float64(middle(c.ours).Microseconds())/1e3, c.name+"-ms")
			s.ReportMetric(float64(middle(c.ours))/float64(middle(c.raw)), c.name+"-ratio")
		}
	})
}
