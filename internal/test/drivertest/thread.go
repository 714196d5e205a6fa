package drivertest

import "runtime"

// thread is an operating-system thread of its own. The driver keeps a current
// context and a capture mode per thread, so a rule that names threads runs its
// calls on these. The thread ends with the case, and nothing that it left
// behind reaches another goroutine.
type thread struct {
	work chan func()
}

func (t *T) thread() *thread {
	th := &thread{work: make(chan func())}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		// Never unlocked: the runtime ends the thread with the goroutine.
		runtime.LockOSThread()
		for f := range th.work {
			f()
		}
	}()
	t.Cleanup(func() {
		close(th.work)
		<-ended
	})
	return th
}

// do runs f on the thread and waits for it. f must not end the test.
func (th *thread) do(f func()) {
	done := make(chan struct{})
	th.work <- func() {
		defer close(done)
		f()
	}
	<-done
}
