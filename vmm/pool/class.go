package pool

import "math/bits"

// Small requests are rounded up to a size class: 4 to each power of two below
// 16 quanta, 8 above. What is wasted is at most a fifth of a small request, and
// an eighth of a larger one.

// quantum is what every block is a multiple of, and aligned to: a line of the
// GPU's memory four times over, and what frameworks expect of an allocator.
const quantum = 512

// classes are the size classes up to a limit.
type classes struct {
	sizes []uint64
	of    []uint8 // the class, by the size in quanta, rounded up
}

func newClasses(limit uint64) classes {
	var c classes
	for size := uint64(quantum); ; {
		c.sizes = append(c.sizes, size)
		if size >= limit {
			break
		}
		steps := uint64(4)
		if size >= 16*quantum {
			steps = 8
		}
		floor := uint64(1) << (bits.Len64(size) - 1)
		size = min(limit, size+max(quantum, floor/steps))
	}
	class := 0
	for q := range limit/quantum + 1 {
		if q*quantum > c.sizes[class] {
			class++
		}
		c.of = append(c.of, uint8(class))
	}
	return c
}

// find is the least class for so many bytes, which are within the limit.
func (c *classes) find(bytes uint64) int { return int(c.of[(bytes+quantum-1)/quantum]) }

// aligned is the least class for so many bytes whose slots are multiples of an
// alignment, or -1.
func (c *classes) aligned(bytes, align uint64) int {
	for class := c.find(bytes); class < len(c.sizes); class++ {
		if c.sizes[class]%align == 0 {
			return class
		}
	}
	return -1
}
