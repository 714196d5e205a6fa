package fd

import (
	"sync"
	"time"
)

const (
	// patience is far longer than the close of any honest file takes.
	patience = time.Second
	// mostAway bounds the threads that stand still in the kernel.
	mostAway = 64
)

var away struct {
	mu      sync.Mutex
	running int
	waiting []func()
}

// Away runs a close of something that another process chose: the file behind a
// descriptor that it sent, or a socket in whose queue such descriptors lie. The
// kernel may take as long over that as the other process likes, for instance an
// hour where the file is a socket that lingers. So it runs on a goroutine of its
// own, on which nothing may wait for longer than Await does. At most 64 run at a
// time; the others queue, and their descriptors stay open meanwhile.
func Away(do func()) (done <-chan struct{}) {
	over := make(chan struct{})
	job := func() {
		defer close(over)
		do()
	}
	away.mu.Lock()
	defer away.mu.Unlock()
	if away.running == mostAway {
		away.waiting = append(away.waiting, job)
	} else {
		away.running++
		go work(job)
	}
	return over
}

func work(job func()) {
	for job != nil {
		job()
		away.mu.Lock()
		if len(away.waiting) > 0 {
			job, away.waiting = away.waiting[0], away.waiting[1:]
		} else {
			job = nil
			away.running--
		}
		away.mu.Unlock()
	}
}

// Await waits until all are done, or for a second in all.
func Await(all ...<-chan struct{}) {
	var limit <-chan time.Time
	for _, done := range all {
		select {
		case <-done:
			continue
		default:
		}
		if limit == nil {
			t := time.NewTimer(patience)
			defer t.Stop()
			limit = t.C
		}
		select {
		case <-done:
		case <-limit:
			return
		}
	}
}
