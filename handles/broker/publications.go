package broker

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// A publication's memory is kept from the request of its first publisher until it is removed. One client at a
// time publishes it, which alone holds it. When that process has ended the next one gets the same memory, and the
// page that says what is complete, which the broker does not read. A name is that of one publication, or of objects.

// keptAs returns what is kept under a name, or nil.
func (b *books) keptAs(name string) *object {
	for _, o := range b.objects {
		if o.Name == name && o.State == kept {
			return o
		}
	}
	return nil
}

// published reports whether a process publishes what is kept, or may come back for it.
func (b *books) published(o *object) bool { return len(o.holders) > 0 || o.awaited }

// expect notes that the process of a client lives, unless it will be said to have left.
func (b *books) expect(h holder) {
	for _, o := range b.objects {
		if o.State == kept && o.Writer == h {
			o.holders[h], o.awaited = false, false
		}
	}
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
	case o.Request == asked.key && o.Writer == r.Writer:
		o.holders[r.Writer] = false
		return o, nil
	case o.making || b.published(o):
		return nil, errs.Peer(op, ErrWriting, fmt.Sprintf("publication %q of process %d", r.Name, o.PID), "wait for the end of that process: see KeepOptions.Wait")
	case o.memory.Device != asked.device || uint64(o.memory.Length) != asked.bytes:
		return nil, errs.Peer(op, cuda.ErrInvalidArgument, fmt.Sprintf("%s on %v of publication %q, which has %s on %v", errs.Bytes(asked.bytes), asked.device, r.Name, errs.Bytes(o.memory.Length), o.memory.Device),
			"ask for the memory that there is, or remove it")
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
	o.record, o.awaited = r, false
	o.holders[r.Writer] = false
	return o, nil
}
