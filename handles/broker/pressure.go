package broker

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/wire"
)

func lacksRoom(err error) bool {
	return errors.Is(err, ErrLimit) || errors.Is(err, cuda.ErrOutOfMemory)
}

// counts returns which objects take the room that a request lacks: its user's, the device's, or all.
func (s *session) counts(r *request, q Quota, why error) func(*object) bool {
	switch {
	case errors.As(why, new(quotaError)):
		return func(o *object) bool { return o.UID == s.of.UID && (q.Counts == nil || q.Counts(o.Name)) }
	case errors.Is(why, cuda.ErrOutOfMemory):
		return func(o *object) bool { return o.memory.Device == r.device }
	}
	return func(*object) bool { return true }
}

// canFit reports whether an object would fit if there were no other.
func (s *session) canFit(r *request, q Quota) bool {
	most := []int{s.b.o.Limit, q.Bytes}
	if d, err := deviceOf("", s.b.sys, r.device); err == nil {
		most = append(most, d.TotalMemory())
	}
	return !slices.ContainsFunc(most, func(n int) bool { return n > 0 && uint64(n) < r.bytes })
}

// relieve asks holders for objects that end with their last, and waits until enough of these have ended, also
// of those whose holders another request has asked. It returns false if there is nobody to ask.
func (b *Broker) relieve(bytes int, counts func(*object) bool) bool {
	b.mu.Lock()
	asked := b.books.want(bytes, counts)
	var to []func()
	for _, w := range asked {
		if p := b.present[w.by]; p != nil && !w.before {
			for s := range p.sessions {
				to = append(to, func() { _ = s.send(b.ctx, &reply{kind: wire.BrokerWanted, key: w.key}) })
			}
		}
	}
	b.mu.Unlock()
	if len(asked) == 0 {
		return false
	}
	for _, send := range to {
		b.running.Go(send) // a client that reads nothing keeps no other from being asked
	}
	limit := time.NewTimer(b.o.Ask)
	defer limit.Stop()
	for {
		b.mu.Lock()
		changed := b.changed
		waiting := b.dropping > 0 || slices.ContainsFunc(asked, func(w wanted) bool {
			o := b.books.objects[w.key]
			return o != nil && o.State != ended
		})
		b.mu.Unlock()
		if !waiting {
			return true
		}
		select {
		case <-changed:
		case <-limit.C:
			return true // some may have ended
		case <-b.ctx.Done():
			return false
		}
	}
}

// named is how many objects a refusal names.
const named = 3

// saysWhoHas adds to a refusal which processes hold the largest objects that take the room. It names
// only objects that the client may read.
func (s *session) saysWhoHas(why error, counts func(*object) bool) error {
	b := s.b
	b.mu.Lock()
	var all []Listing
	for _, o := range b.books.objects {
		if counts(o) && !o.isDraft() {
			all = append(all, b.listingLocked(o))
		}
	}
	b.mu.Unlock()
	slices.SortFunc(all, func(x, y Listing) int { return cmp.Compare(y.Bytes, x.Bytes) })
	var said []string
	for _, l := range all {
		if len(said) == named {
			break
		}
		if b.grant(s.of, l.Name).Access < publish.ReadAccess {
			continue
		}
		by := "by nobody"
		if l.Holders > 0 {
			by = "by " + errs.Count(l.Holders, "client")
		}
		for _, p := range l.HeldBy {
			by += fmt.Sprintf(", process %d of user %d", p.PID, p.UID)
		}
		said = append(said, fmt.Sprintf("%q, %s, is held %s", wire.Clip(l.Name, 40), errs.Bytes(l.Bytes), by))
	}
	if len(said) == 0 {
		return why
	}
	return fmt.Errorf("%w. %s", why, strings.Join(said, "; "))
}
