//go:build linux

package broker_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
)

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// An engine loads its weights, and its successor finds them. Broker and engines would be different
// processes; "cuvmm serve" is such a broker, with a keeper.
func ExampleClient_Ensure() {
	machine, err := sim.New(sim.Options{})
	must(err)
	sys, err := machine.OpenOwned(cuda.Options{})
	must(err)
	defer sys.Close()
	device := sys.Devices()[0]
	ctx := context.Background()
	top, err := os.MkdirTemp("", "example")
	must(err)
	defer os.RemoveAll(top)

	// The broker.
	socket, err := peer.Listen(filepath.Join(top, "cuvmm"), "broker", peer.Options{})
	must(err)
	defer socket.Close()
	b, err := broker.New(ctx, sys, broker.Options{})
	must(err)
	defer b.Close()
	go b.Serve(ctx, socket)

	engine := func(name string) {
		k, err := broker.Dial(ctx, socket.Path(), broker.DialOptions{})
		must(err)
		defer k.Close()
		load := func(ctx context.Context, w *broker.Writer) (*broker.Object, error) {
			fmt.Println(name, "loads the weights")
			stream, err := device.NewStream(cuda.StreamOptions{})
			must(err)
			defer stream.Close()
			must(stream.Upload(w.Buffer().Ptr(), []byte("weights")))
			return w.Commit(ctx, &handles.Manifest{Bytes: 7, Tensors: []handles.Tensor{
				{Name: "layer.0.w", Element: handles.Uint8, Shape: []int{7}},
			}}, stream)
		}
		weights, err := k.Ensure(ctx, device, "model", broker.CreateOptions{Bytes: 7}, load)
		must(err)
		defer weights.Close()
		_, memory, err := weights.Tensor("layer.0.w")
		must(err)
		bytes := make([]byte, 7)
		must(memory.CopyTo(nil, bytes))
		fmt.Printf("%s has %q, version %d\n", name, bytes, weights.About().Version)
	}
	engine("the first engine")
	engine("its successor")
	// Output:
	// the first engine loads the weights
	// the first engine has "weights", version 1
	// its successor has "weights", version 1
}

// A cache goes from one process to the next, and with the last that holds it.
func ExampleClient_Create() {
	sys, path, end := serving()
	defer end()
	ctx := context.Background()
	device := sys.Devices()[0]
	k, err := broker.Dial(ctx, path, broker.DialOptions{})
	must(err)
	defer k.Close()
	w, err := k.Create(ctx, device, "cache", broker.CreateOptions{Bytes: 4 << 20, Ephemeral: true})
	must(err)
	cache, err := w.Commit(ctx, nil)
	must(err)
	reader, err := k.Attach(ctx, device, "cache", broker.AttachOptions{})
	must(err)
	show := func(l broker.Listing) { fmt.Println(l.Name, l.Bytes>>20, "MiB, holders:", l.Holders) }
	list := func() {
		all, err := k.List(ctx)
		must(err)
		for _, l := range all {
			show(l)
		}
		fmt.Println(len(all), "objects")
	}
	must(cache.Close())
	list()
	must(reader.Close())
	list()
	// Output:
	// cache 4 MiB, holders: 1
	// 1 objects
	// 0 objects
}

// A publisher ends, and its successor goes on with what it announced.
func ExampleClient_Keep() {
	sys, path, end := serving()
	defer end()
	ctx := context.Background()
	publisher := func(text string) {
		k, err := broker.Dial(ctx, path, broker.DialOptions{})
		must(err)
		defer k.Close()
		var kept *broker.Kept
		kept, err = k.Keep(ctx, sys.Devices()[0], "weights", broker.KeepOptions{Bytes: 8, Wait: true})
		must(err)
		defer kept.Close()
		server := publish.NewServer(publish.ServerOptions{}) // its socket is left out
		defer server.Close()
		p, err := server.Publish("weights", kept.Buffer(), publish.PublishOptions{Page: kept.Page()})
		must(err)
		memory, err := kept.Buffer().Slice(0, 8)
		must(err)
		was := make([]byte, 8)
		must(memory.CopyTo(nil, was))
		fmt.Printf("shows something: %v, %q\n", p.Stats().Generation > 0, was)
		must(p.Rewrite(ctx, publish.RewriteOptions{}))
		must(memory.CopyFrom(nil, []byte(text)))
		must(p.Announce(ctx, 8))
	}
	publisher("weights1")
	publisher("weights2")
	// Output:
	// shows something: false, "\x00\x00\x00\x00\x00\x00\x00\x00"
	// shows something: true, "weights1"
}

// A process serves its child over the connection that the child inherits.
func ExampleNewClient() {
	machine, err := sim.New(sim.Options{})
	must(err)
	sys, err := machine.OpenOwned(cuda.Options{})
	must(err)
	defer sys.Close()
	ctx := context.Background()
	b, err := broker.New(ctx, sys, broker.Options{})
	must(err)
	defer b.Close()
	near, file, err := peer.Pair(peer.Options{}) // file is for the child's exec.Cmd.ExtraFiles
	must(err)
	go b.ServeConn(ctx, near)

	// The child.
	far, err := peer.Inherit(file, peer.Options{})
	must(err)
	k, err := broker.NewClient(ctx, far)
	must(err)
	defer k.Close()
	var s broker.Status
	s, err = k.Status(ctx)
	must(err)
	fmt.Println("ready:", s.Ready, "objects:", s.Objects)
	// Output: ready: true objects: 0
}

// serving is a broker as in the first example.
func serving() (sys *cuda.System, path string, end func()) {
	machine, err := sim.New(sim.Options{})
	must(err)
	sys, err = machine.OpenOwned(cuda.Options{})
	must(err)
	top, err := os.MkdirTemp("", "example")
	must(err)
	socket, err := peer.Listen(filepath.Join(top, "cuvmm"), "broker", peer.Options{})
	must(err)
	b, err := broker.New(context.Background(), sys, broker.Options{})
	must(err)
	go b.Serve(context.Background(), socket)
	return sys, socket.Path(), func() {
		must(b.Close())
		must(socket.Close())
		must(sys.Close())
		must(os.RemoveAll(top))
	}
}
