package multicast

// Closing reports whether Close was called.
func (b *Binding) Closing() bool { return b.closer.Closed() }
