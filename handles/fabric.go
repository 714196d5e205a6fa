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

// Transfers counts the objects that a connection carried with [SendBuffer] and the like.
// Both ends have the same counts.
type Transfers struct{ Sent, Received Carried }

// Carried counts objects of one direction.
type Carried struct {
	// Descriptor and Fabric count objects by the type of handle that they were
	// imported by. Memory already imported is counted again.
	Descriptor, Fabric int
	// Downgraded counts those of Descriptor that have a fabric handle too, and
	// Reason is the receiver's reason to refuse it.
	Downgraded int
	Reason     string
}

// TransfersOf returns the counts of a connection.
func TransfersOf(c *peer.Conn) Transfers {
	if c == nil {
		return Transfers{}
	}
	in := link.Of(c)
	if in == nil {
		return Transfers{}
	}
	return in.Inbox().(*transfers).carried.now()
}

// carried is the record of a connection's transfers.
type carried struct {
	mu             sync.Mutex // a leaf
	sent, received Carried
}

func (c *carried) now() Transfers {
	c.mu.Lock()
	defer c.mu.Unlock()
	return Transfers{Sent: c.sent, Received: c.received}
}

// handleNegotiation is the choice of the handle type that memory travels by. It is the
// fabric handle if the memory has one, until the receiver's driver refuses the first
// chunk in a way that allows another type. Then the receiver says so, the sender begins
// again with descriptors, and both keep to that for the connection.
type handleNegotiation struct {
	// way is vmm.Fabric or vmm.PosixFD, and types the handle types of the memory.
	way, types vmm.HandleTypes
	// reason is why way is not vmm.Fabric.
	reason string
	// settled: the receiver took the first chunks.
	settled bool
	// restart: the sender begins again.
	restart bool
}

// startOf returns the first choice for memory of these types on a connection with this
// record.
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

// choice reports whether the way can still change.
func (by *handleNegotiation) choice() bool {
	return by.way == vmm.Fabric && by.types&vmm.PosixFD != 0 && !by.settled
}

// window is how many messages with chunks may be in flight: one while the way can still
// change, which would waste the others.
func (by *handleNegotiation) window() int {
	if by.choice() {
		return 1
	}
	return chunkWindow
}

// downgrade changes to descriptors, if that is still possible.
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

// note counts an object that has arrived, and logs a new reason to downgrade.
func (c *carried) note(on *Carried, by handleNegotiation, log *slog.Logger, what string) {
	// Without the lock: the program's handler may call TransfersOf.
	if c.count(on, by) {
		log.Warn("cuvmm: memory that has a fabric handle travels by descriptor on this connection", "direction", what, "reason", by.reason)
	}
}

// count counts an object, and reports whether it is the first of a downgrade.
func (c *carried) count(on *Carried, by handleNegotiation) (first bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if by.way == vmm.Fabric {
		on.Fabric++
		return false
	}
	on.Descriptor++
	if by.types&vmm.Fabric == 0 {
		return false
	}
	on.Downgraded++
	first = on.Reason != by.reason
	on.Reason = by.reason
	return first
}

// takePart imports the chunks of a message.
func (c conn) takePart(ctx context.Context, op string, t *transfer, i *importing, part peer.Message) error {
	way := vmm.PosixFD
	if part.Kind == wire.Fabric {
		way = vmm.Fabric
	}
	if way == vmm.PosixFD && t.by.choice() {
		// The sender keeps to a downgrade of a transfer that ended before this side had
		// counted it.
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
	// Both sides record the same reason.
	m := reasonMessage(wire.ByFD, t.number, briefly(err))
	t.by.downgrade(textOf(m))
	return c.Send(ctx, op, m)
}

// errKeepsDescriptors is the reason of an importer that keeps descriptors to refuse fabric
// handles.
var errKeepsDescriptors = errors.New("the receiver keeps descriptors")

// briefly drops the parts of a refused import that only its caller can use.
func briefly(err error) error {
	var d *cuda.Error
	var why *diagnose.Error
	if errors.As(err, &d) && errors.As(err, &why) {
		return fmt.Errorf("%v: %w", d.Code, why)
	}
	return err
}

// fabricHandlesOf reads the handles of a message that transferOf has checked.
func fabricHandlesOf(m peer.Message) []cuda.FabricHandle {
	b := m.Body[transferHeader+4:]
	all := make([]cuda.FabricHandle, len(b)/len(cuda.FabricHandle{}))
	for i := range all {
		b = b[copy(all[i][:], b):]
	}
	return all
}

// canDowngrade reports whether the driver refused a fabric handle because this process
// cannot use the fabric. Any other result is an error.
func canDowngrade(err error) bool {
	var d *cuda.Error
	return errors.As(err, &d) && d.Call == driver.CallMemImportFromShareableHandle.String() &&
		(d.Code == cuda.Code(driver.NotPermitted) || d.Code == cuda.Code(driver.NotSupported))
}

// textOf returns the reason in a message.
func textOf(m peer.Message) string { return string(m.Body[transferHeader:]) }
