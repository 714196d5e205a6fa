package load

import (
	"runtime"
	"sync"
)

const (
	// mostThreads is how many threads there are, unless the caller says.
	mostThreads = 16
	// leastParallel is how many tensors are worth a goroutine.
	leastParallel = 2048
)

// inParallel has f do n things, some on each processor, and returns the error of the first that has one.
func inParallel(n int, f func(from, to int) error) error {
	parts := min(runtime.GOMAXPROCS(0), mostThreads, (n+leastParallel-1)/leastParallel)
	failed := make([]error, parts)
	var wg sync.WaitGroup
	for i := range parts {
		wg.Go(func() { failed[i] = f(i*n/parts, (i+1)*n/parts) })
	}
	wg.Wait()
	for _, err := range failed {
		if err != nil {
			return err
		}
	}
	return nil
}
