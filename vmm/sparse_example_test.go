package vmm_test

import (
	"context"
	"fmt"
	"log"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/vmm"
)

// Two sequences of a cache have their pages from one source, so that what one gives back the
// other uses. Each has a contiguous range of addresses.
func ExampleNewSparse() {
	sys, err := auto.Open(auto.Options{})
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

	pages, err := vmm.NewPages(dev, vmm.PagesOptions{Budget: cuda.NewBudget(64<<20, cuda.BudgetOptions{}), Name: "kv"})
	if err != nil {
		log.Fatal(err)
	}
	defer pages.Close()
	var sequences [2]*vmm.Sparse
	for i := range sequences {
		if sequences[i], err = vmm.NewSparse(dev, vmm.SparseOptions{Reserve: 1 << 30, Pages: pages}); err != nil {
			log.Fatal(err)
		}
		defer sequences[i].Close()
	}

	ctx := context.Background()
	first := vmm.Span{First: 0, N: 3}
	if err := sequences[0].Map(ctx, stream, first); err != nil {
		log.Fatal(err)
	}
	if err := cuda.UploadOf(stream, sequences[0].Ptr(), []float32{1, 2, 3}); err != nil {
		log.Fatal(err)
	}
	// Its end: the pages are free when the work that is on the stream now is done.
	if err := sequences[0].UnmapAfter([]*cuda.Stream{stream}, first); err != nil {
		log.Fatal(err)
	}
	// Work of the same stream may have them at once, anywhere.
	if err := sequences[1].Map(ctx, stream, vmm.Span{First: 2, N: 2}, vmm.Span{First: 90, N: 1}); err != nil {
		log.Fatal(err)
	}
	show := func(p vmm.PagesStats, s vmm.SparseStats) {
		fmt.Printf("%d pages, of which %d are used; %d were recycled\n", p.Pages, p.Used, p.Recycled)
		fmt.Printf("%d of the sequence's %d are mapped\n", s.Mapped, s.Pages)
	}
	show(pages.Stats(), sequences[1].Stats())
	// Output:
	// 3 pages, of which 3 are used; 3 were recycled
	// 3 of the sequence's 512 are mapped
}

// Two sequences begin with the same tokens, whose pages they share until one writes there.
func ExampleSparse_Share() {
	sys, err := auto.Open(auto.Options{})
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
	first, err := vmm.NewSparse(dev, vmm.SparseOptions{Reserve: 1 << 30, Page: 2 << 20})
	if err != nil {
		log.Fatal(err)
	}
	ctx, page := context.Background(), first.Page()
	second, err := vmm.NewSparse(dev, vmm.SparseOptions{Reserve: 1 << 30, Pages: first.Pages()})
	if err != nil {
		log.Fatal(err)
	}
	defer first.Close() // after the other one, which uses its source
	defer second.Close()

	prefix := vmm.Span{First: 0, N: 2}
	if err := first.Map(ctx, stream, prefix); err != nil {
		log.Fatal(err)
	}
	tokens, err := vmm.ViewOf[uint32](first, page, 3)
	if err != nil {
		log.Fatal(err)
	}
	if err := tokens.CopyFrom(stream, []uint32{1, 2, 3}); err != nil {
		log.Fatal(err)
	}
	if err := second.Share(ctx, first, 0, prefix); err != nil {
		log.Fatal(err)
	}
	// The second writes its last page: that one becomes its own.
	if err := second.Replace(ctx, stream, 1); err != nil {
		log.Fatal(err)
	}
	own, err := vmm.ViewOf[uint32](second, page, 3)
	if err != nil {
		log.Fatal(err)
	}
	part, err := own.Slice(1, 2)
	if err != nil {
		log.Fatal(err)
	}
	if err := part.CopyFrom(stream, []uint32{20}); err != nil {
		log.Fatal(err)
	}
	for _, v := range []vmm.View[uint32]{tokens, own} {
		got := make([]uint32, 3)
		if err := v.CopyTo(stream, got); err != nil {
			log.Fatal(err)
		}
		fmt.Println(got)
	}
	marks := map[vmm.PageState]string{vmm.PageHole: ".", vmm.PageMapped: "own ", vmm.PageShared: "shared "}
	for _, state := range second.States()[:5] {
		fmt.Print(marks[state])
	}
	fmt.Printf(" of %d pages\n", first.Pages().Stats().Pages)
	// Output:
	// [1 2 3]
	// [1 20 3]
	// shared own ... of 3 pages
}
