package core_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/stretchr/testify/require"
)

var errTest = errors.New("test")

func TestCloserGoesOnWhereTheTeardownFailed(t *testing.T) {
	_, s, st := system(t, core.Config{})
	for name, again := range map[string]func(c *life.Closer, teardown func() error) error{
		"by Close": (*life.Closer).Close,
		"by CloseAfter": func(c *life.Closer, teardown func() error) error {
			fence := func() (*core.Fence, error) { return s.NewFence("x", []*core.Stream{st}) }
			return errors.Join(life.CloseAfter(c, s, fence, teardown), s.Drain(t.Context()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			var c life.Closer
			torn := 0
			teardown := func() error {
				if torn++; torn == 1 {
					return errTest
				}
				return nil
			}
			require.ErrorIs(t, c.Close(teardown), errTest)
			require.True(t, c.Closed())
			require.NoError(t, again(&c, teardown))
			require.NoError(t, again(&c, teardown))
			require.Equal(t, 2, torn)
		})
	}
}

func TestCloseAfterWaitsForTheFenceAndForOperations(t *testing.T) {
	m, s, st := system(t, core.Config{})
	var c life.Closer
	torn := make(chan struct{})
	failing := func() (*core.Fence, error) { return nil, errTest }
	require.ErrorIs(t, life.CloseAfter(&c, s, failing, nil), errTest)
	require.False(t, c.Closed(), "nothing has changed")

	m.Hold(uintptr(st.Handle))
	work(t, st)
	require.True(t, c.Acquire())
	fence := func() (*core.Fence, error) { return s.NewFence("x", []*core.Stream{st}) }
	require.NoError(t, life.CloseAfter(&c, s, fence, func() error { close(torn); return nil }))
	require.NoError(t, life.CloseAfter(&c, s, failing, nil), "again does nothing")
	require.NoError(t, c.Close(func() error { return errTest }), "nor does this")
	require.False(t, c.Acquire())
	require.Equal(t, 1, s.PendingReclaims())

	still := func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, s.Drain(ctx), context.DeadlineExceeded)
		select {
		case <-torn:
			t.Fatal("torn down too early")
		default:
		}
	}
	still()
	m.Release(uintptr(st.Handle))
	still() // an operation still runs
	c.Release()
	require.NoError(t, s.Drain(t.Context()))
	<-torn
	require.Zero(t, s.PendingReclaims())
}
