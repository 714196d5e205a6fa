package broker

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// A publication's memory is kept from the request of its first publisher until it is removed. One client at a
// time publishes it, which alone holds it. Once that gave it back, or its process has ended, the next one gets the
// same memory, and the page that says what is complete, which the broker does not read. A client whose process
// cannot be watched must give it back itself. A name is that of one publication, or of objects.

// keptAs returns what is kept under a name, or nil.
func (b *books) keptAs(name string) *object {
	for _, o := range b.objects {
		if o.Name == name && o.State == kept {
			return o
		}
	}
	return nil
}

// awaited reports whether what is kept will be given to another client, once it is made, or its publisher has ended.
func (b *books) awaited(o *object) bool {
	return o.State == kept && (o.making || !o.Free && (!o.unseen || b.returning))
}

// keep makes a client the publisher of what is kept under a name, or of what is added: chunks of those sizes. A
// client that asks again, because it did not learn the outcome, has the same key.
func (b *books) keep(op string, asked *request, r record, sizes []int, q Quota) (*object, error) {
	o := b.keptAs(r.Name)
	r.State, r.Request = kept, asked.key
	switch {
	case o == nil && b.objects[asked.key] != nil:
		return nil, errs.Peer(op, ErrLost, fmt.Sprintf("memory of publication %q", r.Name), "ask again")
	case o == nil && len(b.versions(r.Name)) > 0:
		return nil, errs.Peer(op, ErrExists, fmt.Sprintf("object %q", r.Name), "use another name, or remove it")
	case o == nil && b.writers(r.Name) > 0:
		return nil, errs.Peer(op, ErrWriting, fmt.Sprintf("object %q", r.Name), "use another name")
	case o == nil:
		return b.add(op, asked.key, r, sizes, q)
	case !o.Free && o.Request == asked.key && o.Writer == r.Writer:
		o.unseen = false
		return o, nil
	case !o.Free && !b.awaited(o):
		return nil, errs.Peer(op, cuda.ErrNotSupported, fmt.Sprintf("the end of process %d, which publishes %q and is not connected", o.PID, r.Name),
			"once it has ended, remove the publication: its end is noticed in the broker's pid namespace, or on Linux 6.5 or later")
	case !o.making && (o.memory.Device != asked.device || uint64(o.memory.Length) != asked.bytes):
		return nil, errs.Peer(op, cuda.ErrInvalidArgument, fmt.Sprintf("%s on %v of publication %q, which has %s on %v", errs.Bytes(asked.bytes), asked.device, r.Name, errs.Bytes(o.memory.Length), o.memory.Device),
			"ask for the memory that there is, or remove it")
	case o.making || !o.Free:
		return nil, errs.Peer(op, ErrWriting, fmt.Sprintf("publication %q of process %d", r.Name, o.PID), "wait until that process closes it, or ends")
	}
	if o.UID != r.UID { // the memory counts for another user from now on
		delete(b.objects, o.key)
		err := b.room(op, r.UID, o.bytes, o.descriptors, q)
		b.objects[o.key] = o
		if err != nil {
			return nil, err
		}
	}
	r.Memory = o.Memory
	o.record, o.unseen = r, false
	return o, nil
}

// publishedBy returns what a client publishes, or what has a key of that, or was asked for with it.
func (b *books) publishedBy(h holder, key keeper.Key) (all []*object) {
	for _, o := range b.objects {
		if o.State == kept && !o.Free && o.Writer == h && (key == counter || o.key == key || o.Request == key) {
			all = append(all, o)
		}
	}
	return all
}

// unpublish notes that a client publishes no more what it kept, or what has a key of that: in the keeper first, which
// the next broker asks. Without a key its process has ended, or, if that cannot be watched, its last connection.
func (b *Broker) unpublish(h holder, key keeper.Key) {
	b.publishing.Lock()
	defer b.publishing.Unlock()
	b.mu.Lock()
	all := b.books.publishedBy(h, key)
	if key == counter && b.present[h] != nil {
		all = nil // it came back before this, and may publish anew
	}
	b.mu.Unlock()
	for _, o := range all {
		b.mu.Lock()
		r, making := o.record, o.making
		b.mu.Unlock()
		if key == counter && !r.Watched {
			b.change(func() []*object {
				o.unseen = b.present[h] == nil
				return nil
			})
			continue
		}
		r.Free = true
		if !making && (b.ctx.Err() != nil || b.keep(o.key, r) != nil) {
			return
		}
		b.change(func() []*object {
			o.Free = true
			clear(o.holders)
			return nil
		})
	}
}
