package multicast

import "time"

// Closing reports whether Close was called.
func (b *Binding) Closing() bool { return b.closer.Closed() }

// SetCallTimeout changes the limit of a team that was formed, so that forming
// needs not be quick.
func (t *Team) SetCallTimeout(d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.timeout = d
}

// NotReadyPause sets the first pause between tries, and returns how to set it
// back.
func NotReadyPause(d time.Duration) func() {
	before := notReadyPause
	notReadyPause = d
	return func() { notReadyPause = before }
}
