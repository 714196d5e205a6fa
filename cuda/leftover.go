package cuda

// Leftover is something that an operation made and could not give back, because the driver
// refused to take it. It is the library's own: no object of the user stands for it.
type Leftover struct {
	// What it is: "memory", "event".
	What string
	// Bytes of memory that stay allocated.
	Bytes int
	// Device is the ordinal of its device, or -1 if it has none.
	Device int
	// Err is the driver's error at the latest try.
	Err error
}

// Leftovers returns what operations could not give back, the oldest first. The library tries
// it again: by itself with growing pauses, in every Drain, when an allocation finds no
// memory, and in Close, which succeeds only once nothing is left.
func (s *System) Leftovers() []Leftover {
	left := s.core.Leftovers()
	all := make([]Leftover, len(left))
	for i, l := range left {
		all[i] = Leftover{What: l.What, Bytes: l.Bytes, Device: int(l.Device), Err: l.Err}
	}
	return all
}
