package main

import (
	"context"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"

	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/samples/internal/app"
)

// follow maps the weights, and reads each tensor where the manifest says that it is.
func follow(ctx context.Context, e *app.Env, dir string) (err error) {
	client, err := publish.Dial(ctx, filepath.Join(dir, socket), publish.DialOptions{Wait: true})
	if err != nil {
		return err
	}
	defer app.Close(client, &err)
	memory, err := publish.Follow[byte](ctx, client, e.Device, weights, publish.FollowOptions{ReadOnly: true})
	if err != nil {
		return err
	}
	defer app.Close(memory, &err)
	if err := memory.Next(ctx); err != nil {
		return err
	}
	tensors := memory.Manifest().Tensors
	e.Line("follower", "process %d, %d tensors in memory at %v", os.Getpid(), len(tensors), memory.Array().Ptr())
	for _, of := range tensors {
		t, part, err := memory.Tensor(of.Name)
		if err != nil {
			return err
		}
		read := make([]byte, t.Size())
		if err := part.CopyTo(nil, read); err != nil {
			return err
		}
		if sum := fmt.Sprintf("crc32c:%08x", crc32.Checksum(read, crc32.MakeTable(crc32.Castagnoli))); sum != t.Digest {
			return fmt.Errorf("tensor %q has the digest %s, where the manifest has %s", t.Name, sum, t.Digest)
		}
	}
	e.Line("verified", "every tensor has the digest that it was loaded with")
	return nil
}
