package pages

import "iter"

// table has what lies at each place of a range; nil is a hole. It is cut into blocks, which are
// made when something first lies there: a range has far more addresses than pages, and the
// garbage collector reads every pointer.
type table struct {
	n      int
	blocks []*[blockPlaces]*place
}

const blockPlaces = 512

func newTable(n int) table {
	return table{n, make([]*[blockPlaces]*place, (n+blockPlaces-1)/blockPlaces)}
}

func (t *table) at(i int) *place {
	if b := t.blocks[i/blockPlaces]; b != nil {
		return b[i%blockPlaces]
	}
	return nil
}

func (t *table) set(i int, p *place) {
	b := t.blocks[i/blockPlaces]
	if b == nil {
		b = new([blockPlaces]*place)
		t.blocks[i/blockPlaces] = b
	}
	b[i%blockPlaces] = p
}

// all iterates over what is not a hole, in the order of the places.
func (t *table) all() iter.Seq2[int, *place] {
	return func(yield func(int, *place) bool) {
		for i, b := range t.blocks {
			if b == nil {
				continue
			}
			for j, p := range b {
				if p != nil && !yield(i*blockPlaces+j, p) {
					return
				}
			}
		}
	}
}
