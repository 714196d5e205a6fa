package keeper

import (
	"context"
	"fmt"
	"sync"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// Client is the side of the process that a keeper keeps for. Its methods are safe for concurrent
// use, and each returns when the keeper has done what it says. After an error, other than that of a
// wrong argument or a refusal, it is not known whether the keeper did it, and the connection is
// over: all later calls fail.
type Client struct {
	mu sync.Mutex
	c  *peer.Conn
}

// NewClient makes a client of a connection to a keeper, which the caller closes.
func NewClient(c *peer.Conn) *Client { return &Client{c: c} }

// Write adds an entry, or replaces the record of the one with the same key and adds to its files.
// The files stay the caller's. An entry that the keeper has no room for is peer.ErrTooLarge.
func (k *Client) Write(ctx context.Context, e Entry) error {
	const op = "keeper.Client.Write"
	switch {
	case len(e.Record) > MaxRecord:
		return errs.PeerInvalid(op, fmt.Sprintf("a record of %s", errs.Bytes(len(e.Record))), fmt.Sprintf("use at most %s, and a file for more", errs.Bytes(MaxRecord)))
	case len(e.Files) > MaxFiles:
		return errs.PeerInvalid(op, fmt.Sprintf("%d files", len(e.Files)), fmt.Sprintf("use at most %d", MaxFiles))
	}
	_, err := k.request(ctx, op, func() error { return sendEntry(ctx, k.c, wire.KeepWrite, &e) })
	return err
}

// Drop closes the files of an entry, and forgets it. A key that there is no entry of is no error.
func (k *Client) Drop(ctx context.Context, key Key) error {
	_, err := k.request(ctx, "keeper.Client.Drop", func() error {
		return k.c.Send(ctx, peer.Message{Kind: wire.KeepDrop, Body: key[:]})
	})
	return err
}

// All returns the entries, in the order of their keys. The caller closes them.
func (k *Client) All(ctx context.Context) ([]Entry, error) {
	return k.request(ctx, "keeper.Client.All", func() error { return k.c.Send(ctx, peer.Message{Kind: wire.KeepAll}) })
}

// request sends a request, and receives what the keeper returns before it is done.
func (k *Client) request(ctx context.Context, op string, send func() error) (all []Entry, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	defer func() {
		if err != nil {
			for i := range all {
				_ = all[i].Close()
			}
			all = nil
		}
	}()
	if err := send(); err != nil {
		return nil, k.over(op, err)
	}
	for {
		m, err := k.c.Receive(ctx)
		if err != nil {
			return all, k.over(op, err)
		}
		switch m.Kind {
		case wire.KeepDone:
			return all, nil
		case wire.KeepRefused:
			return all, errs.Peer(op, peer.ErrTooLarge, "refused: "+errs.Words(string(m.Body)), "drop entries that are not needed")
		case wire.KeepWrite:
			e, err := receiveEntry(ctx, k.c, m)
			if err != nil {
				return all, k.over(op, err)
			}
			all = append(all, e)
		default:
			_ = m.Close()
			return all, k.over(op, errs.Violation("a reply of kind %#x of a keeper", m.Kind))
		}
	}
}

// over ends the connection: a later reply could be taken for that of another request.
func (k *Client) over(op string, err error) error {
	_ = k.c.Close()
	return errs.PeerCause(err, op, nil, "the keeper did not reply", "end this process: the keeper starts another")
}
