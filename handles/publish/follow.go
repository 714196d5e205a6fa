package publish

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/sharedpage"
	"github.com/cuvmm/cuvmm/vmm"
)

// FollowOptions configure [Follow]. The zero value follows the whole publication, for
// reading and writing.
type FollowOptions struct {
	// ReadOnly maps the memory for reading: no other access to it can be granted in this
	// process. It protects against mistakes of this process, not of others. If the
	// publisher's policy grants no more (Listing.Access), following without it returns
	// cuda.ErrNotPermitted.
	ReadOnly bool
	// Reserve is the address space in bytes, rounded up to the granularity; 0 is
	// as much as the publisher has. If the publication grows beyond it, Next returns
	// cuda.ErrCapacity, and no other follower is affected.
	Reserve int
	// Hint is a preferred address, so that several processes can have the memory at the
	// same one; 0 leaves it to the driver. A hint: check the array's Ptr.
	Hint cuda.Ptr
	// Align is a power of two that the address is a multiple of; 0 is the granularity.
	Align int
	// MaxChunks is the most chunks; 0 is handles.MaxChunks.
	MaxChunks int
	// Expect is the manifest that the publication must have, but for the tensors' digests. It is compared before
	// anything is mapped; handles.ErrMismatch names the fields that differ. Nil compares nothing.
	Expect *handles.Manifest
	// KeepDescriptors keeps the file descriptors of the memory, so that it can be
	// passed on and taken over: see handles.ImportOptions.
	KeepDescriptors bool
	// MaxWait is how long a stream, or Next without one, may wait for the work behind an
	// announcement. After that the follower ends with [ErrStalled], as if the publisher
	// had died, and its streams go on. 0 is no limit: a stream waits for as long as the
	// publisher lives.
	MaxWait time.Duration
	// Quiesce is called when the publisher takes back the memory behind the first length
	// elements, which is all of it, 0, when it is suspended. When it returns, no work that uses that memory may be submitted any more.
	// It returns the streams whose work may still use it: the memory is unmapped when
	// that work is done, and then acknowledged to the publisher. If Quiesce is nil or
	// returns no streams, the follower waits for all work that could use the memory, as
	// vmm.Buffer.Clip does. The follower waits for it, so it must not wait for the follower.
	// A panic, or runtime.Goexit, is logged and counts as no streams.
	//
	// The memory behind length may be unmapped as soon as Quiesce has returned, so a program
	// must not read Len before and submit work on those elements afterwards: such work is a
	// fault that loses the device's context. Hold a lock from reading Len to submitting the
	// work, and acquire it in Quiesce. Without Quiesce a program can follow only a publisher
	// that does not call Shrink while followers submit kernels; copies of the array exclude
	// it by themselves.
	Quiesce func(length int) []*cuda.Stream
}

// Follower is a publication of another process as this one sees it: an array
// that grows and shrinks as its publisher announces, at an address that never changes.
// All methods are safe for concurrent use. The caller closes it.
//
// New memory is mapped as it arrives and shown by Next: Len counts only elements that
// the streams given to Next are ordered behind.
//
// When the publisher ends, or withdraws, a follower keeps what it has mapped until it is
// closed ([Client.CloseStale]), and Next and Err return the reason. No stream hangs: when
// the publisher dies, the connection ends ([Client.Close]), a wait reaches MaxWait or the
// follower closes, the library in the follower's process releases the streams that still
// wait for the publisher's work. A publisher that withdraws and lives finishes that work,
// and the streams wait for it. Elements that were not complete at a release are no longer
// shown, and Err returns [ErrUnfinished]. Work on them may have read anything, so its
// results count only if Err does not match ErrUnfinished after that work is done; of a
// publication that is rewritten, only if Intact says so.
type Follower[T any] struct {
	f     *follower
	array *vmm.Array[T]
}

// Follow follows the publication of a name, on a device of this process, which may be
// another GPU than the publisher's if it can access that one. T must have the
// publisher's element type and size ([handles.ErrMismatch]); a buffer is followed as
// bytes. At first nothing is shown: call Next. The context bounds the request, which does not
// wait for a publication of the name: see [Client.Await].
func Follow[T any](ctx context.Context, k *Client, d *cuda.Device, name string, o FollowOptions) (*Follower[T], error) {
	l, err := k.lineOf(opFollow)
	if err != nil {
		return nil, err
	}
	f, err := l.follow(ctx, opFollow, d, name, o, wantedOf[T]())
	if err != nil {
		return nil, err
	}
	a, err := vmm.ArrayOf[T](f.buffer)
	if err != nil {
		return nil, f.abandon(err)
	}
	k.addFollower(f)
	f.start()
	return &Follower[T]{f, a}, nil
}

// wanted are the elements that the caller names.
type wanted struct {
	element handles.ElementType
	size    int
}

func wantedOf[T any]() wanted {
	e, size := handles.ElementOf[T]()
	return wanted{e, size}
}

// of compares the elements with those of the publication.
func (e wanted) of(op, name string, d *handles.Descriptor) error {
	is, size := d.Element, d.ElementSize
	if d.Kind == handles.BufferKind {
		is, size = handles.Uint8, 1
	}
	if is != e.element || size != e.size {
		return errs.Peer(op, handles.ErrMismatch, fmt.Sprintf("publication %q has elements of type %v and size %d, not of %v and %d", name, is, size, e.element, e.size),
			"use the publisher's element type; a buffer is followed as bytes")
	}
	return nil
}

// follow makes a follower, which the caller starts.
func (k *line) follow(ctx context.Context, op string, d *cuda.Device, name string, o FollowOptions, want wanted) (*follower, error) {
	room, err := roomOf(op, d, o)
	if err == nil && o.Expect != nil {
		if invalid := o.Expect.Validate(); invalid != nil {
			err = errs.PeerCause(invalid, op, cuda.ErrInvalidArgument, "FollowOptions.Expect", "expect a manifest that could be published")
		}
	}
	if err != nil {
		return nil, err
	}
	said, r, err := k.subscribe(ctx, op, name, room, o.ReadOnly, possession{})
	if err != nil {
		return nil, err
	}
	defer r.close()
	told, err := k.readDescription(op, said, r.text)
	if err == nil {
		err = told.matches(op, name, o.Expect)
	}
	if err != nil {
		k.leave(said.token, r.mailbox)
		return nil, err
	}
	f := newFollower(k, name, said, r.mailbox, d, o)
	f.told = told
	if room > 0 && said.reserved > room {
		err = k.conn.in.Fail(errs.Violation("a range of %d bytes, where %d were requested", said.reserved, room))
	} else {
		err = f.build(op, r.page, said.slot, want)
	}
	if err != nil {
		return nil, f.abandon(err)
	}
	return f, nil
}

// maxRoom is more than any device has address space for.
const maxRoom = 1 << 60

// roomOf returns the address space to request, in bytes; 0 is as much as the publisher
// has.
func roomOf(op string, d *cuda.Device, o FollowOptions) (uint64, error) {
	if core.SystemOf(d) == nil {
		return 0, errs.PeerInvalid(op, "a nil device", "take one from System.Devices")
	}
	if o.Reserve < 0 || o.Reserve > maxRoom || o.MaxWait < 0 {
		return 0, errs.PeerInvalid(op, fmt.Sprintf("a range of %d bytes and a wait of %v", o.Reserve, o.MaxWait), "give limits of 0 or more, and a range of at most "+errs.Bytes(maxRoom))
	}
	if err := exchange.CheckBounds(op, 0, o.MaxChunks, o.Align); err != nil {
		return 0, err
	}
	if o.Reserve == 0 {
		return 0, nil
	}
	gran, err := vmm.GranularityOf(d, vmm.Properties{})
	if err != nil {
		return 0, err
	}
	return uint64(o.Reserve+gran-1) / uint64(gran) * uint64(gran), nil
}

// abandon gives back what was made of a follower that has not started, after an operation
// that failed with cause.
func (f *follower) abandon(cause error) error {
	f.end()
	f.k.leave(f.token, f.mailbox)
	if f.hold != nil {
		f.hold.Release()
	}
	if f.memory != nil {
		cause = f.memory.Abandon(opFollow, cause)
	}
	if f.stream != nil {
		cause = dropStream(f.stream, cause)
	}
	if f.releases != nil {
		cause = f.releases.drop(cause)
	}
	if f.slot != nil {
		cause = f.slot.drop(opFollow, cause)
	}
	return cause
}

// build makes the memory, the word and the stream. After an error the caller abandons the
// follower.
func (f *follower) build(op string, page *peer.FD, slot uint32, want wanted) error {
	if err := want.of(op, f.name, &f.about); err != nil {
		return err
	}
	in, err := newImporter(op, f.dev, f.about, handles.ImportOptions{ReadOnly: f.options.ReadOnly, MaxChunks: f.replica.most, KeepDescriptors: f.options.KeepDescriptors})
	if err != nil {
		return err
	}
	f.importer = in
	if f.replica.room == 0 || f.replica.room > maxRoom || f.replica.room%in.Granularity() != 0 {
		return f.k.conn.in.Fail(errs.Violation("a publication with room for %d bytes, in memory with a granularity of %d", f.replica.room, in.Granularity()))
	}
	f.replica.granularity = in.Granularity()
	f.replica.unit = uint64(want.size)
	if f.slot, err = f.k.openSlot(op, f.dev, page, slot); err != nil {
		return err
	}
	if f.slot.ctx != nil {
		if f.stream, err = f.dev.NewStream(cuda.StreamOptions{}); err != nil {
			return err
		}
	}
	if f.releases, err = newTimeline(f.dev); err != nil {
		return err
	}
	if f.buffer, err = in.Buffer(share.ImportOptions{Reserve: f.replica.room, Hint: f.options.Hint, Align: f.options.Align, Followed: true}); err != nil {
		return err
	}
	f.memory = share.Of(f.buffer)
	if f.hold, err = f.memory.Hold(op, fmt.Sprintf("the follower of publication %q", f.name), 0); err == nil {
		f.inspect()
	}
	return err
}

// openSlot makes the follower's slot of the page that the server sent.
func (k *line) openSlot(op string, d *cuda.Device, page *peer.FD, slot uint32) (*pageSlot, error) {
	shared, err := k.openPage(op, page, slot)
	if err != nil {
		return nil, err
	}
	w, err := newPageSlot(op, d, shared)
	if err != nil {
		return nil, err
	}
	w.index = int(slot)
	return w, nil
}

// openPage maps the page that the server sent, which must have the word. Anything else
// ends the connection.
func (k *line) openPage(op string, f *peer.FD, slot uint32) (p *sharedpage.Page, err error) {
	err = f.Use(func(n int) (err error) {
		p, err = sharedpage.Open(n)
		return err
	})
	switch {
	case errors.Is(err, sharedpage.ErrNoPage):
		return nil, k.conn.in.Fail(errs.Violation("something other than a page of fence words: %v", err))
	case err != nil:
		return nil, errs.SystemCall(op, "the page of the fence word", err)
	case int64(slot) >= int64(slotsOf(p)):
		return nil, errors.Join(k.conn.in.Fail(errs.Violation("slot %d of a page with %d", slot, slotsOf(p))), p.Close())
	}
	link.Of(f).SetForeign(false)
	return p, nil
}

// Array returns the follower's memory as an array of the elements that are shown. Its
// address never changes. Only the publisher changes its length
// (cuda.ErrNotPermitted), and closing the follower closes it (cuda.ErrInUse until then).
func (f *Follower[T]) Array() *vmm.Array[T] {
	if f == nil {
		return nil
	}
	return f.array
}

// in returns the follower without its type, which is nil if Follow did not make it.
func (f *Follower[T]) in() *follower {
	if f == nil {
		return nil
	}
	return f.f
}

// Len returns the number of elements that are shown: those of the last Next, or fewer
// if the publisher has taken some back since, or either ended before they were complete. While
// nothing is taken back, the array has at least as many, even during a Next.
func (f *Follower[T]) Len() int { return f.in().shownNow().length }

// Generation returns the publisher's count of changes at the last Next. Len is of the same
// Next unless another goroutine calls Next between the two: serialize the three calls to
// combine them. If the publisher or the follower ended before that generation was complete,
// it is the last complete one that Next showed, or 0 ([ErrUnfinished]); the next Next shows a
// later one that is complete.
func (f *Follower[T]) Generation() uint64 { return f.in().shownNow().generation }

// Next waits for the next announcement and shows it: later work on the streams is
// ordered behind the publisher's work before the announcement. Next does not wait for
// that work; without streams, or on a device whose streams cannot wait for 64-bit words,
// it does, and then any stream may use the elements. If a
// stream captures a graph it returns cuda.ErrCapturing, without effect.
//
// Announcements that arrived before the call are shown in one step: the last generation
// counts. One that arrives while Next waits is left to the next call. If nothing new has
// arrived, Next first releases what its streams hold, and what an earlier Next without streams
// holds (Release), and then waits. After a time-out, or another error, they may hold nothing: order
// the streams again (Order) to read on. A Next that waits for the publisher's work and times out loses nothing: the next call goes on waiting for
// the same generation, or shows the last if that is complete. An error is either
// the reason why that generation could not be shown, and the next may be
// (cuda.ErrCapacity: it does not fit into the reserved range; what was shown before is shown no
// longer if the publisher has rewritten it); or no further one comes
// ([peer.ErrGone], [ErrWithdrawn], [ErrExcluded], handles.ErrMismatch, cuda.ErrClosed: State is Ended, and
// Next returns the same at once from then on). Earlier announcements are shown
// first. A follower that comes back waits for another publisher instead. If
// elements that were shown no longer are, Next returns [ErrUnfinished] once before it shows others.
func (f *Follower[T]) Next(ctx context.Context, streams ...*cuda.Stream) error {
	return f.in().next(ctx, streams)
}

// State reports whether more may be announced. It is Suspended while the publisher has the memory
// suspended (vmm.Suspend): then nothing is shown, and Next waits. It is Stale while the publisher is gone
// and the client comes back (DialOptions.ComeBack): what is shown stays until the next
// announcement of another publisher replaces it.
func (f *Follower[T]) State() State { return f.in().stateNow() }

// Release tells the publisher that the work which is on the streams now is the last that
// reads the elements they were ordered behind: [Publication.Rewrite] waits for it. Every
// stream that Next or Order ordered holds what is shown until its Release, or until its own
// next Next, which releases before it waits. A Next without streams holds it for its caller,
// until the next call of Next or a Release without streams. Later work on a released stream
// must not read the elements before it was ordered again.
//
// Release does not wait, except on a device whose streams cannot write 64-bit words. For a
// stream that holds nothing it has no effect. If a stream captures a graph it returns
// cuda.ErrCapturing, without effect; after another error the streams hold on, and Release may
// be called again.
func (f *Follower[T]) Release(streams ...*cuda.Stream) error { return f.in().release(streams) }

// Intact reports whether the elements that the generation shows have stayed as they were,
// in memory that the publisher has neither begun to rewrite nor taken anything back of. Ask
// when the work that read them is done, and before a Release or a further Next, after which
// the publisher may go on: then what was read is that generation and no mixture, even if the
// follower was late. False says that nothing is proven: the publisher rewrites or took elements
// back, excluded the follower or withdrew, or the connection has ended; discard what was
// computed from the elements.
func (f *Follower[T]) Intact(generation uint64) bool { return f.in().intact(generation) }

// Order orders later work on the streams behind the publisher's work before what is
// shown, for streams that were not given to Next, and holds that for them (Release). It does
// not wait, except on a device whose streams cannot wait for 64-bit words. While the
// publisher rewrites what is shown, or waits to, it returns [ErrRewriting]. Of a follower that shows nothing, as one that
// was excluded, it returns nil and nothing is held: before a pointer that was kept is used, check Len.
func (f *Follower[T]) Order(streams ...*cuda.Stream) error { return f.in().orderShown(streams) }

// Err returns nil while more may be announced, and then the reason why not, which is
// cuda.ErrClosed if the follower was closed first. The error also matches [ErrUnfinished]
// if elements that were shown no longer are, because the publisher or the follower ended
// before they were complete; that of a follower which was excluded matches [ErrExcluded] alone. Call it after waiting for the work that used the elements,
// and after Close, too, if that did the waiting.
func (f *Follower[T]) Err() error { return f.in().failed() }

// Close ends the follower: it waits for all work that could use the elements (see
// package vmm) and releases everything. Streams that wait for the publisher go on without
// its work, and Err then matches [ErrUnfinished]. A publisher that rewrites does not wait for
// what a closing follower reads: wait for that work, and ask Intact, before. After an error
// it may be called again.
func (f *Follower[T]) Close() error { return f.in().close() }

// CloseAfter ends the follower at once and releases everything when the work
// that is on the streams now is done, regardless of other streams. It never blocks. Streams
// that wait for the publisher go on without its work, as they do when Close is called: a
// program that wants the results waits for the streams first.
// Without a stream it returns cuda.ErrInvalidArgument, and cuda.ErrCapturing if a stream
// captures a graph, both without effect. System.Drain waits for the release.
func (f *Follower[T]) CloseAfter(streams ...*cuda.Stream) error { return f.in().closeAfter(streams) }

// Released returns the end of the follower's closing, by Close or CloseAfter: from then
// on its memory is released. It can be obtained at any time.
func (f *Follower[T]) Released() cuda.Completion { return f.in().completion() }
