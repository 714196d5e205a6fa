package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// ChunkPlan says in what pieces a buffer takes its memory. The driver's cost is
// per chunk, and a chunk is given back whole: large chunks grow cheaply, small
// ones waste less. The zero value is GeometricChunks(0, 64 MiB).
type ChunkPlan struct {
	floor, cap int
	given      bool // false in the zero value
}

// defaultCap bounds the chunks of the default plan: from there on creating and
// mapping a gibibyte costs about a millisecond, a small part of what it takes
// to fill it.
const defaultCap = 64 << 20

// FixedChunks takes chunks of one size in bytes, a multiple of the granularity.
func FixedChunks(size int) ChunkPlan { return ChunkPlan{size, size, true} }

// GeometricChunks takes chunks as large as what the buffer has already, so that
// a small buffer stays small and a large one has few, but at least floor and at
// most cap bytes. Where there is no memory for so large a chunk it takes the
// smallest that is enough, not below floor. A floor of 0 is the granularity.
func GeometricChunks(floor, cap int) ChunkPlan { return ChunkPlan{floor, cap, true} }

// String writes the plan: "chunks of 2 MiB to 64 MiB".
func (p ChunkPlan) String() string {
	if !p.given {
		return "chunks of the granularity to " + errs.Bytes(defaultCap)
	}
	if p.floor == p.cap {
		return "chunks of " + errs.Bytes(p.floor)
	}
	return fmt.Sprintf("chunks of %s to %s", errs.Bytes(p.floor), errs.Bytes(p.cap))
}

// resolve decides the defaults and refuses sizes that are no multiples of the
// granularity.
func (p ChunkPlan) resolve(op string, gran uint64) (ChunkPlan, error) {
	g := int(gran)
	if !p.given {
		p = ChunkPlan{0, max(defaultCap/g*g, g), true}
	}
	if p.floor == 0 && p.cap > 0 {
		p.floor = g
	}
	if p.floor <= 0 || p.cap < p.floor || p.cap > maxBytes || p.floor%g != 0 || p.cap%g != 0 {
		return p, errs.Invalid(op, fmt.Sprintf("a chunk plan from %s to %s", errs.Bytes(p.floor), errs.Bytes(p.cap)),
			fmt.Sprintf("use positive multiples of the granularity, %s, the cap not below the floor", errs.Bytes(g)))
	}
	return p, nil
}

// least is the size of the smallest chunk that has room for n bytes more.
func (p ChunkPlan) least(n, gran uint64) uint64 { return max(roundUp(n, gran), uint64(p.floor)) }

// next is the size of the chunk behind committed bytes, of which at most room
// are left in the reservation.
func (p ChunkPlan) next(committed, room uint64) uint64 {
	return min(max(committed, uint64(p.floor)), uint64(p.cap), room)
}
