//go:build linux

package publish_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/vmm"
)

// A publisher has two versions of its weights in one array, and writes the one that no follower
// reads. The two would be different processes.
func ExampleHalfOf() {
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
	writer, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	defer writer.Close()

	// The publisher announces both halves complete.
	array, err := vmm.NewArray[float32](dev, vmm.BufferOptions{})
	check(err)
	defer array.Close()
	_, err = array.Append(writer, []float32{1, 1, 1, 1}) // two versions of two weights
	check(err)
	listener, err := peer.Listen(filepath.Join(top, "sockets"), "server", peer.Options{})
	check(err)
	defer listener.Close()
	server := publish.NewServer(publish.ServerOptions{})
	defer server.Close()
	go server.Serve(ctx, listener)
	weights, err := publish.Array(server, "weights", array)
	check(err)
	check(weights.Announce(ctx, array.Len(), writer))

	client, err := publish.Dial(ctx, filepath.Join(top, "sockets", "server"), publish.DialOptions{})
	check(err)
	defer client.Close()
	follower, err := publish.Follow[float32](ctx, client, dev, "weights", publish.FollowOptions{ReadOnly: true})
	check(err)
	defer follower.Close()

	read := func() []float32 {
		from, to := publish.HalfOf(follower.Generation(), follower.Len())
		half, err := follower.Array().Slice(from, to)
		check(err)
		got := make([]float32, to-from)
		check(half.CopyTo(writer, got))
		return got
	}
	for version := float32(2); version < 5; version++ {
		check(weights.Rewrite(ctx, publish.RewriteOptions{Turn: true}))
		from, to := publish.HalfOf(weights.Stats().Generation+1, array.Len())
		half, err := array.Slice(from, to)
		check(err)
		check(half.CopyFrom(writer, []float32{version, version}))

		if version > 2 {
			fmt.Println("while it is written:", read(), follower.Intact(follower.Generation()))
		}
		check(weights.Announce(ctx, array.Len(), writer))
		check(follower.Next(ctx))
		fmt.Println("announced:", read())
	}
	// Output:
	// announced: [2 2]
	// while it is written: [2 2] true
	// announced: [3 3]
	// while it is written: [3 3] true
	// announced: [4 4]
}
