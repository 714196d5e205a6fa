package vmm

import (
	"slices"

	"github.com/cuvmm/cuvmm/internal/suspend"
)

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
	StateNames = [states]string{active: "active", moved: "moved", failed: "failed",
		suspending: "suspending", suspended: "suspended", resuming: "resuming"}
	OperationNames = [operations]string{resizing: "resizing", shortening: "shortening", clipping: "clipping", catchingUp: "catchingUp", reclaiming: "reclaiming", moving: "moving",
		forking: "forking", holding: "holding", following: "following", granting: "granting", revoking: "revoking", reading: "reading",
		writing: "writing", hosting: "hosting", exporting: "exporting", sleeping: "sleeping"}
)

// StateOf returns the state of a buffer.
func StateOf(b *Buffer) string {
	if at := b.b.status.State(); at != suspend.Awake {
		return StateNames[asleep[at]]
	}
	return StateNames[b.b.state()]
}

// Allow asks the gate for an operation.
func Allow(b *Buffer, operation string) error {
	return b.b.allow("test", operationOf(operation))
}

func operationOf(name string) operation {
	return operation(slices.Index(OperationNames[:], name))
}

// Refuse lets the gate refuse an operation to active buffers, as if they had been moved.
func Refuse(operation string) (restore func()) {
	o := operationOf(operation)
	gate[active][o], refusals[active] = no, (*buffer).errMoved
	return func() { gate[active][o], refusals[active] = yes, nil }
}

// Verdict returns what the gate says: "no", "yes" or "partly".
func Verdict(state, operation string) string {
	s, o := slices.Index(StateNames[:], state), operationOf(operation)
	return [...]string{no: "no", yes: "yes", partly: "partly"}[gate[s][o]]
}

// Advance has a source ask how far the GPU is, and reports whether anything waits for it.
func Advance(p *Pages) bool { return p.s.Advance() }

// CheckPages returns an error if a source's pages, places and lists contradict each other.
func CheckPages(p *Pages) error { return p.s.Check() }
