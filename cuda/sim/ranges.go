package sim

// span is a half-open range of addresses or offsets.
type span struct{ lo, hi uint64 }

func (s span) size() uint64 { return s.hi - s.lo }

// ranges is a set of numbers that are free to be taken. It hands out what was
// never used before what was given back: taking goes round, from where the
// last one ended.
type ranges struct {
	free   intervals[struct{}]
	end    uint64 // one past the highest number that was ever free
	cursor uint64
}

// put makes [lo, hi) free, which must not be free already.
func (r *ranges) put(s span) {
	if s.lo == s.hi {
		return
	}
	for range r.free.overlapping(s.lo, s.hi) {
		panic("sim: a range was given back twice")
	}
	r.end = max(r.end, s.hi)
	if s.lo > 0 {
		if before, ok := r.free.find(s.lo - 1); ok {
			r.free.remove(before.lo)
			s.lo = before.lo
		}
	}
	if after, ok := r.free.find(s.hi); ok {
		r.free.remove(after.lo)
		s.hi = after.hi
	}
	r.free.insert(s.lo, s.hi, struct{}{})
}

// acquireAt acquires exactly s, if all of it is free.
func (r *ranges) acquireAt(s span) bool {
	f, ok := r.free.find(s.lo)
	if !ok || f.hi < s.hi || s.lo >= s.hi {
		return false
	}
	r.free.remove(f.lo)
	r.free.insert(f.lo, s.lo, struct{}{})
	r.free.insert(s.hi, f.hi, struct{}{})
	return true
}

// acquire returns size numbers in a row, the first a multiple of align (a power of
// two), and leaves up to gap numbers behind them for later.
func (r *ranges) acquire(size, align, gap uint64) (uint64, bool) {
	for _, part := range [2]span{{r.cursor, r.end}, {0, r.end}} {
		for f := range r.free.overlapping(part.lo, part.hi) {
			lo := (max(f.lo, part.lo) + align - 1) &^ (align - 1)
			if lo < f.lo || lo > f.hi || f.hi-lo < size {
				continue
			}
			r.acquireAt(span{lo, lo + size})
			r.cursor = lo + size + min(gap, f.hi-lo-size)
			return lo, true
		}
	}
	return 0, false
}

// acquirePieces acquires size numbers, in pieces as it finds them. The caller has checked that
// so many are free.
func (r *ranges) acquirePieces(size uint64) []span {
	var taken []span
	for size > 0 {
		f, ok := r.next()
		if !ok {
			panic("sim: more was taken than was free")
		}
		s := span{f.lo, f.lo + min(size, f.size())}
		r.acquireAt(s)
		r.cursor = s.hi
		size -= s.size()
		taken = append(taken, s)
	}
	return taken
}

// next is the free range at or after the cursor, round the end.
func (r *ranges) next() (span, bool) {
	for _, part := range [2]span{{r.cursor, r.end}, {0, r.end}} {
		for f := range r.free.overlapping(part.lo, part.hi) {
			return span{max(f.lo, part.lo), f.hi}, true
		}
	}
	return span{}, false
}
