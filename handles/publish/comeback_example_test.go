//go:build linux

package publish_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/vmm"
)

// serve publishes some text until the returned function is called.
func serve(dev *cuda.Device, dir, text string) (stop func()) {
	buffer, err := vmm.NewBuffer(dev, vmm.BufferOptions{Reserve: 2 << 20})
	check(err)
	_, err = buffer.Append(nil, []byte(text))
	check(err)
	server := publish.NewServer(publish.ServerOptions{})
	p, err := server.Publish("text", buffer)
	check(err)
	check(p.Announce(context.Background(), buffer.Len()))
	listener, err := peer.Listen(dir, "server", peer.Options{})
	check(err)
	go server.Serve(context.Background(), listener)
	return func() {
		check(listener.Close())
		check(server.Close())
		check(buffer.Close())
	}
}

// A client that comes back goes on with the next publisher. Its followers keep what
// they have until then.
func ExampleDial() {
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
	stop := serve(dev, dir, "the first publisher")

	client, err := publish.Dial(ctx, filepath.Join(dir, "server"), publish.DialOptions{ComeBack: &publish.ComeBack{Most: 20 * time.Millisecond}})
	check(err)
	defer client.Close()
	follower, err := publish.Follow[byte](ctx, client, dev, "text", publish.FollowOptions{})
	check(err)
	defer follower.Close()
	show := func() {
		text := make([]byte, follower.Len())
		check(follower.Array().All().CopyTo(nil, text))
		fmt.Printf("%v: %s\n", follower.State(), text)
	}
	check(follower.Next(ctx))
	show()
	stop()
	for follower.State() == publish.Live {
		time.Sleep(time.Millisecond)
	}
	show()
	defer serve(dev, dir, "the second one")()
	check(follower.Next(ctx))
	show()
	// Output:
	// live: the first publisher
	// stale: the first publisher
	// live: the second one
}
