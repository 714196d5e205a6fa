package pool

import (
	"fmt"
	"slices"
	"sync"
)

// Tag says what blocks are for, in statistics and errors. The zero Tag is none.
type Tag uint16

// tags are the names, of all pools.
var tags = struct {
	mu    sync.RWMutex
	names []string
}{names: []string{""}}

// NewTag is the tag of a name, the same each time. Tags are for ever: make them
// of what a program is made of, not of what passes through it. There are 65,535;
// names beyond share the zero Tag.
func NewTag(name string) Tag {
	tags.mu.Lock()
	defer tags.mu.Unlock()
	at := slices.Index(tags.names, name)
	if at < 0 {
		if len(tags.names) > 1<<16-1 {
			return 0
		}
		at = len(tags.names)
		tags.names = append(tags.names, name)
	}
	return Tag(at)
}

// String is the tag's name; of a number that NewTag never answered it is the
// number.
func (t Tag) String() string {
	tags.mu.RLock()
	defer tags.mu.RUnlock()
	if int(t) >= len(tags.names) {
		return fmt.Sprintf("tag %d", uint16(t))
	}
	return tags.names[t]
}
