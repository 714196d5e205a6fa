package tracegen

import "github.com/cuvmm/cuvmm/vmm/pool/trace"

// Caches is a program with a few caches of up to 5 GiB that grow by reallocation:
// the larger block is taken, the contents are copied, and the old one is given
// back. Between the steps come passing values of all sizes. A cache that has
// reached its length goes, and another begins.
func Caches(c Config) *trace.Trace {
	b := newBuilder("caches", c)
	budget := b.between(10, 14) * gib
	quarters := b.one(5, 6, 8) // what a cache grows to, of four
	most := b.between(2, 6)
	type cache struct {
		block        block
		bytes, limit uint64
		stream       uint32
	}
	var caches []cache
	live := uint64(0)
	drop := func(i uint64) {
		b.free(caches[i].block)
		live -= caches[i].bytes
		caches[i] = caches[len(caches)-1]
		caches = caches[:len(caches)-1]
	}
	const steps, perStep = 44, 25
	for range steps {
		for range perStep {
			if uint64(len(caches)) < most {
				n := roundUp(b.spread(16*mib, 256*mib), 4096)
				for live+n > budget && len(caches) > 0 {
					drop(b.below(uint64(len(caches))))
				}
				stream := uint32(b.below(trace.MaxStreams) % uint64(b.t.Streams))
				caches = append(caches, cache{b.allocOn(stream, tagKV, n), n, b.between(512*mib, 5*gib), stream})
				live += n
			}
			i := b.below(uint64(len(caches)))
			k := &caches[i]
			n := roundUp(k.bytes*quarters/4, 4096)
			if n > k.limit || live+n > budget {
				drop(i)
			} else {
				larger := b.allocOn(k.stream, tagKV, n)
				b.free(k.block)
				live += n - k.bytes
				k.block, k.bytes = larger, n
			}
			var passing []block
			for range b.between(2, 6) {
				passing = append(passing, b.allocOn(uint32(b.below(trace.MaxStreams)%uint64(b.t.Streams)), tagActivations, roundUp(b.spread(4096, 64*mib), 512)))
			}
			if b.t.Streams > 1 {
				b.use(1, passing[0])
			}
			b.free(passing...)
		}
		b.sync()
	}
	return b.done()
}
