package managed

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/cuvmm/cuvmm/internal/life"
)

// Attachment determines which processors may access managed memory of a device without
// concurrent managed access. On other devices it has no effect.
type Attachment uint8

const (
	// AttachGlobal, the default, allows every stream of every device.
	AttachGlobal Attachment = iota
	// AttachHost allows only the CPU, which may then access the memory while devices
	// work on other memory.
	AttachHost
	// AttachStream allows one stream and, while that has no work, the CPU. When the
	// stream is closed the memory is attached to the CPU, as it was allocated.
	AttachStream
)

// String returns the name of the attachment.
func (a Attachment) String() string {
	return errs.Name("Attachment", a, []string{AttachGlobal: "global", AttachHost: "host", AttachStream: "stream"})
}

// Options describe managed memory. The zero value is memory that is attached globally and
// has no pages until it is first accessed.
type Options struct {
	// Attach determines which processors may access the memory.
	Attach Attachment
	// Stream is the stream of AttachStream and of the placement's prefetches. Without one
	// prefetches run on the device's own stream, and the allocation waits for them.
	Stream *cuda.Stream
	// Placement places the memory. Without one its pages are placed when they are first
	// accessed.
	Placement Placement
}

// Buffer is managed memory. It embeds the Range of all of it, and so has a Range's methods.
// All methods are safe for concurrent use. If no function made the Buffer, methods that
// return an error return ErrInvalidArgument.
type Buffer struct {
	Range
	watched life.Watched
	from    *Allocator // retained by its buffers, nil if New made the memory
}

// handle is shared by a Buffer and its Ranges: one reference to the memory.
type handle struct {
	closer life.Closer
	m      *memory
}

// maxBytes exceeds the memory of any machine; rounding larger sizes up would overflow.
const maxBytes = 1 << 50

// New makes n bytes of managed memory on the device, in whole pages of the host. The caller
// closes it. Its contents are undefined. On a device with concurrent managed access it may
// exceed the device's memory: the driver moves pages that were not accessed for long to the
// host.
func New(d *cuda.Device, n int, o Options) (*Buffer, error) {
	return newBuffer("managed.New", d, n, o, nil)
}

func newBuffer(op string, d *cuda.Device, n int, o Options, from *Allocator) (b *Buffer, err error) {
	switch {
	case core.SystemOf(d) == nil:
		return nil, errs.NilDevice(op)
	case n <= 0:
		return nil, errs.Invalid(op, errs.Count(n, "byte"), "ask for at least one byte")
	case n > maxBytes:
		return nil, errs.Invalid(op, errs.Bytes(n), "no machine has that much: ask for less")
	}
	sys := core.SystemOf(d)
	if err := o.check(op, sys); err != nil {
		return nil, err
	}
	m, err := allocate(op, d, uint64(n), o)
	if err != nil {
		return nil, err
	}
	if from != nil {
		m.from, m.accesses = from.a, &from.a.accesses
		m.from.made(m)
	}
	placed := false
	defer func() { // the placement may panic
		if placed {
			return
		}
		if undo := m.release(op); undo != nil {
			m.mu.Lock()
			m.unfenced = true // what could not be waited for is waited for when it is freed
			m.mu.Unlock()
			sys.Left("managed memory", int(m.size), driver.Device(d.Ordinal()), undo, func() error { return m.releaseLater(op) })
			err = core.UndoError(err, undo)
		}
	}()
	b = &Buffer{Range: Range{h: &handle{m: m}, n: m.size}, from: from}
	if err := b.prepare(op, o); err != nil {
		return nil, err
	}
	placed = true
	b.watch()
	return b, nil
}

// allocate has the driver allocate n bytes.
func allocate(op string, d *cuda.Device, n uint64, o Options) (*memory, error) {
	sys := core.SystemOf(d)
	ctx, err := core.ContextOf(op, d)
	if err != nil {
		return nil, err
	}
	if sys.Attribute(ctx.Device, driver.AttrManagedMemory) == 0 {
		return nil, errs.New(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: d.String() + " has no managed memory",
			Hint: "use the package vmm"})
	}
	if err := o.mayAttach(op, sys); err != nil {
		return nil, err
	}
	// Whole pages, so that advice for one buffer does not affect another.
	page := host.PageSize()
	size := (n + page - 1) / page * page
	flags := driver.AttachGlobal
	if o.Attach != AttachGlobal {
		flags = driver.AttachHost
	}
	m := &memory{sys: sys, dev: d, ctx: ctx, size: n, refs: 1, accesses: new(accesses)}
	var r driver.Result
	if r = ctx.Lost(); r == driver.Success {
		r = sys.Allocate(size, func() (r driver.Result) {
			m.ptr, r = sys.Drv.MemAllocManaged(ctx.Handle, size, flags)
			return r
		})
	}
	if r != driver.Success {
		return nil, ctx.CallError(op, driver.CallMemAllocManaged, r, fmt.Sprintf("%s of managed memory on %v", errs.Bytes(n), d))
	}
	sys.Track(m, life.KindManaged, m.size)
	return m, nil
}

// check refuses options that cannot work.
func (o Options) check(op string, sys *core.System) error {
	switch {
	case o.Attach > AttachStream:
		return errs.Invalid(op, o.Attach.String(), "use AttachGlobal, AttachHost or AttachStream")
	case o.Attach == AttachStream && o.Stream == nil:
		return errs.Invalid(op, "an attachment to a stream without a stream", "name it in Options.Stream")
	}
	if err := checkStream(op, sys, o.Stream); err != nil || o.Attach != AttachStream {
		return err
	}
	return attachable(op, core.StreamOf(o.Stream))
}

// attachable refuses the one stream that memory cannot be attached to.
func attachable(op string, st *core.Stream) error {
	if st.IsLegacy() {
		return errs.Invalid(op, "the legacy default stream", "memory is attached to streams that were created")
	}
	return nil
}

// mayAttach refuses to attach memory to a stream that captures a graph.
func (o Options) mayAttach(op string, sys *core.System) error {
	if o.Attach != AttachStream {
		return nil
	}
	st := core.StreamOf(o.Stream)
	if err := st.Use(op, sys); err != nil {
		return err
	}
	defer st.Release()
	return notCapturing(op, st)
}

// checkStream refuses streams of another System, and closed ones. It accepts nil.
func checkStream(op string, sys *core.System, s *cuda.Stream) error {
	if s == nil {
		return nil
	}
	st := core.StreamOf(s)
	if err := st.Use(op, sys); err != nil {
		return err
	}
	st.Release()
	return nil
}

// prepare attaches and places new memory.
func (b *Buffer) prepare(op string, o Options) error {
	if o.Attach == AttachStream {
		if err := b.attach(op, o.Stream, driver.AttachSingle); err != nil {
			return err
		}
	}
	if o.Placement == nil {
		return nil
	}
	if err := o.Placement(o.Stream, b.Range); err != nil {
		return fmt.Errorf("%s: placement: %w", op, err)
	}
	return nil
}

// Attach changes which processors may access the memory, as work on the stream, which is
// also the stream of AttachStream; that cannot be the legacy default stream. A View must
// be of a whole allocation. While the stream captures a graph it returns ErrCapturing.
func (b *Buffer) Attach(s *cuda.Stream, a Attachment) error {
	const op = "managed.Buffer.Attach"
	flags, ok := map[Attachment]driver.AttachFlags{AttachGlobal: driver.AttachGlobal, AttachHost: driver.AttachHost, AttachStream: driver.AttachSingle}[a]
	if !ok {
		return errs.Invalid(op, a.String(), "use AttachGlobal, AttachHost or AttachStream")
	}
	if core.StreamOf(s) == nil {
		return errs.Invalid(op, "a nil stream", "name the stream in whose order the memory is attached")
	}
	return b.attach(op, s, flags)
}

func (b *Buffer) attach(op string, s *cuda.Stream, flags driver.AttachFlags) error {
	if b == nil {
		return errNilBuffer(op)
	}
	if err := b.acquire(op); err != nil {
		return err
	}
	defer b.release()
	m := b.h.m
	return m.on(op, s, func(st *core.Stream) error {
		if flags == driver.AttachSingle {
			if err := attachable(op, st); err != nil {
				return err
			}
		}
		if m.kind == hinted {
			return nil
		}
		n, err := m.whole(op)
		if err != nil {
			return err
		}
		if r := st.Ctx.Observe(m.sys.Drv.StreamAttachMemAsync(st.Ctx.Handle, st.Handle, m.ptr, n, flags)); r != driver.Success {
			return m.fail(op, driver.CallStreamAttachMemAsync, r)
		}
		return nil
	})
}

// whole returns the size to attach. The driver attaches only whole allocations, named by 0
// and their address; the operating system's memory is named by its size.
func (m *memory) whole(op string) (uint64, error) {
	if m.kind == owned {
		return 0, nil
	}
	start, size, ok := m.extent()
	if !ok {
		return m.size, nil
	}
	// This library's allocations are rounded up to pages.
	if page := host.PageSize(); start != uint64(m.ptr) || (size+page-1)/page != (m.size+page-1)/page {
		return 0, errs.Invalid(op, fmt.Sprintf("a view of %s, part of the %s of managed memory from %#x on", m.asked(), errs.Bytes(size), start),
			"memory is attached whole: view all of it")
	}
	return 0, nil
}

// inner returns what the buffer and its ranges share, nil for a Buffer that no
// function made.
func (b *Buffer) inner() *handle {
	if b == nil {
		return nil
	}
	return b.h
}

func errNilBuffer(op string) error {
	return errs.Invalid(op, "a nil buffer", "make one with New, an Allocator or View")
}

// Device returns the device that the memory was made on, or is viewed from.
func (b *Buffer) Device() *cuda.Device { return b.h.m.dev }

// Valid reports whether the memory can still be used: neither the buffer nor its
// allocator was closed.
func (b *Buffer) Valid() bool {
	h := b.inner()
	return h != nil && !h.closer.Closed() && !h.m.life.Closed()
}

// Managed reports whether the memory is managed. Only a View with Hint may be of
// memory that is not; operations on that do nothing.
func (b *Buffer) Managed() bool { return b.h.m.kind != hinted }

// Clone returns another Buffer of the same memory, which is freed with the last of them.
// The caller closes it.
func (b *Buffer) Clone() (*Buffer, error) {
	const op = "managed.Buffer.Clone"
	if b == nil {
		return nil, errNilBuffer(op)
	}
	if err := b.acquire(op); err != nil {
		return nil, err
	}
	defer b.release()
	m := b.h.m
	if err := m.retain(op); err != nil {
		return nil, err
	}
	c := &Buffer{Range: Range{h: &handle{m: m}, n: m.size}, from: b.from}
	c.watch()
	return c, nil
}

// watch has the loss of the buffer reported, unless an allocator frees its memory.
func (b *Buffer) watch() {
	if b.h.m.kind == owned && b.from == nil {
		b.h.m.Watch(&b.watched)
	}
}

// Close takes the buffer out of use. The last one of its memory waits for all work that
// could use it, and frees it; the package documentation describes the cost. While a Host
// function uses the buffer, Close returns ErrInUse and the buffer stays open. It is
// idempotent, and after an error it may be called again.
func (b *Buffer) Close() error { return b.end("managed.Buffer.Close") }

func (b *Buffer) end(op string) error {
	h := b.inner()
	if h == nil {
		return errNilBuffer(op)
	}
	if err := h.m.accesses.shut(op, h, &h.closer.Life); err != nil {
		return err
	}
	return h.closer.Close(func() error {
		if err := h.m.release(op); err != nil {
			return err
		}
		b.watched.Stop()
		return nil
	})
}

// CloseAfter takes the buffer out of use at once. The memory of the last one is freed when
// the work that is on the streams now is done. It never blocks. Without a stream it
// returns ErrInvalidArgument; with one that captures a graph it returns ErrCapturing and
// nothing has changed.
func (b *Buffer) CloseAfter(streams ...*cuda.Stream) error {
	return b.endAfter("managed.Buffer.CloseAfter", streams)
}

// Released returns the completion of this Buffer's closing. The memory is back when
// the last Buffer of it is closed; an Allocator that is closed first gives it back
// (Allocator.Released), and that closes no Buffer.
func (b *Buffer) Released() cuda.Completion {
	return b.h.closer.Completion()
}

func (b *Buffer) endAfter(op string, streams []*cuda.Stream) error {
	h := b.inner()
	if h == nil {
		return errNilBuffer(op)
	}
	m := h.m
	return life.CloseAfter(&h.closer, m.sys, func() (*core.Fence, error) {
		return core.FenceOf(m.sys, op, streams)
	}, func() error {
		if err := m.releaseLater(op); err != nil {
			return err
		}
		b.watched.Stop()
		return nil
	})
}
