package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

// socket is the one of the first tenant, in the folder.
const socket = "weights"

// published is what the first tenant has for its reader.
type published struct {
	server   *publish.Server
	listener *peer.Listener
}

// show publishes an array to those who come.
func show(e *app.Env, folder string, a *vmm.Array[uint32]) (p published, err error) {
	if p.listener, err = peer.Listen(folder, socket, peer.Options{}); err != nil {
		return p, err
	}
	p.server = publish.NewServer(publish.ServerOptions{})
	shown, err := publish.Array(p.server, "weights", a)
	if err == nil {
		err = shown.Announce(e.Context, a.Len())
	}
	if err != nil {
		return p, errors.Join(err, p.Close())
	}
	go func() { _ = p.server.Serve(e.Context, p.listener) }()
	return p, nil
}

// Close ends what was published.
func (p published) Close() error {
	if p.server == nil {
		return nil
	}
	return errors.Join(p.listener.Close(), p.server.Close())
}

// read is a process that follows the weights of the first tenant. It needs to know nothing of their sleep:
// while they are away Next waits, and then they are at the same address.
func read(e *app.Env, o options) (err error) {
	conn, err := peer.Inherit(os.NewFile(3, "parent"), peer.Options{})
	if err != nil {
		return err
	}
	defer app.Close(conn, &err)
	client, err := publish.Dial(e.Context, filepath.Join(o.folder, socket), publish.DialOptions{})
	if err != nil {
		return err
	}
	defer app.Close(client, &err)
	f, err := publish.Follow[uint32](e.Context, client, e.Device, "weights", publish.FollowOptions{ReadOnly: true})
	if err != nil {
		return err
	}
	defer app.Close(f, &err)
	var c contents
	defer app.Close(&c, &err)
	if err := c.open(e); err != nil {
		return err
	}
	return serve(e.Context, conn, func(ctx context.Context, _ uint16) error {
		if err := f.Next(ctx, c.streams...); err != nil {
			return err
		}
		if err := c.check(f.Array(), 0); err != nil {
			return err
		}
		return f.Release(c.streams...)
	})
}
