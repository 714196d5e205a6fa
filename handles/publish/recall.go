package publish

import (
	"context"
	"fmt"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/suspend"
)

// audience is a publication as what a suspension of its memory recalls: see rewriting for its
// states. A follower begins to read nothing from leaving on, and the publication waits until none
// reads. Then it shows a generation without memory, which is suspended, and waits until none has
// any. Memory that comes back has other identities, so no follower takes it for what it had.
type audience struct{ p *Publication }

// MayRecall implements suspend.Publication.
func (a audience) MayRecall(op string) error {
	a.p.mu.Lock()
	defer a.p.mu.Unlock()
	if a.p.rewriting == away || a.p.rewriting == leaving {
		return nil // a suspension that ends now
	}
	return a.p.settled(op)
}

// Memory implements suspend.Publication.
func (a audience) Memory() []*phys.Handle {
	a.p.mu.Lock()
	defer a.p.mu.Unlock()
	return handlesOf(a.p.mem.Chunks)
}

// Recall implements suspend.Publication.
func (a audience) Recall(ctx context.Context, op string, limit time.Duration) (late []suspend.Late, err error) {
	p := a.p
	p.awaitReceived(ctx)
	if err := p.turn(ctx, op); err != nil {
		if p.over() {
			return nil, nil // who followed it may have the memory for ever
		}
		return nil, err
	}
	if p.rewriting == away { // what the suspension before gave back is not shown yet
		p.changes.Give()
		return nil, nil
	}
	before := p.view
	if err = p.mayRenumber(op); err == nil {
		err = p.settled(op)
	}
	if err == nil {
		p.beginTurn(false)
		p.setRewriting(leaving)
	}
	p.changes.Give()
	if err != nil {
		return nil, err
	}
	e := exclusion{since: time.Now(), after: limit, undone: "the memory stays", option: "vmm.SuspendOptions.ExcludeAfter",
		excluded: func(f *replicator, why string) { late = append(late, p.lateOf(f, before.chunks, why)...) }}
	err = p.awaitReleased(ctx, op, e)
	if err == nil {
		p.changes <- struct{}{}
		p.showNothing()
		p.changes.Give()
		e.since = time.Now() // or who is late with the first step would cost the others the second
		err = p.awaitUnmapped(ctx, op, e)
	}
	p.changes <- struct{}{}
	defer p.changes.Give()
	switch {
	case p.ctx.Err() != nil: // it may be Withdraw's turn next
		return nil, p.closed(op)
	case err != nil:
		p.setRewriting(settled)
		if before.generation > 0 {
			before.generation = p.spendLike(p.view.generation)
			p.show(before, p.mem)
		}
		return nil, err
	}
	p.length, p.back = before.length, false
	p.setRewriting(away)
	p.mu.Lock()
	mem := p.mem
	p.mem = share.View{}
	p.mu.Unlock()
	sharing.remove(p, mem.Chunks)
	_ = mem.Release() // the buffer has the memory
	return late, nil
}

// showNothing shows that the memory is suspended. The caller holds changes.
func (p *Publication) showNothing() {
	if p.over() || p.view.generation == 0 {
		return
	}
	p.setCut()
	p.show(view{generation: p.spendLike(p.view.generation), ordered: p.view.ordered, away: true}, p.mem)
}

// awaitUnmapped waits until no follower has the memory any more, and excludes those that are late.
func (p *Publication) awaitUnmapped(ctx context.Context, op string, e exclusion) error {
	for {
		p.mu.Lock()
		changed, over := p.changed, p.withdrawn
		var have, ending []*replicator // those that end have the memory until they are told
		var refused *replicator
		for f := range p.followers {
			switch g := f.progress; {
			case f.ending != nil:
				ending = append(ending, f)
			case len(g.has)+len(g.sent) == 0:
			case g.level(p.view):
				refused = f
			default:
				have = append(have, f)
			}
		}
		p.mu.Unlock()
		switch {
		case over:
			return p.closed(op)
		case refused != nil:
			return errs.Peer(op, peer.ErrRefused, fmt.Sprintf("%s, which follows publication %q: %s", refused.on, p.name, errs.Words(p.reasonOf(refused))),
				"the memory stays, and followers are shown it again; the reason is that process's own words")
		case len(have)+len(ending) == 0:
			return nil
		case len(have) > 0 && e.over():
			p.exclude(have, e, fmt.Sprintf("the memory was not unmapped within %v", e.after))
			continue
		}
		if !e.await(ctx, changed) {
			have = append(have, ending...)
			return errs.PeerWait(ctx, op, fmt.Sprintf("%s of %q that did not unmap the memory: %v", errs.Count(len(have), "follower"), p.name, namesOf(have)),
				fmt.Sprintf("%s; find out what they wait for, or go on without late ones (%s)", e.undone, e.option))
		}
	}
}

func (p *Publication) reasonOf(f *replicator) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return f.progress.reason
}

// lateOf returns what a follower has of the chunks that were shown.
func (p *Publication) lateOf(f *replicator, shown []chunk, why string) (all []suspend.Late) {
	why = fmt.Sprintf("%s, which follows publication %q: %s", f.on, p.name, why)
	p.mu.Lock()
	defer p.mu.Unlock()
	g := f.progress
	n := common(append(g.has[:len(g.has):len(g.has)], g.sent...), shown)
	for _, c := range p.mem.Chunks[:min(n, len(p.mem.Chunks))] {
		all = append(all, suspend.Late{Memory: c.Handle, Why: why})
	}
	return all
}

// Show implements suspend.Publication. Memory whose bytes were lost is open for rewriting, so that
// followers have it, and are shown nothing before the next Announce.
func (a audience) Show(whole bool) {
	p := a.p
	p.changes <- struct{}{}
	defer p.changes.Give()
	p.back, p.whole = true, whole
	if err := p.awake("publish: show what is back"); err != nil {
		p.server.log.Error("cuvmm: memory that is back could not be shown to followers, which the next Announce tries again", "publication", p.name, "error", err)
	}
}

// awake refuses what is not done while the memory is suspended. What has come back is shown first.
// The caller holds changes.
func (p *Publication) awake(op string) error {
	switch {
	case p.over():
		return nil
	case p.rewriting == leaving || p.rewriting == away && !p.back:
		return errs.Peer(op, cuda.ErrSuspended, fmt.Sprintf("publication %q, whose memory is suspended", p.name), "call Resume of its Suspension first")
	case p.rewriting != away:
		return nil
	}
	length := min(p.length, p.memory.Used()/p.unit) // what sleeps can be made shorter
	if err := p.hold.Cover(op, length*p.unit); err != nil {
		return err
	}
	mem, err := p.memory.View(op, length*p.unit)
	if err != nil {
		return err
	}
	if err := sharing.add(op, p, mem.Chunks); err != nil {
		_ = mem.Release() // the buffer has the memory
		return err
	}
	if length != p.length || !p.whole {
		p.endTurns()
	}
	switch {
	case p.whole || p.view.generation == 0:
		p.setRewriting(settled)
	default:
		_ = sharing.begin(op, p, nil) // what another publication shows of the memory is open, too
		p.setRewriting(open)
	}
	if p.view.generation > 0 {
		p.show(view{generation: p.spendLike(p.view.generation), ordered: p.view.ordered, length: length, chunks: p.chunksOf(mem)}, mem)
	}
	return nil
}

// exclusion is how long followers are waited for, and what becomes of those that are later.
type exclusion struct {
	since time.Time
	after time.Duration // 0 is for as long as the context lasts
	// For errors: what has not happened, and the option that sets after.
	undone, option string
	excluded       func(f *replicator, why string)
}

func (e *exclusion) over() bool { return e.after > 0 && time.Since(e.since) >= e.after }

// await waits for a change, or until followers are late. It returns false if the context ends.
func (e *exclusion) await(ctx context.Context, changed <-chan struct{}) bool {
	var late <-chan time.Time
	if e.after > 0 && !e.over() {
		t := time.NewTimer(e.after - time.Since(e.since))
		defer t.Stop()
		late = t.C
	}
	select {
	case <-changed:
	case <-late:
	case <-ctx.Done():
		return false
	}
	return true
}

// exclude ends followers that are late.
func (p *Publication) exclude(late []*replicator, e exclusion, why string) {
	for _, f := range late {
		p.server.log.Warn("cuvmm: a follower is excluded", "publication", p.name, "follower", f.on.String(), "reason", why)
		e.excluded(f, why) // while it is among the followers
		f.end(&ended{f.token, 0, Ended, statusExcluded, why})
	}
}

// exclusionOf is the exclusion of a Rewrite that begins now.
func (p *Publication) exclusionOf(o RewriteOptions) exclusion {
	return exclusion{since: time.Now(), after: o.ExcludeAfter, undone: "nothing may be written", option: "RewriteOptions.ExcludeAfter", excluded: func(f *replicator, _ string) {
		f.slot.word(intentWord).Store(p.view.generation) // it shows nothing, even if it has gone when Rewrite returns
		f.slot.word(fluxWord).Store(p.view.generation)
		for _, s := range p.samples([]*replicator{f}) {
			if o.Excluded != nil {
				core.SystemOf(p.timeline.dev).Hook("publish.RewriteOptions.Excluded", func() { o.Excluded(s.stats()) })
			}
		}
	}}
}
