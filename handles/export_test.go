package handles

// DropKept closes the descriptors that are kept for the driver's sake, so that a
// benchmark finds the driver as a program does that shares nothing yet.
func DropKept() {
	kept.mu.Lock()
	defer kept.mu.Unlock()
	kept.drop()
}
