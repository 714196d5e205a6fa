// Command 19-weights loads a file of tensors into GPU memory and publishes it with its
// manifest: another process finds the tensors by their names, in the same memory.
//
//	go run ./samples/19-weights [-driver auto|real|sim] [FILE]
package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/load"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

var sample = app.Sample{
	Name:  "19-weights",
	Shows: "a file of tensors, loaded once, that another process finds by name",
	Arg:   "FILE",
	Next:  "20-kv-pages: a cache of pages, in which sequences have contiguous addresses",
	Run:   run,
}

func main() { app.Main(sample) }

// What the two processes call each other and the memory.
const (
	socket  = "server"
	weights = "weights"
	limit   = time.Minute // for the other process
)

func run(e *app.Env) (err error) {
	dir := e.Flags.String("dir", "", "the private `folder` in which the processes meet (default: a temporary one)")
	if err := e.Parse(); err != nil {
		return err
	}
	if *dir == "" {
		if *dir, err = os.MkdirTemp("", "19-weights"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(*dir)) }()
	}
	if err := e.Open(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(e.Context, limit)
	defer cancel()
	if e.Role == "follower" {
		return follow(ctx, e, *dir)
	}
	if e.Arg == "" {
		e.Arg = filepath.Join(*dir, "model.safetensors")
		if err := makeModel(ctx, e); err != nil {
			return err
		}
	}
	memory, manifest, err := loadModel(ctx, e)
	if err != nil {
		return err
	}
	defer app.Close(memory, &err)
	return serve(ctx, e, *dir, memory, manifest)
}

// makeModel saves a small model from GPU memory.
func makeModel(ctx context.Context, e *app.Env) (err error) {
	array, err := vmm.NewArray[float32](e.Device, vmm.BufferOptions{})
	if err != nil {
		return err
	}
	defer app.Close(array, &err)
	numbers := make([]float32, 64*256+256)
	for i := range numbers {
		numbers[i] = float32(i)
	}
	stream, err := e.Device.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer app.Close(stream, &err)
	if _, err := array.Append(stream, numbers); err != nil {
		return err
	}
	return load.SaveSafetensors(ctx, load.SaveOptions{}, stream, e.Arg,
		load.Saving{Name: "embed.weight", Element: handles.Float32, Shape: []int{64, 256}, From: array.Ptr()},
		load.Saving{Name: "norm.weight", Element: handles.Float32, Shape: []int{256}, From: array.Ptr() + 4*64*256})
}

// loadModel loads all tensors of the file into one array of bytes.
func loadModel(ctx context.Context, e *app.Env) (memory *vmm.Array[byte], manifest *handles.Manifest, err error) {
	m, err := load.OpenSafetensors(e.Arg)
	if err != nil {
		return nil, nil, err
	}
	defer app.Close(m, &err)
	layout, err := m.Layout(0)
	if err != nil {
		return nil, nil, err
	}
	stream, err := e.Device.NewStream(cuda.StreamOptions{})
	if err != nil {
		return nil, nil, err
	}
	defer app.Close(stream, &err)
	memory, err = vmm.NewArray[byte](e.Device, vmm.BufferOptions{Reserve: max(layout.Bytes, 1)})
	if err != nil {
		return nil, nil, err
	}
	if err = memory.Resize(nil, layout.Bytes); err == nil {
		manifest, err = m.LoadAll(ctx, load.Options{}, stream, layout, memory.Ptr(), memory.Len())
	}
	if err != nil {
		return nil, nil, errors.Join(err, memory.Close())
	}
	e.Line("loaded", "%d tensors in %d bytes, process %d", len(manifest.Tensors), manifest.Bytes, os.Getpid())
	return memory, manifest, nil
}

// serve publishes the memory with its manifest until the other process has read it.
func serve(ctx context.Context, e *app.Env, dir string, memory *vmm.Array[byte], manifest *handles.Manifest) (err error) {
	server := publish.NewServer(publish.ServerOptions{})
	defer app.Close(server, &err)
	published, err := publish.Array(server, weights, memory, publish.PublishOptions{Manifest: manifest})
	if err != nil {
		return err
	}
	if err := published.Announce(ctx, memory.Len()); err != nil {
		return err
	}
	listener, err := peer.Listen(dir, socket, peer.Options{})
	if err != nil {
		return err
	}
	defer app.Close(listener, &err)
	go func() { _ = server.Serve(ctx, listener) }()
	cmd, err := e.Again(ctx, "follower", "-dir", dir)
	if err != nil {
		return err
	}
	return cmd.Run()
}
