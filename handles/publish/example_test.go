//go:build linux

package publish_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/vmm"
)

// A publisher announces an array as it grows, and a follower sees it grow. The
// two would be different processes, each with a device of its own.
func ExampleServer() {
	machine, err := sim.New(sim.Options{})
	check(err)
	sys, err := machine.OpenOwned(cuda.Options{})
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
	listener, err := peer.Listen(dir, "server", peer.Options{}) // dir is made, for this user alone
	check(err)
	defer listener.Close()
	server := publish.NewServer(publish.ServerOptions{})
	defer server.Close()
	go server.Serve(ctx, listener)
	weights, err := publish.Array(server, "weights", array)
	check(err)
	writer, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	defer writer.Close()

	// The follower.
	client, err := publish.Dial(ctx, filepath.Join(dir, "server"), publish.DialOptions{})
	check(err)
	defer client.Close()
	follower, err := publish.Follow[float32](ctx, client, dev, "weights", publish.FollowOptions{ReadOnly: true})
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
	system, err := machine.OpenOwned(cuda.Options{})
	check(err)
	defer system.Close()
	array, err := vmm.NewArray[int32](system.Devices()[0], vmm.BufferOptions{})
	check(err)
	defer array.Close()
	server := publish.NewServer(publish.ServerOptions{})
	defer server.Close()
	index, err := publish.Array(server, "index", array)
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

// A client reads what a server publishes, once or as it grows.
func ExampleClient() {
	ctx := context.Background()
	machine, err := sim.New(sim.Options{})
	check(err)
	sys, err := machine.OpenOwned(cuda.Options{})
	check(err)
	defer sys.Close()
	dev := sys.Devices()[0]
	array, err := vmm.NewArray[int32](dev, vmm.BufferOptions{})
	check(err)
	defer array.Close()
	_, err = array.Append(nil, []int32{1, 2, 3})
	check(err)
	server := publish.NewServer(publish.ServerOptions{
		Authorize: func(p peer.Credentials, known bool, name string) publish.Access { return publish.ReadAccess },
	})
	defer server.Close()
	numbers, err := publish.Array(server, "numbers", array)
	check(err)
	check(numbers.Announce(ctx, 3))
	near, file, err := peer.Pair(peer.Options{}) // a child would inherit the file
	check(err)
	go func() { _ = server.ServeConn(ctx, near) }()
	conn, err := peer.Inherit(file, peer.Options{})
	check(err)

	client := publish.NewClient(conn)
	defer client.Close()
	all, err := client.List(ctx)
	check(err)
	show := func(l publish.Listing) { fmt.Println(l.Name, l.Access, l.Length) }
	show(all[0])
	once, err := publish.Open[int32](ctx, client, dev, "numbers", handles.ImportOptions{ReadOnly: true})
	check(err)
	fmt.Println(once.Len(), "elements were copied nowhere")
	check(once.Close())
	follower, err := publish.Follow[int32](ctx, client, dev, "numbers", publish.FollowOptions{ReadOnly: true})
	check(err)
	check(follower.Next(ctx))
	fmt.Println(follower.Len(), "elements of generation", follower.Generation())
	check(numbers.Settle(ctx)) // the publisher knows it, too
	length := func(st publish.Stats, f publish.FollowerStats) {
		fmt.Println(f.Length, "of", st.Length, "acknowledged")
	}
	length(numbers.Stats(), numbers.Stats().Followers[0])
	check(follower.Close())
	// Output:
	// numbers read 3
	// 3 elements were copied nowhere
	// 3 elements of generation 1
	// 3 of 3 acknowledged
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// A publisher rewrites an array in place, and a follower reads each version as a whole. The
// two would be different processes.
func ExamplePublication_Rewrite() {
	top, err := os.MkdirTemp("", "example")
	check(err)
	defer os.RemoveAll(top)
	machine, err := sim.New(sim.Options{})
	check(err)
	sys, err := machine.OpenOwned(cuda.Options{})
	check(err)
	defer sys.Close()
	dev := sys.Devices()[0]
	ctx := context.Background()

	// The publisher.
	array, err := vmm.NewArray[float32](dev, vmm.BufferOptions{})
	check(err)
	defer array.Close()
	_, err = array.Append(nil, []float32{0, 0, 0})
	check(err)
	listener, err := peer.Listen(filepath.Join(top, "sockets"), "server", peer.Options{})
	check(err)
	defer listener.Close()
	server := publish.NewServer(publish.ServerOptions{})
	defer server.Close()
	go server.Serve(ctx, listener)
	weights, err := publish.Array(server, "weights", array)
	check(err)
	check(weights.Announce(ctx, array.Len()))

	// The follower.
	client, err := publish.Dial(ctx, filepath.Join(top, "sockets", "server"), publish.DialOptions{})
	check(err)
	defer client.Close()
	follower, err := publish.Follow[float32](ctx, client, dev, "weights", publish.FollowOptions{ReadOnly: true})
	check(err)
	defer follower.Close()
	reader, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	defer reader.Close()

	for version := range 3 {
		check(follower.Next(ctx, reader))
		got := make([]float32, follower.Len())
		check(follower.Array().All().CopyTo(reader, got))
		fmt.Println(got, "intact:", follower.Intact(follower.Generation()))
		check(follower.Release(reader))

		// Returns when the work that was on the reader is done.
		check(weights.Rewrite(ctx, publish.RewriteOptions{}))
		next := float32(version + 1)
		check(array.All().CopyFrom(nil, []float32{next, next, next}))
		check(weights.Announce(ctx, array.Len()))
	}
	// Output:
	// [0 0 0] intact: true
	// [1 1 1] intact: true
	// [2 2 2] intact: true
}
