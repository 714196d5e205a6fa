package core

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Upkeep runs once at a time, what comes up while it runs is not forgotten, and it stops.
func TestUpkeepSeesWhatComesUpWhileItRuns(t *testing.T) {
	const most = 20 * time.Second
	var u Upkeep
	var runs atomic.Int32
	began, end, twice := make(chan struct{}), make(chan struct{}), make(chan struct{})
	tend := func() time.Duration {
		switch runs.Add(1) {
		case 1:
			close(began)
			<-end
			return Never
		case 2:
			close(twice)
		}
		return most
	}
	u.Wake(0, tend)
	<-began
	u.Wake(most, tend)
	u.Wake(time.Millisecond, tend) // which is sooner
	u.Wake(most, tend)
	u.run(tend) // as a timer does that had run out before
	require.EqualValues(t, 1, runs.Load(), "upkeep runs twice at a time")
	close(end)
	select {
	case <-twice:
	case <-time.After(most / 2):
		t.Fatal("what came up meanwhile is forgotten")
	}
	u.Stop()
	u.Wake(0, tend)
	time.Sleep(5 * time.Millisecond)
	require.EqualValues(t, 2, runs.Load(), "it runs although it was stopped")
}
