package publish

import (
	"context"
	"fmt"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/peererr"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// orderShown is Follower.Order.
func (f *follower) orderShown(streams []*cuda.Stream) error {
	const op = "publish.Follower.Order"
	if !f.closer.Acquire() {
		return peererr.Closed(op, "follower")
	}
	defer f.closer.Release()
	if len(streams) == 0 {
		return peererr.Invalid(op, "no streams", "name the streams to order")
	}
	_, err := f.order(context.Background(), op, streams, func() (uint64, bool) { return f.shownNow().ordered, true })
	return err
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
			return nil, peererr.Invalid(op, "a nil stream", "name streams made with Device.NewStream or BorrowStream")
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
		r := own.Ctx.System().Drv.StreamWaitValue64(own.Ctx.Handle, own.Handle, f.word.at(), generation)
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
		return peererr.Wait(ctx, op, fmt.Sprintf("the work of generation %d is not done", generation), "name streams, which wait instead")
	case !over():
		return peererr.Closed(op, "follower")
	}
	return nil
}

// limitWait lets the watcher enforce MaxWait on a wait that begins.
func (f *follower) limitWait(generation uint64) {
	if f.options.MaxWait == 0 {
		return
	}
	f.mu.Lock()
	if n := len(f.waits); n == 0 || f.waits[n-1].generation < generation {
		f.waits = append(f.waits, limitedWait{generation, time.Now()})
	}
	f.mu.Unlock()
	select {
	case f.begun <- struct{}{}:
	default:
	}
}

// limit returns when the oldest wait reaches its limit; ok is false if there is none.
func (f *follower) limit() (generation uint64, at time.Time, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.waits) > 0 && f.word.reached(f.waits[0].generation) {
		f.waits = f.waits[1:]
	}
	if len(f.waits) == 0 {
		return 0, at, false
	}
	return f.waits[0].generation, f.waits[0].since.Add(f.options.MaxWait), true
}

// watch waits for the end of the connection, or for a wait to reach its limit, and then
// ends the waits for the publisher, which would last forever.
func (f *follower) watch() {
	defer close(f.ended)
	for {
		var limit <-chan time.Time
		var t *time.Timer
		generation, at, waits := f.limit()
		if waits {
			t = time.NewTimer(time.Until(at))
			limit = t.C
		}
		select {
		case <-f.ctx.Done():
			return
		case <-f.k.read:
			select {
			case <-f.mailbox.over: // before the connection's end, or with it
				f.disconnected(f.mailbox.why)
			default: // it has left
			}
			return
		case <-f.begun:
		case <-limit:
			if !f.reached(generation) {
				f.cutOff(peererr.New(opFollower, ErrStalled, fmt.Sprintf("the publisher's work of generation %d is not done after %v", generation, f.options.MaxWait),
					"find out what the publisher waits for, or raise FollowOptions.MaxWait"), (*subscription).end)
				f.k.leave(f.token, f.mailbox)
				return
			}
		}
		if t != nil {
			t.Stop()
		}
	}
}

// disconnected notes the end of the connection.
func (f *follower) disconnected(why error) {
	if f.mayReturn(why) {
		f.cutOff(why, (*subscription).lose)
	} else {
		f.cutOff(why, (*subscription).end)
	}
}

// cutOff ends what counted of the publisher's word: only complete elements stay shown, and
// the streams that wait are released.
func (f *follower) cutOff(why error, event func(s *subscription, why error, word uint64)) {
	var counted bool
	f.tell(func(s *subscription) {
		// The outcome is settled under the lock, so that callers whose streams are released
		// see it.
		var word uint64
		if counted = s.counts(); counted {
			word = f.word.value().Swap(release)
		}
		event(s, why, word)
	})
	if counted {
		f.letGo()
		_ = f.settle() // fails only if the follower closes
	}
}

// counts reports whether the publisher's word still counts.
func (f *follower) counts() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sub.counts()
}

// letGo writes the final value to the word until the stream is idle, because a last
// write of the publisher may land after the first of these. A failed query says nothing
// about the stream; only on a lost device nothing waits.
func (f *follower) letGo() {
	for failed := time.Duration(0); failed < letGoLimit; {
		f.word.value().Store(release)
		if f.stream == nil {
			return
		}
		done, err := f.stream.Done()
		if done || f.word.ctx.Lost() != driver.Success {
			return
		}
		if err != nil {
			failed += wait.Longest
		}
		time.Sleep(wait.Longest)
	}
}

// letGoLimit bounds letGo if the driver returns only errors.
const letGoLimit = time.Second

// reached reports whether a generation is complete. The caller holds words, or is a
// goroutine of the follower.
func (f *follower) reached(generation uint64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.word.reached(generation)
}
