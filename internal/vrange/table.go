package vrange

import (
	"iter"
	"slices"
	"sort"
)

// table holds the mappings of a range in the order of their offsets, which never overlap.
// They lie in leaves, so that a change moves at most one leaf, however many mappings there
// are and wherever it is: pages are mapped in random order. A search reads no mapping, since
// each lies elsewhere in memory.
type table struct {
	leaves []leaf
	n      int
	// The arrays of leaves and of the first leaf while there is one mapping.
	one   [1]leaf
	first [1]entry
	spare []entry // the array of the last leaf that there was
}

// leaf has at most leafSize mappings, and at least one.
type leaf struct {
	off uint64 // of the first
	all []entry
}

type entry struct {
	off, end uint64
	m        *Mapping
}

const leafSize = 64

// place is a position in a table: that of a mapping, or the end.
type place struct{ leaf, at int }

// find returns the place of the first mapping that ends behind an offset.
func (t *table) find(off uint64) place {
	i := sort.Search(len(t.leaves), func(i int) bool { return t.leaves[i].off > off }) - 1
	if i < 0 {
		return place{0, 0}
	}
	all := t.leaves[i].all
	at := sort.Search(len(all), func(i int) bool { return all[i].off > off }) // at least 1
	switch {
	case all[at-1].end > off:
		return place{i, at - 1}
	case at == len(all):
		return place{i + 1, 0}
	}
	return place{i, at}
}

// get returns the first mapping that ends behind an offset, or nil.
func (t *table) get(off uint64) *Mapping {
	at := t.find(off)
	if at.leaf == len(t.leaves) {
		return nil
	}
	return t.leaves[at.leaf].all[at.at].m
}

// from iterates over the mappings that end behind an offset.
func (t *table) from(off uint64) iter.Seq[*Mapping] {
	return func(yield func(*Mapping) bool) {
		for at := t.find(off); at.leaf < len(t.leaves); at = (place{at.leaf + 1, 0}) {
			for _, e := range t.leaves[at.leaf].all[at.at:] {
				if !yield(e.m) {
					return
				}
			}
		}
	}
}

// insert adds mappings, among which and between which there is no other.
func (t *table) insert(run []*Mapping) {
	t.n += len(run)
	at := t.find(run[0].Off)
	if len(t.leaves) == 0 {
		if t.spare == nil {
			t.spare = t.first[:0]
		}
		t.leaves = append(t.one[:0], leaf{all: t.spare})
	}
	if at.at == 0 && at.leaf > 0 { // rather at the end of the leaf before
		at = place{at.leaf - 1, len(t.leaves[at.leaf-1].all)}
	}
	l := &t.leaves[at.leaf]
	atEnd := at.at == len(l.all)
	l.all = slices.Grow(l.all, len(run))[:len(l.all)+len(run)]
	copy(l.all[at.at+len(run):], l.all[at.at:])
	for i, m := range run {
		l.all[at.at+i] = entry{m.Off, m.end(), m}
	}
	l.off = l.all[0].off
	if len(l.all) > leafSize {
		t.split(at.leaf, atEnd)
	}
}

// split makes leaves of one that is too large. Those of a range that grows at its end stay
// full.
func (t *table) split(i int, atEnd bool) {
	size := leafSize / 2
	if atEnd {
		size = leafSize
	}
	var parts []leaf
	for part := range slices.Chunk(t.leaves[i].all, size) {
		parts = append(parts, leaf{part[0].off, slices.Clone(part)})
	}
	t.leaves = slices.Replace(t.leaves, i, i+1, parts...)
}

// remove takes mappings out, which follow one another.
func (t *table) remove(run []*Mapping) {
	t.n -= len(run)
	for len(run) > 0 {
		at := t.find(run[0].Off)
		l := &t.leaves[at.leaf]
		n := min(len(run), len(l.all)-at.at)
		run = run[n:]
		l.all = slices.Delete(l.all, at.at, at.at+n)
		t.settle(at.leaf)
	}
}

// settle drops a leaf that became empty, or joins it with the next if both are small.
func (t *table) settle(i int) {
	l := &t.leaves[i]
	if len(l.all) == 0 {
		if len(t.leaves) == 1 {
			t.spare = l.all
		}
		t.leaves = slices.Delete(t.leaves, i, i+1)
		return
	}
	l.off = l.all[0].off
	if i+1 < len(t.leaves) && len(l.all)+len(t.leaves[i+1].all) <= leafSize/2 {
		l.all = append(l.all, t.leaves[i+1].all...)
		t.leaves = slices.Delete(t.leaves, i+1, i+2)
	}
}
