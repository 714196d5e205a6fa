//go:build linux

package handles_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/vmm"
	"golang.org/x/sys/unix"
)

// A server in a private directory hands out a file.
func Example() {
	ctx := context.Background()
	top, err := os.MkdirTemp("", "example")
	check(err)
	defer os.RemoveAll(top)

	server, err := handles.Listen(filepath.Join(top, "sockets"), "", handles.Options{})
	check(err)
	defer server.Close()
	served := make(chan struct{})
	go func() {
		defer close(served)
		conn, err := server.Accept(ctx)
		check(err)
		defer conn.Close()
		m, err := conn.Receive(ctx)
		check(err)
		fmt.Printf("asked for: %s\n", m.Body)
		n, err := unix.Open(os.DevNull, unix.O_RDONLY, 0)
		check(err)
		f, err := handles.NewFD(n)
		check(err)
		defer f.Close()
		check(conn.Send(ctx, handles.Message{Kind: 2, FDs: []*handles.FD{f}}))
		_, _ = conn.Receive(ctx) // until the client is gone
	}()

	client, err := handles.Dial(ctx, server.Path(), handles.Options{})
	check(err)
	defer func() {
		client.Close()
		<-served
	}()
	check(client.Send(ctx, handles.Message{Kind: 1, Body: []byte("a file")}))
	m, err := client.Receive(ctx)
	check(err)
	defer m.Close()
	fmt.Printf("got %d\n", len(m.FDs))
	// Output:
	// asked for: a file
	// got 1
}

// One end shares an array, the other maps the same memory. In a program the ends
// are in two processes.
func ExampleSendArray() {
	ctx := context.Background()
	machine, err := sim.New(sim.Options{})
	check(err)
	system, err := machine.OpenOwned()
	check(err)
	defer system.Close()
	device := system.Devices()[0]
	near, file, err := handles.Pair(handles.Options{})
	check(err)
	defer near.Close()
	far, err := handles.Inherit(file, handles.Options{})
	check(err)
	defer far.Close()

	numbers, err := vmm.NewArray[float32](device, vmm.BufferOptions{})
	check(err)
	_, err = numbers.Append(nil, []float32{1, 2, 3})
	check(err)
	sent := make(chan error, 1)
	go func() { sent <- handles.SendArray(ctx, near, numbers) }()

	shared, err := handles.ReceiveArray[float32](ctx, far, device, handles.ImportOptions{ReadOnly: true})
	check(err)
	check(<-sent)
	check(numbers.Close()) // the memory lives on
	got := make([]float32, shared.Len())
	check(shared.All().CopyTo(nil, got))
	fmt.Println(got)
	check(shared.Close())
	// Output:
	// [1 2 3]
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// A publisher announces an array as it grows, and a follower sees it grow. The
// two would be different processes, each with a device of its own.
func ExampleServer() {
	machine, err := sim.New(sim.Options{})
	check(err)
	sys, err := machine.OpenOwned()
	check(err)
	defer sys.Close()
	dev := sys.Devices()[0]
	ctx := context.Background()
	top, err := os.MkdirTemp("", "example")
	check(err)
	defer os.RemoveAll(top)
	dir := filepath.Join(top, "sockets")

	// The publisher.
	array, err := vmm.NewArray[float32](dev, vmm.BufferOptions{})
	check(err)
	defer array.Close()
	listener, err := handles.Listen(dir, "server", handles.Options{}) // dir is made, for this user alone
	check(err)
	defer listener.Close()
	server := handles.NewServer(handles.ServerOptions{})
	defer server.Close()
	go server.Serve(ctx, listener)
	weights, err := handles.PublishArray(server, "weights", array)
	check(err)
	writer, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	defer writer.Close()

	// The follower.
	conn, err := handles.Dial(ctx, filepath.Join(dir, "server"), handles.Options{})
	check(err)
	client := handles.NewClient(conn)
	defer client.Close()
	follower, err := handles.Follow[float32](ctx, client, dev, "weights", handles.FollowOptions{ReadOnly: true})
	check(err)
	defer follower.Close()
	reader, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	defer reader.Close()

	for i := range 2 {
		_, err := array.Append(writer, []float32{float32(i), float32(i) + 0.5})
		check(err)
		check(weights.Announce(ctx, array.Len(), writer))

		// What the reader does from here on comes behind what the writer did.
		check(follower.Next(ctx, reader))
		got := make([]float32, follower.Len())
		check(follower.Array().All().CopyTo(reader, got))
		fmt.Println("generation", follower.Generation(), "has", got)
	}
	// Output:
	// generation 1 has [0 0.5]
	// generation 2 has [0 0.5 1 1.5]
}

// Goroutines that append at the same time announce what each of them appended,
// in any order: all before the first gap is shown.
func ExamplePublication_AnnounceRange() {
	ctx := context.Background()
	machine, err := sim.New(sim.Options{})
	check(err)
	system, err := machine.OpenOwned()
	check(err)
	defer system.Close()
	array, err := vmm.NewArray[int32](system.Devices()[0], vmm.BufferOptions{})
	check(err)
	defer array.Close()
	server := handles.NewServer(handles.ServerOptions{})
	defer server.Close()
	index, err := handles.PublishArray(server, "index", array)
	check(err)

	var writers sync.WaitGroup
	for range 4 {
		writers.Go(func() {
			stream, err := array.Device().NewStream(cuda.StreamOptions{})
			check(err)
			defer stream.Close()
			for range 10 {
				at, err := array.Append(stream, []int32{1, 2, 3})
				check(err)
				check(index.AnnounceRange(ctx, at, at+3, stream))
			}
		})
	}
	writers.Wait()
	fmt.Println(index.Stats().Length, "elements are shown")
	// Output: 120 elements are shown
}
