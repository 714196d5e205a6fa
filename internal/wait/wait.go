// Package wait implements waits between goroutines and processes: for a turn, for a
// time, within a deadline of package net, and by polling.
package wait

import (
	"context"
	"errors"
	"net"
	"os"
	"time"
)

// Slot admits one goroutine at a time. A waiting goroutine gives up when its context
// ends.
type Slot chan struct{}

// NewSlot returns a free slot.
func NewSlot() Slot { return make(Slot, 1) }

// Take takes the slot. It returns false if the context ends, or over is closed, first.
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

// Within takes the slot if it becomes free within d.
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

// Until runs a blocking call of package net until the limit (zero: none) or the end of
// the context, which are both os.ErrDeadlineExceeded. The caller holds the slot of
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
		<-set // otherwise it could cut the next wait short
	}
	return err
}

// TimedOut reports whether Until ended at its limit, or with its context.
func TimedOut(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }

// WasClosed reports whether a call failed because its file was closed.
func WasClosed(err error) bool { return errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrClosed) }

// Sleep sleeps for d. It returns false if the context ends first.
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

// SleepUntil is Sleep that ends at a limit at the latest. It returns false after the limit.
func SleepUntil(ctx context.Context, d time.Duration, limit time.Time) bool {
	left := time.Until(limit)
	return left > 0 && Sleep(ctx, min(d, left))
}

// Backoff is a pause between retries that doubles from 1 to 50 milliseconds. The zero
// value is ready.
type Backoff struct{ last time.Duration }

// Next returns the next pause.
func (b *Backoff) Next() time.Duration {
	b.last = min(max(2*b.last, time.Millisecond), 50*time.Millisecond)
	return b.last
}

// Sleep pauses. It returns false if the context ends first, or after the limit.
func (b *Backoff) Sleep(ctx context.Context, limit time.Time) bool {
	return SleepUntil(ctx, b.Next(), limit)
}

// Longest is the longest pause of Poll.
const Longest = time.Millisecond

// Poll calls done until it returns true. It returns false if the context ends first. The
// pauses between the calls grow from 20 microseconds to Longest.
func Poll(ctx context.Context, done func() bool) bool {
	for pause := 20 * time.Microsecond; !done(); pause = min(2*pause, Longest) {
		if !Sleep(ctx, pause) {
			return false
		}
	}
	return true
}
