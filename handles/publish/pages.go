package publish

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/peererr"
	"github.com/cuvmm/cuvmm/internal/sharedpage"
)

// pages are those that a server shares with its clients. Each belongs to one
// session, for the streams of one device: a process that had a page can write it
// for ever, and what it writes must never be read for another's. Each follower
// of the session has a word that none had before, since one that left may still
// write its own to release its streams.
//
// To unregister a page waits for all work of its context and stalls the launches
// of all threads meanwhile. So pages that serve nobody any more are collected, and
// many go at once. All go when the server closes.
type pages struct {
	mu     sync.Mutex
	open   map[peer.Credentials]int // pages with an open descriptor, by process
	opened int                      // in all
	spent  []*page                  // serve nobody any more
	kept   []*page                  // could not be given back, or streams may write them still
	// out counts the words that followers have, or that wait for their streams.
	out sync.WaitGroup
	// life is the server's.
	life *life.Closer
}

type page struct {
	word *word    // its slot is the next one
	fd   *peer.FD // for the session's next follower, nil when there is none
	of   peer.Credentials
	// users are the followers that have a word, and the session while it may hand
	// out further ones. Guarded by the pages' mu.
	users int
}

// get returns a word of the session that reads 0, with its page's descriptor for
// the client, which the caller closes.
func (p *pages) get(op string, d *cuda.Device, ss *session) (g *page, w *word, file *peer.FD, err error) {
	ss.paging.Lock()
	defer ss.paging.Unlock()
	g = ss.pages[d]
	if g == nil || g.word.slot == g.word.page.Words() {
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
	at := *g.word
	g.word.slot++
	p.mu.Lock()
	defer p.mu.Unlock()
	g.users++
	p.out.Add(1)
	return g, &at, file, nil
}

// pageShare is the part of the limit of open files that pages may take, one in so
// many, and pageProcessShare that of a single process's.
const (
	pageShare        = 4
	pageProcessShare = 16
	// leastPages are had in any case.
	leastPages = 8
)

// make makes a page for a session, which uses it.
func (p *pages) make(op string, d *cuda.Device, ss *session) (*page, error) {
	limit, err := fd.Limit()
	if err != nil {
		return nil, peererr.System(op, "the limit of open files", err)
	}
	g := &page{of: ss.process(), users: 1}
	if err := p.enter(op, g, int(min(limit, 1<<20))); err != nil {
		return nil, err
	}
	shared, n, err := sharedpage.New()
	if err != nil {
		p.leave(g)
		return nil, peererr.System(op, "a page for the client", err)
	}
	if g.fd, err = peer.NewFD(n); err != nil {
		p.leave(g)
		return nil, errors.Join(err, fd.Close(n), shared.Close())
	}
	if g.word, err = newWord(op, d, shared); err != nil {
		p.leave(g)
		return nil, errors.Join(err, g.fd.Close(), shared.Close())
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
		return peererr.New(op, peer.ErrTooLarge, fmt.Sprintf("%d pages of clients, where %d is the most", p.opened+1, most), hint)
	case p.open[g.of] >= of:
		return peererr.New(op, peer.ErrTooLarge, fmt.Sprintf("%d pages of %v, where %d is the most", p.open[g.of]+1, g.of, of), hint)
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

// finish says that a page's session hands out no further words.
func (p *pages) finish(g *page) {
	_ = g.fd.Close()
	p.leave(g)
	p.drop(g)
}

// put takes a word back, of which all streams have passed.
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
	go func() { // the caller may be the reclaimer, which does not wait for the GPU
		defer p.life.Release()
		_ = p.discard("publish: followers left", spent)
	}()
}

// mostSpent is how many pages are kept that serve nobody.
const mostSpent = 64

// discard gives pages back, and keeps those where that fails.
func (p *pages) discard(op string, all []*page) error {
	var errs []error
	for _, g := range all {
		if err := g.word.close(op); err != nil {
			errs = append(errs, err)
			p.mu.Lock()
			p.kept = append(p.kept, g)
			p.mu.Unlock()
		}
	}
	return errors.Join(errs...)
}

// retire takes a word back that streams may write still: its page goes with the
// server.
func (p *pages) retire(g *page) {
	defer p.out.Done()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.Contains(p.kept, g) {
		p.kept = append(p.kept, g)
	}
}

// close waits for the words that are out, and gives all pages back. What fails
// may be tried again.
func (p *pages) close(op string) error {
	p.out.Wait()
	p.mu.Lock()
	all := slices.Concat(p.spent, p.kept)
	p.spent, p.kept = nil, nil
	p.mu.Unlock()
	return p.discard(op, all)
}
