package main

import (
	"errors"
	"path/filepath"

	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/samples/internal/app"
)

// follow waits for the socket, and follows what is published there.
func follow(e *app.Env, dir string) (client *publish.Client, f *publish.Follower[uint32], err error) {
	client, err = publish.Dial(e.Context, filepath.Join(dir, "server"), publish.DialOptions{Wait: true, ComeBack: &publish.ComeBack{}})
	if err != nil {
		return nil, nil, err
	}
	f, err = publish.Follow[uint32](e.Context, client, e.Device, "rounds", publish.FollowOptions{Reserve: 1 << 30, KeepDescriptors: true})
	if err != nil {
		return nil, nil, errors.Join(err, client.Close())
	}
	return client, f, nil
}

// sidecar takes over when the publisher has ended, and goes on with its rounds.
func sidecar(e *app.Env, dir string) (err error) {
	client, f, err := follow(e, dir)
	if err != nil {
		return err
	}
	defer app.Close(client, &err)
	server := publish.NewServer(publish.ServerOptions{})
	defer app.Close(server, &err)
	published, err := publish.TakeOver(e.Context, server, f, publish.TakeOverOptions{})
	if err != nil {
		return errors.Join(err, f.Close())
	}
	array := f.Array() // which is this process's now
	defer app.Close(array, &err)
	defer func() { err = errors.Join(err, published.Withdraw()) }()
	e.Line("sidecar", "goes on after %d elements", array.Len())
	return rounds(e, array, published)
}
