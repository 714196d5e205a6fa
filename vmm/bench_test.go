package vmm_test

import (
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/cbench"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// The promises are ratios, or differences, to the same driver calls in C, taken
// in turn in the same run: what else the machine does falls on both.

// pair runs two ways in turn and returns the median time of each, and the
// median of what ours took above theirs, round by round.
func pair(rounds int, ours, theirs func() time.Duration) (a, b, above time.Duration) {
	var as, bs, more []time.Duration
	ours()
	theirs()
	for i := range rounds {
		var a, b time.Duration
		if i%2 == 0 {
			a = ours()
			b = theirs()
		} else {
			b = theirs()
			a = ours()
		}
		as, bs, more = append(as, a), append(bs, b), append(more, a-b)
	}
	return median(as), median(bs), median(more)
}

// plain is the memory of the C loops: neither shareable nor RDMA-capable.
var plain = vmm.Properties{Handles: vmm.NoHandles, RDMA: vmm.RDMAOff}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

func baseline(b *testing.B, d *cuda.Device) *cbench.Library {
	b.Helper()
	if !cbench.Available {
		b.Skip("built without cgo: no C to compare with")
	}
	lib, err := cbench.Open(d.System().Driver().Path)
	require.NoError(b, err)
	_, err = d.Context()
	require.NoError(b, err)
	return lib
}

// BenchmarkFullCycle is reserve, create, map, set access, unmap, release, free.
// Promised: at most 1.5 µs above C at 2 MiB, at most 1% at 1 GiB.
func BenchmarkFullCycle(b *testing.B) {
	for _, c := range []struct {
		name   string
		size   int
		rounds int
		loops  int
		memory vmm.Properties
	}{
		{"2MiB", 2 * mib, 301, 50, plain},
		{"1GiB", 1024 * mib, 41, 10, plain},
		{"2MiB with descriptor", 2 * mib, 101, 50, vmm.Properties{RDMA: vmm.RDMAOff}},
		{"2MiB with RDMA", 2 * mib, 101, 50, vmm.Properties{Handles: vmm.NoHandles}},
		{"2MiB by default", 2 * mib, 101, 50, vmm.Properties{}},
	} {
		b.Run(c.name, func(b *testing.B) {
			d := gputest.RealWith(b, cuda.Options{NamedStreamsOnly: true})
			lib := baseline(b, d)
			access := vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite}
			cycle := func() {
				r, err := vmm.Reserve(d, c.size, vmm.ReserveOptions{})
				must(b, err)
				a, err := vmm.Create(d, c.size, c.memory)
				must(b, err)
				m, err := r.Map(0, a)
				must(b, err)
				must(b, m.SetAccess(access))
				must(b, m.Close())
				must(b, a.Close())
				must(b, r.Close())
			}
			b.ReportAllocs()
			for b.Loop() {
				cycle()
			}
			ours, theirs, above := pair(c.rounds, func() time.Duration {
				start := time.Now()
				for range c.loops {
					cycle()
				}
				return time.Since(start) / time.Duration(c.loops)
			}, func() time.Duration {
				t, r := lib.VMMCycle(driver.Device(d.Ordinal()), uint64(c.size), c.loops)
				require.Equal(b, driver.Success, r)
				return t / time.Duration(c.loops)
			})
			b.ReportMetric(float64(theirs.Nanoseconds()), "C-ns/op")
			b.ReportMetric(float64(above.Nanoseconds()), "above-C-ns")
			b.ReportMetric(float64(ours.Nanoseconds()), "Go-ns/op")
			b.ReportMetric(float64(above)/float64(theirs)+1, "ratio")
		})
	}
}

// BenchmarkGrowTo4GiB grows a buffer by 64 MiB steps. Promised: at most 1.05 of
// a C loop with the same chunks.
func BenchmarkGrowTo4GiB(b *testing.B) {
	const total, step = 4096 * mib, 64 * mib
	d := gputest.RealWith(b, cuda.Options{NamedStreamsOnly: true})
	lib := baseline(b, d)
	// The chunks that the default plan takes.
	var steps [][]uint64
	for committed, need := uint64(0), uint64(step); need <= total; need += step {
		var chunks []uint64
		for committed < need {
			size := min(max(committed, 2*mib), 64*mib)
			chunks = append(chunks, size)
			committed += size
		}
		if len(chunks) > 0 {
			steps = append(steps, chunks)
		}
	}
	grow := func() time.Duration {
		buf, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 2 * total, Memory: plain})
		must(b, err)
		start := time.Now()
		for range total / step {
			must(b, gputest.Err(buf.AppendUndefined(step)))
		}
		took := time.Since(start)
		must(b, buf.Close())
		return took
	}
	for b.Loop() {
		grow()
	}
	ours, theirs, _ := pair(15, grow, func() time.Duration {
		t, r := lib.GrowLoop(driver.Device(d.Ordinal()), 2*total, steps)
		require.Equal(b, driver.Success, r)
		return t
	})
	b.ReportMetric(float64(theirs.Microseconds()), "C-us/op")
	b.ReportMetric(float64(ours.Microseconds()), "grow-us/op")
	b.ReportMetric(float64(ours)/float64(theirs), "ratio")
}

// BenchmarkAppendPinned appends 1 GiB of pinned memory to an empty buffer.
// Promised: at least 95% of the raw copy's bandwidth.
func BenchmarkAppendPinned(b *testing.B) {
	const n = 1024 * mib
	d := gputest.RealWith(b, cuda.Options{NamedStreamsOnly: true})
	lib := baseline(b, d)
	host, err := d.NewHostBuffer(n)
	must(b, err)
	b.Cleanup(func() { must(b, host.Close()) })
	for i := range host.Bytes() {
		host.Bytes()[i] = byte(i * 31)
	}
	s, err := d.NewStream(cuda.StreamOptions{})
	must(b, err)
	b.Cleanup(func() { must(b, s.Close()) })
	raw, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: n, Chunks: vmm.FixedChunks(n)})
	must(b, err)
	b.Cleanup(func() { must(b, raw.Close()) })
	must(b, gputest.Err(raw.AppendUndefined(n)))
	ctx, err := core.ContextOf("test", d)
	must(b, err)
	for _, fresh := range []bool{true, false} {
		name := "growing"
		if !fresh {
			name = "committed"
		}
		b.Run(name, func(b *testing.B) {
			appended := func() time.Duration {
				buf, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: n})
				must(b, err)
				if !fresh {
					must(b, gputest.Err(buf.AppendUndefined(n)))
					must(b, buf.Resize(nil, 0))
				}
				start := time.Now()
				must(b, gputest.Err(buf.AppendHost(s, host.All())))
				must(b, s.Synchronize())
				took := time.Since(start)
				must(b, buf.Close())
				return took
			}
			b.SetBytes(n)
			for b.Loop() {
				appended()
			}
			ours, theirs, _ := pair(9, appended, func() time.Duration {
				t, r := lib.CopyLoop(ctx.Handle, driver.Stream(s.Handle()), driver.Ptr(raw.Ptr()), unsafe.Pointer(&host.Bytes()[0]), n, n, 1)
				require.Equal(b, driver.Success, r)
				return t
			})
			b.ReportMetric(float64(n)/theirs.Seconds()/1e9, "raw-GB/s")
			b.ReportMetric(float64(n)/ours.Seconds()/1e9, "append-GB/s")
			b.ReportMetric(float64(theirs)/float64(ours), "of-raw")
		})
	}
}

func must(tb testing.TB, err error) {
	if err != nil {
		tb.Helper()
		tb.Fatal(err)
	}
}
