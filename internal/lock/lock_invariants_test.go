//go:build invariants

package lock_test

import (
	"reflect"
	"sync"
	"testing"

	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/stretchr/testify/require"
)

func TestOrder(t *testing.T) {
	var long, other lock.Mutex[lock.Long]
	var buffer, second lock.RWMutex[lock.Buffer]
	var leaf, more lock.Mutex[lock.Leaf]

	long.Lock()
	other.Lock() // which may follow another
	buffer.RLock()
	second.RLock()
	leaf.Lock()
	outOfOrder(t, "Leaf is taken", "holds Leaf", more.Lock)
	outOfOrder(t, "Buffer is taken", "holds Leaf", buffer.Lock)
	outOfOrder(t, "Buffer is taken", "holds Leaf", buffer.RLock)
	require.True(t, more.TryLock(), "what never waits is exempt")
	more.Unlock()
	leaf.Unlock()
	outOfOrder(t, "Long is taken", "holds Buffer", long.Lock)
	second.RUnlock()
	buffer.RUnlock()
	long.Unlock() // in any order
	done := make(chan struct{})
	go func() { // each goroutine has locks of its own
		defer close(done)
		long.Lock()
		defer long.Unlock()
	}()
	<-done
	other.Unlock()
	require.Panics(t, long.Unlock, "no goroutine holds it")
}

// Each rank refuses those before it, and lets those behind it be taken.
func TestEachRankHasItsPlace(t *testing.T) {
	type rank struct {
		lock.Rank
		sync.Locker
	}
	ranks := []rank{
		{lock.Misses{}, new(lock.RWMutex[lock.Misses])},
		{lock.Addresses{}, new(lock.Mutex[lock.Addresses])},
		{lock.Pressing{}, new(lock.RWMutex[lock.Pressing])},
		{lock.Clock{}, new(lock.Mutex[lock.Clock])},
		{lock.Pool{}, new(lock.Mutex[lock.Pool])},
		{lock.Shard{}, new(lock.Mutex[lock.Shard])},
		{lock.Words{}, new(lock.RWMutex[lock.Words])},
		{lock.Waiting{}, new(lock.Mutex[lock.Waiting])},
		{lock.Publication{}, new(lock.Mutex[lock.Publication])},
		{lock.Staging{}, new(lock.Mutex[lock.Staging])},
		{lock.Buffer{}, new(lock.RWMutex[lock.Buffer])},
		{lock.Range{}, new(lock.Mutex[lock.Range])},
		{lock.Block{}, new(lock.Mutex[lock.Block])},
		{lock.Event{}, new(lock.Mutex[lock.Event])},
		{lock.Captures{}, new(lock.RWMutex[lock.Captures])},
		{lock.Stem{}, new(lock.Mutex[lock.Stem])},
		{lock.Leaf{}, new(lock.Mutex[lock.Leaf])},
	}
	for i, first := range ranks {
		for _, second := range ranks[i+1:] {
			inOrder(first, second)
			second.Lock()
			outOfOrder(t, name(first.Rank)+" is taken", "holds "+name(second.Rank), first.Lock)
			second.Unlock()
		}
	}
	long := new(lock.Mutex[lock.Long])
	for i, r := range ranks {
		inOrder(long, r)
		if i < 3 { // what a pool holds for long is among the locks of Long
			inOrder(r, long)
			continue
		}
		r.Lock()
		outOfOrder(t, "Long is taken", "holds "+name(r.Rank), long.Lock)
		r.Unlock()
	}
	for _, same := range [][2]sync.Locker{
		{new(lock.Mutex[lock.Pool]), new(lock.Mutex[lock.Pool])},
		{new(lock.Mutex[lock.Shard]), new(lock.Mutex[lock.Shard])},
		{new(lock.RWMutex[lock.Misses]), new(lock.RWMutex[lock.Misses])},
		{new(lock.Mutex[lock.Staging]), new(lock.Mutex[lock.Staging])},
		{new(lock.Mutex[lock.Stem]), new(lock.Mutex[lock.Stem])},
	} {
		same[0].Lock()
		outOfOrder(t, "is taken", "holds", same[1].Lock)
		same[0].Unlock()
	}
}

// inOrder takes one lock under another.
func inOrder(first, second sync.Locker) {
	first.Lock()
	defer first.Unlock()
	second.Lock()
	defer second.Unlock()
}

func name(r lock.Rank) string { return reflect.TypeOf(r).Name() }

// outOfOrder expects that locking panics, and says what is taken and what is held.
func outOfOrder(t *testing.T, taken, holds string, lock func()) {
	t.Helper()
	defer func() {
		t.Helper()
		said, _ := recover().(string)
		require.Contains(t, said, taken)
		require.Contains(t, said, holds)
		require.Contains(t, said, "lock_test.Test")
	}()
	lock()
}
