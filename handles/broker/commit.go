package broker

import (
	"fmt"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
)

// commit seals what the client wrote, and returns its version.
func (s *session) commit(op string, r *request) (uint64, error) {
	b := s.b
	text, err := exchange.ReadText(op, "a manifest", r.manifest)
	if err != nil {
		_ = r.manifest.Close()
		return 0, err
	}
	var m handles.Manifest
	if err := m.UnmarshalBinary(text); err != nil {
		_ = r.manifest.Close()
		return 0, errs.PeerCause(err, op, cuda.ErrInvalidArgument, "a manifest", "pass what handles.Manifest.MarshalBinary returned")
	}
	b.mu.Lock()
	o, err := b.books.seal(op, s.h, r.key)
	if err == nil && o != nil && m.Bytes != o.memory.Length {
		o.sealing = false
		err = errs.Peer(op, cuda.ErrInvalidArgument, fmt.Sprintf("a manifest of %s for an object of %s", errs.Bytes(m.Bytes), errs.Bytes(o.memory.Length)), "describe what is there")
	}
	if err != nil || o == nil {
		version := uint64(0)
		if err == nil {
			o := b.books.copyOf(r.key, s.h)
			if o == nil {
				o = b.books.objects[r.key]
			}
			version = o.Version
		}
		b.mu.Unlock()
		_ = r.manifest.Close()
		return version, err
	}
	record := b.books.sealedRecord(o, time.Now())
	b.mu.Unlock()
	to, files := o, []*peer.FD{r.manifest}
	if may := b.grant(s.of, o.Name); may.Copy {
		if to, err = s.copy(op, o, &record, may.Quota); err == nil {
			files = append(slices.Clip(to.files.chunks), r.manifest)
		}
	}
	if err == nil {
		err = b.keep(counter, record.Version)
	}
	if err == nil {
		err = b.keep(to.key, record, files...)
	}
	b.change(func() (gone []*object) {
		if err == nil {
			to.files.beside = r.manifest
			b.counted.Commits++
		}
		switch {
		case to == o:
			return b.books.sealEnded(o, record, err == nil)
		case err == nil:
			gone = b.books.sealEnded(to, record, true)
			o.sealing = false
			return append(gone, b.books.end(o)...) // which its writer alone has
		case to != nil:
			to.sealing = false
			gone = b.books.discard(to)
		}
		return append(gone, b.books.sealEnded(o, record, false)...)
	})
	if err != nil {
		_ = r.manifest.Close()
		return 0, err
	}
	b.o.Log.Info("cuvmm: an object was committed", "name", o.Name, "version", record.Version, "bytes", o.bytes, "writer", s.of.String())
	return record.Version, nil
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
