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
	d, err := deviceOf(opServe, s.b.sys, r.device)
	if err != nil {
		return false
	}
	sizes, _, err := layout(opServe, d, int(r.bytes))
	within := func(n, limit int) bool { return limit == 0 || n <= limit }
	return err == nil && within(total(sizes), s.b.o.Limit) && within(total(sizes), q.Bytes) && within(len(sizes)+1, q.Descriptors)
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

// named is how many objects a refusal names, and how many holders of each.
const named = 3

// saysWhoHas adds to a refusal which objects take the room, the largest first, and which processes hold them. It names
// only objects that the client may read, and says how much the others have. Of a device it says how much objects take,
// since other programs use it, too.
func (s *session) saysWhoHas(why error, r *request, q Quota) error {
	b, counts := s.b, s.counts(r, q, why)
	taken := 0
	b.mu.Lock()
	var all []Listing
	for _, o := range b.books.objects {
		if !counts(o) {
			continue
		}
		taken += o.bytes
		if !o.isDraft() {
			all = append(all, b.listingLocked(o))
		}
	}
	b.mu.Unlock()
	slices.SortFunc(all, func(x, y Listing) int { return cmp.Compare(y.Bytes, x.Bytes) })
	var said []string
	if d, err := deviceOf(opServe, b.sys, r.device); err == nil && errors.Is(why, cuda.ErrOutOfMemory) {
		said = append(said, fmt.Sprintf("objects take %s of the device's %s", errs.Bytes(taken), errs.Bytes(d.TotalMemory())))
		if d.TotalMemory()-taken >= int(r.bytes) {
			said = append(said, "other programs have the rest, and cuvmm top lists them")
		}
	}
	seen, unseen := 0, 0
	for _, l := range all {
		switch {
		case b.grant(s.of, l.Name).Access < publish.ReadAccess:
			unseen += l.Bytes
		case seen < named:
			seen++
			said = append(said, fmt.Sprintf("%q, %s, is held by %s", wire.Clip(l.Name, 40), errs.Bytes(l.Bytes), holdersOf(&l)))
		}
	}
	if unseen > 0 {
		said = append(said, fmt.Sprintf("objects that this client may not read have %s", errs.Bytes(unseen)))
	}
	if len(said) == 0 {
		return why
	}
	return fmt.Errorf("%w. %s", why, strings.Join(said, "; "))
}

// holdersOf says who holds an object.
func holdersOf(l *Listing) string {
	if l.Holders == 0 {
		return "nobody"
	}
	by := errs.Count(l.Holders, "client")
	for _, p := range l.HeldBy[:min(len(l.HeldBy), named)] {
		by += fmt.Sprintf(", process %d of user %d", p.PID, p.UID)
	}
	return by
}
