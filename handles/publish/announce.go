package publish

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/peererr"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// Announce shows the first length elements to all followers: growth, or new
// contents of what they have. They may not be fewer than were shown before,
// which is for Shrink. The memory of what is new is exported and sent with a new
// generation, and what is on the streams now comes before it: no follower's
// stream sees the elements earlier. What other streams wrote of them is not waited
// for. Without a stream (or with nil) the elements are there already.
//
// It waits for no follower, and each fails by itself. The context bounds the
// wait for another change and, on devices whose streams write no 64-bit words,
// that for the streams. With a stream that captures a graph it is
// cuda.ErrCapturing and nothing has changed.
func (p *Publication) Announce(ctx context.Context, length int, streams ...*cuda.Stream) error {
	const op = "publish.Publication.Announce"
	return p.announceNext(ctx, op, streams, func() (int, error) {
		if _, err := p.may(op, length); err != nil {
			return 0, err
		}
		if shown := p.view.length; uint64(length) < shown {
			return 0, peererr.Invalid(op, fmt.Sprintf("a length of %d, where %d is shown", length, shown), "use Shrink")
		}
		return length, nil
	})
}

// AnnounceRange says that elements from to to are there, or will be when the work
// that is on the streams now is done, and shows all elements before the first that
// nothing was said of. So goroutines that append to a buffer or an array at the
// same time announce what each of them appended, in any order and without a lock
// of their own: what lies behind a gap is shown when the gap is closed, after the
// work of all. In every other way it is Announce. A Shrink forgets what was
// announced and is not shown.
func (p *Publication) AnnounceRange(ctx context.Context, from, to int, streams ...*cuda.Stream) error {
	const op = "publish.Publication.AnnounceRange"
	return p.announceNext(ctx, op, streams, func() (int, error) {
		bytes, err := p.may(op, to)
		switch {
		case err != nil:
			return 0, err
		case from < 0 || from > to:
			return 0, peererr.Invalid(op, fmt.Sprintf("elements %d to %d", from, to), "a range has its end behind its beginning")
		case bytes > p.memory.Used():
			return 0, peererr.New(op, cuda.ErrOutOfRange, fmt.Sprintf("elements %d to %d, where %d are in use", from, to, p.memory.Used()/p.unit), "append them first")
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

// AnnounceAppended shows everything that was appended to the buffer or array until
// now, by any goroutine, ordered behind the streams of those appends: a program that
// appends in several places announces in one without naming a stream. What other work
// wrote, such as a kernel after AppendUndefined, is not waited for. With an append on a
// stream that captures a graph it is cuda.ErrCapturing. In every other way it is
// Announce.
func (p *Publication) AnnounceAppended(ctx context.Context) error {
	const op = "publish.Publication.AnnounceAppended"
	if err := p.turn(ctx, op); err != nil {
		return err
	}
	defer p.changes.Give()
	bytes, on, mark := p.hold.Appended()
	on = slices.DeleteFunc(on, (*core.Stream).Gone) // and nothing of them is under way
	err := p.announceBehind(ctx, op, on, func() (int, error) { return int(bytes / p.unit), nil })
	if err == nil {
		p.hold.Announced(mark)
	}
	return err
}

// turn waits for the changes before, if the publication is still there then.
func (p *Publication) turn(ctx context.Context, op string) error {
	if !p.changes.Take(ctx, p.ctx.Done()) {
		if p.ctx.Err() != nil {
			return p.closed(op)
		}
		return peererr.Wait(ctx, op, "another change is under way", "try again: nothing was announced")
	}
	if p.over() {
		p.changes.Give()
		return p.closed(op)
	}
	return nil
}

// announceNext orders what is announced behind the streams, and shows as much as
// next says, unless that is behindGap.
func (p *Publication) announceNext(ctx context.Context, op string, streams []*cuda.Stream, next func() (length int, err error)) error {
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
	return p.announceBehind(ctx, op, on, next)
}

// announceBehind is announceNext for a caller that holds changes.
func (p *Publication) announceBehind(ctx context.Context, op string, streams []*core.Stream, next func() (length int, err error)) error {
	// Last of all, to the goroutines that send it: they would wait for another processor
	// to wake, where this one goes on with something else.
	defer runtime.Gosched()
	// Before anything else: a capture is refused without a trace.
	free, err := useAll(core.SystemOf(p.seq.dev), op, streams)
	if err != nil {
		return err
	}
	defer free()
	if err := p.behind(ctx, op, streams); err != nil {
		return err
	}
	length, err := next()
	if err != nil || length == behindGap {
		return err
	}
	// Held first: the chunks that are looked at stay the buffer's.
	bytes := uint64(length) * p.unit
	if err := p.hold.Cover(op, bytes); err != nil {
		return err
	}
	mem, err := p.memory.View(op, bytes)
	var fresh []*phys.Handle
	if err == nil {
		fresh, err = p.announce(op, mem)
	}
	if err != nil {
		_ = p.hold.Cover(op, p.view.length*p.unit) // fails only if the buffer was made shorter than what is shown
		return errors.Join(err, mem.Release())
	}
	defer p.exports.Close(fresh)
	before := p.mem
	p.written.drop(length)
	p.show(view{generation: p.used, ordered: p.used, length: uint64(length), chunks: p.chunksOf(mem)}, mem)
	return before.Release()
}

// behind has the words that are written from now on come after the work that is on
// the streams.
func (p *Publication) behind(ctx context.Context, op string, streams []*core.Stream) error {
	both := ctx
	if p.seq.stream == nil { // it waits
		var cancel context.CancelFunc
		both, cancel = context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(p.ctx, cancel)()
	}
	for _, s := range streams {
		if err := p.seq.behind(both, op, s); err != nil {
			if p.ctx.Err() != nil {
				return p.closed(op)
			}
			return err
		}
	}
	if ctx.Err() != nil {
		return peererr.Wait(ctx, op, "", "try again: nothing was announced")
	}
	return nil
}

func (p *Publication) closed(op string) error {
	return peererr.Closed(op, fmt.Sprintf("publication %q", p.name))
}

// announce exports what is new, and has the words read the next generation in
// their turn. The new memory's exports are the caller's.
func (p *Publication) announce(op string, next share.View) ([]*phys.Handle, error) {
	if len(next.Chunks) > handles.MaxChunks {
		return nil, peererr.New(op, peer.ErrTooLarge, fmt.Sprintf("%d chunks, of which %d can be shared", len(next.Chunks), handles.MaxChunks), "use larger chunks")
	}
	if p.used >= lastGeneration {
		return nil, peererr.New(op, peer.ErrTooLarge, fmt.Sprintf("%d generations", p.used), "publish it anew")
	}
	// More than one update holds is exported when it is sent, and so is all where
	// the budget has too little left: announcing waits for no follower.
	var fresh []*phys.Handle
	followers := p.subscribers()
	if added := next.Chunks[len(p.mem.Chunks):]; len(followers) > 0 {
		fresh = handlesOf(added[:min(len(added), batchNow())])
	}
	if len(fresh) > 0 && wait.CanSpin() {
		p.warn()
	}
	switch fds, err := p.exports.OpenNow(op, fresh); {
	case err != nil:
		return nil, err
	case fds == nil:
		fresh = nil
	}
	if err := p.write(op, followers); err != nil {
		p.exports.Close(fresh)
		return nil, err
	}
	return fresh, nil
}

// warn wakes followers that have nothing to do, for the update that comes when
// the memory is exported.
func (p *Publication) warn() {
	var idle []conn
	p.mu.Lock()
	for f := range p.followers {
		if f.running && f.feed.out == nil && len(idle) < mostWarned {
			idle = append(idle, f.on.conn)
		}
	}
	p.mu.Unlock()
	for _, c := range idle {
		c.in.Warn()
	}
}

// mostWarned is how many are warned: with more of them the announcement would be
// held up for longer than they gain.
const mostWarned = 4

// write has the followers' words read the next generation.
func (p *Publication) write(op string, followers []*subscriber) error {
	p.used++
	for _, f := range followers {
		if err := p.seq.write(op, f.word, p.used); err != nil {
			return err
		}
	}
	return nil
}

// chunksOf names the chunks of a view that follows the present one: they begin with the
// same memory. The caller holds changes.
func (p *Publication) chunksOf(v share.View) []chunk {
	all := make([]chunk, len(v.Chunks))
	for i, c := range v.Chunks {
		if i < len(p.mem.Chunks) && p.mem.Chunks[i].Handle == c.Handle {
			all[i] = p.view.chunks[i]
		} else {
			all[i] = newChunk(c.Handle.Size)
		}
	}
	return all
}

func handlesOf(chunks []share.Chunk) []*phys.Handle {
	all := make([]*phys.Handle, len(chunks))
	for i, c := range chunks {
		all[i] = c.Handle
	}
	return all
}

// Shrink shows the first length elements and no more, makes the buffer as long,
// and takes the whole chunks behind out of it: at once for this process, as a
// new generation. Without streams it waits for all work that could use them, as
// vmm.Buffer.Clip does; with some it does not wait for the GPU, and they are
// unmapped here when the work that is on the streams now is done. With a stream
// that captures a graph it is cuda.ErrCapturing and nothing has changed.
//
// What another publication of the buffer shows stays: a shorter length is
// cuda.ErrInUse and nothing has changed.
//
// Followers are told, and acknowledge when they have unmapped it: until then
// the memory stays taken, and Stats tells by whom.
//
// It is a change of the buffer like Clip: those go one at a time, so with streams,
// too, it waits for a change that is under way, which may be one that waits for
// the GPU. It never waits for a follower. Nothing else of the publication waits
// meanwhile, and an error of that time, which says that memory could not be
// unmapped, takes nothing back.
func (p *Publication) Shrink(length int, streams ...*cuda.Stream) error {
	const op = "publish.Publication.Shrink"
	free, err := useStreams(core.SystemOf(p.seq.dev), op, streams)
	if err != nil {
		return err
	}
	defer free()
	cut, err := p.hold.Begin(op)
	if err != nil {
		return err
	}
	gone, lost, hoarders, err := p.shrink(op, length, streams, cut)
	for _, f := range hoarders {
		f.on.cutLater(peererr.New(op, peer.ErrTooLarge, fmt.Sprintf("more than %s of publication %q are still mapped that are no longer published",
			errs.Bytes(p.server.o.MaxPinned), p.name), "acknowledge what a publisher takes back"))
	}
	return errors.Join(err, cut.End(), gone.Release(), lost.Release())
}

// shrink shows less: gone has left the buffer, lost is no longer shown, and the
// hoarders kept too much before.
func (p *Publication) shrink(op string, length int, streams []*cuda.Stream, cut share.Shrinking) (gone, lost share.View, hoarders []*subscriber, err error) {
	p.changes <- struct{}{}
	defer p.changes.Give()
	bytes, err := p.may(op, length)
	if err != nil {
		return gone, lost, nil, err
	}
	if shown := p.view.length; uint64(length) > shown {
		return gone, lost, nil, peererr.Invalid(op, fmt.Sprintf("a length of %d, where %d is shown", length, shown), "use Announce")
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
	hoarders = p.hoarders()
	p.used++
	p.written.drop(math.MaxInt)
	p.show(view{generation: p.used, ordered: p.view.ordered, length: uint64(length), chunks: p.chunksOf(kept)}, kept)
	return gone, lost, hoarders, nil
}

// hoarders are the followers that keep more than they may of what was taken
// back before.
func (p *Publication) hoarders() (all []*subscriber) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for f := range p.followers {
		if most := p.server.o.MaxPinned; most > 0 && f.feed.pinned(p.view) > uint64(most) {
			all = append(all, f)
		}
	}
	return all
}

// may asks whether the publication can change to a length, and answers that in
// bytes. The caller holds changes, and so may read the view.
func (p *Publication) may(op string, length int) (bytes uint64, err error) {
	switch {
	case p.over():
		return 0, p.closed(op)
	case length < 0:
		return 0, peererr.Invalid(op, fmt.Sprintf("a length of %d", length), "lengths are not negative")
	case uint64(length) > math.MaxInt64/p.unit:
		return 0, peererr.New(op, cuda.ErrOutOfRange, fmt.Sprintf("%d elements of %s", length, errs.Count(p.unit, "byte")), "announce what the buffer has")
	}
	return uint64(length) * p.unit, nil
}

func (p *Publication) over() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.withdrawn
}

// show makes a view the one that followers are told of. The caller holds
// changes.
func (p *Publication) show(v view, mem share.View) {
	p.mu.Lock()
	defer p.mu.Unlock()
	less := v.length < p.view.length
	p.view, p.mem = v, mem
	for f := range p.followers {
		if less {
			f.feed.lower(v.length)
		}
		p.prepareLocked(f, true)
		f.poke()
	}
	p.changeLocked()
}

// changeLocked tells those who wait for the publication. The caller has mu.
func (p *Publication) changeLocked() {
	close(p.changed)
	p.changed = make(chan struct{})
}
