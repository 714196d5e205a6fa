package load

import (
	"cmp"
	"hash/crc32"
	"slices"
	"sync"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sums are the CRC-32C of items, whose bytes pass in pieces, in any order.
type sums struct {
	items []item
	// whole gets the sum of each item of which all bytes have passed. Several goroutines call it.
	whole func(item int, crc uint32)

	mu    sync.Mutex
	parts []partSum
}

// partSum is the sum of n bytes of an item, from byte at on.
type partSum struct {
	item  int
	at, n int64
	crc   uint32
}

// add takes the sums of a piece's spans. Several goroutines may call it.
func (s *sums) add(spans []span) {
	for i := range spans {
		switch sp := &spans[i]; {
		case sp.n == 0: // end tells of it
		case int64(sp.n) == s.items[sp.item].bytes: // so no other piece has any of it
			s.whole(sp.item, sp.crc)
		default:
			s.mu.Lock()
			s.parts = append(s.parts, partSum{sp.item, sp.within, int64(sp.n), sp.crc})
			s.mu.Unlock()
		}
	}
}

// addPiece sums the bytes of the stream from offset on.
func (s *sums) addPiece(piece []byte, offset int64) {
	spans := spansOf(s.items, offset, len(piece))
	for i := range spans {
		sp := &spans[i]
		sp.crc = crc32.Checksum(piece[sp.at:sp.at+sp.n], castagnoli)
	}
	s.add(spans)
}

// end is called behind the last piece: it sums up the items that passed in several, and those that
// have no bytes.
func (s *sums) end() {
	slices.SortFunc(s.parts, func(a, b partSum) int {
		return cmp.Or(cmp.Compare(a.item, b.item), cmp.Compare(a.at, b.at))
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
		if n == s.items[first.item].bytes {
			s.whole(first.item, crc)
		}
	}
	for i := range s.items {
		if s.items[i].bytes == 0 {
			s.whole(i, 0)
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
