// Package front is what a pool and a cache of blocks in front of it are to each other. A cache
// (cmd/libcuvmm has one, in C) keeps blocks that its callers freed and serves requests from
// them, and the pool does not learn of either. To the pool a cached block is live; the pool
// asks the cache before that would show. Users never import this package and no public
// signature needs it: pool.Pool embeds a [Holder], and [Of] looks inside.
package front

import "github.com/cuvmm/cuvmm/cuda"

// Block is a live block of the pool.
type Block struct {
	Ptr   uint64
	Gen   uint64 // which block at that address
	Bytes uint64 // as requested
}

// Pool is what a cache needs of the pool behind it. All methods are safe for concurrent use.
type Pool interface {
	// SetCache puts a cache in front of the pool, which has none and serves no request yet.
	SetCache(c Cache)
	// Classes returns the sizes of the blocks that a cache may keep, by class; the first of the
	// large classes; and the class of a request by its size in units of 512 bytes, rounded up.
	Classes() (sizes []uint64, large int, of []uint8)
	// Alloc is the pool's Alloc. The class is that of the block, or -1 if no cache may keep it.
	// A large request is rounded up to its class, and to a coarser one if that takes at most round bytes
	// more than it needs; if round is negative, not at all, and it has no class.
	Alloc(bytes int, s *cuda.Stream, round int) (b Block, class int, err error)
	// More fills blocks of a class with what the stream has free, and returns how many. They
	// count as requested with 0 bytes.
	More(class int, s *cuda.Stream, blocks []Block) int
	// Free frees blocks in the order of their own streams, and panics if one is not live.
	Free(blocks []Block)
	// Resize says for how many bytes live blocks were requested. It skips those that are not
	// live any more.
	Resize(blocks []Block)
	// NotLive returns the error for the free of an address where no live block begins.
	NotLive(ptr uint64) error
}

// Cache is what the pool asks of a cache. The pool calls Hold with none of its locks held that
// the cache's calls of Free, More and Resize take.
type Cache interface {
	// Hold frees all that the cache has and passes every call on to the pool until release. If
	// exact is set it also resizes what it served at another size than the pool knows.
	Hold(exact bool) (release func())
	// Bytes returns how much it keeps.
	Bytes() uint64
	// GiveLarge frees what the cache has of large classes at the moment.
	GiveLarge()
	// Counts returns the counts of the blocks that the cache's callers have.
	Counts() Counts
	ResetPeaks()
}

// Counts are what the pool counts of its blocks, as its users see them. Sizes are in bytes.
type Counts struct {
	Requested, PeakRequested, Blocks, PeakBlocks, Allocs, Frees, AllocatedBytes int
}

// Holder is embedded, unexported, by pool.Pool.
type Holder struct{ p Pool }

// NewHolder makes the holder.
func NewHolder(p Pool) Holder { return Holder{p} }

func (h *Holder) front() Pool { return h.p }

// Of looks inside a pool.Pool.
func Of(h interface{ front() Pool }) Pool { return h.front() }
