// Package wait implements the waits of what processes say to each other: for a turn,
// for a moment, within a deadline of package net, and by polling.
package wait

import (
	"context"
	"errors"
	"net"
	"os"
	"time"
)

// Slot admits one goroutine at a time. Those that wait give up when their context
// ends.
type Slot chan struct{}

// NewSlot returns a free slot.
func NewSlot() Slot { return make(Slot, 1) }

// Take returns false if the context ended first, or over was closed.
func (s Slot) Take(ctx context.Context, over <-chan struct{}) bool {
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

// Try takes the slot if it is free.
func (s Slot) Try() bool {
	select {
	case s <- struct{}{}:
		return true
	default:
		return false
	}
}

// Within takes the slot if it becomes free in so long.
func (s Slot) Within(d time.Duration) bool {
	if s.Try() {
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

// Give frees the slot.
func (s Slot) Give() { <-s }

// Until runs a call of package net that waits, until the limit (zero: none) or until
// the context ends; both are os.ErrDeadlineExceeded. The caller holds the slot of
// that direction.
func Until(ctx context.Context, limit time.Time, deadline func(time.Time) error, call func() error) error {
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

// TimedOut reports whether Until ended at its limit, or with its context.
func TimedOut(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }

// WasClosed reports whether a call failed because its file was closed.
func WasClosed(err error) bool { return errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrClosed) }

// Sleep returns false if the context ended first.
func Sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// SleepUntil is Sleep that also ends at a limit, after which it returns false.
func SleepUntil(ctx context.Context, d time.Duration, limit time.Time) bool {
	left := time.Until(limit)
	return left > 0 && Sleep(ctx, min(d, left))
}

// Longest is the longest pause of Poll.
const Longest = time.Millisecond

// Poll waits until done returns true, and returns false if the context ended first.
// It asks after ever longer pauses, from 20 microseconds to Longest.
func Poll(ctx context.Context, done func() bool) bool {
	for pause := 20 * time.Microsecond; !done(); pause = min(2*pause, Longest) {
		if !Sleep(ctx, pause) {
			return false
		}
	}
	return true
}
