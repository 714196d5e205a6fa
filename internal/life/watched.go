package life

import (
	"runtime"

	"github.com/cuvmm/cuvmm/internal/lock"
)

// Watched reports an owner that its user lost. It is a field of the handle that
// the user holds. An owner that is closed soon is never registered with the
// collector, which costs more than everything else in its life: the handles that were
// made since the last collection are kept in a list, and the next collection registers
// those that are still in it. So a loss is noticed one collection later.
type Watched struct {
	o          *Object
	prev, next *Watched // in the list of the young
	cleanup    runtime.Cleanup
	registered bool
}

// young are the handles made since the last collection.
type young struct {
	mu    lock.Mutex[lock.Leaf]
	head  *Watched
	alarm bool // collected runs after the next collection
}

// Watch reports the loss of the handle that w lies in, whose inner state is o.
func (o *Object) Watch(w *Watched) {
	w.o = o
	y := &o.list.young
	y.mu.Lock()
	defer y.mu.Unlock()
	if w.next = y.head; w.next != nil {
		w.next.prev = w
	}
	y.head = w
	if !y.alarm {
		y.alarm = true
		runtime.AddCleanup(new(*Watched), (*young).collected, y)
	}
}

// Stop ends the watch, when the owner is closed. Idempotent.
func (w *Watched) Stop() {
	if w.o == nil {
		return
	}
	y := &w.o.list.young
	y.mu.Lock()
	defer y.mu.Unlock()
	if w.registered {
		w.cleanup.Stop()
		w.registered = false
		return
	}
	y.unlink(w)
}

func (y *young) unlink(w *Watched) {
	switch {
	case y.head == w:
		y.head = w.next
	case w.prev != nil:
		w.prev.next = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	}
	w.prev, w.next = nil, nil
}

// collected runs after a collection, which the handles that are still young survived.
func (y *young) collected() {
	y.mu.Lock()
	y.alarm = false
	y.mu.Unlock()
	for y.register() {
	}
}

// register registers one handle, so that the lock is never held for long.
func (y *young) register() bool {
	y.mu.Lock()
	defer y.mu.Unlock()
	w := y.head
	if w == nil {
		return false
	}
	y.unlink(w)
	w.cleanup = runtime.AddCleanup(w, (*Object).Lost, w.o)
	w.registered = true
	return true
}

// Lost is what the collector calls for a handle that went away without Close. The
// object stays as it is, because its address is a number in kernels, graphs and
// network cards that Go cannot see.
func (o *Object) Lost() {
	l := o.list
	l.mu.Lock()
	gone, text := o.next == nil, o.String()
	l.mu.Unlock()
	if gone {
		return
	}
	l.lost.Add(1)
	hint := "call Close or CloseAfter on it; leak tracing shows where it was made"
	if o.Kind() == KindSuspension {
		hint = "keep it to resume its memory, which can only be closed now"
	}
	l.log.Warn("cuvmm: an object was lost without Close; it stays as it is", "object", text, "hint", hint)
}
