package handles

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/diagnose"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/peererr"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/cuvmm/cuvmm/vmm"
)

// Transfers are what a connection carried with [SendBuffer] and the like. Both
// ends count the same.
type Transfers struct{ Sent, Received Carried }

// Carried counts what went one way.
type Carried struct {
	// Descriptor and Fabric count objects by the type of handle that they were
	// imported by. What the receiver has already counts like the first time.
	Descriptor, Fabric int
	// Downgraded counts those of Descriptor that have a fabric handle too, and
	// Reason says why the receiver did not take it.
	Downgraded int
	Reason     string
}

// TransfersOf returns what a connection has carried so far.
func TransfersOf(c *peer.Conn) Transfers {
	if c == nil {
		return Transfers{}
	}
	return link.Of(c).Inbox().(*transfers).carried.now()
}

// carried is what a connection remembers of its transfers.
type carried struct {
	mu             sync.Mutex // a leaf
	sent, received Carried
}

func (c *carried) now() Transfers {
	c.mu.Lock()
	defer c.mu.Unlock()
	return Transfers{Sent: c.sent, Received: c.received}
}

// handleNegotiation is the way that memory takes. It is by fabric where the memory has
// that, until the receiver's driver refuses the first chunk in a way that
// allows another type. Then the receiver says so, the sender begins anew with
// descriptors, and both remember it for the connection.
type handleNegotiation struct {
	// way is vmm.Fabric or vmm.PosixFD, and types what the memory has.
	way, types vmm.HandleTypes
	// reason why it is not the fabric.
	reason string
	// settled: the receiver took the first chunks.
	settled bool
	// restart: the sender begins anew.
	restart bool
}

// startOf is the way of memory with these types on a connection that has
// carried so much.
func startOf(types vmm.HandleTypes, before Carried) handleNegotiation {
	by := handleNegotiation{way: vmm.PosixFD, types: types}
	switch {
	case types&vmm.Fabric == 0:
	case types&vmm.PosixFD != 0 && before.Reason != "":
		by.reason = before.Reason
	default:
		by.way = vmm.Fabric
	}
	return by
}

func (c *transfers) begin(types vmm.HandleTypes) handleNegotiation {
	return startOf(types, c.carried.now().Sent)
}
func (c *transfers) expect(types vmm.HandleTypes) handleNegotiation {
	return startOf(types, c.carried.now().Received)
}

// choice: the way can still change.
func (by *handleNegotiation) choice() bool {
	return by.way == vmm.Fabric && by.types&vmm.PosixFD != 0 && !by.settled
}

// window is how many messages with chunks may be on their way: one while the
// others could be for nothing.
func (by *handleNegotiation) window() int {
	if by.choice() {
		return 1
	}
	return chunkWindow
}

// downgrade goes on by descriptor, if it can still.
func (by *handleNegotiation) downgrade(reason string) bool {
	if !by.choice() {
		return false
	}
	by.way, by.reason, by.restart = vmm.PosixFD, reason, true
	if reason == "" {
		by.reason = "no reason given"
	}
	return true
}

// note counts an object that has arrived. A downgrade is logged when it is new.
func (c *carried) note(on *Carried, by handleNegotiation, log *slog.Logger, what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if by.way == vmm.Fabric {
		on.Fabric++
		return
	}
	on.Descriptor++
	if by.types&vmm.Fabric == 0 {
		return
	}
	on.Downgraded++
	if on.Reason != by.reason {
		on.Reason = by.reason
		log.Warn("cuvmm: memory that has a fabric handle goes by descriptor on this connection", "direction", what, "reason", by.reason)
	}
}

// takePart imports what a message with chunks brought.
func (c conn) takePart(ctx context.Context, op string, t *transfer, i *importing, part peer.Message) error {
	way := vmm.PosixFD
	if part.Kind == wire.Fabric {
		way = vmm.Fabric
	}
	if way == vmm.PosixFD && t.by.choice() {
		// The sender remembers a downgrade whose end this side did not hear of.
		t.by.downgrade("the sender went on by descriptor, as before")
	}
	if way != t.by.way {
		return peererr.Violation("memory by %v, where %v was agreed on", way, t.by.way)
	}
	if way == vmm.PosixFD {
		return i.Take(part.FDs)
	}
	var err error
	if i.KeepsDescriptors() {
		err = errKeepsDescriptors
	} else {
		err = i.TakeFabric(fabricHandlesOf(part))
	}
	if err == nil || i.Chunks() > 0 {
		t.by.settled = true
	}
	if !errors.Is(err, errKeepsDescriptors) && !canDowngrade(err) || !t.by.choice() {
		return err
	}
	// Both sides remember the same words.
	m := reasonMessage(wire.ByFD, t.number, briefly(err))
	t.by.downgrade(textOf(m))
	return c.Send(ctx, op, m)
}

// errKeepsDescriptors is the reason to refuse fabric handles of memory that has
// descriptors too.
var errKeepsDescriptors = errors.New("the receiver keeps descriptors")

// briefly leaves out of a refused import what only its caller can use.
func briefly(err error) error {
	var d *cuda.Error
	var why *diagnose.Error
	if errors.As(err, &d) && errors.As(err, &why) {
		return fmt.Errorf("%v: %w", d.Code, why)
	}
	return err
}

// fabricHandlesOf reads what transferOf let through.
func fabricHandlesOf(m peer.Message) []cuda.FabricHandle {
	b := m.Body[transferHeader+4:]
	all := make([]cuda.FabricHandle, len(b)/len(cuda.FabricHandle{}))
	for i := range all {
		b = b[copy(all[i][:], b):]
	}
	return all
}

// canDowngrade: the driver's result for a fabric handle means that this process has no
// use of the fabric. Every other one is an error.
func canDowngrade(err error) bool {
	var d *cuda.Error
	return errors.As(err, &d) && d.Call == driver.CallMemImportFromShareableHandle.String() &&
		(d.Code == cuda.Code(driver.NotPermitted) || d.Code == cuda.Code(driver.NotSupported))
}

// textOf is the reason that a message gives.
func textOf(m peer.Message) string { return string(m.Body[transferHeader:]) }
