package handles

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/peererr"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/vmm"
)

// DefaultLease is how long a lease lasts where nothing else is said.
const DefaultLease = time.Minute

// LeaseOptions describe a lease. The zero value is one by fabric handles, which
// ends with Close or after DefaultLease.
type LeaseOptions struct {
	// Handle is the type of the handles that are offered: vmm.Fabric, or
	// vmm.PosixFD; 0 is vmm.Fabric. The memory must have it.
	Handle vmm.HandleTypes
	// Receivers is how many processes are to import the memory: when as many
	// have said that they did, the lease ends. 0 is any number.
	Receivers int
	// Timeout is when it ends at the latest; 0 is DefaultLease.
	Timeout time.Duration
	// Log is told of a lease that ends before all receivers have imported. Nil
	// logs nothing.
	Log *slog.Logger
}

// Lease keeps memory that was offered until its receivers have imported it. A
// fabric handle pins nothing: were the memory released before, the handle would
// name nothing. The lease holds the memory itself, not the buffer, which may be
// clipped or closed meanwhile. An importer that has the memory keeps it by
// itself, so a lease that has ended takes nothing from it.
//
// It ends when all receivers have said that they imported, when it is closed, or
// at its deadline, so none that is forgotten keeps memory for ever. All methods
// are safe for use by any goroutine. The caller closes it.
type Lease struct {
	offer   Offer
	options LeaseOptions
	bytes   uint64
	exports exchange.Set
	handles []*phys.Handle
	timer   *time.Timer
	done    chan struct{} // closed when it has ended
	hide    func()        // from snapshots

	mu        sync.Mutex
	importers map[Process]bool
	ended     bool
	why       error // of the end, nil where all have imported
	left      error // what could not be given back at once
}

// String says what is offered, without the handles.
func (l *Lease) String() string { return "lease of " + l.offer.String() }

// Format writes String whatever the verb.
func (l *Lease) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(l.String())) }

// LeaseStats count the leases of this process.
type LeaseStats struct {
	// Open leases hold Bytes of memory.
	Open  int
	Bytes uint64
	// Expired counts those that ended at their deadline.
	Expired int
}

var leases struct {
	mu sync.Mutex // a leaf
	LeaseStats
}

// Leases are those of this process.
func Leases() LeaseStats {
	leases.mu.Lock()
	defer leases.mu.Unlock()
	return leases.LeaseStats
}

// LeaseBuffer offers a buffer's bytes in use, as they are now, to callers of
// [ImportBuffer].
func LeaseBuffer(b *vmm.Buffer, o LeaseOptions) (*Lease, error) {
	const op = "handles.LeaseBuffer"
	if b == nil {
		return nil, peererr.Invalid(op, "a nil buffer", "make one with vmm.NewBuffer")
	}
	return leaseMemory(op, b, Descriptor{Kind: BufferKind}, 1, o)
}

// LeaseArray offers an array's elements in use to callers of [ImportArray] with the
// same type.
func LeaseArray[T any](a *vmm.Array[T], o LeaseOptions) (*Lease, error) {
	const op = "handles.LeaseArray"
	if a == nil {
		return nil, peererr.Invalid(op, "a nil array", "make one with vmm.NewArray")
	}
	e, size := ElementOf[T]()
	return leaseMemory(op, a.Buffer(), Descriptor{Kind: ArrayKind, Element: e, ElementSize: uint32(size)}, uint64(size), o)
}

// LeaseAllocation offers physical memory to callers of [ImportAllocation].
func LeaseAllocation(a *vmm.Allocation, o LeaseOptions) (*Lease, error) {
	const op = "handles.LeaseAllocation"
	if a == nil {
		return nil, peererr.Invalid(op, "a nil allocation", "make one with vmm.Create")
	}
	h, open := phys.Use(a)
	if !open {
		return nil, errs.ClosedError(op, "allocation")
	}
	v := share.View{Chunks: []share.Chunk{{Handle: h}}}
	return lease(op, Descriptor{Kind: AllocationKind, Length: h.Size}, h.System(), h.Asked, h.Imported, v, o)
}

func leaseMemory(op string, b *vmm.Buffer, d Descriptor, element uint64, o LeaseOptions) (*Lease, error) {
	in := share.Of(b)
	used := in.Used()
	v, err := in.View(op, used)
	if err != nil {
		return nil, err
	}
	d.Length = used / element
	about := in.About()
	return lease(op, d, core.SystemOf(b.Device()), about.Asked, about.Imported, v, o)
}

// lease takes the view over, even if it fails.
func lease(op string, d Descriptor, on *core.System, asked driver.AllocationProp, imported bool, v share.View, o LeaseOptions) (*Lease, error) {
	l, err := newLease(op, d, on, asked, imported, v, o)
	if err != nil {
		return nil, errors.Join(err, v.Release())
	}
	return l, nil
}

func newLease(op string, d Descriptor, on *core.System, asked driver.AllocationProp, imported bool, v share.View, o LeaseOptions) (*Lease, error) {
	if o.Handle == 0 {
		o.Handle = vmm.Fabric
	}
	if o.Timeout == 0 {
		o.Timeout = DefaultLease
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Handle != vmm.Fabric && o.Handle != vmm.PosixFD || o.Receivers < 0 || o.Timeout < 0 {
		return nil, peererr.Invalid(op, fmt.Sprintf("a lease by %v for %d receivers and %v", o.Handle, o.Receivers, o.Timeout),
			"use vmm.Fabric or vmm.PosixFD, and nothing negative")
	}
	l := &Lease{options: o, done: make(chan struct{}), importers: map[Process]bool{}}
	for _, c := range v.Chunks {
		l.handles = append(l.handles, c.Handle)
		l.bytes += c.Handle.Size
	}
	if err := phys.Exportable(op, driver.HandleTypes(o.Handle), asked, imported, l.bytes); err != nil {
		return nil, err
	}
	if err := describe(op, &d, on, asked, l.handles); err != nil {
		return nil, err
	}
	d.Handle = o.Handle
	l.offer = Offer{Descriptor: d}
	_, _ = rand.Read(l.offer.Lease[:]) // never fails
	if o.Handle == vmm.PosixFD {
		if err := exchange.Exports.Ever(op, len(l.handles)); err != nil {
			return nil, err // all are open as long as the lease
		}
		ctx, cancel := context.WithTimeout(context.Background(), min(o.Timeout, DefaultLease))
		defer cancel()
		var err error
		if l.offer.Files, err = l.exports.Open(ctx, op, l.handles); err != nil {
			return nil, err
		}
	} else {
		for _, h := range l.handles {
			f, err := h.ExportFabric(op)
			if err != nil {
				return nil, err
			}
			l.offer.Handles = append(l.offer.Handles, cuda.FabricHandle(f))
		}
	}
	leases.mu.Lock()
	leases.Open++
	leases.Bytes += l.bytes
	leases.mu.Unlock()
	l.hide = on.Show(inspected{l, time.Now().Add(o.Timeout)})
	l.mu.Lock() // it may be over at once
	defer l.mu.Unlock()
	l.timer = time.AfterFunc(o.Timeout, l.expire)
	return l, nil
}

// Offer is what the receivers import. Its files are the lease's, and closed with
// it: send or duplicate them before.
func (l *Lease) Offer() Offer { return l.offer }

// Imported takes a receipt. The same process counts once. A receipt of another
// lease is [ErrMismatch]; one that comes when the lease has ended is the reason
// of that, and nil where all had imported.
func (l *Lease) Imported(r Receipt) error {
	const op = "handles.Lease.Imported"
	if r.Lease != l.offer.Lease {
		return peererr.New(op, ErrMismatch, fmt.Sprintf("a receipt of lease %x from %v", r.Lease, r.Importer), "give it to the lease that it is of")
	}
	l.mu.Lock()
	if l.ended {
		defer l.mu.Unlock()
		return l.why
	}
	l.importers[r.Importer] = true
	all := l.options.Receivers > 0 && len(l.importers) >= l.options.Receivers
	l.mu.Unlock()
	if all {
		l.end(nil)
	}
	return nil
}

// Wait waits until the lease has ended. It returns nil if all receivers have
// imported, [peer.ErrTimeout] after the deadline, cuda.ErrClosed after Close.
func (l *Lease) Wait(ctx context.Context) error {
	select {
	case <-l.done:
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.why
	case <-ctx.Done():
		l.mu.Lock()
		defer l.mu.Unlock()
		return peererr.Wait(ctx, "handles.Lease.Wait", l.progress(), "see what the receivers wait for")
	}
}

// progress says how many have imported. The caller has the lock.
func (l *Lease) progress() string {
	if l.options.Receivers == 0 {
		return fmt.Sprintf("imports: %d", len(l.importers))
	}
	return fmt.Sprintf("imported by %d of %s", len(l.importers), errs.Count(l.options.Receivers, "receiver"))
}

func (l *Lease) expire() {
	l.mu.Lock()
	err := peererr.New("handles.Lease", peer.ErrTimeout, fmt.Sprintf("%s within %v", l.progress(), l.options.Timeout),
		"see what the receivers wait for, or raise LeaseOptions.Timeout; those that import later find the memory gone")
	l.mu.Unlock()
	l.end(err)
}

// end gives the memory up, once.
func (l *Lease) end(why error) {
	l.mu.Lock()
	if l.ended {
		l.mu.Unlock()
		return
	}
	l.ended, l.why = true, why
	l.timer.Stop()
	l.mu.Unlock()
	if l.options.Handle == vmm.PosixFD {
		l.exports.Close(l.handles)
	}
	// What cannot be released now the reclaimer tries again.
	over := errors.New("handles.Lease: the memory could not be released at once")
	if err := phys.Abandon("handles.Lease", over, l.handles...); !errors.Is(over, err) {
		l.mu.Lock()
		l.left = err
		l.mu.Unlock()
		l.options.Log.Error("cuvmm: memory of a lease that ended could not be released at once", "error", err)
	}
	expired := errors.Is(why, peer.ErrTimeout)
	if expired && l.options.Receivers > 0 {
		l.options.Log.Warn("cuvmm: a lease ended before all receivers had imported", "offer", l.offer, "reason", why)
	}
	leases.mu.Lock()
	leases.Open--
	leases.Bytes -= l.bytes
	if expired {
		leases.Expired++
	}
	leases.mu.Unlock()
	l.hide()
	close(l.done)
}

// Close ends the lease, if it has not ended. The error says what could not be
// given back at once, which System.Drain tries again.
func (l *Lease) Close() error {
	l.end(peererr.Closed("handles.Lease", "lease"))
	<-l.done
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.left
}
