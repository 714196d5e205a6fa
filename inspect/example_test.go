//go:build linux

package inspect_test

import (
	"bytes"
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
)

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// opened opens the driver for an example.
func opened() (sys *cuda.System, dev *cuda.Device) {
	sys, err := auto.Open(auto.Options{Driver: auto.Software, CUDA: cuda.Options{TraceLeaks: true}})
	check(err)
	return sys, sys.Devices()[0]
}

// A snapshot shows what is reserved, what is mapped into it, and which memory that is.
func ExampleTake() {
	sys, dev := opened()
	defer sys.Close()
	buffer, err := vmm.NewBuffer(dev, vmm.BufferOptions{Reserve: 64 << 20, Chunks: vmm.FixedChunks(2 << 20)})
	check(err)
	defer buffer.Close()
	_, err = buffer.Append(nil, make([]byte, 3<<20))
	check(err)

	s, err := inspect.Take(sys)
	check(err)
	at := slices.IndexFunc(s.Reservations, func(r inspect.Reservation) bool { return r.Ptr == inspect.Address(buffer.Ptr()) })
	r := s.Reservations[at]
	fmt.Println(s.Holder(r), "of", r.Bytes>>20, "MiB")
	where := func(m inspect.Mapping) string {
		at := slices.IndexFunc(s.Memory, func(x inspect.Memory) bool { return x.ID == m.Memory })
		return s.Memory[at].Location
	}
	for _, m := range r.Mappings {
		fmt.Printf("%d MiB at %d MiB on %s, %s\n", m.Bytes>>20, m.Offset>>20, where(m), m.Access)
	}
	fullest := slices.MaxFunc(s.Buffers, func(a, b inspect.Buffer) int { return a.Used - b.Used })
	fmt.Println(fullest.Used>>20, "MiB used of", fullest.Committed>>20)
	// Output:
	// buffer of 64 MiB
	// 2 MiB at 0 MiB on device 0, device 0: read-write
	// 2 MiB at 2 MiB on device 0, device 0: read-write
	// 3 MiB used of 4
}

// With a driver for CUDA 13.4, here the software driver, a snapshot shows where the pages of managed
// memory are.
func ExampleManaged() {
	machine, err := sim.New(sim.Options{DriverVersion: 13040})
	check(err)
	sys, err := machine.OpenOwned(cuda.Options{})
	check(err)
	defer sys.Close()
	memory, err := managed.New(sys.Devices()[0], 8<<20, managed.Options{})
	check(err)
	defer memory.Close()
	half, err := memory.Slice(4<<20, 8<<20)
	check(err)
	check(half.Prefetch(nil, cuda.OnDevice(0)))

	s, err := inspect.Take(sys)
	check(err)
	show := func(r inspect.Resident) { fmt.Println(r.Bytes>>20, "MiB at", r.Offset>>20, "MiB on", r.Location) }
	for _, m := range s.Managed {
		for _, r := range m.Resident {
			show(r)
		}
	}
	// Output:
	// 4 MiB at 4 MiB on device 0
}

// A summary takes no walk over the objects, so it is cheap enough for each scrape of a
// monitor.
func ExampleSummarize() {
	sys, dev := opened()
	defer sys.Close()
	memory, err := vmm.Create(dev, 2<<20, vmm.Properties{})
	check(err)
	defer memory.Close()

	s, err := inspect.Summarize(sys)
	check(err)
	own := func(p inspect.Process) bool { return p.PID == os.Getpid() }
	used := func(d inspect.Device) bool { return d.Free != nil }
	fmt.Println(own(s.Process), slices.IndexFunc(s.Devices, used), s.Totals.AllocatedBytes>>20, "MiB")

	s, err = inspect.Take(sys) // which lists objects of all kinds
	check(err)
	fmt.Println(slices.ContainsFunc(s.Others, func(o inspect.Other) bool { return o.Kind == "stream" }))
	// Output:
	// true 0 2 MiB
	// false
}

// Two snapshots show what a program's memory is used for, and what has changed.
func ExampleCompare() {
	sys, dev := opened()
	defer sys.Close()
	stream, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	defer stream.Close()
	p, err := pool.New(dev, pool.Options{})
	check(err)
	defer p.Close()
	request := func(tag string, bytes int) pool.Block {
		b, err := p.Alloc(pool.Request{Bytes: bytes, Stream: stream, Tag: pool.NewTag(tag)})
		check(err)
		return b
	}

	first := request("activations", 6<<20)
	before, err := inspect.Take(sys)
	check(err)
	check(p.Free(first))
	second, third := request("kv cache", 4<<20), request("kv cache", 4<<20)
	after, err := inspect.Take(sys)
	check(err)

	show := func(u inspect.Use) { fmt.Printf("%+d MiB in %+d blocks: %s\n", u.Bytes>>20, u.Count, u.Name) }
	for _, u := range inspect.Compare(before, after) {
		show(u)
	}
	check(p.Free(second))
	check(p.Free(third))
	// Output:
	// +8 MiB in +2 blocks: kv cache
	// -6 MiB in -1 blocks: activations
}

// Snapshots are written as JSON, which any program reads.
func ExampleRead() {
	sys, _ := opened()
	defer sys.Close()
	s, err := inspect.Take(sys)
	check(err)
	var file bytes.Buffer
	check(s.Write(&file))

	back, err := inspect.Read(&file)
	check(err)
	fmt.Println(back.Format, back.Version, back.Process == s.Process)
	// Output:
	// cuvmm snapshot 2 true
}

// A reader of many processes' summaries bounds what each of them may send.
func ExampleReadSummary() {
	sys, _ := opened()
	defer sys.Close()
	s, err := inspect.Summarize(sys)
	check(err)
	var reply bytes.Buffer
	check(s.Write(&reply))

	back, err := inspect.ReadSummary(&reply)
	check(err)
	fmt.Println(back.Process == s.Process)
	// Output:
	// true
}

// What an operation could not give back is in the snapshot, and tried again.
func ExampleLeftover() {
	machine, err := sim.New(sim.Options{})
	check(err)
	sys, err := machine.OpenOwned(cuda.Options{})
	check(err)
	defer sys.Close()
	machine.Inject(sim.Fault{Call: "cuMemRelease", Result: 999})
	_, err = sys.Devices()[0].Probe()
	check(err)
	s, err := inspect.Take(sys)
	check(err)
	for _, left := range s.Leftovers {
		fmt.Println(left.What, left.Bytes, *left.Device)
	}
	// Output:
	// memory 2097152 0
}

// A pool's blocks have the stacks that allocated them if the pool tracks them, and its
// history what was allocated and freed.
func ExamplePool() {
	sys, dev := opened()
	defer sys.Close()
	stream, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	defer stream.Close()
	p, err := pool.New(dev, pool.Options{Track: true})
	check(err)
	defer p.Close()
	p.StartHistory(pool.HistoryOptions{})
	b, err := p.Alloc(pool.Request{Bytes: 3 << 20, Stream: stream, Tag: pool.NewTag("weights")})
	check(err)

	s, err := inspect.Take(sys)
	check(err)
	block := func(b inspect.Block, stack inspect.Stack) {
		function, file, _ := inspect.Frame(stack[0])
		fmt.Println(b.Requested>>20, "MiB for", b.Tag, "by", filepath.Base(function), "in", filepath.Base(file))
	}
	segment := func(g inspect.Segment) {
		fmt.Println(g.Kind, "of", g.Bytes>>20, "MiB")
		for _, b := range g.Blocks {
			block(b, s.Stacks[b.Stack-1])
		}
	}
	show := func(p inspect.Pool) {
		for _, g := range p.Segments {
			segment(g)
		}
		of := func(s inspect.Stream) bool { return s.Blocks > 0 }
		freed := func(e inspect.Event) bool { return e.Op == "free" }
		fmt.Println(slices.ContainsFunc(p.Streams, of), slices.ContainsFunc(p.History, freed))
	}
	show(s.Pools[0])
	check(p.Free(b))
	// Output:
	// region of 32 MiB
	// 3 MiB for weights by inspect_test.ExamplePool in example_test.go
	// true false
}

// What a process publishes shows its followers, and how much each keeps pinned.
func ExamplePublication() {
	sys, dev := opened()
	defer sys.Close()
	ctx := context.Background()
	top, err := os.MkdirTemp("", "example")
	check(err)
	defer os.RemoveAll(top)
	array, err := vmm.NewArray[float32](dev, vmm.BufferOptions{})
	check(err)
	defer array.Close()
	check(array.Resize(nil, 1000))
	listener, err := peer.Listen(filepath.Join(top, "sockets"), "server", peer.Options{})
	check(err)
	defer listener.Close()
	server := publish.NewServer(publish.ServerOptions{})
	defer server.Close()
	go server.Serve(ctx, listener)
	weights, err := publish.Array(server, "weights", array)
	check(err)
	check(weights.Announce(ctx, array.Len()))
	conn, err := peer.Dial(ctx, listener.Path(), peer.Options{})
	check(err)
	client := publish.NewClient(conn)
	defer client.Close()
	follower, err := publish.Follow[float32](ctx, client, dev, "weights", publish.FollowOptions{ReadOnly: true})
	check(err)
	defer follower.Close()
	check(follower.Next(ctx))
	lease, err := handles.LeaseArray(array, handles.LeaseOptions{Handle: vmm.PosixFD, Timeout: time.Hour})
	check(err)
	defer lease.Close()

	s, err := inspect.Summarize(sys)
	check(err)
	reader := func(r inspect.Reader) string { return fmt.Sprint(r.Bytes>>20, " MiB, ", r.Pinned, " pinned") }
	published := func(p inspect.Publication) { fmt.Println("published:", p.Name, reader(p.Followers[0])) }
	followed := func(f inspect.Follower) { fmt.Println("followed:", f.Name, f.Bytes>>20, "MiB, stuck:", f.Stuck != "") }
	leased := func(l inspect.Lease) { fmt.Println("leased:", l.Bytes>>20, "MiB") }
	published(s.Publications[0])
	followed(s.Followers[0])
	leased(s.Leases[0])
	// Output:
	// published: weights 2 MiB, 0 pinned
	// followed: weights 2 MiB, stuck: false
	// leased: 2 MiB
}

// A snapshot says which pages of a sparse range are mapped, and what its source has.
func ExampleSparse() {
	sys, dev := opened()
	defer sys.Close()
	seq, err := vmm.NewSparse(dev, vmm.SparseOptions{Reserve: 1 << 30, Page: 2 << 20, Name: "seq 1"})
	check(err)
	defer seq.Close()
	check(seq.Map(context.Background(), nil, vmm.Span{First: 0, N: 3}, vmm.Span{First: 9, N: 1}))
	snapshot, err := inspect.Take(sys)
	check(err)
	show := func(r inspect.Sparse, from inspect.Source, spans ...inspect.Span) {
		fmt.Println(r.Name, "has", r.Mapped, "of", r.Pages, "pages:", spans)
		fmt.Println("its source has", from.Pages)
	}
	show(snapshot.Sparse[0], snapshot.Sources[0], snapshot.Sparse[0].Spans...)
	// Output:
	// seq 1 has 4 of 512 pages: [{0 3} {9 1}]
	// its source has 4
}

// A snapshot has the budgets of the process, and which objects have the memory.
func ExampleBudget() {
	sys, dev := opened()
	defer sys.Close()
	limit := cuda.NewBudget(1<<30, cuda.BudgetOptions{Name: "example tenant"})
	buffer, err := vmm.NewBuffer(dev, vmm.BufferOptions{Name: "cache", Chunks: vmm.FixedChunks(2 << 20), Budget: limit})
	check(err)
	defer buffer.Close()
	check(buffer.Grow(6 << 20))

	s, err := inspect.Take(sys)
	check(err)
	budget := s.Budgets[slices.IndexFunc(s.Budgets, func(b inspect.Budget) bool { return b.Name == "example tenant" })]
	show := func(u inspect.BudgetUse) { fmt.Println(u.Kind, u.Name, u.Committed>>20, "MiB") }
	fmt.Println(budget.Committed>>20, "of", budget.Limit>>20, "MiB")
	show(budget.Owners[0])
	// Output:
	// 6 of 1024 MiB
	// buffer cache 6 MiB
}
