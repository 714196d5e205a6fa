package publish

import (
	"fmt"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// limitedWait is a wait for the publisher's work.
type limitedWait struct {
	generation uint64
	since      time.Time
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
	for len(f.waits) > 0 && f.slot.reached(f.waits[0].generation) {
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
				f.cutOff(errs.Peer(opFollower, ErrStalled, fmt.Sprintf("the publisher's work of generation %d is not done after %v", generation, f.options.MaxWait),
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
func (f *follower) cutOff(why error, event func(s *subscription, why error, w seen)) {
	if f.endWord(why, event) {
		f.letGo()
		_ = f.settle() // fails only if the follower closes
	}
}

// endWord tells the subscription of an end, with what is complete by the word, which does not
// count from then on. It reports whether it did before. The outcome is settled under the lock,
// so that callers whose streams are released see it.
func (f *follower) endWord(why error, event func(s *subscription, why error, w seen)) (counted bool) {
	f.tell(func(s *subscription) {
		var w seen
		if counted = s.counts(); counted {
			complete := f.slot.word(completeWord).Swap(release)
			w = f.slot.seen()
			w.complete = complete
		}
		event(s, why, w)
	})
	return counted
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
		f.slot.word(completeWord).Store(release)
		if f.stream == nil {
			return
		}
		done, err := f.stream.Done()
		if done || f.slot.ctx.Lost() != driver.Success {
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
