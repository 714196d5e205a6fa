package driver

// Holder is embedded, unexported, by the public objects that stand for a driver. Its method
// is unexported too, so no other module can reach the driver, or implement one.
type Holder struct{ d Driver }

// NewHolder makes the holder.
func NewHolder(d Driver) Holder { return Holder{d} }

func (h *Holder) driver() Driver { return h.d }

// Of returns the driver that a csrc.Driver or a sim.Machine stands for.
func Of(h interface{ driver() Driver }) Driver { return h.driver() }

// Direct is a driver whose entry points C can call.
type Direct interface {
	// EntryPoint returns the address of an entry point, or 0.
	EntryPoint(c Call) uintptr
}
