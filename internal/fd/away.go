package fd

import (
	"sync"
	"time"
)

const (
	// closeTimeout far exceeds the time that the close of an ordinary file takes.
	closeTimeout = time.Second
	// mostAway bounds the threads that block in the kernel.
	mostAway = 64
)

var away struct {
	mu      sync.Mutex
	running int
	waiting []func()
}

// Away runs the close of something that another process chose: the file behind a
// descriptor that it sent, or a socket with such descriptors in its queue. The other
// process decides how long that takes in the kernel: an hour, for example, if the file is
// a socket that lingers. So the close runs on a goroutine of its own, and no caller waits
// for it longer than Await does. At most 64 run at a time. The others queue with their
// descriptors open, so this process's limit of open files bounds the queue.
func Away(do func()) (done <-chan struct{}) {
	ended := make(chan struct{})
	job := func() {
		defer close(ended)
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
	return ended
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

// Await waits until all are done, for at most a second in total.
func Await(all ...<-chan struct{}) {
	var limit <-chan time.Time
	for _, done := range all {
		select {
		case <-done:
			continue
		default:
		}
		if limit == nil {
			t := time.NewTimer(closeTimeout)
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
