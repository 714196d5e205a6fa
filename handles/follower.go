package handles

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/vmm"
)

// release is what a word reads after its waits must end: later than every
// generation.
const release = 1 << 62

// follower is the inner state. One goroutine maps and unmaps what arrives, and
// another watches for the publisher's end, which must not wait for the first.
type follower struct {
	k       *Client
	token   token
	inlet   *inlet
	about   Descriptor
	dev     *cuda.Device
	options FollowOptions
	closer  core.Closer
	closing chan struct{} // closed by the first close
	shut    sync.Once
	running sync.WaitGroup

	word   *word
	stream *cuda.Stream // waits for the word; nil where the CPU does
	buffer *vmm.Buffer
	memory share.Memory
	hold   share.Hold

	tracker tracker // the mapping goroutine's
	nexts   slot    // one Next at a time
	lengths slot    // for whoever makes the buffer's length the one shown

	mu      sync.Mutex
	changed chan struct{} // closed, and made anew, at every change
	// pending is mapped and not yet shown.
	pending *pending
	// shown is what Next showed: the last, and those before it back to one that
	// is complete.
	shown  []shown
	waited uint64 // generation that the stream waits for already
	// gone is why nothing further comes. completed is then the last generation
	// that the publisher finished.
	gone       error
	completed  uint64
	settled    bool // nothing further is mapped
	unfinished bool
	// ended is closed when the connection's end was dealt with, which died says
	// has begun.
	died  bool
	ended chan struct{}
}

// pending is the latest that came: what to show, or why that cannot be.
type pending struct {
	shown
	err error
}

// shown is a state of the publication that users see.
type shown struct {
	generation, ordered uint64
	length              int
}

func newFollower(k *Client, said *accepted, i *inlet, d *cuda.Device, o FollowOptions) *follower {
	f := &follower{k: k, token: said.token, inlet: i, about: said.about, dev: d, options: o,
		closing: make(chan struct{}), nexts: newSlot(), lengths: newSlot(), changed: make(chan struct{}), ended: make(chan struct{}), shown: []shown{{}}}
	f.tracker.room, f.tracker.most = said.reserved, MaxChunks
	if o.MaxChunks > 0 {
		f.tracker.most = min(o.MaxChunks, MaxChunks)
	}
	return f
}

func (f *follower) start() {
	f.running.Go(f.work)
	f.running.Go(f.watch)
}

// changeLocked tells those who wait. The caller has mu.
func (f *follower) changeLocked() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// work maps and unmaps what arrives.
func (f *follower) work() {
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.settled = true
		f.changeLocked()
	}()
	for {
		select {
		case <-f.closing:
			return
		case a := <-f.inlet.updates:
			f.update(a)
			continue
		default:
		}
		select {
		case <-f.closing:
			return
		case a := <-f.inlet.updates:
			f.update(a)
		case <-f.inlet.over:
			// What came before the end counts.
			select {
			case a := <-f.inlet.updates:
				f.update(a)
			default:
			}
			f.mu.Lock()
			if f.gone == nil {
				// Withdrawn: the publisher lives, and finishes what it announced.
				f.gone, f.completed = f.inlet.why, lastGeneration
			}
			f.mu.Unlock()
			return
		}
	}
}

// update does what the publisher says, and tells it what came of that.
func (f *follower) update(a arrival) {
	defer func() { _ = closeAll(a.fds) }()
	if err := f.tracker.take(a.update); err != nil {
		_ = f.k.conn.fail(err)
		return
	}
	err := f.carryOut(a)
	now := shown{a.generation, a.ordered, int(a.length)}
	switch {
	case err != nil:
		f.arrived(&pending{shown: now, err: err})
	case a.over:
		f.arrived(&pending{shown: now, err: failure(opFollow, cuda.ErrCapacity,
			fmt.Sprintf("%d elements, in chunks that do not fit into the reserved %s", a.length, core.Bytes(f.tracker.room)),
			"follow it anew with a larger FollowOptions.Reserve")})
	case a.last:
		f.arrived(&pending{shown: now})
	}
	answer := f.tracker.took(f.token, err)
	_ = f.k.conn.Send(f.k.ctx, pack(answer)) // a connection that is over is noticed where it is read
}

func (f *follower) carryOut(a arrival) error {
	if f.tracker.less(a.update) {
		return f.giveBack(int(a.length), a.keep)
	}
	if len(a.sizes) == 0 {
		return nil
	}
	in, err := f.intake(opFollow, a.sizes)
	if err != nil {
		return err
	}
	if err := in.take(a.fds); err != nil {
		return in.discard(err)
	}
	if err := in.attach(f.memory); err != nil {
		return in.discard(err)
	}
	return nil
}

// arrived has Next look.
func (f *follower) arrived(p *pending) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pending = p
	f.changeLocked()
}

// giveBack shows no more than a length, and unmaps the chunks behind the first
// keep when their work is done.
func (f *follower) giveBack(length int, keep uint32) error {
	f.mu.Lock()
	for i := range f.shown {
		f.shown[i].length = min(f.shown[i].length, length)
	}
	if p := f.pending; p != nil && p.err == nil && p.length > length {
		less := *p
		less.length = length
		f.pending = &less
	}
	f.changeLocked()
	f.mu.Unlock()
	if err := f.settle(); err != nil {
		return err
	}
	var streams []*cuda.Stream
	if f.options.Quiesce != nil {
		streams = f.options.Quiesce(length)
	}
	var bytes uint64
	for _, c := range f.tracker.chunks[:keep] {
		bytes += c
	}
	if int(keep) == len(f.tracker.chunks) {
		// Nothing is unmapped, but what lies behind may be written from now on.
		return f.waitFor(streams)
	}
	gone, err := f.hold.Shrink(opFollow, bytes, streams)
	if err == nil {
		// Until it is unmapped.
		err = f.memory.Attach(opFollow, nil)
	}
	return errors.Join(err, gone.Release())
}

// waitFor waits for the work on the streams, or, without any, for all that
// could use the memory.
func (f *follower) waitFor(streams []*cuda.Stream) error {
	sys := core.SystemOf(f.dev)
	if len(streams) == 0 {
		return sys.WaitDevices(opFollow, []driver.Device{driver.Device(f.dev.Ordinal())})
	}
	fence, err := core.FenceOf(sys, opFollow, streams)
	if err != nil {
		return err
	}
	return passed(context.Background(), opFollow, fence)
}

// settle makes the buffer's length the one that is shown.
func (f *follower) settle() error {
	f.lengths <- struct{}{}
	defer f.lengths.give()
	return f.settleLocked()
}

// settleLocked is settle for whoever has the slot.
func (f *follower) settleLocked() error {
	return f.memory.SetLen(opFollow, uint64(f.shownNow().length)*f.tracker.unit)
}

func (f *follower) shownNow() shown {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.shown[len(f.shown)-1]
}

// watch waits for the end of the connection, and lets go of what then waits for
// the publisher for ever.
func (f *follower) watch() {
	defer close(f.ended)
	select {
	case <-f.closing:
		return
	case <-f.k.read:
	}
	select {
	case <-f.inlet.over: // before the connection's end, or with it
	default:
		return // it has left
	}
	f.mu.Lock()
	// Whoever is let go finds the truth here: the lock is held until it stands.
	f.completed = f.word.value().Swap(release)
	f.gone, f.died = f.inlet.why, true
	last := len(f.shown) - 1
	for last > 0 && f.shown[last].ordered > f.completed {
		last--
		f.unfinished = true
	}
	f.shown = f.shown[:last+1]
	f.changeLocked()
	f.mu.Unlock()
	f.letGo()
	_ = f.settle() // fails only where the follower closes
}

// letGo has the word read that everything is done until the stream has seen it:
// a last write of the publisher's may come after the first of these.
func (f *follower) letGo() {
	for {
		f.word.value().Store(release)
		if f.stream == nil {
			return
		}
		if done, err := f.stream.Done(); done || err != nil {
			return
		}
		time.Sleep(longestPoll)
	}
}

// next shows what is pending: see Follower.Next.
func (f *follower) next(ctx context.Context, streams []*cuda.Stream) error {
	const op = "handles.Follower.Next"
	if !f.closer.Hold() {
		return closedError(op, "follower")
	}
	defer f.closer.Drop()
	if !f.nexts.take(ctx, f.closing) {
		return f.notNext(ctx, op)
	}
	defer f.nexts.give()
	for {
		f.mu.Lock()
		p, changed := f.pending, f.changed
		if p != nil && p.err == nil && f.gone != nil && p.ordered > f.completed {
			// It will never be complete, and nobody has seen it.
			p, f.pending = nil, nil
		}
		var end error
		if p == nil && f.settled && f.gone != nil {
			end = f.goneLocked()
		}
		if p != nil && p.err != nil {
			f.pending = nil
		}
		f.mu.Unlock()
		switch {
		case end != nil:
			return f.failed()
		case p != nil && p.err != nil:
			return p.err
		case p != nil:
			done, err := f.show(ctx, op, p, streams)
			if done || err != nil {
				return err
			}
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return f.notNext(ctx, op)
		case <-f.closing:
			return f.notNext(ctx, op)
		}
	}
}

func (f *follower) notNext(ctx context.Context, op string) error {
	select {
	case <-f.closing:
		return closedError(op, "follower")
	default:
		return waitError(ctx, op, "nothing new was announced", "try again: nothing was lost")
	}
}

// show orders the streams and then shows what is pending, unless that has
// changed meanwhile.
func (f *follower) show(ctx context.Context, op string, p *pending, streams []*cuda.Stream) (done bool, err error) {
	if err := f.order(ctx, op, p.ordered, streams); err != nil {
		return false, err
	}
	if !f.lengths.take(ctx, f.closing) {
		return false, f.notNext(ctx, op)
	}
	defer f.lengths.give()
	f.mu.Lock()
	if f.pending != p || f.gone != nil && p.ordered > f.completed {
		f.mu.Unlock()
		return false, nil
	}
	f.pending = nil
	// Of what was shown before the last that is complete counts, if the
	// publisher ends now.
	complete := f.word.value().Load()
	for len(f.shown) > 1 && f.shown[1].ordered <= complete {
		f.shown = f.shown[1:]
	}
	f.shown = append(f.shown, p.shown)
	f.mu.Unlock()
	return true, f.settleLocked()
}

// order has later work on the streams come behind a generation, or, without
// streams, waits until that is complete.
func (f *follower) order(ctx context.Context, op string, generation uint64, streams []*cuda.Stream) error {
	sys := core.SystemOf(f.dev)
	for _, s := range streams {
		if s == nil {
			return failure(op, cuda.ErrInvalidArgument, "a nil stream", "name streams made with Device.NewStream or BorrowStream")
		}
		in := core.StreamOf(s)
		if err := in.Use(op, sys); err != nil {
			return err
		}
		defer in.Drop()
		capturing, err := s.Capturing()
		if err != nil {
			return err
		}
		if capturing {
			return core.CapturingError(op, in)
		}
	}
	if f.word.reached(generation) {
		return nil
	}
	if len(streams) == 0 || f.stream == nil {
		return f.await(ctx, op, generation)
	}
	own := core.StreamOf(f.stream)
	f.mu.Lock()
	waits := f.waited < generation
	f.waited = max(f.waited, generation)
	f.mu.Unlock()
	if waits {
		if r := sys.Drv.StreamWaitValue64(own.Ctx.Handle, own.Handle, f.word.at, generation); r != driver.Success {
			return own.Ctx.Fail(op, driver.CallStreamWaitValue64, r, fmt.Sprintf("generation %d", generation))
		}
	}
	m, _, err := own.Mark(op) // nobody captures it
	if err != nil {
		return err
	}
	defer m.Drop()
	for _, s := range streams {
		if err := core.StreamOf(s).After(op, m); err != nil {
			return err
		}
	}
	return nil
}

// await waits on the CPU until a generation is complete.
func (f *follower) await(ctx context.Context, op string, generation uint64) error {
	pause := shortestPoll
	for !f.word.reached(generation) {
		select {
		case <-f.closing:
			return closedError(op, "follower")
		default:
		}
		if !sleep(ctx, pause) {
			return waitError(ctx, op, fmt.Sprintf("the work of generation %d is not done", generation), "name streams, which wait instead")
		}
		pause = min(2*pause, longestPoll)
	}
	return nil
}

// orderShown is Follower.Order.
func (f *follower) orderShown(streams []*cuda.Stream) error {
	const op = "handles.Follower.Order"
	if !f.closer.Hold() {
		return closedError(op, "follower")
	}
	defer f.closer.Drop()
	if len(streams) == 0 {
		return failure(op, cuda.ErrInvalidArgument, "no streams", "name those that are to come behind")
	}
	return f.order(context.Background(), op, f.shownNow().ordered, streams)
}

// goneLocked is why nothing further comes. The caller has mu.
func (f *follower) goneLocked() error {
	if f.gone != nil && f.unfinished {
		return failure(opFollow, ErrUnfinished, "elements that were shown and are not any more", "what was computed from them does not count").because(f.gone)
	}
	return f.gone
}

// failed is Follower.Err. Where the connection ended nothing is shown any more
// that does not count when it answers.
func (f *follower) failed() error {
	f.mu.Lock()
	err, died := f.goneLocked(), f.died
	f.mu.Unlock()
	if died {
		<-f.ended
	}
	return err
}

// close lets go: see Follower.Close. It also gives back what a follower has that
// was only made in part.
func (f *follower) close() error {
	f.shut.Do(func() { close(f.closing) }) // those who wait end
	return f.closer.Close(func() error {
		f.k.leave(f.token, f.inlet)
		if f.word != nil {
			f.letGo() // or the mapping goroutine might wait for ever
		}
		f.running.Wait()
		f.k.leave(f.token, f.inlet) // what came meanwhile
		if f.stream != nil {
			if err := f.stream.Close(); err != nil {
				return err
			}
			f.stream = nil
		}
		if f.hold != nil {
			f.hold.Release()
		}
		if f.buffer != nil {
			if err := f.buffer.Close(); err != nil {
				return err
			}
			f.buffer = nil
		}
		if f.word != nil {
			if err := f.word.close(opFollow); err != nil {
				return err
			}
			f.word = nil
		}
		return nil
	})
}
