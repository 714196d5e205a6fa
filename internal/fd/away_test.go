package fd_test

import (
	"sync/atomic"
	"testing"

	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/stretchr/testify/require"
)

func TestACloseThatNeverReturnsDelaysNoOther(t *testing.T) {
	release := make(chan struct{})
	var open atomic.Int64
	var all []<-chan struct{}
	for range 100 { // more than run at a time
		open.Add(1)
		all = append(all, fd.Away(func() { <-release; open.Add(-1) }))
	}
	fd.Await(all...)
	require.EqualValues(t, 100, open.Load())
	close(release)
	for _, done := range all {
		<-done
	}
	require.Zero(t, open.Load())
	done := fd.Away(func() {})
	fd.Await(done)
	<-done
}
