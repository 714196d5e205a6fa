package core

import (
	"context"
	"sync/atomic"
)

// Completion is the end of one object's closing.
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

// closed is the completion of everything that was closed.
var closed = func() *Completion {
	c := &Completion{done: make(chan struct{})}
	close(c.done)
	return c
}()

// completion is made when it is asked for, so that closing costs nothing more
// without one.
type completion struct{ p atomic.Pointer[Completion] }

// Completion returns the end of the object's closing: of the one that is under way
// or comes next, or that was.
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

// end says how a closing ended. After an error the next one has a completion of
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
