package vmm

import "slices"

// Look is what Mapping.Host does once it holds the mapping.
func Look(m *Mapping) error {
	v, err := m.m.View("test", &m.m.closer.Life)
	if err == nil {
		m.m.Range.Views.Close(v)
	}
	return err
}

// The names of what the gate knows.
var (
	StateNames     = [states]string{active: "active", moved: "moved", failed: "failed"}
	OperationNames = [operations]string{resizing: "resizing", clipping: "clipping", reclaiming: "reclaiming", moving: "moving",
		forking: "forking", holding: "holding", following: "following", granting: "granting", reading: "reading",
		writing: "writing", hosting: "hosting", exporting: "exporting"}
)

// StateOf returns the state of a buffer.
func StateOf(b *Buffer) string { return StateNames[b.b.state()] }

// Refuse lets the gate refuse an operation to active buffers, as if they had been moved.
func Refuse(operation string) (restore func()) {
	o := slices.Index(OperationNames[:], operation)
	gate[active][o], refusals[active] = no, (*buffer).errMoved
	return func() { gate[active][o], refusals[active] = yes, nil }
}

// Verdict returns what the gate says: "no", "yes" or "partly".
func Verdict(state, operation string) string {
	s, o := slices.Index(StateNames[:], state), slices.Index(OperationNames[:], operation)
	return [...]string{no: "no", yes: "yes", partly: "partly"}[gate[s][o]]
}
