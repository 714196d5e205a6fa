package drivertest

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// callTimeout is how long a call may take that must not wait for running work.
const callTimeout = time.Minute

// glance is how long a call is watched that must wait: long against any driver
// call that does not.
func (s *suite) glance() time.Duration {
	if s.software {
		return 20 * time.Millisecond
	}
	return 50 * time.Millisecond
}

// holds are words of pinned memory that kernels wait for. The first is always
// written.
type holds struct {
	words  unsafe.Pointer
	device driver.Ptr
	used   int
}

func newHolds(t testing.TB, d driver.Driver, c driver.Context) (h holds) {
	t.Helper()
	words, r := d.MemHostAlloc(c, pageSize, driver.HostAllocPortable|driver.HostAllocDeviceMap)
	if r != driver.Success {
		t.Fatalf("cuMemHostAlloc: %v", r)
	}
	t.Cleanup(func() {
		if r := d.MemFreeHost(c, words); r != driver.Success {
			t.Errorf("cuMemFreeHost: %v", r)
		}
	})
	p, r := d.MemHostGetDevicePointer(c, words)
	if r != driver.Success {
		t.Fatalf("cuMemHostGetDevicePointer: %v", r)
	}
	(*atomic.Uint64)(words).Store(1)
	return holds{words: words, device: p, used: 1}
}

// held is a stream on which a kernel runs until release.
type held struct {
	release func()
	overdue atomic.Bool
}

// hold runs a kernel on a stream that ends when release is called: at the
// latest before the case cleans up, or when callTimeout is at an end, so that a
// driver that waits where it must not ends in a failing case instead of a
// hanging one.
func (t *T) hold(c driver.Context, s driver.Stream) *held {
	t.Helper()
	// Every hold has a word of its own: the kernel of an earlier case may not
	// have seen its release yet.
	at := t.holds.used * 8
	if t.holds.used++; at >= pageSize {
		t.Fatalf("more than %d holds in one run", pageSize/8)
	}
	word := (*atomic.Uint64)(unsafe.Add(t.holds.words, at))
	word.Store(0)
	h := &held{release: sync.OnceFunc(func() { word.Store(1) })}
	t.ok(t.kernelsOf(c).launchHold(t.D, c, s, t.holds.device+driver.Ptr(at)), "launch the kernel that waits")
	timer := time.AfterFunc(callTimeout, func() {
		h.overdue.Store(true)
		h.release()
	})
	t.Cleanup(func() {
		timer.Stop()
		h.release()
	})
	return h
}

// didNotWait requires that what just returned did so while the stream was held.
func (t *T) didNotWait(h *held, what string) {
	t.Helper()
	if h.overdue.Load() {
		t.Fatalf("%s waited for the held stream", what)
	}
}

// waitsFor requires that f does not return before the stream is released, and
// succeeds then.
func (t *T) waitsFor(h *held, what string, f func() driver.Result) {
	t.Helper()
	done := make(chan driver.Result, 1)
	go func() { done <- f() }()
	select {
	case r := <-done:
		t.Fatalf("%s did not wait for the held stream: %v", what, r)
	case <-time.After(t.glance()):
	}
	h.release()
	t.ok(<-done, "%s", what)
}
