package life

import (
	"context"
	"sync/atomic"
)

// Completion is the end of one object's closing. It implements cuda.Completion.
type Completion struct {
	done chan struct{}
	err  error // written before done is closed
}

// Done is closed when the closing has ended.
func (c *Completion) Done() <-chan struct{} { return c.done }

// Wait waits for the end of the closing and returns its error.
func (c *Completion) Wait(ctx context.Context) error {
	select {
	case <-c.done:
		return c.err
	default:
	}
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// NewCompletion returns the Completion of something that ends once, and what ends it.
func NewCompletion() (c *Completion, end func(error)) {
	c = &Completion{done: make(chan struct{})}
	return c, func(err error) {
		c.err = err
		close(c.done)
	}
}

// Ending makes the Completion of an object that no Closer closes. Its zero value is that
// of an object in use.
type Ending struct{ completion }

// End ends the closing in progress. After an error the next closing has a Completion of
// its own.
func (e *Ending) End(err error) { e.end(err) }

// closed is the Completion of every object that is closed.
var closed = func() *Completion {
	c := &Completion{done: make(chan struct{})}
	close(c.done)
	return c
}()

// completion makes its Completion on first use, so that an object without one closes
// at no extra cost.
type completion struct{ p atomic.Pointer[Completion] }

// Completion returns the end of the object's closing: the one in progress, the next
// one, or the one that has ended.
func (c *completion) Completion() *Completion {
	for {
		if have := c.p.Load(); have != nil {
			return have
		}
		if made := (&Completion{done: make(chan struct{})}); c.p.CompareAndSwap(nil, made) {
			return made
		}
	}
}

// end reports how a closing ended. After an error the next closing has a Completion of
// its own.
func (c *completion) end(err error) {
	next := closed
	if err != nil {
		next = nil
	}
	if waiting := c.p.Swap(next); waiting != nil && waiting != closed {
		waiting.err = err
		close(waiting.done)
	}
}
