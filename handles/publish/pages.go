package publish

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/sharedpage"
)

// pages are the pages that a server shares with its clients. Each belongs to one
// session, for the streams of one device: a process that had a page can write it
// forever, and its writes must never be read for another client. Each follower of the
// session has a slot that no other had, because a follower that left may still write
// its own to release its streams.
//
// Unregistering a page waits for all work of its context and stalls the launches of
// all threads meanwhile. So unused pages are collected and unregistered many at a time,
// and all of them when the server closes.
type pages struct {
	mu     lock.Mutex[lock.Leaf]
	open   map[peer.Credentials]int // pages with an open descriptor, by process
	opened int                      // in all
	spent  []*page                  // without users
	stuck  []*page                  // could not be released, or streams may still write them
	// out counts the slots that followers have, or that wait for their streams.
	out sync.WaitGroup
	// life is the server's.
	life *life.Closer
}

type page struct {
	slot *pageSlot // its slot is the next one
	fd   *peer.FD  // for the session's next follower
	of   peer.Credentials
	// users counts the followers that have a slot, and the session while it may hand
	// out further ones. Guarded by the pages' mu.
	users int
}

// get returns an unused slot of the session's page, whose words read 0, with the page's
// descriptor for the client. The caller closes the descriptor.
func (p *pages) get(op string, d *cuda.Device, ss *session) (g *page, w *pageSlot, file *peer.FD, err error) {
	ss.paging.Lock()
	defer ss.paging.Unlock()
	g = ss.pages[d]
	if g == nil || g.slot.index == slotsOf(g.slot.page) {
		if g != nil {
			p.finish(g)
			delete(ss.pages, d)
		}
		if g, err = p.make(op, d, ss); err != nil {
			return nil, nil, nil, err
		}
		ss.pages[d] = g
	}
	if file, err = g.fd.Dup(); err != nil {
		return nil, nil, nil, err
	}
	at := *g.slot
	g.slot.index++
	p.mu.Lock()
	defer p.mu.Unlock()
	g.users++
	p.out.Add(1)
	return g, &at, file, nil
}

// pageShare divides the limit of open files: pages take at most one part in so many,
// and those of one process one in pageProcessShare.
const (
	pageShare        = 4
	pageProcessShare = 16
	// leastPages are allowed under any limit.
	leastPages = 8
)

// make makes a page for a session, which becomes its first user.
func (p *pages) make(op string, d *cuda.Device, ss *session) (*page, error) {
	limit, err := fd.Limit()
	if err != nil {
		return nil, errs.SystemCall(op, "the limit of open files", err)
	}
	g := &page{of: ss.process(), users: 1}
	if err := p.enter(op, g, int(min(limit, 1<<20))); err != nil {
		return nil, err
	}
	shared, n, err := sharedpage.New()
	if err != nil {
		p.leave(g)
		return nil, errs.SystemCall(op, "a page for the client", err)
	}
	if g.fd, err = peer.NewFD(n); err != nil {
		p.leave(g)
		return nil, errors.Join(err, fd.Close(n), shared.Close())
	}
	if g.slot, err = newPageSlot(op, d, shared); err != nil {
		p.leave(g)
		return nil, errors.Join(err, g.fd.Close())
	}
	return g, nil
}

// enter counts a page that is about to have a descriptor.
func (p *pages) enter(op string, g *page, limit int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	const hint = "follow fewer publications at a time, or raise the publisher's limit of open files (ulimit -n)"
	switch most, of := max(leastPages, limit/pageShare), max(leastPages, limit/pageProcessShare); {
	case p.opened >= most:
		return errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("%d pages of clients, where %d is the most", p.opened+1, most), hint)
	case p.open[g.of] >= of:
		return errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("%d pages of %v, where %d is the most", p.open[g.of]+1, g.of, of), hint)
	}
	if p.open == nil {
		p.open = map[peer.Credentials]int{}
	}
	p.opened++
	p.open[g.of]++
	return nil
}

func (p *pages) leave(g *page) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.opened--
	if p.open[g.of]--; p.open[g.of] == 0 {
		delete(p.open, g.of)
	}
}

// finish ends the session's use of a page: it hands out no further slots.
func (p *pages) finish(g *page) {
	_ = g.fd.Close()
	p.leave(g)
	p.drop(g)
}

// put takes a slot back that all streams have passed.
func (p *pages) put(g *page) {
	defer p.out.Done()
	p.drop(g)
}

func (p *pages) drop(g *page) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if g.users--; g.users > 0 {
		return
	}
	if p.spent = append(p.spent, g); len(p.spent) < mostSpent || !p.life.Acquire() {
		return
	}
	spent := p.spent
	p.spent = nil
	go func() { // because the caller may be the reclaimer, which must not wait for the GPU
		defer p.life.Release()
		_ = p.discard("publish: followers left", spent)
	}()
}

// mostSpent is how many unused pages are collected before they are unregistered.
const mostSpent = 64

// discard unregisters pages, and keeps those for which that fails.
func (p *pages) discard(op string, all []*page) error {
	var errs []error
	for _, g := range all {
		if err := g.slot.close(op); err != nil {
			errs = append(errs, err)
			p.mu.Lock()
			p.stuck = append(p.stuck, g)
			p.mu.Unlock()
		}
	}
	return errors.Join(errs...)
}

// retire takes a slot back that streams may still write: its page stays until the
// server closes.
func (p *pages) retire(g *page) {
	defer p.out.Done()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.Contains(p.stuck, g) {
		p.stuck = append(p.stuck, g)
	}
}

// close waits for the slots that are out, and unregisters all pages. After an error it
// may be called again.
func (p *pages) close(op string) error {
	p.out.Wait()
	p.mu.Lock()
	all := slices.Concat(p.spent, p.stuck)
	p.spent, p.stuck = nil, nil
	p.mu.Unlock()
	return p.discard(op, all)
}
