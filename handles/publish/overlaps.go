package publish

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/share"
)

// overlaps knows which publications of this process show the same memory, as two of one buffer
// do, or of a fork. Followers of one know nothing of a Rewrite of the other, so memory that two
// show is not rewritten, and memory that is being rewritten is not shown by another.
type overlaps struct {
	mu lock.Mutex[lock.Leaf]
	// shown are the publications that show a chunk, by its ID, and shared counts for each the
	// chunks that another one shows.
	shown  map[uint64][]*Publication
	shared map[*Publication]int
	// rewritten are those that are open for rewriting, or about to be, and the chunks of one that shows none of its memory.
	rewritten map[*Publication][]share.Chunk
}

var sharing = overlaps{shown: map[uint64][]*Publication{}, shared: map[*Publication]int{}, rewritten: map[*Publication][]share.Chunk{}}

// add notes that a publication shows chunks. It fails, without effect, if another one that has
// one of them is being rewritten.
func (o *overlaps) add(op string, p *Publication, chunks []share.Chunk) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, c := range chunks {
		for other, hidden := range o.rewritten {
			if other != p && (slices.Contains(o.shown[c.ID], other) || slices.ContainsFunc(hidden, func(h share.Chunk) bool { return h.ID == c.ID })) {
				return errs.Peer(op, cuda.ErrInUse, fmt.Sprintf("memory of publication %q, which is being rewritten", other.name), "Announce of that one ends it")
			}
		}
	}
	for _, c := range chunks {
		o.count(p, c.ID, 1)
		o.shown[c.ID] = append(o.shown[c.ID], p)
	}
	return nil
}

// remove notes that a publication shows chunks no longer.
func (o *overlaps) remove(p *Publication, chunks []share.Chunk) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, c := range chunks {
		all := o.shown[c.ID]
		if i := slices.Index(all, p); i >= 0 {
			all = slices.Delete(all, i, i+1)
		}
		if o.shown[c.ID] = all; len(all) == 0 {
			delete(o.shown, c.ID)
		}
		o.count(p, c.ID, -1)
	}
}

// count counts a chunk of a publication for it and for the others that show it.
func (o *overlaps) count(p *Publication, chunk uint64, by int) {
	for _, other := range o.shown[chunk] {
		if other == p {
			continue
		}
		for _, each := range []*Publication{p, other} {
			if o.shared[each] += by; o.shared[each] == 0 {
				delete(o.shared, each)
			}
		}
	}
}

// begin notes that a publication is about to be rewritten, of chunks that no other one may show: those that it shows,
// or else those of its memory.
func (o *overlaps) begin(op string, p *Publication, hidden []share.Chunk) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	other := p
	if o.shared[p] > 0 {
		other = o.other(p)
	}
	for _, c := range hidden {
		if all := o.shown[c.ID]; len(all) > 0 {
			other = all[0]
		}
	}
	if other != p {
		return errs.Peer(op, cuda.ErrInUse, fmt.Sprintf("memory of publication %q, which publication %q shows as well", p.name, other.name),
			"withdraw one of them: the followers of the other are not waited for")
	}
	o.rewritten[p] = hidden
	return nil
}

// other returns a publication that shows a chunk of this one.
func (o *overlaps) other(p *Publication) *Publication {
	for _, all := range o.shown {
		for _, other := range all {
			if other != p && slices.Contains(all, p) {
				return other
			}
		}
	}
	return p
}

// end notes that a publication is not rewritten any more.
func (o *overlaps) end(p *Publication) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.rewritten, p)
}
