package multicast

import "time"

// call is a call that may never come back.
type call struct {
	what  string
	began time.Time
	done  chan struct{}
	err   error // when done is closed
}

func begin(what string, do func() error) *call {
	c := &call{what: what, began: time.Now(), done: make(chan struct{})}
	go func() {
		defer close(c.done)
		c.err = do()
	}()
	return c
}

// within reports whether the call came back within the limit.
func (c *call) within(limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-c.done:
		return true
	case <-timer.C:
		return false
	}
}

// bounded runs what cannot be cancelled, and waits for it until the limit. What
// is late goes on, and the team is stuck until it has come back. The caller
// holds the lock, or has the team alone.
func (t *Team) bounded(op, what string, do func() error) error {
	c := begin(what, do)
	if c.within(t.timeout) {
		return c.err
	}
	t.late = c
	return stuckError(op, c)
}

// stuck is the error of a team whose late call has not come back.
func (t *Team) stuck(op string) error {
	if t.late == nil {
		return nil
	}
	select {
	case <-t.late.done:
		t.late = nil
		return nil
	default:
		return stuckError(op, t.late)
	}
}
