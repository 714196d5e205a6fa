package publish

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// Announce shows the first length elements to all followers: after growth, or, to end a
// [Publication.Rewrite], because the contents of elements that they have are new. The length
// must not be less than the one shown before; Shrink takes elements back. New memory is exported and sent with a
// new generation, ordered behind the work that is on the streams now: no follower's
// stream sees the elements earlier. Work of other streams is not waited for. Without a
// stream (or with nil) the elements must be complete already.
//
// If the device of a stream is lost, Announce returns cuda.ErrDeviceLost and announces
// nothing. If it is lost later, before the work is done, what followers see of the elements
// is undefined: whether a wait for such work ends is the driver's.
//
// Announce waits for no follower, and a follower's failure affects no other. The
// context bounds the wait for another change of the publication and, on devices whose
// streams cannot write 64-bit words, for the streams. If a stream captures a graph it
// returns cuda.ErrCapturing, without effect; while a Rewrite waits it returns cuda.ErrInUse.
func (p *Publication) Announce(ctx context.Context, length int, streams ...*cuda.Stream) error {
	const op = "publish.Publication.Announce"
	return p.announceNext(ctx, op, streams, func() (int, error) {
		bytes, err := p.may(op, length)
		switch {
		case err != nil:
			return 0, err
		case bytes > p.memory.Used():
			return 0, errs.Peer(op, cuda.ErrOutOfRange, fmt.Sprintf("a length of %d, where %d are in use", length, p.memory.Used()/p.unit), "append or resize first")
		}
		return length, nil
	})
}

// AnnounceRange declares the elements from from up to, not including, to complete when
// the work that is on the streams now is done, and shows all elements before the first
// that was not declared. So goroutines that append to a buffer or an array concurrently
// announce what each of them appended, in any order and without a lock of their own:
// elements behind a gap are shown when the gap is closed, ordered behind the work of
// all. A Shrink forgets the ranges that are not shown yet. Otherwise AnnounceRange is
// like Announce.
func (p *Publication) AnnounceRange(ctx context.Context, from, to int, streams ...*cuda.Stream) error {
	const op = "publish.Publication.AnnounceRange"
	return p.announceNext(ctx, op, streams, func() (int, error) {
		if err := p.settled(op); err != nil {
			return 0, err
		}
		bytes, err := p.may(op, to)
		switch {
		case err != nil:
			return 0, err
		case from < 0 || from > to:
			return 0, errs.PeerInvalid(op, fmt.Sprintf("elements %d to %d", from, to), "give a range from 0 or more that does not end before it begins")
		case bytes > p.memory.Used():
			return 0, errs.Peer(op, cuda.ErrOutOfRange, fmt.Sprintf("elements %d to %d, where %d are in use", from, to, p.memory.Used()/p.unit), "append them first")
		}
		shown := int(p.view.length)
		p.written.add(span{from, to})
		length := p.written.prefix(shown)
		if length == shown && from >= shown {
			return behindGap, nil
		}
		return length, nil
	})
}

// behindGap is the length of an announcement that shows nothing yet.
const behindGap = -1

// turn waits for the changes before this one. It fails if the publication is withdrawn.
func (p *Publication) turn(ctx context.Context, op string) error {
	if !p.changes.Take(ctx, p.ctx.Done()) {
		if p.ctx.Err() != nil {
			return p.closed(op)
		}
		return errs.PeerWait(ctx, op, fmt.Sprintf("publication %q, which was not changed", p.name), "try again: another change may have been under way")
	}
	if p.over() {
		p.changes.Give()
		return p.closed(op)
	}
	return nil
}

// announceNext orders the announcement behind the streams, and shows the length that
// next returns, unless that is behindGap.
func (p *Publication) announceNext(ctx context.Context, op string, streams []*cuda.Stream, next func() (length int, err error)) error {
	if err := p.made(op); err != nil {
		return err
	}
	if err := p.turn(ctx, op); err != nil {
		return err
	}
	defer p.changes.Give()
	var on []*core.Stream
	for _, s := range streams {
		if s != nil {
			on = append(on, core.StreamOf(s))
		}
	}
	// First, because a capture is refused without effect.
	free, err := useAll(core.SystemOf(p.timeline.dev), op, on)
	if err != nil {
		return err
	}
	defer free()
	if err := p.awake(op); err != nil {
		return err
	}
	if p.rewriting == opening {
		return p.settled(op)
	}
	// Yield to the goroutines that send the announcement: otherwise they would wait until
	// another processor wakes, while this one continues with something else.
	defer runtime.Gosched()
	if err := p.behind(ctx, op, on); err != nil {
		return err
	}
	length, err := next()
	switch shown := p.view.length; {
	case err != nil || length == behindGap:
		return err
	case uint64(length) < shown:
		return errs.PeerInvalid(op, fmt.Sprintf("a length of %d, where %d is shown", length, shown), "use Shrink, also after a Resize to less than what is shown")
	case uint64(length) != shown && p.turns:
		return p.sameHalves(op, length)
	}
	if err := p.showsAll(op, length); err != nil {
		return err
	}
	// Held first, so that the viewed chunks stay in the buffer.
	bytes := uint64(length) * p.unit
	if err := p.hold.Cover(op, bytes); err != nil {
		return err
	}
	mem, err := p.memory.View(op, bytes)
	var opened []*peer.FD
	if err == nil {
		opened, err = p.announceChunks(op, mem)
	}
	if err != nil {
		_ = p.hold.Cover(op, p.view.length*p.unit) // fails only if the buffer was made shorter than what is shown
		return errors.Join(err, mem.Release())
	}
	defer p.exports.Close(opened)
	before := p.mem
	p.written.drop(length)
	p.setRewriting(settled)
	p.show(view{generation: p.used, ordered: p.used, length: uint64(length), chunks: p.chunksOf(mem)}, mem)
	return before.Release()
}

// behind orders the words that are written from now on after the work that is on the
// streams, which the caller holds.
func (p *Publication) behind(ctx context.Context, op string, streams []*core.Stream) error {
	both := ctx
	if p.timeline.stream == nil { // the CPU waits
		var cancel context.CancelFunc
		both, cancel = context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(p.ctx, cancel)()
	}
	for _, s := range streams {
		if err := p.timeline.behind(both, op, s); err != nil {
			if p.ctx.Err() != nil {
				return p.closed(op)
			}
			return err
		}
	}
	if ctx.Err() != nil {
		return errs.PeerWait(ctx, op, "", "try again: nothing was announced")
	}
	return nil
}

func (p *Publication) closed(op string) error {
	return errs.Peer(op, cuda.ErrClosed, fmt.Sprintf("publication %q, which was withdrawn", p.name), "use it before its Withdraw, or publish the memory anew")
}

// announceChunks is announce, beside other publications of the memory.
func (p *Publication) announceChunks(op string, next share.View) (opened []*peer.FD, err error) {
	added := next.Chunks[len(p.mem.Chunks):]
	if err := sharing.add(op, p, added); err != nil {
		return nil, err
	}
	if opened, err = p.announce(op, next); err != nil {
		sharing.remove(p, added)
	}
	return opened, err
}

// announce exports new memory, and writes the next generation to the words in their
// turn. The caller closes the exports that are returned.
func (p *Publication) announce(op string, next share.View) ([]*peer.FD, error) {
	if len(next.Chunks) > handles.MaxChunks {
		return nil, errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("%d chunks, of which %d can be shared", len(next.Chunks), handles.MaxChunks), "use larger chunks")
	}
	if err := p.mayRenumber(op); err != nil {
		return nil, err
	}
	// Chunks beyond one update are exported when they are sent, and so are all if the
	// budget of descriptors has too little left: announcing waits for no follower.
	var fresh []*phys.Handle
	followers := p.replicators()
	if added := next.Chunks[len(p.mem.Chunks):]; len(followers) > 0 {
		fresh = handlesOf(added[:min(len(added), batchNow())])
	}
	if len(fresh) > 0 && wait.CanSpin() {
		p.warn()
	}
	opened, err := p.exports.OpenNow(op, fresh)
	if err != nil {
		return nil, err
	}
	if err := p.write(op, followers); err != nil {
		p.exports.Close(opened)
		return nil, err
	}
	return opened, nil
}

// mayRenumber refuses another generation after the last. The caller holds changes.
func (p *Publication) mayRenumber(op string) error {
	if p.used >= lastGeneration {
		return errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("%d generations", p.used), "publish it anew")
	}
	return nil
}

// warn wakes idle followers, so that they are awake when the update comes after the
// export.
func (p *Publication) warn() {
	var idle []conn
	p.mu.Lock()
	for f := range p.followers {
		if f.running && f.progress.out == nil && len(idle) < mostWarned {
			idle = append(idle, f.on.conn)
		}
	}
	p.mu.Unlock()
	for _, c := range idle {
		c.in.Warn()
	}
}

// mostWarned bounds the followers that are warned: warning more delays the announcement
// by more than they gain.
const mostWarned = 4

// write makes the followers' words read the next generation, in their turn.
func (p *Publication) write(op string, followers []*replicator) error {
	switch {
	case p.rewriting != open: // nothing that was shown is rewritten, and the other half may be torn
		p.spendLike(p.view.generation)
	case p.turning: // the other half
		p.spendLike(p.view.generation + 1)
	default:
		p.spend()
	}
	for _, f := range followers {
		if err := p.timeline.write(op, f.slot, completeWord, p.used); err != nil {
			return err
		}
	}
	if p.kept != nil {
		return p.timeline.write(op, p.kept.page.slot, completeWord, p.used)
	}
	return nil
}

// chunksOf returns the chunks of the next view. Memory that the current view shows
// keeps its identity. The caller holds changes.
func (p *Publication) chunksOf(v share.View) []chunk {
	all := make([]chunk, len(v.Chunks))
	for i, c := range v.Chunks {
		if i < len(p.mem.Chunks) && p.mem.Chunks[i].ID == c.ID {
			all[i] = p.view.chunks[i]
		} else if p.kept != nil {
			all[i] = p.kept.chunk(i, c.Handle.Size)
		} else {
			all[i] = newChunk(c.Handle.Size)
		}
	}
	return all
}

// forget notes that chunks are shown no longer, and that followers may have them yet.
func (p *Publication) forget(chunks []share.Chunk) {
	sharing.remove(p, chunks)
	for _, c := range chunks {
		c.Handle.Unfollowed(p.name)
	}
}

func handlesOf(chunks []share.Chunk) []*phys.Handle {
	all := make([]*phys.Handle, len(chunks))
	for i, c := range chunks {
		all[i] = c.Handle
	}
	return all
}

// Shrink shows only the first length elements, sets the buffer's length to that, and
// takes the whole chunks behind it out of the buffer, as a new generation. Without
// streams it waits for all work that could use those chunks, as vmm.Buffer.Clip does.
// With streams it does not wait for the GPU: the chunks are unmapped in this process
// when the work that is on the streams now is done. If a stream captures a graph it
// returns cuda.ErrCapturing, without effect. If another publication of the buffer shows
// more than length it returns cuda.ErrInUse, without effect.
//
// Work that other goroutines have put on streams that are not named, appends included, is
// not waited for: name every stream that may still use the elements.
//
// Followers are told, and acknowledge when they have unmapped the chunks and the work that
// used the elements is done. Until then the memory stays allocated, and Stats names the
// followers that keep it.
//
// What is left of the last chunk stays in use, and the next append writes there at once. So
// before it call Settle, or followers may still read the elements that were taken back; and
// order its stream behind earlier appends of those elements that are not done, or they may
// overwrite the new ones.
//
// Shrink is a change of the buffer, like Clip. Changes are serialized, so even with
// streams it waits for one in progress, which may wait for the GPU. It never waits for a
// follower, and delays nothing else of the publication. An error that memory could not
// be unmapped undoes nothing: the elements are no longer shown.
func (p *Publication) Shrink(length int, streams ...*cuda.Stream) error {
	const op = "publish.Publication.Shrink"
	if err := p.made(op); err != nil {
		return err
	}
	free, err := useStreams(core.SystemOf(p.timeline.dev), op, streams)
	if err != nil {
		return err
	}
	defer free()
	cut, err := p.hold.Begin(op)
	if err != nil {
		return err
	}
	gone, lost, over, err := p.shrink(op, length, streams, cut)
	for _, f := range over {
		f.end(&ended{f.token, 0, Ended, statusLimit, fmt.Sprintf("more than %s of publication %q are still mapped that are no longer published",
			errs.Bytes(p.server.o.MaxPinned), p.name)})
	}
	return errors.Join(err, cut.End(), gone.Release(), lost.Release())
}

// shrink shows less: gone has left the buffer, lost is no longer shown, and the
// followers over their limit kept too much of what was taken back before.
func (p *Publication) shrink(op string, length int, streams []*cuda.Stream, cut share.Shrinking) (gone, lost share.View, over []*replicator, err error) {
	p.changes <- struct{}{}
	defer p.changes.Give()
	if err := p.awake(op); err != nil {
		return gone, lost, nil, err
	}
	if err := p.settled(op); err != nil {
		return gone, lost, nil, err
	}
	bytes, err := p.may(op, length)
	if err == nil {
		err = p.showsAll(op, length)
	}
	if err != nil {
		return gone, lost, nil, err
	}
	if shown := p.view.length; p.turns {
		return gone, lost, nil, p.sameHalves(op, length)
	} else if uint64(length) > shown {
		return gone, lost, nil, errs.PeerInvalid(op, fmt.Sprintf("a length of %d, where %d is shown", length, shown), "use Announce")
	}
	if gone, err = cut.Shrink(bytes, streams); err != nil {
		return gone, lost, nil, err
	}
	keep := len(p.mem.Chunks)
	for keep > 0 && p.mem.Chunks[keep-1].Offset >= bytes {
		keep--
	}
	kept := share.View{Chunks: p.mem.Chunks[:keep:keep]}
	lost = share.View{Chunks: append([]share.Chunk(nil), p.mem.Chunks[keep:]...)}
	over = p.overPinned()
	p.forget(lost.Chunks)
	p.setCut()
	p.used++
	p.written.drop(math.MaxInt)
	p.show(view{generation: p.used, ordered: p.view.ordered, length: uint64(length), chunks: p.chunksOf(kept)}, kept)
	return gone, lost, over, nil
}

// overPinned returns the followers that keep more than MaxPinned of what was taken back
// before, and could have acknowledged it.
func (p *Publication) overPinned() (all []*replicator) {
	most := p.server.o.MaxPinned
	if most <= 0 {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for f := range p.followers {
		late := f.progress.level(p.view) || time.Since(f.asked) >= p.server.most.acknowledging
		if late && f.progress.pinned(p.view) > uint64(most) {
			all = append(all, f)
		}
	}
	return all
}

// may checks that the publication can change to a length, and returns that in bytes.
// The caller holds changes, and so may read the view.
func (p *Publication) may(op string, length int) (bytes uint64, err error) {
	switch {
	case p.over():
		return 0, p.closed(op)
	case length < 0:
		return 0, errs.PeerInvalid(op, fmt.Sprintf("a length of %d", length), "give a length of 0 or more")
	case uint64(length) > math.MaxInt64/p.unit:
		return 0, errs.Peer(op, cuda.ErrOutOfRange, fmt.Sprintf("%d elements of %s", length, errs.Count(p.unit, "byte")), "announce what the buffer has")
	}
	return uint64(length) * p.unit, nil
}

func (p *Publication) over() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.withdrawn
}

// show makes a view the current one. The caller holds changes.
func (p *Publication) show(v view, mem share.View) {
	p.mu.Lock()
	defer p.mu.Unlock()
	less := v.length < p.view.length
	turned := p.turnTo(v.generation)
	p.view, p.mem = v, mem
	p.tellAll() // before anything of the view is sent
	if turned {
		p.noteReaders()
	}
	for f := range p.followers {
		if less {
			f.progress.lower(v.length)
		}
		p.prepareLocked(f, true)
		f.poke()
	}
	p.changeLocked()
}

// changeLocked wakes the goroutines that wait for the publication. The caller holds mu.
func (p *Publication) changeLocked() {
	close(p.changed)
	p.changed = make(chan struct{})
}
