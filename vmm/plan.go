package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/memspec"
)

// ChunkPlan determines the sizes of a buffer's chunks. The driver's cost is per chunk,
// and a chunk is freed as a whole: large chunks make growth cheap, small ones waste
// less. The zero value is GeometricChunks(0, 64 MiB).
type ChunkPlan struct {
	floor, cap int
	given      bool // false in the zero value
}

// defaultCap bounds the chunks of the default plan. With chunks of this size creating
// and mapping a gibibyte takes about a millisecond, far less than filling it.
const defaultCap = 64 << 20

// FixedChunks returns a plan of chunks of one size in bytes, a multiple of the
// granularity.
func FixedChunks(size int) ChunkPlan { return ChunkPlan{size, size, true} }

// GeometricChunks returns a plan of chunks as large as the buffer's memory so far, at
// least floor and at most cap bytes, so that a small buffer stays small and a large one
// has few chunks. If there is not enough memory for so large a chunk the buffer takes the
// smallest that suffices, at least floor. A floor of 0 is the granularity.
func GeometricChunks(floor, cap int) ChunkPlan { return ChunkPlan{floor, cap, true} }

// String returns the plan as text: "chunks of 2 MiB to 64 MiB".
func (p ChunkPlan) String() string {
	if !p.given {
		return "chunks of the granularity to " + errs.Bytes(defaultCap)
	}
	if p.floor == p.cap {
		return "chunks of " + errs.Bytes(p.floor)
	}
	return fmt.Sprintf("chunks of %s to %s", errs.Bytes(p.floor), errs.Bytes(p.cap))
}

// resolve fills in the defaults and refuses sizes that are not multiples of the
// granularity.
func (p ChunkPlan) resolve(op string, gran uint64) (ChunkPlan, error) {
	g := int(gran)
	if !p.given {
		p = ChunkPlan{0, max(defaultCap/g*g, g), true}
	}
	if p.floor == 0 && p.cap > 0 {
		p.floor = g
	}
	if p.floor <= 0 || p.cap < p.floor || p.cap > memspec.MaxBytes || p.floor%g != 0 || p.cap%g != 0 {
		return p, errs.Invalid(op, fmt.Sprintf("a chunk plan from %s to %s", errs.Bytes(p.floor), errs.Bytes(p.cap)),
			fmt.Sprintf("use positive multiples of the granularity, %s, the cap not below the floor", errs.Bytes(g)))
	}
	return p, nil
}

// least returns the size of the smallest chunk that holds n bytes.
func (p ChunkPlan) least(n, gran uint64) uint64 { return max(roundUp(n, gran), uint64(p.floor)) }

// next returns the size of the chunk behind the committed bytes, at most room, the rest
// of the reservation.
func (p ChunkPlan) next(committed, room uint64) uint64 {
	return min(max(committed, uint64(p.floor)), uint64(p.cap), room)
}
