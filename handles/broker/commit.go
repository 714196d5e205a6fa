package broker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// commit seals what the client wrote, and replies with its version. A copy is made beside the client's other
// requests, and a commit that asks again while one goes on waits beside them, too.
func (s *session) commit(ctx context.Context, op string, r *request) error {
	b := s.b
	o, record, version, err := s.beginCommit(op, r)
	switch {
	case errors.Is(err, errSealing):
	case o == nil:
		_ = r.manifest.Close()
		return s.committed(ctx, r, version, err)
	default:
		if may := b.grant(s.of, o.Name); !may.Copy {
			return s.committed(ctx, r, record.Version, s.seal(ctx, op, o, record, r.manifest, may))
		}
	}
	late := s.later(ctx, r.number, func(within context.Context) (send func() error) {
		for errors.Is(err, errSealing) {
			if b.await(within, func() bool { o := b.books.objects[r.key]; return o == nil || !o.sealing }) {
				o, record, version, err = s.beginCommit(op, r)
			} else {
				err = errs.Peer(op, peer.ErrGone, "the client, which does not wait", "")
			}
		}
		if o == nil {
			_ = r.manifest.Close()
		} else {
			version, err = record.Version, s.seal(within, op, o, record, r.manifest, b.grant(s.of, o.Name))
		}
		return func() error { return s.committed(ctx, r, version, err) }
	})
	switch {
	case late == nil:
	case o == nil:
		_ = r.manifest.Close()
	default:
		_ = s.endCommit(o, nil, record, nil, r.manifest, late)
	}
	return late
}

// seal seals an object, or its copy, of which a client has one made at a time.
func (s *session) seal(ctx context.Context, op string, o *object, r record, manifest *peer.FD, may Grant) error {
	if !may.Copy {
		return s.endCommit(o, o, r, []*peer.FD{manifest}, manifest, nil)
	}
	var to *object
	var files []*peer.FD
	err := errs.Peer(op, peer.ErrGone, "the client, whose object is not copied", "")
	if s.copying.Take(ctx, nil) {
		if to, err = s.copy(op, o, &r, may.Quota); err == nil {
			files = append(slices.Clip(to.files.chunks), manifest)
		} else {
			s.b.o.Log.Warn("cuvmm: an object could not be copied, and is not committed", "name", o.Name, "writer", s.of.String(), "error", err)
		}
		s.copying.Give()
	}
	return s.endCommit(o, to, r, files, manifest, err)
}

// beginCommit begins to seal an object, and returns the record of that; or no object, and the version of what is
// sealed already, or why not.
func (s *session) beginCommit(op string, r *request) (*object, record, uint64, error) {
	text, err := exchange.ReadText(op, "a manifest", r.manifest)
	if err != nil {
		return nil, record{}, 0, err
	}
	var m handles.Manifest
	if err := m.UnmarshalBinary(text); err != nil {
		return nil, record{}, 0, errs.PeerCause(err, op, cuda.ErrInvalidArgument, "a manifest", "send one in the form of docs/protocol.md")
	}
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	o, err := b.books.seal(op, s.h, r.key)
	switch {
	case err != nil:
		return nil, record{}, 0, err
	case o.State == sealed: // its reply was lost
		return nil, record{}, o.Version, nil
	case m.Bytes != o.memory.Length:
		o.sealing = false
		return nil, record{}, 0, errs.Peer(op, cuda.ErrInvalidArgument, fmt.Sprintf("a manifest of %s for an object of %s", errs.Bytes(m.Bytes), errs.Bytes(o.memory.Length)), "describe what is there")
	}
	return o, b.books.sealedRecord(o, time.Now()), 0, nil
}

// endCommit has the keeper keep an object as sealed, with its files, unless the commit failed: o itself, or its copy.
func (s *session) endCommit(o, to *object, r record, files []*peer.FD, manifest *peer.FD, err error) error {
	b := s.b
	if err == nil {
		err = b.keepCounter()
	}
	if err == nil {
		err = b.keep(to.key, r, files...)
	}
	b.change(func() (gone []*object) {
		if err == nil {
			to.files.beside = manifest
			b.counted.Commits++
		}
		switch {
		case to == o:
			return b.books.sealEnded(o, r, err == nil)
		case err == nil:
			gone = b.books.sealEnded(to, r, true)
			o.sealing = false
			return append(gone, b.books.end(o)...) // which its writer alone has
		case to != nil:
			to.sealing = false
			gone = b.books.discard(to)
		}
		return append(gone, b.books.sealEnded(o, r, false)...)
	})
	if err != nil {
		_ = manifest.Close()
		return err
	}
	b.o.Log.Info("cuvmm: an object was committed", "name", o.Name, "version", r.Version, "bytes", o.bytes, "writer", s.of.String())
	return nil
}

// keepCounter has the keeper keep the highest version that was given. Of commits that overlap the later one does not
// put back what the other wrote.
func (b *Broker) keepCounter() error {
	b.counting.Lock()
	defer b.counting.Unlock()
	b.mu.Lock()
	last := b.books.last
	b.mu.Unlock()
	return b.keep(counter, last)
}

// committed replies to a commit.
func (s *session) committed(ctx context.Context, r *request, version uint64, err error) error {
	return s.reply(ctx, &reply{kind: wire.BrokerDone, number: r.number, version: version}, err)
}

// copy makes the object that is served in place of one: a copy, in memory that the writer never had. It returns nil, or an
// object without memory, and an error.
func (s *session) copy(op string, o *object, r *record, q Quota) (*object, error) {
	b := s.b
	d, err := deviceOf(op, b.sys, o.memory.Device)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	to, err := b.books.copyFor(op, o, q)
	b.mu.Unlock()
	if err != nil {
		return nil, err
	}
	about, fds, err := makeMemory(op, d, o.memory.Length)
	if err == nil {
		r.CopyOf = o.key
		if r.Memory, err = about.MarshalBinary(); err == nil {
			err = b.copied(op, o.memory, o.files.chunks, about, fds)
		}
	}
	if err != nil {
		_ = peer.CloseAll(fds)
		return to, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	to.memory, to.files = about, &files{chunks: fds}
	return to, nil
}
