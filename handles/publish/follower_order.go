package publish

import (
	"context"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// orderShown is Follower.Order.
func (f *follower) orderShown(streams []*cuda.Stream) error {
	const op = "publish.Follower.Order"
	if err := f.made(op); err != nil {
		return err
	}
	if !f.closer.Acquire() {
		return errs.PeerClosed(op, "follower")
	}
	defer f.closer.Release()
	if len(streams) == 0 {
		return errs.PeerInvalid(op, "no streams", "name the streams to order")
	}
	var shown version
	if _, err := f.order(context.Background(), op, streams, func() (uint64, bool) {
		shown = f.shownNow()
		return shown.ordered, true
	}); err != nil {
		return err
	}
	if shown.length > 0 && !f.beginHold(streams, shown.generation) {
		if err := f.failed(); err != nil {
			return err
		}
		return errRewriting(op, shown.generation)
	}
	return nil
}

// order orders later work on the streams behind a generation, or, without streams, waits
// until that is complete. of returns the generation while the word that it counts for is
// held, or ok = false if there is nothing to order any more.
func (f *follower) order(ctx context.Context, op string, streams []*cuda.Stream, of func() (generation uint64, ok bool)) (ok bool, err error) {
	release, err := useStreams(core.SystemOf(f.dev), op, streams)
	if err != nil {
		return false, err
	}
	defer release()
	f.words.RLock()
	defer f.words.RUnlock()
	generation, ok := of()
	if !ok || f.reached(generation) {
		return ok, nil
	}
	f.limitWait(generation)
	if f.onHost(streams) {
		return true, f.await(ctx, op, generation)
	}
	m, err := f.mark(op, generation)
	if err != nil {
		return false, err
	}
	defer m.Release()
	for _, s := range streams {
		if err := core.StreamOf(s).After(op, m); err != nil {
			return false, err
		}
	}
	return true, nil
}

// onHost reports whether a wait for the publisher's work is the caller's own.
func (f *follower) onHost(streams []*cuda.Stream) bool { return len(streams) == 0 || f.stream == nil }

// useStreams acquires streams of the user, none of which may capture a graph.
func useStreams(sys *core.System, op string, streams []*cuda.Stream) (release func(), err error) {
	all := make([]*core.Stream, len(streams))
	for i, s := range streams {
		if all[i] = core.StreamOf(s); all[i] == nil {
			return nil, errs.PeerInvalid(op, "a nil stream", "name streams made with Device.NewStream or BorrowStream")
		}
	}
	return useAll(sys, op, all)
}

// useAll is useStreams for the inner state of streams.
func useAll(sys *core.System, op string, streams []*core.Stream) (release func(), err error) {
	held := 0
	drop := func() {
		for _, s := range streams[:held] {
			s.Release()
		}
	}
	defer func() {
		if err != nil {
			drop()
		}
	}()
	for _, s := range streams {
		if err := s.Use(op, sys); err != nil {
			return nil, err
		}
		held++
		capturing, r := s.Capturing()
		switch {
		case r != driver.Success:
			return nil, s.Ctx.CallError(op, driver.CallStreamIsCapturing, r, fmt.Sprintf("stream %#x", uintptr(s.Handle)))
		case capturing:
			return nil, core.CapturingError(op, s)
		}
	}
	return drop, nil
}

// mark returns a mark behind the wait of the follower's own stream for a generation.
func (f *follower) mark(op string, generation uint64) (core.Mark, error) {
	own := core.StreamOf(f.stream)
	f.waiting.Lock()
	defer f.waiting.Unlock()
	if f.waited < generation {
		r := own.Ctx.System().Drv.StreamWaitValue64(own.Ctx.Handle, own.Handle, f.slot.at(completeWord), generation)
		if r != driver.Success {
			return core.Mark{}, own.Ctx.CallError(op, driver.CallStreamWaitValue64, r, fmt.Sprintf("generation %d", generation))
		}
		f.waited = generation
		if !f.counts() {
			f.letGo() // the end may have been handled before this wait was submitted
		}
	}
	m, _, err := own.Mark(op) // the stream never captures
	return m, err
}

// await waits on the CPU until a generation is complete.
func (f *follower) await(ctx context.Context, op string, generation uint64) error {
	over := func() bool { return f.reached(generation) || !f.counts() }
	switch {
	case !wait.Poll(ctx, func() bool { return over() || f.ctx.Err() != nil }):
		return errs.PeerWait(ctx, op, fmt.Sprintf("the work of generation %d is not done", generation), "name streams, which wait instead")
	case !over():
		return errs.PeerClosed(op, "follower")
	}
	return nil
}

// reached reports whether a generation is complete. The caller holds words, or is a
// goroutine of the follower.
func (f *follower) reached(generation uint64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.slot.reached(generation)
}
