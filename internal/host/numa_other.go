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

// Prefer returns an error: memory has no node that a process can choose here.
func Prefer(mem []byte, node int) error {
	return fmt.Errorf("prefer memory of node %d: needs Linux: %w", node, errors.ErrUnsupported)
}
