package core

import (
	"errors"

	"github.com/cuvmm/cuvmm/internal/lock"
)

// Attachment is what another package keeps for a System, from its first use until the
// System closes.
type Attachment interface {
	// Idle returns how many bytes of host memory Trim would release.
	Idle() (bytes int)
	// Trim releases idle host memory, and returns how many bytes.
	Trim() (bytes int, err error)
	// Close releases everything: nothing is in use any more. Contexts, streams and events
	// still exist. After an error it is called again.
	Close() error
}

// attached are the attachments by the keys of their packages.
type attached struct {
	mu  lock.Mutex[lock.Leaf]
	all map[any]Attachment
}

// Attached returns the attachment of that key, or makes it. The function that makes it calls
// neither the driver nor the System.
func Attached[A Attachment](s *System, key any, newAttachment func() A) A {
	s.attached.mu.Lock()
	defer s.attached.mu.Unlock()
	a, ok := s.attached.all[key].(A)
	if !ok {
		a = newAttachment()
		if s.attached.all == nil {
			s.attached.all = map[any]Attachment{}
		}
		s.attached.all[key] = a
	}
	return a
}

// attachments returns all attachments.
func (s *System) attachments() (all []Attachment) {
	s.attached.mu.Lock()
	defer s.attached.mu.Unlock()
	for _, a := range s.attached.all {
		all = append(all, a)
	}
	return all
}

// IdleAttached returns how much host memory attachments hold idle.
func (s *System) IdleAttached() (bytes int) {
	for _, a := range s.attachments() {
		bytes += a.Idle()
	}
	return bytes
}

// TrimAttached gives back host memory that attachments hold idle.
func (s *System) TrimAttached() (bytes int, err error) {
	for _, a := range s.attachments() {
		n, failed := a.Trim()
		bytes, err = bytes+n, errors.Join(err, failed)
	}
	return bytes, err
}

// closeAttached closes the attachments, before the contexts go.
func (s *System) closeAttached() (err error) {
	for _, a := range s.attachments() {
		err = errors.Join(err, a.Close())
	}
	return err
}
