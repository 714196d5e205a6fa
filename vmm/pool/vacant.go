package pool

import "slices"

// vacant are the places of a region that hold nothing: runs of chunks, sorted,
// that do not touch. The first that is long enough serves, so that what is used
// stays at the region's beginning, and with the memory how far it spreads is
// bounded, too.
type vacant []vacancy

type vacancy struct{ from, to int }

// take takes the place of n chunks.
func (v *vacant) take(n int) (at int, ok bool) {
	for i := range *v {
		r := &(*v)[i]
		if r.to-r.from < n {
			continue
		}
		at = r.from
		if r.from += n; r.from == r.to {
			*v = slices.Delete(*v, i, i+1)
		}
		return at, true
	}
	return 0, false
}

// give gives the place of n chunks back.
func (v *vacant) give(at, n int) {
	i, _ := slices.BinarySearchFunc(*v, at, func(r vacancy, at int) int { return r.from - at })
	before := i > 0 && (*v)[i-1].to == at
	after := i < len(*v) && (*v)[i].from == at+n
	switch {
	case before && after:
		(*v)[i-1].to = (*v)[i].to
		*v = slices.Delete(*v, i, i+1)
	case before:
		(*v)[i-1].to += n
	case after:
		(*v)[i].from = at
	default:
		*v = slices.Insert(*v, i, vacancy{at, at + n})
	}
}
