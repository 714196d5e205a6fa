package publish

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/cuvmm/cuvmm/vmm"
)

// Publication is a buffer or an array that a [Server] publishes under a name.
// Followers see the elements that were announced last, and the memory behind them. All
// methods are safe for concurrent use.
//
// A publication holds its memory: until Withdraw, closing the buffer, or clipping
// what was announced, returns cuda.ErrInUse. The buffer can still grow. A Resize to less
// than what is shown hides nothing from followers, and a later append overwrites elements
// that they may be reading: use Shrink, and Settle before that append. Lengths count
// elements of an array, and bytes of a buffer.
type Publication struct {
	server *Server
	name   string
	// identity stays when another process takes the publication over.
	identity identity
	memory   share.Memory
	hold     share.Hold
	about    handles.Descriptor
	unit     uint64 // bytes of an element
	// told is what followers are told of the memory, and text the file of the description, if
	// there is one, until nothing is sent any more.
	told description
	text *peer.FD
	// readOnly: an heir that only read has it, and cannot write.
	readOnly bool
	timeline *timeline
	// exports are the descriptors that are being sent.
	exports exchange.Set

	// changes serializes the changes of the publication and of its followers, driver
	// calls included. Lock order: a change of the buffer (Shrink), changes, the buffer's
	// other locks, mu, exports.
	changes wait.Slot
	// ctx ends with Withdraw.
	ctx context.Context
	end context.CancelFunc
	// used is the last generation that words were written for. It is beyond the view's
	// if an announcement failed.
	used uint64
	// written are the ranges that were announced behind a gap. Guarded by changes.
	written spans
	// flux and cut are what the words of these names read in the followers' slots. Written
	// with changes and mu held, as rewriting is.
	flux, cut uint64
	rewriting rewriting
	halves
	kept *kept // of memory that a broker keeps; nil of other memory
	// length is what was shown of memory that is away. back says that there is memory again, and whole
	// that it has the bytes.
	length      uint64
	back, whole bool

	// users counts the publication until Withdraw has ended, its timeline, and the
	// followers' goroutines. The last ends the closing.
	users  atomic.Int64
	ending life.Ending

	// mu guards the fields below. The view and its memory are written with changes
	// held too, so either lock suffices to read them.
	mu        lock.Mutex[lock.Publication]
	view      view
	mem       share.View // a chunk for each of the view's
	followers map[*replicator]struct{}
	withdrawn bool
	changed   chan struct{} // closed and replaced at every change
	closing   error         // of the timeline
}

// Publish publishes a buffer under a name of 1 to MaxName bytes, which must be
// unused (cuda.ErrInUse). The buffer's memory must have been created with a descriptor
// as handle type, which is the default if location and device support it. Followers
// see nothing until the first Announce. They are told the buffer's tag, and what the options say, of
// which there is at most one.
func (s *Server) Publish(name string, b *vmm.Buffer, o ...PublishOptions) (*Publication, error) {
	const op = "publish.Server.Publish"
	if b == nil {
		return nil, errs.PeerInvalid(op, "a nil buffer", "make one with vmm.NewBuffer")
	}
	return s.publishAs(op, name, share.Of(b), handles.Descriptor{Kind: handles.BufferKind}, 1, o)
}

// Array publishes an array, as [Server.Publish] does a buffer. Followers
// must name the same element type.
func Array[T any](s *Server, name string, a *vmm.Array[T], o ...PublishOptions) (*Publication, error) {
	const op = "publish.Array"
	if a.Buffer() == nil {
		return nil, errs.PeerInvalid(op, "a nil or zero array", "make one with vmm.NewArray")
	}
	element, size := handles.ElementOf[T]()
	return s.publishAs(op, name, share.Of(a.Buffer()), handles.Descriptor{Kind: handles.ArrayKind, Element: element, ElementSize: size}, uint64(size), o)
}

// publishAs makes a publication with what the options say of it.
func (s *Server) publishAs(op, name string, m share.Memory, d handles.Descriptor, unit uint64, o []PublishOptions) (*Publication, error) {
	told, err := describe(op, o)
	if err != nil {
		return nil, err
	}
	if s == nil || m == nil || len(o) == 0 || o[0].Page == nil {
		return s.publish(op, name, m, d, unit, told, nil)
	}
	told.tag = m.About().Tag
	from, err := o[0].Page.take(op, m, unit, o[0].Incomplete)
	if err != nil {
		return nil, err
	}
	s.pages.out.Add(1) // until Withdraw has put the page back
	p, err := s.publish(op, name, m, d, unit, told, from)
	if err != nil {
		s.pages.out.Done()
		return nil, from.kept.drop(op, err)
	}
	return p, nil
}

// publish makes a publication, which continues that of a publisher that ended if from is
// not nil.
func (s *Server) publish(op, name string, m share.Memory, d handles.Descriptor, unit uint64, told description, from *legacy) (*Publication, error) {
	if s == nil {
		return nil, errs.PeerInvalid(op, "a nil server", "make one with NewServer")
	}
	if s.refused != nil {
		return nil, s.refused
	}
	if err := checkPublished(op, name); err != nil {
		return nil, err
	}
	if m == nil {
		return nil, errs.PeerInvalid(op, "a zero buffer", "make one with vmm.NewBuffer")
	}
	about := m.About()
	if about.Followed {
		return nil, errs.Peer(op, cuda.ErrNotPermitted, "the memory of a follower, whose length another publisher announces", "close the follower first, publish a copy, or use TakeOver")
	}
	if about.Kept && (from == nil || from.kept == nil) {
		return nil, errs.PeerInvalid(op, "memory that a broker keeps, without its page", "set PublishOptions.Page, so that the next publisher learns what is whole")
	}
	if from == nil {
		told.tag = about.Tag
	}
	if err := told.fits(op, about.Reserved); err != nil {
		return nil, err
	}
	if err := phys.Exportable(op, driver.HandlePosixFD, about.Asked, about.Imported, about.Granularity); err != nil {
		return nil, err
	}
	said, err := exchange.Describe(op, core.SystemOf(about.Device), about.Asked, nil)
	if err != nil {
		return nil, err
	}
	d.Location, d.Device, d.Exporter = said.Location, said.Device, handles.Self()
	d.Handle = vmm.PosixFD // each follower maps a page of this process, so it is on this host
	if !s.closer.Acquire() {
		return nil, errs.PeerClosed(op, "server")
	}
	defer s.closer.Release()
	p := &Publication{server: s, name: name, identity: newIdentity(), memory: m, about: d, unit: unit, told: told,
		exports: exchange.Set{Followed: true}, followers: map[*replicator]struct{}{}, changes: wait.NewSlot(), changed: make(chan struct{})}
	p.ctx, p.end = context.WithCancel(context.Background())
	p.users.Store(2)
	if told.form != noDescription {
		if p.text, err = exchange.TextFile(op, "a description", told.text); err != nil {
			return nil, err
		}
	}
	if p.hold, err = m.Hold(op, fmt.Sprintf("publication %q", name), 0); err != nil {
		return nil, errors.Join(err, p.text.Close())
	}
	if p.timeline, err = newTimeline(about.Device); err == nil {
		exchange.Warm.Enter() // until Withdraw
		if from != nil {
			err = p.inherits(op, from)
		}
		if err == nil {
			err = s.enter(op, p)
		}
		if err == nil {
			p.hold.RecallBy(audience{p})
			p.inspect()
			return p, nil
		}
		exchange.Warm.Leave()
		sharing.remove(p, p.mem.Chunks)
		sharing.end(p)
		err = errors.Join(p.timeline.drop(err), p.mem.Release())
	}
	p.hold.Release()
	return nil, errors.Join(err, p.text.Close())
}

// made refuses a publication that no server made.
func (p *Publication) made(op string) error {
	if p == nil || p.server == nil {
		return errs.PeerInvalid(op, "a nil or zero publication", "make one with Server.Publish or publish.Array")
	}
	return nil
}

// Name returns the name that it is published under.
func (p *Publication) Name() string {
	if p == nil {
		return ""
	}
	return p.name
}

// replicators returns the followers. The caller holds changes, so they stay.
func (p *Publication) replicators() []*replicator {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make([]*replicator, 0, len(p.followers))
	for f := range p.followers {
		all = append(all, f)
	}
	return all
}

// Withdraw ends the publication: its name becomes free, its memory is no longer held,
// and followers are told. They keep what they have mapped until they release it, and their
// streams go on waiting for the work behind the announcements.
// It waits neither for followers nor for the GPU; an Announce that waits returns
// cuda.ErrClosed. A follower does not get what was not sent yet, so call Settle first.
// Nothing of memory that a broker keeps is whole after that, since it may be written: to hand it
// on, close the server. Idempotent.
func (p *Publication) Withdraw() error {
	const op = "publish.Publication.Withdraw"
	if err := p.made(op); err != nil {
		return err
	}
	return p.withdraw(op, ended{state: Ended, status: statusWithdrawn})
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
	p.withdrawn, p.rewriting = true, settled
	defer p.drop()
	followers, mem := p.followers, p.mem
	p.forget(mem.Chunks)
	sharing.end(p)
	p.followers, p.mem = map[*replicator]struct{}{}, share.View{}
	p.changeLocked()
	p.mu.Unlock()
	pool := &p.server.pages
	pool.out.Add(1) // until the last user has gone, for which Server.Close waits
	p.server.leave(p)
	exchange.Warm.Leave()
	p.hold.Release()
	pages := make([]*page, 0, len(followers))
	for f := range followers {
		p.tell(f.slot) // nothing is to be rewritten any more
		f.slot.word(cutWord).Store(cutWithdrawn)
		pages = append(pages, f.page)
		to := last
		to.token, to.generation = f.token, p.view.generation
		f.end(&to)
	}
	if p.kept != nil {
		if last.state == Ended { // its owner may write from now on
			p.kept.page.slot.word(fluxWord).Store(p.used)
		}
		pages = append(pages, p.kept.page)
	}
	err := p.timeline.later(op, func() error {
		for _, g := range pages {
			pool.put(g)
		}
		return p.timelineClosed(p.timeline.close())
	})
	if err != nil {
		go func() { // because closing the stream waits for its work
			closing := p.timeline.close()
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
			_ = p.timelineClosed(closing)
		}()
	}
	return errors.Join(err, mem.Release())
}

// timelineClosed is called when the stream of a withdrawn publication was closed, or
// could not be.
func (p *Publication) timelineClosed(err error) error {
	if p.kept != nil {
		p.kept.of.used.Give() // before Released and Server.Close, which promise it
	}
	p.mu.Lock()
	p.closing = err
	p.mu.Unlock()
	if err != nil {
		p.server.keep(p)
	}
	p.drop()
	return err
}

// drop removes a user of the publication. The last user ends its closing.
func (p *Publication) drop() {
	if p.users.Add(-1) == 0 {
		_ = p.text.Close() // whose number is released even after an error
		p.ending.End(p.closing)
		p.server.pages.out.Done()
	}
}

// Released returns the end of the publication's closing: after Withdraw, when the work
// behind the announcements is done and nothing is being sent to followers any more, the
// publication holds no memory. It can be obtained at any time. Followers' mappings are
// theirs, and are not waited for. An error is that of closing the publication's stream,
// which Server.Close tries again.
func (p *Publication) Released() cuda.Completion {
	if err := p.made("publish.Publication.Released"); err != nil {
		return completed(err)
	}
	return p.ending.Completion()
}

// Settle waits until every follower has what was announced last, or has refused it. It
// waits for followers that map memory, or use elements, that are no longer shown, even if
// they refused to give it back, which they retry at the next change.
func (p *Publication) Settle(ctx context.Context) error {
	return p.await(ctx, "publish.Publication.Settle", func() string {
		waiting := 0
		for f := range p.followers {
			if g := f.progress; g.told != p.view.generation || g.out != nil || g.pinned(p.view) > 0 || g.length > p.view.length {
				waiting++
			}
		}
		if waiting == 0 {
			return ""
		}
		return fmt.Sprintf("%s of %q that did not acknowledge yet", errs.Count(waiting, "follower"), p.name)
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

// await waits until missing, which runs under mu, returns "".
func (p *Publication) await(ctx context.Context, op string, missing func() string) error {
	if err := p.made(op); err != nil {
		return err
	}
	for {
		p.mu.Lock()
		what := missing()
		changed, over := p.changed, p.withdrawn
		p.mu.Unlock()
		switch {
		case over:
			return p.closed(op)
		case what == "":
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return errs.PeerWait(ctx, op, what, "Stats names the followers")
		}
	}
}
