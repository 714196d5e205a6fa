package multicast

import "time"

// Closing reports whether Close was called.
func (b *Binding) Closing() bool { return b.closer.Closed() }

// NotReadyPause sets the first pause between tries, and answers how to set it
// back.
func NotReadyPause(d time.Duration) func() {
	before := notReadyPause
	notReadyPause = d
	return func() { notReadyPause = before }
}
