package wait

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPollingInVainRests(t *testing.T) {
	var p Spinner
	polls := 0
	occasions := func(n int, came bool) {
		for range n {
			asked := false
			p.Spin(func() bool { asked = true; return came })
			if asked {
				polls++
			}
		}
	}
	occasions(10, true)
	require.Equal(t, 10, polls)
	polls = 0
	occasions(1+2+1+4+1+8+1, false) // each time twice as many are left out
	require.Equal(t, 4, polls)
	polls = 0
	occasions(16+1, true)
	require.Equal(t, 1, polls)
	occasions(5, true)
	require.Equal(t, 6, polls, "it came, so it is polled for again")
}
