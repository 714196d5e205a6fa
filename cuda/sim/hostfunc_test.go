package sim

import (
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
	time.Sleep(10 * time.Millisecond) // in which a release that does not wait is seen
	close(goOn)
	require.True(t, <-seen, "it was released while its call was in progress")
}
