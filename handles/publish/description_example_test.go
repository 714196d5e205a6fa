//go:build linux

package publish_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/vmm"
)

// A publication has a manifest: followers find tensors by their names, and one that expects others is
// refused before anything is mapped. The two would be different processes.
func ExamplePublishOptions() {
	ctx := context.Background()
	machine, err := sim.New(sim.Options{})
	check(err)
	sys, err := machine.OpenOwned(cuda.Options{})
	check(err)
	defer sys.Close()
	dev := sys.Devices()[0]
	top, err := os.MkdirTemp("", "example")
	check(err)
	defer os.RemoveAll(top)

	// The publisher.
	model := handles.Manifest{Bytes: 1088, Tensors: []handles.Tensor{
		{Name: "embed", Element: handles.BFloat16, Shape: []int{16, 32}, Kind: "parameter"},
		{Name: "norm", Element: handles.Float32, Shape: []int{16}, Offset: 1024, Kind: "parameter"},
	}}
	memory, err := vmm.NewArray[byte](dev, vmm.BufferOptions{Tag: "model"})
	check(err)
	defer memory.Close()
	_, err = memory.Append(nil, make([]byte, model.Bytes))
	check(err)
	listener, err := peer.Listen(filepath.Join(top, "sockets"), "server", peer.Options{})
	check(err)
	defer listener.Close()
	server := publish.NewServer(publish.ServerOptions{})
	defer server.Close()
	go server.Serve(ctx, listener)
	weights, err := publish.Array(server, "weights", memory, publish.PublishOptions{Manifest: &model})
	check(err)
	check(weights.Announce(ctx, memory.Len()))

	// The follower.
	client, err := publish.Dial(ctx, listener.Path(), publish.DialOptions{})
	check(err)
	defer client.Close()
	expected := model // what this program was built for; nil would take any
	follower, err := publish.Follow[byte](ctx, client, dev, "weights", publish.FollowOptions{ReadOnly: true, Expect: &expected})
	check(err)
	defer follower.Close()
	check(follower.Next(ctx))
	tensor, bytes, err := follower.Tensor("norm")
	check(err)
	fmt.Println(follower.Tag(), tensor.Element, tensor.Shape, bytes.Len(), "bytes at", bytes.Ptr()-follower.Array().Ptr())

	expected.Tensors = []handles.Tensor{{Name: "embed", Element: handles.Float16, Shape: []int{16, 32}}}
	_, err = publish.Follow[byte](ctx, client, dev, "weights", publish.FollowOptions{Expect: &expected})
	if !errors.Is(err, handles.ErrMismatch) {
		log.Fatal(err)
	}
	fmt.Println(err)
	// Output:
	// model float32 [16] 64 bytes at 0x400
	// publish.Follow: publication "weights": handles.Manifest.Match: not what was declared: tensor "embed" has element bfloat16 instead of float16, kind "parameter" instead of ""; a tensor "norm" that is not expected; use memory of the same model, laid out in the same way
}
