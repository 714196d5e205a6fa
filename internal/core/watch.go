package core

import (
	"runtime"
	"sync"
)

// Watched reports an owner that its user lost. It is a field of the shell that
// the user holds. What is closed soon is never registered with the collector,
// which costs more than all else in an owner's life: the shells that were made
// since the last collection are in a list, which holds them, and the next one
// registers those that still are. So a loss is noticed one collection later.
type Watched struct {
	o          *Object
	prev, next *Watched // in the list of the young
	cleanup    runtime.Cleanup
	registered bool
}

// young are the shells made since the last collection.
type young struct {
	mu    sync.Mutex
	head  *Watched
	alarm bool // the next collection is noticed
}

// Begin watches over the shell that w lies in, whose inner state embeds o.
func (w *Watched) Begin(o *Object) {
	w.o = o
	y := &o.sys.young
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

// Stop ends it, when the owner is closed. Twice is once.
func (w *Watched) Stop() {
	if w.o == nil {
		return
	}
	y := &w.o.sys.young
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

// collected runs after a collection: who is still young has lived through it.
func (y *young) collected() {
	y.mu.Lock()
	y.alarm = false
	y.mu.Unlock()
	for y.register() {
	}
}

// register registers one shell, so that nobody waits long for the lock.
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
