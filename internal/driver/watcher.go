package driver

// Watcher is a driver that names the mistakes of programs. The library tells it what no work
// may use although it is mapped, which a GPU does not notice.
type Watcher interface {
	// OutOfUse says that work submitted from now on must not use n bytes from an address on,
	// which belong to what in says. They are out of use until InUse.
	OutOfUse(at Ptr, n uint64, in Paged)
	InUse(at Ptr, n uint64)
}

// Paged is a range of addresses that is cut into pages.
type Paged struct {
	Base Ptr
	Page uint64
	Name string
}
