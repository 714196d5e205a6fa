//go:build linux && (amd64 || arm64)

package osmem

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
)

// errMappings is returned where the process has too few mappings left
// (vm.max_map_count): Go's runtime ends a process that has none for its heap, so this
// package leaves it some.
var errMappings = errors.New("the process has too few mappings left (vm.max_map_count)")

// A change of the process's mappings adds two at most, by cutting one into three.
const mappingsEach = 2

var mappings struct {
	sync.Mutex
	limit   int // 0 until it is read, -1 if it cannot be
	counted int // when they were counted last
	since   int // at most so many have come since
}

// roomForMappings is called before a change that adds mappings. The kernel joins neighbors,
// so the mappings are counted, but only when there may be too many.
func roomForMappings() error {
	m := &mappings
	m.Lock()
	defer m.Unlock()
	if m.limit == 0 {
		m.limit = mappingsLimit()
	}
	m.since += mappingsEach
	most := m.limit - m.limit/16
	if m.limit < 0 || m.counted+m.since <= most {
		return nil
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return nil // the kernel's own limit remains
	}
	m.counted, m.since = bytes.Count(maps, []byte{'\n'}), mappingsEach
	if m.counted+m.since > most {
		m.since = 0
		return fmt.Errorf("%w: it has %d of %d, and the rest is left to the program", errMappings, m.counted, m.limit)
	}
	return nil
}

func mappingsLimit() int {
	text, err := os.ReadFile("/proc/sys/vm/max_map_count")
	if err != nil {
		return -1
	}
	n, err := strconv.Atoi(string(bytes.TrimSpace(text)))
	if err != nil || n <= 0 {
		return -1
	}
	return n
}

// cutMappings counts a change that gives mappings up, which may cut others and is never
// refused here.
func cutMappings() {
	mappings.Lock()
	defer mappings.Unlock()
	mappings.since += mappingsEach
}
