//go:build !invariants

package lock

import "sync"

// Mutex is a mutex of a rank.
type Mutex[R Rank] = sync.Mutex

// RWMutex is a reader/writer mutex of a rank.
type RWMutex[R Rank] = sync.RWMutex
