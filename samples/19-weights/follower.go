package main

import (
	"context"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"

	"github.com/cuvmm/cuvmm/handles"
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
	manifest, err := manifestOf(ctx, client, e)
	if err != nil {
		return err
	}
	if manifest.Bytes != memory.Len() {
		return fmt.Errorf("a manifest of %d bytes, for memory of %d", manifest.Bytes, memory.Len())
	}
	tensors := manifest.ByName()
	e.Line("follower", "process %d, %d tensors in memory at %v", os.Getpid(), len(tensors), memory.Array().Ptr())
	for name, t := range tensors {
		part, err := memory.Array().Slice(t.Offset, t.Offset+t.Size())
		if err != nil {
			return err
		}
		read := make([]byte, t.Size())
		if err := part.CopyTo(nil, read); err != nil {
			return err
		}
		if sum := fmt.Sprintf("crc32c:%08x", crc32.Checksum(read, crc32.MakeTable(crc32.Castagnoli))); sum != t.Digest {
			return fmt.Errorf("tensor %q has the digest %s, where the manifest has %s", name, sum, t.Digest)
		}
	}
	e.Line("verified", "every tensor has the digest that it was loaded with")
	return nil
}

// manifestOf reads the manifest, which is checked: it comes from another process.
func manifestOf(ctx context.Context, client *publish.Client, e *app.Env) (manifest *handles.Manifest, err error) {
	about, err := publish.Follow[byte](ctx, client, e.Device, described, publish.FollowOptions{ReadOnly: true})
	if err != nil {
		return nil, err
	}
	defer app.Close(about, &err)
	if err := about.Next(ctx); err != nil {
		return nil, err
	}
	text := make([]byte, about.Len())
	if err := about.Array().All().CopyTo(nil, text); err != nil {
		return nil, err
	}
	manifest = new(handles.Manifest)
	return manifest, manifest.UnmarshalBinary(text)
}
