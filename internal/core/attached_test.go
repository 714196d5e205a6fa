package core_test

import (
	"errors"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/stretchr/testify/require"
)

// attachment counts what is done with it.
type attachment struct {
	trimmed, closed int
	refuses         error
}

func (a *attachment) Idle() int          { return 100 }
func (a *attachment) Trim() (int, error) { a.trimmed++; return 100, nil }
func (a *attachment) Close() error       { a.closed++; return a.refuses }

// An attachment is made once for a key, trimmed with the host's memory, and closed with the
// System, before its contexts go and again after an error.
func TestAttachments(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	sys, err := m.OpenOwned(cuda.Options{})
	require.NoError(t, err)
	s := core.SystemOf(sys)
	made := 0
	of := func(key any) *attachment {
		return core.Attached(s, key, func() *attachment { made++; return &attachment{} })
	}
	a, b := of("a"), of("b")
	require.Same(t, a, of("a"))
	require.NotSame(t, a, b)
	require.Equal(t, 2, made)
	require.Equal(t, 200, sys.TrimHost())
	require.Equal(t, 1, a.trimmed)

	b.refuses = errors.New("not yet")
	require.ErrorIs(t, sys.Close(), b.refuses)
	require.Equal(t, 1, a.closed)
	b.refuses = nil
	require.NoError(t, sys.Close())
	require.Equal(t, 2, b.closed)
}
