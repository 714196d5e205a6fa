package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

// serve starts the child, connected by a pair of sockets of which it inherits one,
// streams the input to it, and waits for its end. It returns the input's SHA-256.
func serve(ctx context.Context, e *app.Env, server *publish.Server, in io.Reader, step int, array *vmm.Array[byte], file *publish.Publication) (sum []byte, err error) {
	conn, far, err := peer.Pair(peer.Options{})
	if err != nil {
		return nil, err
	}
	cmd, err := e.Again(ctx, "follower")
	if err != nil {
		return nil, errors.Join(err, conn.Close(), far.Close())
	}
	cmd.ExtraFiles = []*os.File{far}
	// With far open here too, the child's end would go unnoticed.
	if err := errors.Join(cmd.Start(), far.Close()); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	alive, ended := context.WithCancel(ctx)
	defer ended()
	served := make(chan error, 1)
	go func() {
		served <- server.ServeConn(ctx, conn)
		ended()
	}()
	sum, err = stream(alive, array, file, in, step)
	if err != nil && alive.Err() == nil {
		_ = server.Close() // the child ends too, for no reason of its own
		_, _ = cmd.Wait(), <-served
		return nil, err
	}
	return sum, errors.Join(err, cmd.Wait(), <-served)
}

// stream appends the input and announces each piece, in the order of one stream. At
// the end it withdraws the publication from a child that has everything.
func stream(ctx context.Context, array *vmm.Array[byte], file *publish.Publication, in io.Reader, step int) (sum []byte, err error) {
	s, err := array.Buffer().Device().NewStream(cuda.StreamOptions{})
	if err != nil {
		return nil, err
	}
	defer app.Close(s, &err)
	hash, piece := sha256.New(), make([]byte, step)
	for {
		n, err := io.ReadFull(in, piece)
		hash.Write(piece[:n])
		if n > 0 {
			if _, err := array.Append(s, piece[:n]); err != nil {
				return nil, err
			}
			if err := file.Announce(ctx, array.Len(), s); err != nil {
				return nil, err
			}
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return nil, err
		}
	}
	if err := file.AwaitFollowers(ctx, 1); err != nil {
		return nil, err
	}
	if err := file.Settle(ctx); err != nil {
		return nil, err
	}
	return hash.Sum(nil), file.Withdraw()
}
