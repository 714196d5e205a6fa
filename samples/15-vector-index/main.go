// Command 15-vector-index is an index of vectors that grows while it is searched.
// Several goroutines append to one array, each on a stream of its own and without a
// lock, and announce what they appended. Three other processes follow the array and
// look for the vector that is nearest to a query, as vectors arrive.
//
//	go run ./samples/15-vector-index [-driver auto|real|sim]
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
	"golang.org/x/sync/errgroup"
)

const (
	name       = "index" // of the publication and of its socket
	readers    = 3
	writers    = 4
	each       = 1024 // vectors of each writer
	dimensions = 32
	batch      = 64 // of them at a time
)

// vector is an element of the array.
type vector struct {
	ID uint32
	At [dimensions]float32
}

// vectorOf returns the vector with a number.
func vectorOf(id uint32) vector {
	v := vector{ID: id}
	for i := range v.At {
		id = id*1664525 + 1013904223
		v.At[i] = float32(id>>8) / (1 << 24)
	}
	return v
}

var sample = app.Sample{
	Name:  "15-vector-index",
	Shows: "an index that several goroutines extend without a lock, while other processes search it",
	Next:  "16-kv-cache: sequences that share a prefix",
	Run:   run,
}

func main() { app.Main(sample) }

func run(e *app.Env) (err error) {
	socket := e.Flags.String("socket", "", "the `path` that a reader dials (the sample says so)")
	if err := e.Open(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(e.Context, 2*time.Minute)
	defer cancel()
	if e.Role == "reader" {
		return read(ctx, e, *socket)
	}

	index, err := vmm.NewArray[vector](e.Device, vmm.BufferOptions{})
	if err != nil {
		return err
	}
	defer app.Close(index, &err)
	server := publish.NewServer(publish.ServerOptions{})
	defer app.Close(server, &err) // ends the publication: the array can be closed
	published, err := publish.Array(server, name, index)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "index")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	listener, err := peer.Listen(dir, name, peer.Options{})
	if err != nil {
		return err
	}
	defer app.Close(listener, &err)
	all, alive := errgroup.WithContext(ctx)           // the first that fails ends the others
	go func() { _ = server.Serve(alive, listener) }() // until the listener closes
	for range readers {
		reader, err := e.Again(alive, "reader", "-socket", filepath.Join(dir, name))
		if err != nil {
			return err
		}
		all.Go(reader.Run)
	}
	var appending errgroup.Group
	for w := range writers {
		appending.Go(func() error { return extend(alive, e.Device, index, published, w*each) })
	}
	all.Go(func() error {
		// In this order: the publication ends when every reader has everything.
		return errors.Join(appending.Wait(), published.Settle(alive), published.Withdraw())
	})
	if err := all.Wait(); err != nil {
		return err
	}
	e.Line("verified", "%d readers found each of %d vectors once, appended by %d writers", readers, index.Len(), writers)
	return nil
}

// extend appends and announces vectors, as one of several writers. Append returns
// where the batch landed, between batches of the others.
func extend(ctx context.Context, dev *cuda.Device, index *vmm.Array[vector], published *publish.Publication, first int) (err error) {
	stream, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer app.Close(stream, &err)
	for done := 0; done < each; done += batch {
		if done == each/2 { // the rest comes while readers follow
			if err := published.AwaitFollowers(ctx, readers); err != nil {
				return err
			}
		}
		var vectors [batch]vector
		for i := range vectors {
			vectors[i] = vectorOf(uint32(first + done + i))
		}
		at, err := index.Append(stream, vectors[:])
		if err != nil {
			return err
		}
		// Readers see it when everything before it was announced, too.
		if err := published.AnnounceRange(ctx, at, at+batch, stream); err != nil {
			return err
		}
	}
	return nil
}

// read is a reader: it searches what has arrived until the publication ends.
func read(ctx context.Context, e *app.Env, socket string) (err error) {
	conn, err := peer.Dial(ctx, socket, peer.Options{})
	if err != nil {
		return err
	}
	client := publish.NewClient(conn)
	defer app.Close(client, &err)
	follower, err := publish.Follow[vector](ctx, client, e.Device, name, publish.FollowOptions{ReadOnly: true})
	if err != nil {
		return err
	}
	defer app.Close(follower, &err)
	stream, err := e.Device.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer app.Close(stream, &err)
	const total, wanted = writers * each, writers * each / 2
	query, nearest, distance := vectorOf(wanted).At, uint32(0), float32(dimensions)
	seen, searches := map[uint32]bool{}, 0
	for ; ; searches++ {
		if err := follower.Next(ctx, stream); errors.Is(err, publish.ErrWithdrawn) {
			break
		} else if err != nil {
			return err
		}
		arrived, err := follower.Array().Slice(len(seen), follower.Len())
		if err != nil {
			return err
		}
		vectors := make([]vector, arrived.Len())
		if err := arrived.CopyTo(stream, vectors); err != nil {
			return err
		}
		for _, v := range vectors {
			if v != vectorOf(v.ID) || seen[v.ID] {
				return fmt.Errorf("vector %d is not what was appended, or came twice", v.ID)
			}
			seen[v.ID] = true
			apart := float32(0)
			for i := range query {
				apart += (v.At[i] - query[i]) * (v.At[i] - query[i])
			}
			if apart < distance {
				nearest, distance = v.ID, apart
			}
		}
	}
	if len(seen) != total || nearest != wanted {
		return fmt.Errorf("%d vectors, of which %d is the nearest: %d vectors and %d were expected", len(seen), nearest, total, wanted)
	}
	e.Line("reader", "process %d, the index is at %v: %d vectors in %d steps", os.Getpid(), follower.Array().Ptr(), len(seen), searches)
	return nil
}
