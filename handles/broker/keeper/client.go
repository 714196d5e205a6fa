package keeper

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// Client is the side of the process that a keeper keeps for. Its methods are safe for concurrent
// use, and each returns when the keeper has done what it says. After an error, other than that of a
// wrong argument or a refusal, it is not known whether the keeper did it, and the connection is
// over: all later calls fail.
type Client struct {
	mu sync.Mutex
	c  *peer.Conn
	// messages are what the keeper sends; over is closed when nothing more comes, for the reason why.
	messages chan peer.Message
	over     chan struct{}
	why      error
}

// NewClient makes a client of a connection to a keeper, which the caller closes.
func NewClient(c *peer.Conn) *Client {
	k := &Client{c: c, messages: make(chan peer.Message), over: make(chan struct{})}
	go k.read()
	return k
}

// read receives all the time, so that the end of the keeper is noticed between requests, too.
func (k *Client) read() {
	defer close(k.over)
	for {
		m, err := k.c.Receive(context.Background())
		if err != nil {
			k.why = err
			return
		}
		select {
		case k.messages <- m:
		case <-link.Of(k.c).Over():
			k.why = errors.Join(peer.ErrGone, m.Close())
			return
		}
	}
}

// Over is closed when the connection has ended, as it does with the keeper.
func (k *Client) Over() <-chan struct{} { return k.over }

// receive returns the next message of the keeper.
func (k *Client) receive(ctx context.Context) (m peer.Message, err error) {
	select {
	case m = <-k.messages:
		return m, nil
	case <-k.over:
		return m, k.why
	case <-ctx.Done():
		return m, ctx.Err()
	}
}

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
		return nil, k.failed(op, err)
	}
	for {
		m, err := k.receive(ctx)
		if err != nil {
			return all, k.failed(op, err)
		}
		switch m.Kind {
		case wire.KeepDone:
			return all, nil
		case wire.KeepRefused:
			return all, errs.Peer(op, peer.ErrTooLarge, "refused: "+errs.Words(string(m.Body)), "drop entries that are not needed")
		case wire.KeepWrite:
			e, err := receiveEntry(ctx, k.receive, m)
			if err != nil {
				return all, k.failed(op, err)
			}
			all = append(all, e)
		default:
			_ = m.Close()
			return all, k.failed(op, errs.Violation("a reply of kind %#x of a keeper", m.Kind))
		}
	}
}

// failed ends the connection: a later reply could be taken for that of another request.
func (k *Client) failed(op string, err error) error {
	_ = k.c.Close()
	return errs.PeerCause(err, op, nil, "the keeper did not reply", "end this process: the keeper starts another")
}
