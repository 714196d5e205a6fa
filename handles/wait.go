package handles

import (
	"context"
	"errors"
	"net"
	"os"
	"time"
)

// slot lets one in at a time, and those who wait give up when their context
// ends.
type slot chan struct{}

func newSlot() slot { return make(slot, 1) }

// take returns false if the context ended first, or over was closed.
func (s slot) take(ctx context.Context, over <-chan struct{}) bool {
	if ctx.Err() != nil {
		return false
	}
	select {
	case s <- struct{}{}:
		return true
	case <-ctx.Done():
	case <-over:
	}
	return false
}

// try takes the slot if that needs no waiting.
func (s slot) try() bool {
	select {
	case s <- struct{}{}:
		return true
	default:
		return false
	}
}

// within takes the slot if it comes free so soon.
func (s slot) within(d time.Duration) bool {
	if s.try() {
		return true
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case s <- struct{}{}:
		return true
	case <-t.C:
		return false
	}
}

func (s slot) give() { <-s }

// until runs a call of package net that waits, until the limit (zero: none) or
// until the context ends; both are os.ErrDeadlineExceeded. Whoever calls it
// holds the slot of that direction.
func until(ctx context.Context, limit time.Time, deadline func(time.Time) error, call func() error) error {
	if err := deadline(limit); err != nil {
		return err
	}
	if ctx.Done() == nil {
		return call()
	}
	set := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = deadline(time.Unix(1, 0))
		close(set)
	})
	err := call()
	if !stop() {
		<-set // or it would cut the next wait short
	}
	return err
}

func timedOut(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }

func wasClosed(err error) bool { return errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrClosed) }

// pause waits a moment, or until the context ends or the limit is there; then
// it answers false.
func pause(ctx context.Context, d time.Duration, limit time.Time) bool {
	left := time.Until(limit)
	if left <= 0 {
		return false
	}
	t := time.NewTimer(min(d, left))
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
