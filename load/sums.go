package load

import (
	"hash/crc32"
	"slices"
	"sync"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sums are the CRC-32C of items, whose bytes pass in pieces, in any order.
type sums struct {
	mu    sync.Mutex
	parts []partSum
}

// partSum is the sum of n bytes of an item, from byte at on.
type partSum struct {
	item  int
	at, n int64
	crc   uint32
}

func (s *sums) add(parts []partSum) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.parts = append(s.parts, parts...)
}

// each calls f with the sum of each item of which all bytes have passed.
func (s *sums) each(items []item, f func(item int, crc uint32)) {
	slices.SortFunc(s.parts, func(a, b partSum) int {
		if a.item != b.item {
			return a.item - b.item
		}
		return int(a.at - b.at)
	})
	for rest := s.parts; len(rest) > 0; {
		first := rest[0]
		var crc uint32
		var n int64
		for len(rest) > 0 && rest[0].item == first.item {
			if rest[0].at == n {
				crc, n = combined(crc, rest[0].crc, rest[0].n), n+rest[0].n
			}
			rest = rest[1:]
		}
		if n == items[first.item].bytes {
			f(first.item, crc)
		}
	}
}

// combined returns the sum of two runs of bytes from their sums and the length of the second:
// a sum is a polynomial over GF(2), and n bytes behind it multiply it by x to the power of 8n.
func combined(a, b uint32, n int64) uint32 {
	power := uint32(1 << 31) // x^0: the highest bit has the lowest power
	for k := 3; n > 0; n, k = n>>1, k+1 {
		if n&1 != 0 {
			power = times(powers[k%32], power)
		}
	}
	return times(power, a) ^ b
}

// powers are x to the powers of 2^k.
var powers = func() (p [32]uint32) {
	p[0] = 1 << 30
	for k := 1; k < len(p); k++ {
		p[k] = times(p[k-1], p[k-1])
	}
	return p
}()

// times multiplies polynomials modulo that of the sum.
func times(a, b uint32) (product uint32) {
	for bit := uint32(1 << 31); bit != 0; bit >>= 1 {
		if a&bit != 0 {
			product ^= b
		}
		if b&1 != 0 {
			b = b>>1 ^ crc32.Castagnoli
		} else {
			b >>= 1
		}
	}
	return product
}
