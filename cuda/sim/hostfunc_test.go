package sim

import (
	"bytes"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// A context that is lost takes no call back that has begun: the release comes behind it.
func TestAHostFuncIsReleasedBehindACallInProgress(t *testing.T) {
	r := start(t, Options{})
	began, goOn := make(chan struct{}), make(chan struct{})
	var returned atomic.Bool
	f := r.NewHostFunc(func() {
		close(began)
		<-goOn
		returned.Store(true)
	})
	r.ok(r.LaunchHostFunc(r.ctx, r.stream(driver.StreamNonBlocking), f))
	<-began
	r.m.Inject(Fault{Call: "cuMemGetInfo", Result: 700})
	_, _, res := r.MemGetInfo(r.ctx)
	r.is(driver.IllegalAddress, res)
	seen := make(chan bool, 1)
	go r.ReleaseHostFunc(f, func() { seen <- returned.Load() })
	for end := time.Now().Add(time.Minute); !blocked("ReleaseHostFunc") && len(seen) == 0; time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(end), "it neither waits nor returns")
	}
	close(goOn)
	require.True(t, <-seen, "it was released while its call was in progress")
}

// blocked reports whether a goroutine waits for a lock in a call of the function.
func blocked(function string) bool {
	stacks := make([]byte, 1<<20)
	for stack := range bytes.SplitSeq(stacks[:runtime.Stack(stacks, true)], []byte("\n\n")) {
		if bytes.Contains(stack, []byte("[sync.Mutex.Lock")) && bytes.Contains(stack, []byte(function+"(")) {
			return true
		}
	}
	return false
}
