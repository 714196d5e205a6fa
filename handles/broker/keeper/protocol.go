package keeper

import (
	"context"
	"fmt"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// Key names an entry. The process that writes the entry chooses it at random.
type Key [16]byte

// Entry is what belongs together: a record, which the keeper does not read, and open files.
type Entry struct {
	Key    Key
	Record []byte
	// Files are closed by whoever has the entry.
	Files []*peer.FD
}

// Close closes the files.
func (e *Entry) Close() error { return peer.CloseAll(e.Files) }

const (
	// MaxRecord bounds a record, in bytes.
	MaxRecord = peer.MaxBody - 64
	// MaxEntries bounds the entries of a keeper.
	MaxEntries = 1 << 16
	// MaxFiles bounds the files of an entry.
	MaxFiles = 1<<16 + 1<<10
)

// sendEntry sends an entry, in as many messages as its files need.
func sendEntry(ctx context.Context, c *peer.Conn, kind uint16, e *Entry) error {
	m := wire.Encoder{}
	m.Raw(e.Key[:])
	m.Uint32(uint32(len(e.Files)))
	m.Blob(e.Record)
	body, files := m.B, e.Files
	for {
		n := min(len(files), wire.MaxBatch)
		if err := c.Send(ctx, peer.Message{Kind: kind, Body: body, FDs: files[:n]}); err != nil {
			return err
		}
		if files = files[n:]; len(files) == 0 {
			return nil
		}
		kind, body = wire.KeepFiles, nil
	}
}

// receiveEntry receives the entry that begins with a message. After an error its files are closed.
func receiveEntry(ctx context.Context, receive func(context.Context) (peer.Message, error), m peer.Message) (e Entry, err error) {
	e.Files = m.FDs
	defer func() {
		if err != nil {
			_ = e.Close()
		}
	}()
	d := wire.Decoder{B: m.Body}
	copy(e.Key[:], d.Raw(len(e.Key)))
	n := int(d.Uint32())
	e.Record = d.Blob(MaxRecord)
	if err := d.End(); err != nil {
		return e, errs.Violation("an entry: %v", err)
	}
	if n > MaxFiles {
		return e, errs.Violation("an entry of %d files, where %d are the most", n, MaxFiles)
	}
	for len(e.Files) < n {
		more, err := receive(ctx)
		if err != nil {
			return e, err
		}
		e.Files = append(e.Files, more.FDs...)
		if more.Kind != wire.KeepFiles || len(more.FDs) == 0 {
			return e, errs.Violation("a message of kind %#x with %s, where files of an entry were to come", more.Kind, errs.Count(len(more.FDs), "file"))
		}
	}
	if len(e.Files) != n {
		return e, errs.Violation("%s of an entry of %d", errs.Count(len(e.Files), "file"), n)
	}
	return e, nil
}

// keyIn returns the key that a message has and nothing else.
func keyIn(m peer.Message) (k Key, err error) {
	if len(m.Body) != len(k) || len(m.FDs) > 0 {
		return k, errs.Violation("a key of %s, with %s", errs.Bytes(len(m.Body)), errs.Count(len(m.FDs), "file"))
	}
	copy(k[:], m.Body)
	return k, nil
}

// String writes the first bytes, by which logs tell keys apart.
func (k Key) String() string { return fmt.Sprintf("%x", k[:4]) }
