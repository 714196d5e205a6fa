package main

import (
	"errors"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

// publisher appends rounds to an array until it is killed.
func publisher(e *app.Env, dir string) (err error) {
	server := publish.NewServer(publish.ServerOptions{})
	defer app.Close(server, &err)
	array, err := vmm.NewArray[uint32](e.Device, vmm.BufferOptions{Reserve: 1 << 30})
	if err != nil {
		return err
	}
	defer app.Close(array, &err)
	published, err := publish.Array(server, "rounds", array)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, published.Withdraw()) }()
	listener, err := peer.Listen(dir, "server", peer.Options{})
	if err != nil {
		return err
	}
	defer app.Close(listener, &err)
	go func() { _ = server.Serve(e.Context, listener) }()
	if err := published.AwaitFollowers(e.Context, 2); err != nil {
		return err
	}
	return rounds(e, array, published)
}

// rounds appends and announces until the process is interrupted.
func rounds(e *app.Env, array *vmm.Array[uint32], published *publish.Publication) error {
	round := make([]uint32, step)
	for e.Context.Err() == nil {
		for i := range round {
			round[i] = uint32(array.Len() + i)
		}
		if _, err := array.Append(nil, round); err != nil {
			return err
		}
		if err := published.Announce(e.Context, array.Len()); err != nil && e.Context.Err() == nil {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
	return nil
}
