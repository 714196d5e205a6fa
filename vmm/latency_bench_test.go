package vmm_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"golang.org/x/sync/errgroup"
)

func percentile(d []time.Duration, p float64) time.Duration {
	slices.Sort(d)
	return d[min(int(p*float64(len(d))), len(d)-1)]
}

// BenchmarkFreeWhileBusy closes and clips buffers while the GPU works.
// Promised: the caller waits at most 100 µs.
func BenchmarkFreeWhileBusy(b *testing.B) {
	d := gputest.RealWith(b, cuda.Options{})
	work, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 4096 * mib, Chunks: vmm.FixedChunks(1024 * mib)})
	must(b, err)
	b.Cleanup(func() { must(b, work.Close()) })
	must(b, gputest.Err(work.AppendUndefined(4096*mib)))
	s, err := d.NewStream(cuda.StreamOptions{})
	must(b, err)
	b.Cleanup(func() { must(b, s.Close()) })
	var closes, clips []time.Duration
	busy := func() {
		if done, err := s.Done(); err != nil {
			b.Fatal(err)
		} else if done {
			for range 40 { // some 50 ms
				must(b, s.Memset(work.Ptr(), 1, 4096*mib))
			}
		}
	}
	round := func() {
		buf, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 256 * mib})
		must(b, err)
		must(b, gputest.Err(buf.AppendUndefined(128*mib)))
		must(b, buf.Resize(nil, mib))
		busy()
		start := time.Now()
		must(b, buf.ClipAfter(s))
		clips = append(clips, time.Since(start))
		start = time.Now()
		must(b, buf.CloseAfter(s))
		closes = append(closes, time.Since(start))
		if len(closes)%50 == 0 {
			must(b, d.System().Drain(context.Background()))
		}
	}
	for b.Loop() {
		round()
	}
	for len(closes) < 500 {
		round()
	}
	must(b, d.System().Drain(context.Background()))
	b.ReportMetric(float64(percentile(closes, 0.5).Nanoseconds())/1e3, "close-p50-us")
	b.ReportMetric(float64(percentile(closes, 0.99).Nanoseconds())/1e3, "close-p99-us")
	b.ReportMetric(float64(slices.Max(closes).Nanoseconds())/1e3, "close-max-us")
	b.ReportMetric(float64(percentile(clips, 0.99).Nanoseconds())/1e3, "clip-p99-us")
	b.ReportMetric(float64(slices.Max(clips).Nanoseconds())/1e3, "clip-max-us")
}

// BenchmarkClipBesideDownloads clips a buffer while
// other goroutines wait for downloads from it behind a busy stream. Promised:
// the caller waits at most 100 µs.
func BenchmarkClipBesideDownloads(b *testing.B) {
	d := gputest.RealWith(b, cuda.Options{})
	work, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 4096 * mib, Chunks: vmm.FixedChunks(1024 * mib)})
	must(b, err)
	b.Cleanup(func() { must(b, work.Close()) })
	must(b, gputest.Err(work.AppendUndefined(4096*mib)))
	buf, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 256 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	must(b, err)
	b.Cleanup(func() { must(b, buf.Close()) })
	must(b, gputest.Err(buf.AppendUndefined(64*mib)))
	other, err := d.NewStream(cuda.StreamOptions{})
	must(b, err)
	b.Cleanup(func() { must(b, other.Close()) })
	var stop atomic.Bool
	var g errgroup.Group
	for range 2 {
		s, err := d.NewStream(cuda.StreamOptions{})
		must(b, err)
		b.Cleanup(func() { must(b, s.Close()) })
		part, err := buf.Slice(0, 2*mib)
		must(b, err)
		g.Go(func() error {
			got := make([]byte, 2*mib)
			for !stop.Load() {
				if err := s.Memset(work.Ptr(), 1, 4096*mib); err != nil { // a millisecond or two
					return err
				}
				if err := part.CopyTo(s, got); err != nil {
					return err
				}
			}
			return nil
		})
	}
	var waits []time.Duration
	round := func() {
		must(b, buf.Resize(nil, 64*mib))
		must(b, buf.Resize(nil, 2*mib))
		start := time.Now()
		must(b, buf.ClipAfter(other))
		waits = append(waits, time.Since(start))
	}
	for b.Loop() {
		round()
	}
	for len(waits) < 500 {
		round()
	}
	stop.Store(true)
	must(b, g.Wait())
	must(b, d.System().Drain(context.Background()))
	b.ReportMetric(float64(percentile(waits, 0.5).Nanoseconds())/1e3, "clip-p50-us")
	b.ReportMetric(float64(percentile(waits, 0.99).Nanoseconds())/1e3, "clip-p99-us")
	b.ReportMetric(float64(slices.Max(waits).Nanoseconds())/1e3, "clip-max-us")
}

// BenchmarkLaunchBesideGrowth launches a kernel of one thread on one thread, with and
// without another that grows and clips, in turn. Promised: the 99th percentile
// of a launch is at most 1.1 times that without.
func BenchmarkLaunchBesideGrowth(b *testing.B) {
	d := gputest.RealWith(b, cuda.Options{})
	module, err := d.LoadModule(kernels.Basic)
	must(b, err)
	b.Cleanup(func() { must(b, module.Close()) })
	fill, err := module.Kernel(kernels.Fill)
	must(b, err)
	target, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 2 * mib})
	must(b, err)
	b.Cleanup(func() { must(b, target.Close()) })
	must(b, gputest.Err(target.AppendUndefined(mib)))
	s, err := d.NewStream(cuda.StreamOptions{})
	must(b, err)
	b.Cleanup(func() { must(b, s.Close()) })
	other, err := d.NewStream(cuda.StreamOptions{})
	must(b, err)
	b.Cleanup(func() { must(b, other.Close()) })

	var growing atomic.Bool
	var stop atomic.Bool
	var cycles atomic.Int64
	var g errgroup.Group
	g.Go(func() (err error) {
		buf, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 1024 * mib})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, buf.Close()) }()
		for !stop.Load() {
			if !growing.Load() {
				time.Sleep(50 * time.Microsecond)
				continue
			}
			if _, err := buf.AppendUndefined(64 * mib); err != nil {
				return err
			}
			if err := buf.Resize(nil, 0); err != nil {
				return err
			}
			if err := buf.ClipAfter(other); err != nil {
				return err
			}
			if err := d.System().Drain(context.Background()); err != nil {
				return err
			}
			cycles.Add(1)
		}
		return nil
	})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	const window = 2000
	measure := func(into []time.Duration) []time.Duration {
		for i := range window {
			start := time.Now()
			must(b, fill.Launch(s, cuda.Threads(1), target.Ptr(), uint64(1), uint32(1), uint32(0)))
			into = append(into, time.Since(start))
			if i%100 == 99 {
				must(b, s.Synchronize())
			}
		}
		return into
	}
	var alone, beside []time.Duration
	pairOf := func() {
		growing.Store(false)
		time.Sleep(2 * time.Millisecond)
		alone = measure(alone)
		growing.Store(true)
		time.Sleep(2 * time.Millisecond)
		beside = measure(beside)
	}
	for b.Loop() {
		pairOf()
	}
	for len(alone) < 100_000 {
		pairOf()
	}
	stop.Store(true)
	must(b, g.Wait())
	b.ReportMetric(float64(cycles.Load()), "growths")
	for _, p := range []struct {
		name string
		at   float64
	}{{"p50", 0.5}, {"p99", 0.99}, {"p999", 0.999}} {
		a, w := percentile(alone, p.at), percentile(beside, p.at)
		b.ReportMetric(float64(a.Nanoseconds())/1e3, "alone-"+p.name+"-us")
		b.ReportMetric(float64(w.Nanoseconds())/1e3, "beside-"+p.name+"-us")
	}
	b.ReportMetric(float64(percentile(beside, 0.99))/float64(percentile(alone, 0.99)), "p99-ratio")
}
