package multicast

import "time"

// call is a call that may never come back.
type call struct {
	what  string
	began time.Time
	done  chan struct{}
	err   error // when done is closed
}

// bounded runs what cannot be cancelled, and waits for it until the limit. What
// is late goes on, and the team is stuck until it has come back. The caller
// holds the lock, or has the team alone.
func (t *Team) bounded(op, what string, do func() error) error {
	c := &call{what: what, began: time.Now(), done: make(chan struct{})}
	go func() {
		defer close(c.done)
		c.err = do()
	}()
	timer := time.NewTimer(t.timeout)
	defer timer.Stop()
	select {
	case <-c.done:
		return c.err
	case <-timer.C:
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
