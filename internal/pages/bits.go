package pages

// bits is a set of places.
type bits []uint64

func newBits(n int) bits { return make(bits, (n+63)/64) }

func (b bits) has(i int) bool { return b[i/64]&(1<<(i%64)) != 0 }

func (b bits) set(i int, on bool) {
	if on {
		b[i/64] |= 1 << (i % 64)
	} else {
		b[i/64] &^= 1 << (i % 64)
	}
}

// lacks returns the first place from one up to another that is not in the set, or -1.
func (b bits) lacks(from, to int) int {
	for i := from; i < to; i++ {
		if !b.has(i) {
			return i
		}
	}
	return -1
}
