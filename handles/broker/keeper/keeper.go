package keeper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// Keeper has the entries. Its methods are safe for concurrent use. The caller closes it.
type Keeper struct {
	// serving is taken by the one Serve that runs, which alone changes entries and uses their files.
	serving wait.Slot
	mu      sync.Mutex
	entries map[Key]*Entry
	files   int // of all entries
	// requests counts those that were served.
	requests int
}

// New makes a keeper without entries.
func New() *Keeper { return &Keeper{serving: wait.NewSlot(), entries: map[Key]*Entry{}} }

// Len returns how many entries there are.
func (k *Keeper) Len() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.entries)
}

// Close closes all files, which frees memory that no other process has. No Serve may run.
func (k *Keeper) Close() error {
	k.mu.Lock()
	entries := k.entries
	k.entries, k.files = map[Key]*Entry{}, 0
	k.mu.Unlock()
	var failed []error
	for _, e := range entries {
		failed = append(failed, e.Close())
	}
	return errors.Join(failed...)
}

// Serve serves the process at the other end of a connection until it disconnects or ends, and
// then returns nil, or until the context ends. It does not close the connection. What the process
// wrote stays, but for an entry whose messages it had not finished. A keeper serves one process at a
// time: a second call waits for the first.
func (k *Keeper) Serve(ctx context.Context, c *peer.Conn) error {
	const op = "keeper.Keeper.Serve"
	if c == nil {
		return errs.PeerInvalid(op, "a nil connection", "make one with peer.Pair")
	}
	if !k.serving.Take(ctx, nil) {
		return errs.PeerWait(ctx, op, "another process is served", "end that process first")
	}
	defer k.serving.Give()
	for {
		m, err := c.Receive(ctx)
		if err == nil {
			err = k.serve(ctx, c, m)
		}
		switch {
		case errors.Is(err, peer.ErrGone):
			return nil
		case err != nil:
			return err
		}
	}
}

func (k *Keeper) serve(ctx context.Context, c *peer.Conn, m peer.Message) error {
	switch m.Kind {
	case wire.KeepWrite:
		e, err := receiveEntry(ctx, c.Receive, m)
		if err != nil {
			return err
		}
		if err := k.write(e); err != nil {
			_ = e.Close()
			return c.Send(ctx, peer.Message{Kind: wire.KeepRefused, Body: []byte(err.Error())})
		}
	case wire.KeepDrop:
		key, err := keyIn(m)
		if err != nil {
			_ = m.Close()
			return err
		}
		k.drop(key)
	case wire.KeepAll:
		for _, e := range k.all() {
			if err := sendEntry(ctx, c, wire.KeepWrite, e); err != nil {
				return err
			}
		}
	default:
		_ = m.Close()
		return errs.Violation("a message of kind %#x to a keeper", m.Kind)
	}
	k.mu.Lock()
	k.requests++
	k.mu.Unlock()
	return c.Send(ctx, peer.Message{Kind: wire.KeepDone})
}

func (k *Keeper) served() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.requests
}

// filesShare divides the limit of open files: entries have at most one part in so many, so that a
// keeper can start a process that gets all of them.
const filesShare = 2

// write replaces the record of an entry and adds to its files, or adds the entry.
func (k *Keeper) write(e Entry) error {
	limit, err := fd.Limit()
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	old := k.entries[e.Key]
	switch most := int(min(limit, 1<<30)) / filesShare; {
	case len(e.Files) > 0 && k.files+len(e.Files) > most:
		return fmt.Errorf("%d files in all, where the limit of open files (ulimit -n), %d, leaves room for %d", k.files+len(e.Files), limit, most)
	case old == nil && len(k.entries) == MaxEntries:
		return fmt.Errorf("%d entries are the most", MaxEntries)
	case old == nil:
		k.entries[e.Key] = &e
	case len(old.Files)+len(e.Files) > MaxFiles:
		return fmt.Errorf("%d files of an entry, where %d are the most", len(old.Files)+len(e.Files), MaxFiles)
	default:
		old.Record, old.Files = e.Record, append(old.Files, e.Files...)
	}
	k.files += len(e.Files)
	return nil
}

// drop closes the files of an entry, if there is one.
func (k *Keeper) drop(key Key) {
	k.mu.Lock()
	e := k.entries[key]
	delete(k.entries, key)
	if e != nil {
		k.files -= len(e.Files)
	}
	k.mu.Unlock()
	if e != nil {
		_ = e.Close()
	}
}

// all returns the entries, in the order of their keys.
func (k *Keeper) all() []*Entry {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.SortedFunc(maps.Values(k.entries), func(a, b *Entry) int { return bytes.Compare(a.Key[:], b.Key[:]) })
}
