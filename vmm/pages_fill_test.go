package vmm_test

import (
	"context"
	"fmt"
	"log"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// free is what the driver says is free.
func free(t testing.TB, d *cuda.Device) int {
	t.Helper()
	n, _, err := d.MemoryInfo()
	require.NoError(t, err)
	return n
}

// Fill leaves the headroom, and less than a page more, and its pages stay until Trim.
func TestFillLeavesTheHeadroom(t *testing.T) {
	m, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 301 * mib}}})
	p := source(t, d, vmm.PagesOptions{Idle: time.Millisecond})
	s := sparse(t, d, 200, vmm.SparseOptions{Pages: p})
	require.NoError(t, s.Map(background, nil, vmm.Span{First: 0, N: 3}))
	for _, headroom := range []int{40 * mib, 10*mib + 1, 200 * mib, 0} {
		n, err := p.Fill(background, headroom)
		require.NoError(t, err)
		require.GreaterOrEqual(t, free(t, d), headroom)
		require.Less(t, free(t, d), headroom+sparsePage)
		require.Equal(t, n, p.Stats().Pages-3)
	}
	all := p.Stats().Pages
	made := m.Count("cuMemCreate")
	require.NoError(t, s.Map(background, nil, vmm.Span{First: 0, N: all}))
	require.Equal(t, made, m.Count("cuMemCreate"), "they are those that Map takes")
	require.NoError(t, s.Unmap(background, vmm.Span{First: 2, N: 198}))
	becomes(t, p, all)
	_, err := p.Trim(50 * sparsePage)
	require.NoError(t, err)
	becomes(t, p, all-50)

	for _, o := range []sim.Fault{{Call: "cuMemGetInfo", Result: 999}, {Call: "cuMemCreate", After: 3, Times: 1, Result: 999}} {
		m.Inject(o)
		_, err = p.Fill(background, 0)
		require.ErrorContains(t, err, o.Call)
	}
	m.Inject(sim.Fault{Call: "cuMemCreate", After: 3, Times: 2, Result: 2}) // less than the driver said is free
	_, err = p.Fill(background, 0)
	require.NoError(t, err)
	require.Less(t, free(t, d), sparsePage)
	require.NoError(t, vmm.CheckPages(p))

	_, err = p.Fill(background, -1)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	ended, end := context.WithCancel(background)
	end()
	_, err = p.Fill(ended, 0)
	require.ErrorIs(t, err, context.Canceled)
}

// A budget bounds a Fill exactly, on each of its levels, and no owner of it is asked for memory.
func TestFillKeepsToTheBudget(t *testing.T) {
	_, d := open(t)
	top := cuda.NewBudget(50*sparsePage+1, cuda.BudgetOptions{})
	low := cuda.NewBudget(200*sparsePage, cuda.BudgetOptions{Parent: top})
	stop, err := top.OnPressure(0, func(int) int { t.Error("asked"); return 0 })
	require.NoError(t, err)
	defer stop()
	p := source(t, d, vmm.PagesOptions{Budget: low})
	for range 2 {
		n, err := p.Fill(background, 0)
		require.NoError(t, err)
		require.Equal(t, 50, n)
	}
}

// Reserve, capture, measure, commit: a cache reserves the most that it may have, and maps what
// warming up needs. Once every graph was captured and launched, what they and the libraries take
// is taken, and the cache gets all but a headroom.
func ExamplePages_Fill() {
	sys, err := auto.Open(auto.Options{Driver: auto.Software, Machine: sim.Options{Devices: []sim.DeviceOptions{{Memory: 1 << 30}}}})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()
	dev := sys.Devices()[0]
	stream, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer stream.Close()

	cache, err := vmm.NewSparse(dev, vmm.SparseOptions{Reserve: dev.TotalMemory()}) // reserve
	if err != nil {
		log.Fatal(err)
	}
	defer cache.Close()
	ctx, warm := context.Background(), vmm.Span{First: 0, N: 8}
	if err := cache.Map(ctx, stream, warm); err != nil {
		log.Fatal(err)
	}
	graph, err := stream.WithCapture(cuda.CaptureOptions{}, func() error { // capture
		return stream.Memset(cache.Ptr(), 1, warm.N*cache.Page()) // stands for a model's kernels
	})
	if err != nil {
		log.Fatal(err)
	}
	defer graph.Close()
	if err := graph.Launch(stream); err != nil { // once, which takes memory, too
		log.Fatal(err)
	}
	if err := stream.Synchronize(); err != nil {
		log.Fatal(err)
	}

	const headroom = 100 << 20
	n, err := cache.Pages().Fill(ctx, headroom) // measure
	if err != nil {
		log.Fatal(err)
	}
	if err := cache.Map(ctx, stream, vmm.Span{First: 0, N: warm.N + n}); err != nil { // commit
		log.Fatal(err)
	}
	if err := graph.Launch(stream); err != nil {
		log.Fatal(err)
	}
	free, _, err := dev.MemoryInfo()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d of %d pages, and %d MiB stay free\n", cache.Stats().Mapped, cache.Stats().Pages, free>>20)
	// Output:
	// 461 of 512 pages, and 101 MiB stay free
}
