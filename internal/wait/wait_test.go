package wait

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestBackoffDoublesUpToItsMost(t *testing.T) {
	var b Backoff
	var pauses []time.Duration
	for range 8 {
		pauses = append(pauses, b.Next()/time.Millisecond)
	}
	require.Equal(t, []time.Duration{1, 2, 4, 8, 16, 32, 50, 50}, pauses)
	require.False(t, new(Backoff).Sleep(t.Context(), time.Now()), "after its limit")
	over, cancel := context.WithCancel(t.Context())
	cancel()
	require.False(t, b.Sleep(over, time.Now().Add(time.Hour)))
}
