package handles

import (
	"errors"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/sharedpage"
)

// pages are those that a server shares with its followers. One that a follower
// leaves is kept, since the driver stalls the launches of all threads while it
// unregisters memory, and serves the next follower of the same user, who could not
// do to it what that user's processes cannot do to each other anyway. Each
// follower has another word of it, since the one before may still write its own to
// let its streams go. All go when the server closes, and that of an inherited
// connection, of which nobody knows the user, when its follower leaves.
type pages struct {
	mu    sync.Mutex
	free  map[pageFor][]*page
	spent []*page // of which all words were used
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
	if !g.whom.known {
		// Nobody knows whose it was: it serves no other process.
		if errors.Join(g.close("handles: a follower left"), g.fd.Close()) != nil {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.spent = append(p.spent, g)
		}
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if g.slot == g.page.Words()-1 {
		_ = g.fd.Close()
		p.spent = append(p.spent, g)
		return
	}
	if p.free == nil {
		p.free = map[pageFor][]*page{}
	}
	p.free[g.whom] = append(p.free[g.whom], g)
}

// retire takes a page back that streams may write still: it goes with the server.
func (p *pages) retire(g *page) {
	defer p.out.Done()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.spent = append(p.spent, g)
}

// close waits for those that are out, and gives all pages back. What fails may
// be tried again.
func (p *pages) close(op string) error {
	p.out.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, list := range p.free {
		p.spent = append(p.spent, list...)
	}
	p.free = nil
	var errs []error
	var left []*page
	for _, g := range p.spent {
		if err := errors.Join(g.close(op), g.fd.Close()); err != nil {
			errs, left = append(errs, err), append(left, g)
		}
	}
	p.spent = left
	return errors.Join(errs...)
}
