package life_test

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/stretchr/testify/require"
)

var errTest = errors.New("test")

func TestCloserTearsDownOnce(t *testing.T) {
	var c life.Closer
	torn := 0
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := c.Close(func() error { torn++; return nil }); err != nil {
				t.Error(err)
			}
			if torn != 1 { // ordered by the closer's lock
				t.Errorf("torn down %d times when Close returned", torn)
			}
		})
	}
	wg.Wait()
}

func TestCloserWaitsForOperations(t *testing.T) {
	var c life.Closer
	require.True(t, c.Acquire())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := c.Close(func() error { return nil }); err != nil {
			t.Error(err)
		}
	}()
	for !c.Closed() {
		time.Sleep(time.Millisecond)
	}
	select {
	case <-done:
		t.Fatal("it did not wait")
	case <-time.After(5 * time.Millisecond):
	}
	c.Release()
	<-done
}

// fence and reclaimer stand for those of a System.
type fence struct{ all bool }

func (f *fence) AddAllStreams() { f.all = true }

type reclaimer struct {
	fences    []*fence
	lives     []*life.Life
	teardowns []func() error
}

func (r *reclaimer) Reclaim(f *fence, l *life.Life, teardown func() error) {
	r.fences, r.lives, r.teardowns = append(r.fences, f), append(r.lives, l), append(r.teardowns, teardown)
}

func TestCloseAfterLeavesTheTeardownToTheReclaimer(t *testing.T) {
	var c life.Closer
	var r reclaimer
	results := []error{life.ErrAgain, errTest, nil}
	torn := 0
	teardown := func() error { torn++; return results[torn-1] }
	newFence := func() (*fence, error) { return new(fence), nil }
	require.ErrorIs(t, life.CloseAfter(&c, &r, func() (*fence, error) { return nil, errTest }, teardown), errTest)
	require.False(t, c.Closed(), "nothing has changed")

	require.NoError(t, life.CloseAfter(&c, &r, newFence, teardown))
	require.True(t, c.Closed())
	require.Len(t, r.teardowns, 1)
	require.False(t, r.fences[0].all, "no operation ran")
	require.NoError(t, life.CloseAfter(&c, &r, newFence, teardown), "again does nothing")
	require.Len(t, r.teardowns, 1)

	done := c.Completion()
	require.ErrorIs(t, r.teardowns[0](), life.ErrAgain)
	require.NotPanics(t, func() {
		select {
		case <-done.Done():
			panic("it has not ended")
		default:
		}
	})
	require.ErrorIs(t, r.teardowns[0](), errTest)
	require.ErrorIs(t, done.Wait(t.Context()), errTest)
	require.NoError(t, c.Close(teardown), "Close takes it up again")
	require.Equal(t, 3, torn)
	require.NoError(t, c.Completion().Wait(t.Context()))
}

func TestCloseAfterDuringAnOperationAddsAllStreams(t *testing.T) {
	var c life.Closer
	var r reclaimer
	require.True(t, c.Acquire())
	require.NoError(t, life.CloseAfter(&c, &r, func() (*fence, error) { return new(fence), nil }, func() error { return nil }))
	require.True(t, r.fences[0].all)
	require.False(t, r.lives[0].Idle())
	c.Release()
	require.True(t, r.lives[0].Idle())
}
