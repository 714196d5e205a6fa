package publish

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/peererr"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/sharedpage"
	"github.com/cuvmm/cuvmm/vmm"
)

// FollowOptions say how a publication is followed. The zero value follows all of
// it, for reading and writing.
type FollowOptions struct {
	// ReadOnly maps for reading: no access beyond that can be granted to the
	// memory here. It protects from this process's own mistakes, not from others.
	// It is needed where the publisher's policy grants no more (Listing.Access):
	// without it that is cuda.ErrNotPermitted.
	ReadOnly bool
	// Reserve is the address space in bytes, rounded up to the granularity; 0 is
	// what the publisher has. Growth beyond it is this follower's cuda.ErrCapacity
	// alone.
	Reserve int
	// Hint is the address that is wanted, so that several processes can have the memory
	// at one; 0 leaves it to the driver. It is a hint: check the array's Ptr.
	Hint cuda.Ptr
	// Align is a power of two that the address is a multiple of; 0 is the granularity.
	Align int
	// OnGrow, if set, is called after memory was mapped for the bytes from from up to, not
	// including, to, on a goroutine of the follower's own and before Next shows it. It
	// must not wait for the follower.
	OnGrow func(from, to int)
	// MaxChunks is the most chunks; 0 is MaxChunks.
	MaxChunks int
	// KeepDescriptors keeps the file descriptors of the memory, so that it can be
	// passed on and taken over: see handles.ImportOptions.
	KeepDescriptors bool
	// MaxWait is how long a stream, or Next without one, may wait for the work that
	// a publisher announced a generation behind. After that the follower ends with
	// [ErrStalled], as if the publisher had died, and its streams go on. 0 is no
	// limit: a stream waits as long as the publisher lives.
	MaxWait time.Duration
	// Quiesce is called when the publisher takes memory back: what lies behind
	// the first length elements. No work that touches it may be submitted any
	// more when it returns, and the streams that it answers are those whose work
	// may: the memory is unmapped when that work is done, and the publisher is
	// told. Nil, or no streams, waits for all work that could touch it, as
	// vmm.Buffer.Clip does. It runs on a goroutine of the follower's own, and must
	// not wait for the follower.
	Quiesce func(length int) []*cuda.Stream
}

// Follower is a publication of another process as this one sees it: an array
// that grows and shrinks as its publisher announces, at an address fixed for
// life. All methods are safe for use by any goroutine. The caller closes it.
//
// What is new is mapped as it arrives and shown by Next: Len never counts
// elements that the streams named there have not been ordered behind.
//
// When the publisher ends, or withdraws, a follower keeps what it has mapped,
// and Next and Err say so. No stream hangs then: the library of the follower's
// own process lets those go on that still wait for the publisher's. What was
// announced behind work that was never done is not shown any more, and Err is
// [ErrUnfinished]: ask it after waiting for the work that used the elements.
type Follower[T any] struct {
	f     *follower
	array *vmm.Array[T]
}

// Follow follows what is published under a name, on a device of this process,
// which may be another GPU than the publisher's where it can reach that. Elements
// must be of the publisher's type and size ([ErrMismatch]); a buffer is followed
// as bytes. At first nothing is shown: call Next.
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
		return nil, errors.Join(err, f.close())
	}
	f.client = k
	f.start()
	return &Follower[T]{f, a}, nil
}

// wanted are the elements that somebody wants to see.
type wanted struct {
	element handles.ElementType
	size    uint32
}

func wantedOf[T any]() wanted {
	e, size := handles.ElementOf[T]()
	return wanted{e, uint32(size)}
}

// of compares with what is published.
func (e wanted) of(op, name string, d *handles.Descriptor) error {
	is, size := d.Element, d.ElementSize
	if d.Kind == handles.BufferKind {
		is, size = handles.Uint8, 1
	}
	if is != e.element || size != e.size {
		return peererr.New(op, handles.ErrMismatch, fmt.Sprintf("publication %q has elements of type %v and size %d, not of %v and %d", name, is, size, e.element, e.size),
			"name the publisher's type; a buffer is followed as bytes")
	}
	return nil
}

// follow asks for a publication and makes all that is needed for it. The caller
// starts it.
func (k *line) follow(ctx context.Context, op string, d *cuda.Device, name string, o FollowOptions, want wanted) (*follower, error) {
	room, err := roomOf(op, d, o)
	if err != nil {
		return nil, err
	}
	said, a, err := k.subscribe(ctx, op, name, room, o.ReadOnly, possession{})
	if err != nil {
		return nil, err
	}
	defer func() { _ = a.page.Close() }()
	f := newFollower(k, said, a.inlet, d, o)
	f.name, f.identity = name, said.identity
	err = nil
	if room > 0 && said.reserved > room {
		err = k.conn.in.Fail(peererr.Violation("a range of %d bytes, where %d were asked for", said.reserved, room))
	}
	if err == nil {
		err = f.build(op, name, a.page, want)
	}
	if err != nil {
		return nil, errors.Join(err, f.close())
	}
	return f, nil
}

// maxRoom is more than any device has address space for.
const maxRoom = 1 << 60

// roomOf is how much address space is asked for, in bytes.
func roomOf(op string, d *cuda.Device, o FollowOptions) (uint64, error) {
	if d == nil {
		return 0, peererr.Invalid(op, "a nil device", "take one from System.Devices")
	}
	if o.Reserve < 0 || o.Reserve > maxRoom || o.MaxChunks < 0 || o.MaxWait < 0 {
		return 0, peererr.Invalid(op, fmt.Sprintf("a range of %d bytes, %d chunks and a wait of %v", o.Reserve, o.MaxChunks, o.MaxWait), "limits are not negative, and no device has more than "+errs.Bytes(maxRoom))
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

// build makes the memory, the word and the stream. After an error close gives
// back what there is.
func (f *follower) build(op, name string, page *peer.FD, want wanted) error {
	if err := want.of(op, name, &f.about); err != nil {
		return err
	}
	in, err := f.importer(op, nil)
	if err != nil {
		return err
	}
	if f.tracker.room == 0 || f.tracker.room > maxRoom || f.tracker.room%in.Granularity() != 0 {
		return f.k.conn.in.Fail(peererr.Violation("a publication with room for %d bytes, in memory with a granularity of %d", f.tracker.room, in.Granularity()))
	}
	f.tracker.granularity = in.Granularity()
	f.tracker.unit = uint64(want.size)
	if f.word, err = f.k.openWord(op, f.dev, page, f.slot); err != nil {
		return err
	}
	if f.word.ctx != nil {
		if f.stream, err = f.dev.NewStream(cuda.StreamOptions{}); err != nil {
			return err
		}
	}
	if f.buffer, err = in.Buffer(share.ImportOptions{Reserve: f.tracker.room, Hint: f.options.Hint, Align: f.options.Align, OnGrow: f.options.OnGrow, Followed: true}); err != nil {
		return err
	}
	f.memory = share.Of(f.buffer)
	if f.hold, err = f.memory.Hold(op, fmt.Sprintf("the follower of publication %q", name), 0); err == nil {
		f.inspect(name)
	}
	return err
}

// openWord makes a follower's word of the page that a server sent.
func (k *line) openWord(op string, d *cuda.Device, page *peer.FD, slot uint32) (*word, error) {
	shared, err := k.openPage(op, page, slot)
	if err != nil {
		return nil, err
	}
	w, err := newWord(op, d, shared)
	if err != nil {
		return nil, errors.Join(err, shared.Close())
	}
	w.slot = int(slot)
	return w, nil
}

// openPage maps the page that a server sent, which must have the word. What is no
// such page ends the connection.
func (k *line) openPage(op string, f *peer.FD, slot uint32) (p *sharedpage.Page, err error) {
	err = f.Use(func(n int) (err error) {
		p, err = sharedpage.Open(n)
		return err
	})
	switch {
	case errors.Is(err, sharedpage.ErrNoPage):
		return nil, k.conn.in.Fail(peererr.Violation("something other than a page to order work by: %v", err))
	case err != nil:
		return nil, peererr.System(op, "the page to order work by", err)
	case uint64(slot) >= uint64(p.Words()):
		return nil, errors.Join(k.conn.in.Fail(peererr.Violation("word %d of a page with %d", slot, p.Words())), p.Close())
	}
	link.Of(f).SetForeign(false)
	return p, nil
}

// importer is for importing so many chunks.
func (f *follower) importer(op string, sizes []uint64) (*exchange.Importer, error) {
	return newImporter(op, f.dev, f.about, sizes, handles.ImportOptions{ReadOnly: f.options.ReadOnly, MaxChunks: f.tracker.most, KeepDescriptors: f.options.KeepDescriptors})
}

// Array is the memory that is mapped, with the elements that are shown in use.
// Its address is fixed for life. Its length is the publisher's to change
// (cuda.ErrNotPermitted), and it is closed by closing the follower
// (cuda.ErrInUse).
func (f *Follower[T]) Array() *vmm.Array[T] { return f.array }

// Len is the number of elements that are shown: those of the last Next, or fewer
// where the publisher has taken some back since, or ended before they were
// there.
func (f *Follower[T]) Len() int { return f.f.shownNow().length }

// Generation is the publisher's count of changes at the last Next.
func (f *Follower[T]) Generation() uint64 { return f.f.shownNow().generation }

// Next waits until something new was announced, and shows it: later work on the
// streams comes behind the publisher's work that it was announced behind. The
// call itself does not wait for that work; without streams it does, and then any
// stream may use the elements. With a stream that captures a graph it is
// cuda.ErrCapturing and nothing has changed.
//
// What came meanwhile is taken over in one step: the last generation counts. An
// error says why that one could not be taken (cuda.ErrCapacity: beyond the
// reserved range), and the next may be; or that nothing further comes, now and
// for ever: [peer.ErrGone], [ErrWithdrawn], cuda.ErrClosed. What was announced before
// comes first. A follower that comes back waits for another publisher instead; if
// elements that were shown are not any more, that is [ErrUnfinished] once.
func (f *Follower[T]) Next(ctx context.Context, streams ...*cuda.Stream) error {
	return f.f.next(ctx, streams)
}

// State says whether there is more to come. It is Stale while the publisher is gone and
// its follower's client comes back (DialOptions.ComeBack): what is shown stays until
// the next announcement of another publisher replaces it.
func (f *Follower[T]) State() State { return f.f.stateNow() }

// Order lets later work on the streams come behind what is shown, for streams
// that no Next named. It does not wait.
func (f *Follower[T]) Order(streams ...*cuda.Stream) error { return f.f.orderShown(streams) }

// Err is nil while the publisher may announce more, and then why not. It matches
// [ErrUnfinished] too where elements that were shown are not any more, since the
// publisher ended before they were there.
func (f *Follower[T]) Err() error { return f.f.failed() }

// Close ends the follower: it waits for all work that could use the elements (see
// package vmm) and gives everything back. Streams that wait for the publisher go
// on. After an error it may be called again.
func (f *Follower[T]) Close() error { return f.f.close() }

// CloseContext is Close that waits no longer than the context. The follower is
// out of use in any case; after the context's error it goes on closing, and Close
// waits for that.
func (f *Follower[T]) CloseContext(ctx context.Context) error {
	over := make(chan error, 1)
	go func() { over <- f.f.close() }()
	select {
	case err := <-over:
		return err
	case <-ctx.Done():
		return peererr.Wait(ctx, "publish.Follower.CloseContext", "work that could use the elements is not done", "see which stream stands still, or name those that use them with CloseAfter")
	}
}

// CloseAfter ends the follower at once and gives everything back when the work
// that is on the streams now is done, whatever other streams do. It never blocks.
// Without a stream it is cuda.ErrInvalidArgument, with one that captures a graph
// cuda.ErrCapturing, and nothing has changed. System.Drain waits for it.
func (f *Follower[T]) CloseAfter(streams ...*cuda.Stream) error { return f.f.closeAfter(streams) }

// Released ends when everything that the follower had is given back, whichever
// way it was closed.
func (f *Follower[T]) Released() cuda.Completion { return f.f.closer.Completion() }
