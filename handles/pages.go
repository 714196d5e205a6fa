package handles

import (
	"errors"
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/sharedpage"
)

// pages are those that a server shares with its followers. To unregister one waits
// for all work of its context and stalls the launches of all threads meanwhile, so
// one that a follower leaves is kept. It serves the next follower of the same user,
// who could not do to it what that user's processes cannot do to each other anyway.
// Each follower has another word of it, since the one before may still write its
// own to let its streams go. A page of which all words were used, and that of an
// inherited connection, of which nobody knows the user, serves nobody any more;
// many of those go at once. All go when the server closes.
type pages struct {
	mu    sync.Mutex
	free  map[pageFor][]*page
	spent []*page // serve nobody any more
	kept  []*page // streams may write them still
	// out counts those that followers have, or that wait for their streams.
	out sync.WaitGroup
}

// pageFor is whom a page may serve: who is at the other end, and whose streams
// write it.
type pageFor struct {
	dev   *cuda.Device
	uid   uint32
	known bool
}

type page struct {
	*word
	fd   *FD // for the follower
	whom pageFor
}

// get answers a page whose word reads 0.
func (p *pages) get(op string, d *cuda.Device, c *Conn) (*page, error) {
	who, known := c.Peer()
	key := pageFor{d, who.UID, known}
	p.mu.Lock()
	defer p.mu.Unlock()
	if list := p.free[key]; len(list) > 0 {
		g := list[len(list)-1]
		p.free[key] = list[:len(list)-1]
		g.slot++
		g.value().Store(0)
		p.out.Add(1)
		return g, nil
	}
	shared, n, err := sharedpage.New()
	if err != nil {
		return nil, systemError(op, "a page for the follower", err)
	}
	g := &page{fd: own(n), whom: key}
	if g.word, err = newWord(op, d, shared); err != nil {
		return nil, errors.Join(err, g.fd.Close(), shared.Close())
	}
	p.out.Add(1)
	return g, nil
}

// put takes a page back, of which all streams have passed.
func (p *pages) put(g *page) {
	defer p.out.Done()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !g.whom.known || g.slot == g.page.Words()-1 {
		_ = g.fd.Close()
		if p.spent = append(p.spent, g); len(p.spent) >= mostSpent {
			spent := p.spent
			p.spent = nil
			// The reclaimer, which this is called by, does not wait for the GPU.
			p.out.Go(func() { _ = p.discard("handles: followers left", spent) })
		}
		return
	}
	if p.free == nil {
		p.free = map[pageFor][]*page{}
	}
	p.free[g.whom] = append(p.free[g.whom], g)
}

// mostSpent is how many pages are kept that serve nobody.
const mostSpent = 64

// discard gives pages back, and keeps those where that fails.
func (p *pages) discard(op string, all []*page) error {
	var errs []error
	for _, g := range all {
		if err := errors.Join(g.close(op), g.fd.Close()); err != nil {
			errs = append(errs, err)
			p.mu.Lock()
			p.kept = append(p.kept, g)
			p.mu.Unlock()
		}
	}
	return errors.Join(errs...)
}

// retire takes a page back that streams may write still: it goes with the server.
func (p *pages) retire(g *page) {
	defer p.out.Done()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.kept = append(p.kept, g)
}

// close waits for those that are out, and gives all pages back. What fails may
// be tried again.
func (p *pages) close(op string) error {
	p.out.Wait()
	p.mu.Lock()
	all := slices.Concat(p.spent, p.kept)
	for _, list := range p.free {
		all = append(all, list...)
	}
	p.free, p.spent, p.kept = nil, nil, nil
	p.mu.Unlock()
	return p.discard(op, all)
}
