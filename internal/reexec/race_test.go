//go:build unix && race

package reexec_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/reexec"
	"github.com/stretchr/testify/require"
)

func init() {
	reexec.Register("race", func(*reexec.Child) error {
		n, done := 0, make(chan bool)
		go func() { n++; close(done) }()
		n++
		<-done
		return nil
	})
	reexec.Register("nothing", func(*reexec.Child) error { return nil })
}

func TestARaceInAChildIsItsFailure(t *testing.T) {
	c := reexec.Command(t, "race")
	c.Start()
	require.Error(t, c.Exit())
	require.Contains(t, c.Log(), "DATA RACE")
}

// The detector's own default is a second, at the end of every process.
func TestAChildEndsAtOnce(t *testing.T) {
	quickest := time.Hour
	for range 5 { // of which one has the machine for itself
		c := reexec.Command(t, "nothing")
		c.Start()
		began := time.Now()
		c.Wait()
		quickest = min(quickest, time.Since(began))
	}
	require.Less(t, quickest, time.Second)
}
