//go:build invariants

package lock_test

import (
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

// outOfOrder expects that locking panics, and says what is taken and what is held.
func outOfOrder(t *testing.T, taken, holds string, lock func()) {
	t.Helper()
	defer func() {
		t.Helper()
		said, _ := recover().(string)
		require.Contains(t, said, taken)
		require.Contains(t, said, holds)
		require.Contains(t, said, "TestOrder")
	}()
	lock()
}
