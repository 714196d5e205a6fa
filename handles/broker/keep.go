package broker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/cuvmm/cuvmm/vmm"
)

// Kept is memory for a publication that outlives its publisher. All methods are safe for concurrent use. The caller
// closes it, after the publication. To hand it on, close the server and then the Kept, and write nothing in between:
// followers come back to the next publisher. Withdrawing the publication ends them, and nothing is whole after that.
type Kept struct{ o *Object }

// KeepOptions configure [Client.Keep].
type KeepOptions struct {
	// Bytes is the size of the memory, which stays.
	Bytes int
	// Wait waits, within the context, until the process that publishes the memory closes it or ends, or until
	// an object of the name is written or given up. Without it that is ErrWriting.
	Wait bool
}

// Keep makes memory on a device, which this process publishes under others while it rewrites it, or takes that
// over whose publisher has ended:
//
//	server.Publish(name, kept.Buffer(), publish.PublishOptions{Page: kept.Page()})
//
// The broker keeps it until it is removed, whatever becomes of its publishers. The end of a publisher's process
// counts, not that of its connection, because work on the GPU outlives that. If the broker cannot watch a publisher's
// process, and its connection has ended, Keep returns cuda.ErrNotSupported: remove it once that process has ended. New memory has undefined contents.
// Memory of another size, or on another device, is cuda.ErrInvalidArgument; a name of objects is ErrExists, or
// ErrWriting. It needs write access to the name.
func (k *Client) Keep(ctx context.Context, d *cuda.Device, name string, o KeepOptions) (*Kept, error) {
	const op = "broker.Client.Keep"
	if err := k.made(op); err != nil {
		return nil, err
	}
	switch {
	case o.Bytes <= 0 || o.Bytes > maxBytes:
		return nil, errs.PeerInvalid(op, fmt.Sprintf("a publication of %d bytes", o.Bytes), "name the size of its memory")
	case core.SystemOf(d) == nil:
		return nil, errs.PeerInvalid(op, "a nil device", "take one from System.Devices")
	}
	if err := checkName(op, name); err != nil {
		return nil, err
	}
	r := request{kind: wire.BrokerKeep, name: name, device: d.UUID(), bytes: uint64(o.Bytes)}
	for {
		_, _ = rand.Read(r.key[:]) // never fails; the same with each broker that is asked
		got, err := k.take(ctx, op, d, r, handles.ImportOptions{KeepDescriptors: true})
		switch {
		case err == nil && got.page == nil:
			return nil, errs.Both(errs.Violation("memory of a publication without its page"), got.Close())
		case err == nil:
			return &Kept{got}, nil
		case !o.Wait || !errors.Is(err, ErrWriting):
			return nil, err
		}
		if err := k.await(ctx, op, name, fmt.Sprintf("a process still publishes %q", name)); err != nil {
			return nil, err
		}
	}
}

// Buffer returns the memory, to publish with its page and then to write: what an earlier process announced only after
// Publication.Rewrite. It is neither moved, sent nor leased
// (cuda.ErrNotPermitted), and is closed with the Kept.
func (w *Kept) Buffer() *vmm.Buffer {
	if w == nil {
		return nil
	}
	return w.o.Buffer()
}

// Page is publish.PublishOptions.Page. It is closed with the Kept.
func (w *Kept) Page() *publish.Page {
	if w == nil || w.o == nil {
		return nil
	}
	return w.o.page
}

// About describes the memory, as of the time when it was kept for this process.
func (w *Kept) About() Listing {
	if w == nil {
		return Listing{}
	}
	return w.o.About()
}

// Err returns ErrLost once a broker that this client came back to does not keep the memory for this process.
func (w *Kept) Err() error {
	if w == nil || w.o == nil {
		return errs.PeerInvalid("broker.Kept.Err", "a nil or zero Kept", "take one from Client.Keep")
	}
	return w.o.Err()
}

// Close closes the buffer, which waits for the work on it, and tells the broker, for which the next process may
// publish the memory. Its server must be closed before (cuda.ErrInUse); to withdraw the publication would do, but leaves
// nothing whole. Idempotent; after an error it may be called again.
func (w *Kept) Close() error {
	if w == nil || w.o == nil {
		return errs.PeerInvalid("broker.Kept.Close", "a nil or zero Kept", "take one from Client.Keep")
	}
	return w.o.Close()
}
