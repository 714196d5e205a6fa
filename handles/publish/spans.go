package publish

import (
	"slices"
)

// span is a range of elements.
type span struct{ from, to int }

// spans are sorted ranges that neither overlap nor touch.
type spans []span

// add merges a range with the ranges that it overlaps or touches.
func (all *spans) add(s span) {
	if s.from >= s.to {
		return
	}
	first, _ := slices.BinarySearchFunc(*all, s.from, func(o span, from int) int { return o.to - from })
	last := first
	for last < len(*all) && (*all)[last].from <= s.to {
		s.from, s.to = min(s.from, (*all)[last].from), max(s.to, (*all)[last].to)
		last++
	}
	*all = slices.Replace(*all, first, last, s)
}

// prefix returns how many elements there are without a gap, from the first n on.
func (all spans) prefix(n int) int {
	for _, s := range all {
		if s.from > n {
			break
		}
		n = max(n, s.to)
	}
	return n
}

// drop removes the first n elements.
func (all *spans) drop(n int) {
	for len(*all) > 0 && (*all)[0].from < n {
		if (*all)[0].to > n {
			(*all)[0].from = n
			return
		}
		*all = slices.Delete(*all, 0, 1)
	}
}
