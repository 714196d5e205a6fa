package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"os"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/samples/internal/app"
)

// follow is the child: it hashes what the parent announces, and writes the SHA-256
// into the parent's reply.
func follow(ctx context.Context, e *app.Env) (err error) {
	conn, err := peer.Inherit(os.NewFile(3, "parent"), peer.Options{})
	if err != nil {
		return err
	}
	client := publish.NewClient(conn)
	defer app.Close(client, &err)
	f, err := publish.Follow[byte](ctx, client, e.Device, fileName, publish.FollowOptions{ReadOnly: true})
	if err != nil {
		return err
	}
	defer app.Close(f, &err)
	s, err := e.Device.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer app.Close(s, &err)

	hash := sha256.New()
	have, changes := 0, 0
	for {
		// Work that is put on the stream after Next is ordered behind the parent's.
		err := f.Next(ctx, s)
		if errors.Is(err, publish.ErrWithdrawn) {
			break
		}
		if err != nil {
			return err
		}
		part, err := f.Array().Slice(have, f.Len())
		if err != nil {
			return err
		}
		piece := make([]byte, part.Len())
		if err := part.CopyTo(s, piece); err != nil {
			return err
		}
		hash.Write(piece)
		have, changes = f.Len(), changes+1
	}
	e.Line("child", "process %d, the array is at %v: bytes %d, changes %d", os.Getpid(), f.Array().Ptr(), have, changes)
	reply, err := publish.Open[byte](ctx, client, e.Device, replyName, handles.ImportOptions{})
	if err != nil {
		return err
	}
	defer app.Close(reply, &err)
	return reply.All().CopyFrom(nil, hash.Sum(nil))
}
