package load_test

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/limits"
	"github.com/cuvmm/cuvmm/internal/osmem"
	"github.com/cuvmm/cuvmm/internal/test/cbench"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/load"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// The promises are ratios to C in the same run, taken in turn: what else the machine does falls
// on both.

const (
	gib     = 1 << 30
	threads = 16
	piece   = 4 * mib
	rounds  = 5
)

// bench is a real device with C's ring, a model's file and memory for it.
type bench struct {
	*testing.B
	d      *cuda.Device
	ctx    *core.Context
	stream *cuda.Stream
	lib    *cbench.Library
	path   string
	memory *vmm.Buffer
	n      int // bytes of the tensors
}

// benchOf writes a model of count tensors of some bytes each, through the page cache.
func benchOf(b *testing.B, count, size int) *bench {
	d := gputest.RealWith(b, cuda.Options{NamedStreamsOnly: true})
	if !cbench.Available {
		b.Skip("built without cgo: no C to compare with")
	}
	n := count * size
	if h, _ := limits.OfHost(); h.Check(uint64(2*n+4*gib)) != nil {
		b.Skipf("it needs %d GiB of host memory", (2*n+4*gib)/gib)
	}
	if free, _, err := d.MemoryInfo(); err == nil && free < n+gib {
		b.Skipf("the device has %d MiB free", free>>20)
	}
	lib, err := cbench.Open(d.System().Driver().Path)
	require.NoError(b, err)
	ctx, err := core.ContextOf("test", d)
	require.NoError(b, err)
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, s.Close()) })
	memory, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: n + 64*mib})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, memory.Close()) })
	require.NoError(b, memory.Resize(nil, n+64*mib))

	path := filepath.Join(b.TempDir(), "model.safetensors")
	f, err := os.Create(path)
	require.NoError(b, err)
	var header strings.Builder
	header.WriteString("{")
	for i := range count {
		fmt.Fprintf(&header, `"model.layers.%d.weight":{"dtype":"BF16","shape":[%d],"data_offsets":[%d,%d]},`, i, size/2, i*size, (i+1)*size)
	}
	header.WriteString(`"scale":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}`)
	_, err = f.Write(withLength([]byte(header.String())))
	require.NoError(b, err)
	block := some("block", "U8", 64*mib).bytes
	for at := 0; at < n; at += len(block) {
		_, err := f.Write(block[:min(len(block), n-at)])
		require.NoError(b, err)
	}
	require.NoError(b, f.Close())
	return &bench{b, d, ctx, s, lib, path, memory, n}
}

// took is the time of one run, by the clock and of processors.
type took struct{ wall, cpu time.Duration }

func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func timed(f func()) took {
	start, used := time.Now(), cpu()
	f()
	return took{time.Since(start), cpu() - used}
}

// load opens the file and loads all of it.
func (b *bench) load(o load.Options) {
	m, err := load.OpenSafetensors(b.path)
	require.NoError(b, err)
	l, err := m.Layout(0)
	require.NoError(b, err)
	_, err = m.LoadAll(b.Context(), o, b.stream, l, b.memory.Ptr(), b.memory.Len())
	require.NoError(b, err)
	require.NoError(b, m.Close())
}

func (b *bench) ring(threads int) *cbench.Ring {
	r, result := b.lib.NewRing(b.ctx.Handle, threads, piece)
	require.Equal(b, driver.Success, result)
	b.Cleanup(r.Free)
	return r
}

func (b *bench) c(r *cbench.Ring, direct bool) {
	_, result := r.Load(b.path, direct, uint64(b.n), driver.Ptr(b.memory.Ptr()))
	require.Equal(b, driver.Success, result)
}

// pinned loads and pins on all threads, and then copies.
func (b *bench) pinned() {
	drv, c := b.ctx.System().Drv, b.ctx.Handle
	mem, err := osmem.AllocHuge(uint64(b.n))
	require.NoError(b, err)
	f, err := os.Open(b.path)
	require.NoError(b, err)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range threads {
		wg.Go(func() {
			for at := next.Add(16*mib) - 16*mib; at < int64(b.n); at = next.Add(16*mib) - 16*mib {
				slab := mem[at:min(at+16*mib, int64(b.n))]
				if _, err := f.ReadAt(slab, at); err != nil {
					b.Error(err)
				}
				if r := drv.MemHostRegister(c, unsafe.Pointer(&slab[0]), uint64(len(slab)), driver.HostRegisterPortable); r != driver.Success {
					b.Error(r)
				}
			}
		})
	}
	wg.Wait()
	require.NoError(b, f.Close())
	s := core.StreamOf(b.stream).Handle
	for at := 0; at < b.n; at += 16 * mib {
		n := min(16*mib, b.n-at)
		require.Equal(b, driver.Success, drv.MemcpyHtoDAsync(c, driver.Ptr(b.memory.Ptr())+driver.Ptr(at), unsafe.Pointer(&mem[at]), uint64(n), s))
	}
	require.Equal(b, driver.Success, drv.StreamSynchronize(c, s))
	b.Cleanup(func() {
		for at := 0; at < b.n; at += 16 * mib {
			require.Equal(b, driver.Success, drv.MemHostUnregister(c, unsafe.Pointer(&mem[at])))
		}
		require.NoError(b, osmem.Free(mem))
	})
}

func middle(all []took) took {
	slices.SortFunc(all, func(a, b took) int { return int(a.wall - b.wall) })
	return all[len(all)/2]
}

func (b *bench) report(name string, t took) {
	b.ReportMetric(float64(b.n)/t.wall.Seconds()/1e9, name+"-GB/s")
	b.ReportMetric(t.cpu.Seconds(), name+"-cpu-s")
}

// BenchmarkLoad loads a file that the page cache has. Promised: in the first pass, with nothing
// pinned before, 0.92 of what sixteen threads in C reach with a ring that is pinned already,
// and 0.97 with the memory that the first pass left pinned; more than loading, pinning and copying
// one after the other; and five times Python's safetensors, where that is installed.
func BenchmarkLoad(b *testing.B) {
	for _, n := range []int{1, 8} {
		b.Run(fmt.Sprintf("%dGiB", n), func(b *testing.B) {
			t := benchOf(b, n*gib/(32*mib), 32*mib)
			ring := t.ring(threads)
			var first, second, bare, c []took
			round := func() {
				t.d.System().TrimHost()
				first = append(first, timed(func() { t.load(load.Options{}) }))
				c = append(c, timed(func() { t.c(ring, false) }))
				second = append(second, timed(func() { t.load(load.Options{}) }))
				bare = append(bare, timed(func() { t.load(load.Options{NoDigests: true}) }))
			}
			round() // warms up
			first, second, bare, c = nil, nil, nil, nil
			for b.Loop() {
				t.load(load.Options{})
			}
			for range rounds {
				round()
			}
			t.report("first", middle(first))
			t.report("second", middle(second))
			t.report("no-digests", middle(bare))
			t.report("C", middle(c))
			b.ReportMetric(float64(middle(c).wall)/float64(middle(first).wall), "first-ratio")
			b.ReportMetric(float64(middle(c).wall)/float64(middle(second).wall), "second-ratio")
			t.report("load-pin-copy", timed(t.pinned))
			t.python()
		})
	}
}

// python reports what Python's own package reaches, once the context is there.
func (b *bench) python() {
	out, err := exec.CommandContext(b.Context(), "python3", "-c", `
import sys, time, torch, safetensors.torch
torch.zeros(1, device="cuda"); torch.cuda.synchronize()
for _ in range(2):
    start = time.time(); all = safetensors.torch.load_file(sys.argv[1], device="cuda"); torch.cuda.synchronize()
    took = time.time() - start; del all
print(took)
`, b.path).Output()
	if err != nil {
		b.Logf("no comparison with Python's safetensors: %v", err)
		return
	}
	seconds, err := strconv.ParseFloat(strings.TrimSpace(string(out)), 64)
	require.NoError(b, err)
	b.ReportMetric(float64(b.n)/seconds/1e9, "load_file-GB/s")
}

// BenchmarkLoadTwoDevices loads the halves of each tensor to two devices at once, as tensor parallelism does. The ratio
// is to one device that loads its half alone; nothing is promised, since both read through the same host.
func BenchmarkLoadTwoDevices(b *testing.B) {
	const count = 128
	t := benchOf(b, count, 32*mib)
	all := t.d.System().Devices()
	if len(all) < 2 {
		b.Skipf("one GPU here (%v): a pair is needed", t.d)
	}
	m, err := load.OpenSafetensors(t.path)
	require.NoError(b, err)
	defer func() { require.NoError(b, m.Close()) }()
	var streams [2]*cuda.Stream
	var parts [2][]load.Part
	var memory [2]*vmm.Buffer
	for rank := range parts {
		streams[rank], err = all[rank].NewStream(cuda.StreamOptions{})
		require.NoError(b, err)
		defer func() { require.NoError(b, streams[rank].Close()) }()
		memory[rank], err = vmm.NewBuffer(all[rank], vmm.BufferOptions{Reserve: t.n / 2})
		require.NoError(b, err)
		defer func() { require.NoError(b, memory[rank].Close()) }()
		require.NoError(b, memory[rank].Resize(nil, t.n/2))
		for i := range count {
			p, err := m.Part(fmt.Sprintf("model.layers.%d.weight", i))
			require.NoError(b, err)
			p, err = p.Shard(0, rank, 2)
			require.NoError(b, err)
			parts[rank] = append(parts[rank], p.To(memory[rank].Ptr()+cuda.Ptr(i*p.Size()), p.Size()))
		}
	}
	loads := func(ranks ...int) took {
		return timed(func() {
			var wg sync.WaitGroup
			for _, rank := range ranks {
				wg.Go(func() {
					if _, err := m.Load(b.Context(), load.Options{}, streams[rank], parts[rank]...); err != nil {
						b.Error(err)
					}
				})
			}
			wg.Wait()
		})
	}
	loads(0, 1) // pins
	var both, alone []took
	for range rounds {
		both, alone = append(both, loads(0, 1)), append(alone, loads(0), loads(1))
	}
	for b.Loop() {
		loads(0, 1)
	}
	block := some("block", "U8", 64*mib).bytes // of which each tensor is a half
	for rank := range memory {
		got := make([]byte, t.n/2)
		half, err := memory[rank].Slice(0, len(got))
		require.NoError(b, err)
		require.NoError(b, half.CopyTo(nil, got))
		for i := range count {
			want := block[i%2*32*mib+rank*16*mib:][:16*mib]
			require.Equal(b, crc32.ChecksumIEEE(want), crc32.ChecksumIEEE(got[i*16*mib:][:16*mib]))
		}
	}
	t.report("both", middle(both))
	b.ReportMetric(float64(middle(alone).wall)/float64(middle(both).wall), "ratio")
}

// BenchmarkLoadCold loads a file that the page cache does not have. Promised: what eight threads
// in C reach with O_DIRECT.
func BenchmarkLoadCold(b *testing.B) {
	t := benchOf(b, 128, 32*mib)
	ring := t.ring(8)
	var ours, c []took
	round := func() {
		require.NoError(b, dropFromCache(t.path))
		ours = append(ours, timed(func() { t.load(load.Options{}) }))
		require.NoError(b, dropFromCache(t.path))
		c = append(c, timed(func() { t.c(ring, true) }))
	}
	round()
	ours, c = nil, nil
	for b.Loop() {
		require.NoError(b, dropFromCache(t.path))
		t.load(load.Options{})
	}
	for range 3 {
		round()
	}
	t.report("cold", middle(ours))
	t.report("C", middle(c))
	b.ReportMetric(float64(middle(c).wall)/float64(middle(ours).wall), "ratio")
}

// BenchmarkLoadSmall loads 100,000 tensors of 4 KiB. Promised: half of the rate of large ones (ratio), also
// of a layout in another order than the file's (shuffled-ratio), and of a part with an address of its own
// for each, with gaps between them (scattered-ratio).
func BenchmarkLoadSmall(b *testing.B) {
	const count, size = 100_000, 4096
	t := benchOf(b, count, size)
	m, err := load.OpenSafetensors(t.path)
	require.NoError(b, err)
	defer m.Close()
	l, err := m.Layout(0)
	require.NoError(b, err)
	shuffled := shuffle(l)
	gaps, err := vmm.NewBuffer(t.d, vmm.BufferOptions{Reserve: 2 * count * size})
	require.NoError(b, err)
	defer func() { require.NoError(b, gaps.Close()) }()
	require.NoError(b, gaps.Resize(nil, 2*count*size))
	var parts []load.Part
	for i, x := range l.Tensors {
		p, err := m.Part(x.Name)
		require.NoError(b, err)
		parts = append(parts, p.To(gaps.Ptr()+cuda.Ptr(2*i*size), x.Size()))
	}
	all := func(l *handles.Manifest) took {
		return timed(func() {
			_, err := m.LoadAll(b.Context(), load.Options{}, t.stream, l, t.memory.Ptr(), t.memory.Len())
			require.NoError(b, err)
		})
	}
	large := write(b, filepath.Join(b.TempDir(), "large.safetensors"), fileOf([]given{some("w", "U8", count*size)}, nil))
	whole := *t
	whole.path = large
	var small, other, big, scattered []took
	all(l)
	for b.Loop() {
		all(l)
	}
	for range rounds {
		small = append(small, all(l))
		other = append(other, all(shuffled))
		big = append(big, timed(func() { whole.load(load.Options{}) }))
		scattered = append(scattered, timed(func() {
			_, err := m.Load(b.Context(), load.Options{}, t.stream, parts...)
			require.NoError(b, err)
		}))
	}
	t.report("small", middle(small))
	t.report("shuffled", middle(other))
	t.report("scattered", middle(scattered))
	t.report("large", middle(big))
	b.ReportMetric(float64(middle(big).wall)/float64(middle(small).wall), "ratio")
	b.ReportMetric(float64(middle(big).wall)/float64(middle(other).wall), "shuffled-ratio")
	b.ReportMetric(float64(middle(big).wall)/float64(middle(scattered).wall), "scattered-ratio")
}

// shuffle returns a layout with the tensors in another order.
func shuffle(l *handles.Manifest) *handles.Manifest {
	s := &handles.Manifest{Bytes: l.Bytes}
	at, n := 0, len(l.Tensors)
	for i := range n {
		x := l.Tensors[i*7919%n]
		x.Offset = at
		at += x.Size()
		s.Tensors = append(s.Tensors, x)
	}
	return s
}

// BenchmarkSave writes 1 GiB to a file, which then lies on the disk.
func BenchmarkSave(b *testing.B) {
	t := benchOf(b, 32, 32*mib)
	t.load(load.Options{})
	m, err := load.OpenSafetensors(t.path)
	require.NoError(b, err)
	defer m.Close()
	l, err := m.Layout(0)
	require.NoError(b, err)
	path := filepath.Join(b.TempDir(), "saved.safetensors")
	save := func() {
		require.NoError(b, load.SaveSafetensors(b.Context(), load.SaveOptions{}, t.stream, path, load.SavingsOf(l, t.memory.Ptr())...))
	}
	for b.Loop() {
		save()
	}
	t.report("save", timed(save))
}

// BenchmarkOpen reads and checks the header of 100,000 tensors.
func BenchmarkOpen(b *testing.B) {
	var all []given
	for i := range 100_000 {
		all = append(all, given{fmt.Sprintf("model.layers.%d.weight", i), "U8", []int{1}, []byte{1}})
	}
	file := fileOf(all, nil)
	path := write(b, filepath.Join(b.TempDir(), "many.safetensors"), file)
	for b.Loop() {
		m, err := load.OpenSafetensors(path)
		require.NoError(b, err)
		require.NoError(b, m.Close())
	}
	var any map[string]json.RawMessage
	start := time.Now()
	require.NoError(b, json.Unmarshal(file[8:len(file)-100_000], &any))
	b.ReportMetric(float64(time.Since(start).Milliseconds()), "encoding/json-ms")
}
