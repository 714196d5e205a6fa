package publish

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// HalfOf returns which elements a generation shows of a publication whose halves are rewritten in
// turn ([RewriteOptions].Turn): those from from up to, not including, to. Generations that are even
// show the first half, the others the second.
//
// Such a publication has two versions, and one of them can be read at any time. Its publisher
// announces an even number of elements, both of whose halves are complete, and from then on
// rewrites the half that is not shown:
//
//	check(weights.Rewrite(ctx, publish.RewriteOptions{Turn: true}))
//	from, to := publish.HalfOf(weights.Stats().Generation+1, array.Len())
//	check(update(array, from, to, writer))
//	check(weights.Announce(ctx, array.Len(), writer))
//
// Rewrite waits for the readers of that half, which is of the generation before the last: they had
// the time of a whole round. A follower some of whose streams went on to the last generation while
// others still hold the one before is waited for until none holds anything. Followers read
//
//	from, to := publish.HalfOf(follower.Generation(), follower.Len())
//
// and are otherwise as any other: they hold, release and prove what they read. If the publisher
// dies while it writes, what followers show stays whole, and the next publisher goes on with it: an
// Announce without a Rewrite shows the same half again. Until a Rewrite without Turn the length stays as it is.
func HalfOf(generation uint64, length int) (from, to int) {
	half := length / 2
	if generation%2 == 0 {
		return 0, half
	}
	return half, 2 * half
}

// hasHalves refuses to rewrite halves of what has none. The caller holds changes.
func (p *Publication) hasHalves(op string) error {
	switch v := p.view; {
	case v.generation == 0:
		return errs.PeerInvalid(op, "halves of a publication that shows nothing", "announce the elements first, with both halves complete")
	case v.length%2 != 0:
		return errs.PeerInvalid(op, fmt.Sprintf("halves of %d elements", v.length), "announce an even number of elements")
	}
	return nil
}

// halves are what a publication knows of halves that are rewritten in turn. They are written with
// changes and mu held.
//
// Two rules keep the half that is shown whole: what shows the same elements as another generation
// keeps its parity (spendLike), and the generations that show the other half, up to older, are not
// begun any more (intent) from the moment on when a later one is shown. At that moment the held
// words are noted for each follower (before): the half is read no longer once those have ended.
type halves struct {
	turns   bool   // the half that a generation shows is that of its parity
	turning bool   // the Rewrite that waits, or was the last, is of a half
	older   uint64 // the last generation that shows the other half; 0 before the first turn
}

// beginTurn notes what the Rewrite that begins is of. The caller holds changes.
func (p *Publication) beginTurn(half bool) {
	p.mu.Lock()
	p.turning, p.turns = half, p.turns || half
	p.mu.Unlock()
	if half && p.older == 0 {
		p.renumber() // what is shown now becomes the older generation
	}
}

// turnTo notes that a generation is about to be shown. It reports whether what is shown until then
// becomes the older generation. The caller holds changes and mu.
func (p *Publication) turnTo(generation uint64) bool {
	turned := p.turns && (p.older == 0 || generation%2 != p.view.generation%2)
	if turned {
		p.older = p.view.generation
	}
	return turned
}

// noteReaders notes who may read the older generation, which nobody begins to any more. The
// caller holds changes and mu.
func (p *Publication) noteReaders() {
	for f := range p.followers {
		f.before = f.slot.word(heldWord).Load()
	}
}

// endTurns notes that all elements are rewritten, and may become others. The caller holds changes.
func (p *Publication) endTurns() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.halves = halves{}
}

// wanted returns the last generation that is to be rewritten. The caller holds changes or mu.
func (p *Publication) wanted() uint64 {
	if p.turning {
		return p.older
	}
	return p.view.generation
}

// spend returns the next generation. The caller holds changes.
func (p *Publication) spend() uint64 {
	p.used++
	return p.used
}

// spendLike is spend for a generation that shows the same half as another one, if the publication
// has halves. Of one that was taken over that is not known, but it was rewritten before.
func (p *Publication) spendLike(other uint64) uint64 {
	if p.spend(); (p.turns || p.flux > 0) && p.used%2 != other%2 {
		p.used++
	}
	return p.used
}

// sameHalves is the error of another length while halves are rewritten in turn.
func (p *Publication) sameHalves(op string, length int) error {
	return errs.Peer(op, cuda.ErrInUse, fmt.Sprintf("a length of %d, where halves of %d elements are rewritten in turn", length, p.view.length),
		"call Rewrite without RewriteOptions.Turn first")
}
