package publish

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/cuvmm/cuvmm/vmm"
)

// release is the final value of a word: above every generation, it satisfies all waits.
const release = 1 << 62

// follower carries out what its subscription and its replica say. One goroutine maps and
// unmaps what arrives. Another watches for the publisher's end, which must not wait for the
// first.
type follower struct {
	client  *Client
	name    string
	dev     *cuda.Device
	options FollowOptions

	// Its end. quiet is closed when CloseAfter's goroutine has ended; released is the end of
	// the buffer's closing that CloseAfter began.
	closer   life.Closer
	ctx      context.Context // ends with the first close
	end      context.CancelFunc
	running  sync.WaitGroup
	quiet    chan struct{}
	released cuda.Completion

	// Its memory. The mapping goroutine has the replica and the importer, once it runs;
	// lengths serializes changes of the buffer's length.
	buffer   *vmm.Buffer
	memory   share.Memory
	hold     share.Hold
	replica  replica
	importer *exchange.Importer
	lengths  wait.Slot

	// The current connection, which the mapping goroutine replaces with words and mu held.
	// words is held for reading while the word is used; it comes before waiting, lengths
	// and mu.
	attachment
	about handles.Descriptor // its exporter is the current publisher
	told  description
	words lock.RWMutex[lock.Words]

	// The order of streams. stream waits for the word, and is nil if the CPU does; waiting
	// is held while a wait is submitted to it and marked. begun holds one when a wait with a
	// limit begins.
	stream  *cuda.Stream
	waiting lock.Mutex[lock.Waiting]
	begun   chan struct{}

	// What the program may still read. releases tells the publisher when that has ended.
	holds    holds
	releases *timeline
	// back tells those who registered the addresses elsewhere that there is memory again. The
	// mapping goroutine has it.
	back func()

	// What is shown. nexts serializes Next.
	nexts   wait.Slot
	mu      lock.Mutex[lock.Leaf]
	changed chan struct{} // closed and replaced at every event
	sub     subscription
	// taking ends when TakeOver begins: the follower waits for no other publisher any more.
	// over is closed when its goroutines have ended.
	taking context.Context
	take   context.CancelFunc
	over   chan struct{}
}

// attachment is what a follower has of one connection, and has anew on the next.
type attachment struct {
	k        *line
	identity identity // of the publication
	heir     bool     // the publisher names the follower one, though it only reads
	kept     bool     // a broker keeps the memory
	token    token
	mailbox  *mailbox
	slot     *pageSlot
	// waited is the last generation that the follower's stream waits for. waits are the
	// waits that have a limit, oldest first.
	waited uint64
	waits  []limitedWait
	// ended is closed when the connection's end, or a wait that reached its limit, is handled.
	ended chan struct{}
}

func newAttachment(k *line, said *accepted, m *mailbox, w *pageSlot) attachment {
	return attachment{k: k, identity: said.identity, heir: said.heir, kept: said.kept, token: said.token, mailbox: m, slot: w, ended: make(chan struct{})}
}

func newFollower(k *line, name string, said *accepted, m *mailbox, d *cuda.Device, o FollowOptions) *follower {
	f := &follower{name: name, dev: d, options: o, attachment: newAttachment(k, said, m, nil), about: said.about, sub: newSubscription(),
		nexts: wait.NewSlot(), lengths: wait.NewSlot(), changed: make(chan struct{}), begun: make(chan struct{}, 1), over: make(chan struct{})}
	f.ctx, f.end = context.WithCancel(context.Background())
	f.taking, f.take = context.WithCancel(f.ctx)
	f.replica.room, f.replica.most = said.reserved, handles.MaxChunks
	return f
}

// made refuses a follower that Follow did not make.
func (f *follower) made(op string) error {
	if f == nil {
		return errs.PeerInvalid(op, "a nil or zero follower", "make one with publish.Follow")
	}
	return nil
}

func (f *follower) start() {
	f.running.Go(func() {
		for {
			var watching sync.WaitGroup
			watching.Go(f.watch)
			f.work()
			watching.Wait() // until the end of the connection is handled
			if !f.comeBack() {
				break
			}
		}
		f.finish()
		close(f.over)
	})
}

// finish ends what the follower shows, unless it has left.
func (f *follower) finish() {
	select {
	case <-f.mailbox.over:
		f.cutOff(f.mailbox.why, (*subscription).end) // it was to come back when the connection ended, or is closing
	default:
	}
	f.tell((*subscription).drain)
}

// tell tells the subscription what happened, and wakes the goroutines that wait for it.
func (f *follower) tell(event func(*subscription)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	event(&f.sub)
	f.changeLocked()
}

// changeLocked wakes the goroutines that wait. The caller holds mu.
func (f *follower) changeLocked() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// work maps and unmaps what arrives.
func (f *follower) work() {
	for {
		select {
		case <-f.ctx.Done():
			return
		case a := <-f.mailbox.updates:
			f.update(a)
		case <-f.mailbox.over:
			f.lastUpdate()
			f.withdrawn()
			return
		case <-f.ended: // the connection did, or a wait reached its limit
			f.lastUpdate()
			return
		}
	}
}

// lastUpdate carries out an update that arrived before the end.
func (f *follower) lastUpdate() {
	if a, ok := f.mailbox.arrived(); ok {
		f.update(a)
	}
}

// withdrawn notes that the publisher has ended the follower. It lives, and finishes what it
// announced. If the connection has ended the watcher notes that, with what is complete.
func (f *follower) withdrawn() {
	if !f.k.ended() && !f.mayReturn(f.mailbox.why) {
		f.tell(func(s *subscription) { s.withdraw(f.mailbox.why, f.slot.seen()) })
	}
}

// update carries out an update and acknowledges it.
func (f *follower) update(a arrival) {
	defer func() { _ = peer.CloseAll(a.fds) }()
	if err := f.replica.apply(a.update); err != nil {
		_ = f.k.conn.in.Fail(err)
		return
	}
	err := f.leave(a.update)
	if err == nil {
		if err = f.carryOut(a); err == nil && a.last && !a.over && a.length > 0 {
			f.returned()
			f.holdEarly(a.generation)
		}
		f.arrived(a.update, err)
	}
	runtime.Gosched() // to the caller of Next: the publisher is in no hurry
	if err := f.k.conn.Send(f.k.ctx, pack(f.replica.finish(f.token, err))); err != nil && !errors.Is(err, peer.ErrGone) {
		_ = f.k.conn.in.Fail(err) // or the publisher would wait on a connection that is still open
	}
}

func (f *follower) carryOut(a arrival) error {
	if f.replica.less(a.update) {
		return f.giveBack(int(a.length), a.keep)
	}
	if f.memory.Committed() < sizeOf(f.replica.chunks[:a.keep]) { // it was unmapped in part, and the publisher was told that it is there
		return errs.Peer(opFollower, cuda.ErrInUse, "memory that could not be given back as a whole, and is shown again", "close the follower and follow the publication anew")
	}
	if len(a.chunks) == 0 {
		return nil
	}
	if n, most := int(a.keep)+len(a.chunks), f.options.MaxChunks; most > 0 && n > most {
		return errs.Peer(opFollower, peer.ErrTooLarge, fmt.Sprintf("%d chunks, where %d is the most", n, most),
			"publish memory in larger chunks, or raise FollowOptions.MaxChunks")
	}
	if a.lost() {
		return errs.FilesLost(fmt.Sprintf("the file descriptors of %s were dropped", errs.Count(len(a.chunks), "chunk")))
	}
	in := f.importer
	if err := in.Declare(opFollower, sizesOf(a.chunks)); err != nil {
		return err
	}
	if err := in.Receive(a.fds); err != nil {
		return in.Discard(err)
	}
	if err := in.Attach(f.memory); err != nil {
		return in.Discard(err)
	}
	return nil
}

// leave tells those who registered the addresses elsewhere that the publisher suspends the memory.
// The refusal of one is that of the view, of which the program sees nothing: the publisher shows the
// same elements again.
func (f *follower) leave(u *update) error {
	if u.state != Suspended || f.back != nil || len(f.replica.chunks) == 0 {
		return nil
	}
	back, err := f.memory.Leave(f.ctx)
	if err != nil {
		back()
		return err
	}
	f.back = back
	return nil
}

// returned is the end of leave, once there is memory again.
func (f *follower) returned() {
	if f.back != nil {
		core.SystemOf(f.dev).Hook("the function of vmm.OnSuspend", f.back)
		f.back = nil
	}
}

// arrived notes the outcome of an update, and wakes Next if it brought all of a generation.
func (f *follower) arrived(u *update, failed error) {
	v := version{u.generation, u.ordered, int(u.length)}
	if failed == nil && u.over {
		failed = errs.Peer(opFollower, cuda.ErrCapacity,
			fmt.Sprintf("a length of %d, in chunks that do not fit into the reserved %s", u.length, errs.Bytes(f.replica.room)),
			"follow the publication anew with a larger FollowOptions.Reserve")
	}
	f.tell(func(s *subscription) {
		if u.state == Suspended && failed == nil {
			s.suspend()
			return
		}
		if failed == nil {
			s.declare(u.state)
		}
		switch {
		case failed != nil:
			s.refuse(v, failed)
		case u.last:
			s.arrive(v, f.slot.word(completeWord).Load())
		}
	})
}

// giveBack shows no more than length elements, and unmaps the chunks behind the first
// keep when their work is done.
func (f *follower) giveBack(length int, keep uint32) error {
	f.tell(func(s *subscription) { s.takeBack(length) })
	if err := f.settle(); err != nil {
		return err
	}
	var streams []*cuda.Stream
	if f.options.Quiesce != nil {
		core.SystemOf(f.dev).Hook("publish.FollowOptions.Quiesce", func() { streams = f.options.Quiesce(length) })
	}
	if int(keep) == len(f.replica.chunks) {
		// Nothing is unmapped, but the publisher may write the elements behind from now on.
		return f.besideCaptures(func() error { return f.waitFor(streams) })
	}
	return f.besideCaptures(func() error { return f.unmap(keep, streams) })
}

// unmap unmaps the chunks behind the first keep when the work on the streams is done. It
// holds lengths, or a Next would wait in the buffer for that work, beyond its context.
func (f *follower) unmap(keep uint32, streams []*cuda.Stream) error {
	f.lengths <- struct{}{}
	defer f.lengths.Give()
	f.mu.Lock()
	hold := f.hold
	f.mu.Unlock()
	gone, err := share.Shrink(opFollower, hold, sizeOf(f.replica.chunks[:keep]), streams)
	if err == nil {
		err = f.memory.Attach(opFollower, nil) // waits until the chunks are unmapped
	}
	return errors.Join(err, gone.Release())
}

// besideCaptures repeats what a capture of the program refuses, until the capture has
// ended: the program cannot know when its streams are asked. The publisher waits meanwhile.
// It gives up when the follower closes or the connection ends.
func (f *follower) besideCaptures(try func() error) error {
	for pause := time.Millisecond; ; pause = min(2*pause, capturePause) {
		err := try()
		if !errors.Is(err, cuda.ErrCapturing) {
			return err
		}
		select {
		case <-time.After(pause):
		case <-f.mailbox.over:
			return err
		case <-f.ctx.Done():
			return err
		}
	}
}

// capturePause is the longest pause between two looks at a capture.
const capturePause = 20 * time.Millisecond

// waitFor waits for the work on the streams, or, without streams, for all work that
// could use the memory.
func (f *follower) waitFor(streams []*cuda.Stream) error {
	sys := core.SystemOf(f.dev)
	if len(streams) == 0 {
		return sys.WaitDevices(opFollower, []driver.Device{driver.Device(f.dev.Ordinal())})
	}
	fence, err := core.FenceOf(sys, opFollower, streams)
	if err != nil {
		return err
	}
	return passed(f.ctx, opFollower, fence)
}

// settle sets the buffer's length to the one that is shown.
func (f *follower) settle() error {
	f.lengths <- struct{}{}
	defer f.lengths.Give()
	return f.settleLocked()
}

// settleLocked is settle for a caller that holds lengths.
func (f *follower) settleLocked() error {
	return f.setLen(f.shownNow().length)
}

func (f *follower) setLen(elements int) error {
	return f.memory.SetLen(opFollower, uint64(elements)*f.replica.unit)
}

func (f *follower) shownNow() version {
	if f == nil {
		return version{}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sub.current()
}
