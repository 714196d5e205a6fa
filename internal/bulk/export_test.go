package bulk

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/limits"
)

// Sizes that tests straddle.
const (
	SlabBytes  = slabBytes
	PieceBytes = pieceBytes
	MostCopies = mostCopies
)

// WithLimits has the package see other limits of the host during a test.
func WithLimits(t testing.TB, read func() (limits.Host, error)) {
	t.Helper()
	before := readHost
	readHost = read
	t.Cleanup(func() { readHost = before })
}

// Promised returns how much memory is promised that has no pages yet.
func Promised() int64 { return promised.Load() }

// Retained returns how many bytes of idle pinned memory the engine's System retains.
func (e *Engine) Retained() uint64 {
	e.store.mu.Lock()
	defer e.store.mu.Unlock()
	return e.store.idleBytes
}

// Pieces returns the lengths of the pieces of a stream of so many bytes, and the most that each has
// room for.
func Pieces(bytes uint64, threads int) (lengths []uint64, most uint64) {
	t := &transfer{plan: &plan{bytes: bytes}}
	_, room := t.divide(uint64(threads))
	for at := uint64(0); ; {
		offset, n, ok := t.next()
		if !ok {
			return lengths, room - Slack
		}
		if offset != at {
			panic("pieces that do not follow each other")
		}
		lengths, at = append(lengths, uint64(n)), at+uint64(n)
	}
}
