package handles

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/vmm"
)

// DefaultLease is the default of LeaseOptions.Timeout.
const DefaultLease = time.Minute

// LeaseOptions configure a lease. The zero value offers fabric handles if the
// memory has them, otherwise descriptors, and ends with Close or after DefaultLease.
type LeaseOptions struct {
	// Handle is the type of the offered handles: vmm.Fabric, whose offer is a text, or
	// vmm.PosixFD, whose offer also has files; 0 is vmm.Fabric if the memory has that,
	// otherwise vmm.PosixFD, which memory has by default. The memory must have it.
	Handle vmm.HandleTypes
	// Receivers is the number of processes that are to import the memory: the lease
	// ends with the last one's receipt. 0 is any number.
	Receivers int
	// Timeout bounds the lease; 0 is DefaultLease.
	Timeout time.Duration
	// Log receives a record of a lease that ends before all receivers have imported;
	// nil logs nothing.
	Log *slog.Logger
}

// Lease retains offered memory until its receivers have imported it. A
// fabric handle pins nothing: once the memory is released it names nothing. The lease
// retains the memory itself and not the buffer, which may be
// clipped or closed meanwhile. An importer retains what it has imported, so the end of
// the lease takes nothing from it.
//
// A lease ends when all receivers have confirmed their imports, when it is closed, or
// at its deadline, so one that is forgotten does not retain memory for ever. All methods
// are safe for concurrent use. The caller closes it.
type Lease struct {
	offer   Offer
	fds     []*peer.FD // the files of the offer, whose list users see
	options LeaseOptions
	bytes   uint64
	exports exchange.Set
	handles []*phys.Handle
	timer   *time.Timer
	done    chan struct{} // closed at the end
	hide    func()        // from snapshots
	ending  life.Ending
	// released keeps the outcome, as the lease ends once.
	released *life.Completion

	mu        sync.Mutex
	importers map[Process]bool
	ended     bool
	why       error // of the end; nil if all have imported
	left      error // of memory that could not be released at once
}

// String describes the offer, without its handles.
func (l *Lease) String() string { return "lease of " + l.offer.String() }

// Format writes String whatever the verb.
func (l *Lease) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(l.String())) }

// LeaseStats count the leases of this process.
type LeaseStats struct {
	// Open leases hold Bytes of memory.
	Open  int
	Bytes int
	// Expired counts leases that ended at their deadline.
	Expired int
}

var leases struct {
	mu sync.Mutex // a leaf
	LeaseStats
}

// Leases returns the counts of this process.
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
		return nil, errs.PeerInvalid(op, "a nil buffer", "make one with vmm.NewBuffer")
	}
	return leaseMemory(op, b, Descriptor{Kind: BufferKind}, 1, o)
}

// LeaseArray offers an array's elements in use to callers of [ImportArray] with the
// same type.
func LeaseArray[T any](a *vmm.Array[T], o LeaseOptions) (*Lease, error) {
	const op = "handles.LeaseArray"
	if a.Buffer() == nil {
		return nil, errs.PeerInvalid(op, "a nil or zero array", "make one with vmm.NewArray")
	}
	e, size := ElementOf[T]()
	return leaseMemory(op, a.Buffer(), Descriptor{Kind: ArrayKind, Element: e, ElementSize: size}, uint64(size), o)
}

func leaseMemory(op string, b *vmm.Buffer, d Descriptor, element uint64, o LeaseOptions) (*Lease, error) {
	in := share.Of(b)
	if in == nil {
		return nil, errs.PeerInvalid(op, "a zero buffer", "make one with vmm.NewBuffer")
	}
	used, v, err := inUse(op, in)
	if err != nil {
		return nil, err
	}
	d.Length = int(used / element)
	about := in.About()
	return lease(op, d, core.SystemOf(b.Device()), about.Asked, about.Imported, v, o)
}

// lease takes ownership of the view, even if it fails.
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
		if asked.RequestedHandleTypes&driver.HandleFabric == 0 {
			o.Handle = vmm.PosixFD
		}
	}
	if o.Timeout == 0 {
		o.Timeout = DefaultLease
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Handle != vmm.Fabric && o.Handle != vmm.PosixFD || o.Receivers < 0 || o.Timeout < 0 {
		return nil, errs.PeerInvalid(op, fmt.Sprintf("a lease by %v for %d receivers and %v", o.Handle, o.Receivers, o.Timeout),
			"use vmm.Fabric or vmm.PosixFD, and nothing negative")
	}
	l := &Lease{options: o, done: make(chan struct{}), importers: map[Process]bool{}}
	l.released = l.ending.Completion()
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
			return nil, err // all stay open as long as the lease
		}
		ctx, cancel := context.WithTimeout(context.Background(), min(o.Timeout, DefaultLease))
		defer cancel()
		var err error
		if l.fds, err = l.exports.Open(ctx, op, l.handles); err != nil {
			return nil, err
		}
		l.offer.Files = slices.Clone(l.fds)
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
	leases.Bytes += int(l.bytes)
	leases.mu.Unlock()
	l.hide = on.Show(inspected{l, time.Now().Add(o.Timeout)})
	l.mu.Lock() // the timer may fire at once
	defer l.mu.Unlock()
	l.timer = time.AfterFunc(o.Timeout, l.expire)
	return l, nil
}

// Offer returns the offer to hand to the receivers. Its files belong to the lease, which
// closes them at its end: send or duplicate them before.
func (l *Lease) Offer() Offer { return l.offer }

// Imported takes a receipt. The same process counts once. A receipt of another
// lease is [ErrMismatch]. After the end of the lease Imported returns the reason of the
// end, which is nil if all had imported.
func (l *Lease) Imported(r Receipt) error {
	const op = "handles.Lease.Imported"
	if r.Lease != l.offer.Lease {
		return errs.Peer(op, ErrMismatch, fmt.Sprintf("a receipt of lease %x from %v", r.Lease, r.Importer), "give it to the lease that it is of")
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

// Wait waits for the end of the lease. It returns nil if all receivers have
// imported, [peer.ErrTimeout] after the deadline, cuda.ErrClosed after Close.
func (l *Lease) Wait(ctx context.Context) error {
	select {
	case <-l.done:
	case <-ctx.Done():
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.done: // whatever the context says
		return l.why
	default:
		return errs.PeerWait(ctx, "handles.Lease.Wait", l.progressLocked(), "see what the receivers wait for")
	}
}

// name names the lease in reports.
func (l *Lease) name() string {
	d := &l.offer.Descriptor
	return fmt.Sprintf("lease %x of %s of %s", l.offer.Lease[:4], d.what(), errs.Bytes(d.Size()))
}

// progressLocked describes how many have imported.
func (l *Lease) progressLocked() string {
	if l.options.Receivers == 0 {
		return fmt.Sprintf("imports: %d", len(l.importers))
	}
	return fmt.Sprintf("imported by %d of %s", len(l.importers), errs.Count(l.options.Receivers, "receiver"))
}

func (l *Lease) expire() {
	l.mu.Lock()
	err := errs.Peer("handles.Lease", peer.ErrTimeout, fmt.Sprintf("%s within %v", l.progressLocked(), l.options.Timeout),
		"see what the receivers wait for, or raise LeaseOptions.Timeout; later imports find the memory gone")
	l.mu.Unlock()
	l.end(err)
}

// end releases the memory, once.
func (l *Lease) end(why error) {
	l.mu.Lock()
	if l.ended {
		l.mu.Unlock()
		return
	}
	l.ended, l.why = true, why
	l.timer.Stop()
	l.mu.Unlock()
	l.exports.Close(l.fds)
	ended := time.Now()
	for _, h := range l.handles {
		h.NoteSent(fmt.Sprintf("offered by the %s, which ended", l.name()), ended)
	}
	if err := phys.ReleaseAll("handles.Lease", l.handles...); err != nil {
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
	leases.Bytes -= int(l.bytes)
	if expired {
		leases.Expired++
	}
	leases.mu.Unlock()
	l.hide()
	close(l.done)
	l.ending.End(l.left) // written above alone
}

// Released returns the end of the lease, by Close, by its receivers or at its deadline:
// then it holds no memory. Its error names memory that could not be released at once,
// which System.Drain retries. It can be obtained at any time.
func (l *Lease) Released() cuda.Completion { return l.released }

// Close ends the lease. Idempotent. The error names memory that could not be
// released at once, which System.Drain retries.
func (l *Lease) Close() error {
	l.end(errs.PeerClosed("handles.Lease", "lease"))
	<-l.done
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.left
}
