package multicast

import "time"

// pendingCall is a driver call that may never return.
type pendingCall struct {
	what  string
	began time.Time
	done  chan struct{}
	err   error // valid once done is closed
}

// startCall starts do, and returns at once.
func startCall(what string, do func() error) *pendingCall {
	c := &pendingCall{what: what, began: time.Now(), done: make(chan struct{})}
	go func() {
		defer close(c.done)
		c.err = do()
	}()
	return c
}

// within waits and reports whether the call returned within the limit.
func (c *pendingCall) within(limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-c.done:
		return true
	case <-timer.C:
		return false
	}
}

// bounded runs a function that cannot be canceled, and waits for it up to the limit. After
// that the function goes on, and the team is stuck until it has returned. The caller holds
// mu, or is the only user of the team.
func (t *Team) bounded(op, what string, do func() error) error {
	c := startCall(what, do)
	if c.within(t.timeout) {
		return c.err
	}
	t.late = c
	return stuckError(op, c)
}

// stuck returns an error while a late call has not returned.
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
