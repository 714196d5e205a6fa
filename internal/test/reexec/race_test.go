//go:build unix && race

package reexec_test

import (
	"os"
	"testing"

	"github.com/cuvmm/cuvmm/internal/test/reexec"
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
	reexec.Register("options of the detector", func(c *reexec.Child) error {
		return c.Send(os.Getenv("GORACE"))
	})
}

func TestARaceInAChildIsItsFailure(t *testing.T) {
	c := reexec.Command(t, "race")
	c.Start()
	require.Error(t, c.Exit())
	require.Contains(t, c.Log(), "DATA RACE")
}

// The detector's own default is a second, at the end of every process.
func TestAChildEndsAtOnce(t *testing.T) {
	c := reexec.Command(t, "options of the detector")
	c.Start()
	var options string
	c.Recv(&options)
	c.Wait()
	require.Contains(t, options, "atexit_sleep_ms=20")
}
