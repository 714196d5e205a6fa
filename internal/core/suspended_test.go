package core

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// Bytes are compared up to the last address.
func TestSuspendedBytes(t *testing.T) {
	s, sleep := new(System), &Sleep{What: "it"}
	last := ^driver.Ptr(0)
	s.AddSuspended(last-99, 50, sleep)
	for _, c := range []struct {
		at, n  uint64
		sleeps bool
	}{{0, 1, false}, {99, 1, true}, {109, 10, false}, {109, 11, true}, {50, 1, true}, {49, 50, false}, {9, 10, false}, {109, 110, true}} {
		err := s.CheckNotSuspended("test", last-driver.Ptr(c.at), c.n)
		require.Equal(t, c.sleeps, err != nil, c)
	}
	s.RemoveSuspended(sleep)
	require.False(t, s.AnySuspended())
}
