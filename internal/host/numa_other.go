//go:build !linux

package host

import (
	"errors"
	"fmt"
)

// CurrentNode returns an error: threads do not tell their NUMA node here.
func CurrentNode() (int, error) {
	return 0, fmt.Errorf("the thread's NUMA node: needs Linux: %w", errors.ErrUnsupported)
}

// Nodes is node 0 where NUMA is not known.
func Nodes() ([]int, error) { return []int{0}, nil }
