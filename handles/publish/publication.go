package publish

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/peererr"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/cuvmm/cuvmm/vmm"
)

// Publication is a buffer or an array that a [Server] publishes under a name.
// Followers see what was announced last: so many elements, and the memory under
// them. All methods are safe for use by any goroutine.
//
// While it is published its memory is held: closing the buffer, or clipping
// what was announced, is cuda.ErrInUse; the buffer grows as before. Lengths
// count elements of an array, and bytes of a buffer.
type Publication struct {
	server *Server
	name   string
	// identity stays when another process takes the publication over.
	identity identity
	memory   share.Memory
	hold     share.Hold
	about    handles.Descriptor
	unit     uint64 // bytes of an element
	seq      *sequence
	// exports are the descriptors that are being sent.
	exports exchange.Set

	// changes is held by what changes the publication or its followers, one at a
	// time, driver calls included. Lock order: a change of the buffer (Shrink),
	// changes, the buffer's other locks, mu, exports.
	changes wait.Slot
	// ctx ends with Withdraw.
	ctx context.Context
	end context.CancelFunc
	// used is the last generation that words were written for, which is beyond
	// the view's where an announcement failed.
	used uint64
	// written are the ranges that were announced behind a gap. changes guards them.
	written spans

	// mu guards what follows. The view and its memory are written with changes
	// too, so that either lock will do to read them.
	mu        sync.Mutex
	view      view
	mem       share.View // a chunk for each of the view's
	followers map[*subscriber]struct{}
	withdrawn bool
	changed   chan struct{} // closed, and made anew, at every change
}

// Publish publishes a buffer under a name of 1 to MaxName bytes, which must be
// free (cuda.ErrInUse). Its memory must have been created with a descriptor as
// handle type, which is the default where location and device take it. Followers
// see nothing until the first Announce.
func (s *Server) Publish(name string, b *vmm.Buffer) (*Publication, error) {
	const op = "publish.Server.Publish"
	if b == nil {
		return nil, peererr.Invalid(op, "a nil buffer", "make one with vmm.NewBuffer")
	}
	return s.publish(op, name, share.Of(b), handles.Descriptor{Kind: handles.BufferKind}, 1, nil)
}

// Array publishes an array, as [Server.Publish] does a buffer. Followers
// must name the same element type.
func Array[T any](s *Server, name string, a *vmm.Array[T]) (*Publication, error) {
	const op = "publish.Array"
	if a == nil {
		return nil, peererr.Invalid(op, "a nil array", "make one with vmm.NewArray")
	}
	element, size := handles.ElementOf[T]()
	return s.publish(op, name, share.Of(a.Buffer()), handles.Descriptor{Kind: handles.ArrayKind, Element: element, ElementSize: uint32(size)}, uint64(size), nil)
}

// publish makes a publication, which goes on with what a publisher left, if from is
// not nil.
func (s *Server) publish(op, name string, m share.Memory, d handles.Descriptor, unit uint64, from *heritage) (*Publication, error) {
	if s == nil {
		return nil, peererr.Invalid(op, "a nil server", "make one with NewServer")
	}
	if err := checkPublished(op, name); err != nil {
		return nil, err
	}
	about := m.About()
	if about.Followed {
		return nil, peererr.New(op, cuda.ErrNotPermitted, "the memory of a follower, whose length is another publisher's to announce", "close the follower first, or publish a copy")
	}
	if err := phys.Exportable(op, driver.HandlePosixFD, about.Asked, about.Imported, about.Granularity); err != nil {
		return nil, err
	}
	said, err := exchange.Describe(op, core.SystemOf(about.Device), about.Asked, nil)
	if err != nil {
		return nil, err
	}
	d.Location, d.Device, d.Exporter = said.Location, said.Device, handles.Self()
	d.Handle = vmm.PosixFD // each follower has a page of ours, so it is on this host
	if !s.closer.Acquire() {
		return nil, peererr.Closed(op, "server")
	}
	defer s.closer.Release()
	p := &Publication{server: s, name: name, identity: newIdentity(), memory: m, about: d, unit: unit,
		followers: map[*subscriber]struct{}{}, changes: wait.NewSlot(), changed: make(chan struct{})}
	p.ctx, p.end = context.WithCancel(context.Background())
	if p.hold, err = m.Hold(op, fmt.Sprintf("publication %q", name), 0); err != nil {
		return nil, err
	}
	if p.seq, err = newSequence(about.Device); err == nil {
		exchange.Warm.Enter() // until Withdraw
		if from != nil {
			err = p.inherits(op, from)
		}
		if err == nil {
			err = s.enter(op, p)
		}
		if err == nil {
			p.inspect()
			return p, nil
		}
		exchange.Warm.Leave()
		err = errors.Join(err, p.seq.close(), p.mem.Release())
	}
	p.hold.Release()
	return nil, err
}

// Name is what it is published under.
func (p *Publication) Name() string { return p.name }

// subscribers are the followers. The caller holds changes, so they stay.
func (p *Publication) subscribers() []*subscriber {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make([]*subscriber, 0, len(p.followers))
	for f := range p.followers {
		all = append(all, f)
	}
	return all
}

// Withdraw ends the publication: its name is free, its memory is no longer held,
// and followers are told. They keep what they have mapped until they release it.
// It waits neither for followers nor for the GPU, and an Announce that does ends
// with cuda.ErrClosed. What a follower was not sent yet it does not get, so
// Settle first. The second Withdraw does nothing.
func (p *Publication) Withdraw() error {
	return p.withdraw("publish.Publication.Withdraw", ended{state: Ended, status: statusWithdrawn})
}

// withdraw ends the publication with a last view for all followers.
func (p *Publication) withdraw(op string, last ended) error {
	p.end() // an announcement that waits for the GPU
	p.changes <- struct{}{}
	defer p.changes.Give()
	p.mu.Lock()
	if p.withdrawn {
		p.mu.Unlock()
		return nil
	}
	p.withdrawn = true
	followers, mem := p.followers, p.mem
	p.followers, p.mem = map[*subscriber]struct{}{}, share.View{}
	p.changeLocked()
	p.mu.Unlock()
	pool := &p.server.pages
	pool.out.Add(1) // the sequence itself; Server.Close waits for it
	p.server.leave(p)
	exchange.Warm.Leave()
	p.hold.Release()
	pages := make([]*page, 0, len(followers))
	for f := range followers {
		pages = append(pages, f.page)
		to := last
		to.token, to.generation = f.token, p.view.generation
		f.end(&to)
	}
	err := p.seq.later(op, func() error {
		defer pool.out.Done()
		for _, g := range pages {
			pool.put(g)
		}
		return p.seq.close()
	})
	if err != nil {
		go func() { // closing the stream waits for what is on it
			defer pool.out.Done()
			closing := p.seq.close()
			for _, g := range pages {
				if closing == nil {
					pool.put(g)
				} else {
					pool.retire(g)
				}
			}
			if closing != nil {
				p.server.log.Error("cuvmm: the stream of a publication that was withdrawn could not be closed", "publication", p.name, "error", closing)
			}
		}()
	}
	return errors.Join(err, mem.Release())
}

// Settle waits until every follower has what was announced last, or has said why
// not, and nobody keeps memory that is no longer shown.
func (p *Publication) Settle(ctx context.Context) error {
	return p.await(ctx, "publish.Publication.Settle", func() string {
		waiting := 0
		for f := range p.followers {
			if f.feed.told != p.view.generation || f.feed.out != nil || f.feed.pinned(p.view) > 0 {
				waiting++
			}
		}
		if waiting == 0 {
			return ""
		}
		return fmt.Sprintf("%s of %q to acknowledge still", errs.Count(waiting, "follower"), p.name)
	})
}

// AwaitFollowers waits until there are at least n followers.
func (p *Publication) AwaitFollowers(ctx context.Context, n int) error {
	return p.await(ctx, "publish.Publication.AwaitFollowers", func() string {
		if len(p.followers) >= n {
			return ""
		}
		return fmt.Sprintf("%s of %q instead of %d", errs.Count(len(p.followers), "follower"), p.name, n)
	})
}

// await waits until nothing is missing.
func (p *Publication) await(ctx context.Context, op string, missing func() string) error {
	for {
		p.mu.Lock()
		what := missing()
		changed, over := p.changed, p.withdrawn
		p.mu.Unlock()
		switch {
		case over:
			return peererr.Closed(op, fmt.Sprintf("publication %q", p.name))
		case what == "":
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return peererr.Wait(ctx, op, what, "Stats tells who the followers are")
		}
	}
}
