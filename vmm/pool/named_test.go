package pool_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// Errors about a pool say what the program calls it.
func TestErrorsNameThePool(t *testing.T) {
	const title = `pool "activations" tagged "llm"`
	_, d := open(t)
	s := stream(t, d)
	_, err := pool.New(d, pool.Options{Name: "a\nb"})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	p, err := pool.New(d, pool.Options{Name: "activations", Tag: "llm", Limit: 2 * mib})
	require.NoError(t, err)
	require.Equal(t, "activations", p.Name())
	require.Equal(t, cuda.Tag("llm"), p.Tag())
	st := p.Stats()
	require.Equal(t, "activations", st.Name)
	require.Equal(t, cuda.Tag("llm"), st.Tag)

	b := alloc(t, p, s, 1*mib)
	_, err = p.Alloc(pool.Request{Bytes: 8 * mib, Stream: s})
	require.ErrorIs(t, err, cuda.ErrBudget)
	require.ErrorContains(t, err, title+": ")
	err = p.Close()
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorContains(t, err, title+": ")
	free(t, p, b)
	err = p.Free(b)
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.ErrorContains(t, err, title+": ")
	require.NoError(t, p.Close())
	_, err = p.Alloc(pool.Request{Bytes: 1, Stream: s})
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.ErrorContains(t, err, "the "+title+" is closed")
}
