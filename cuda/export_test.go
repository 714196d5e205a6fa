package cuda

import (
	"github.com/cuvmm/cuvmm/internal/driver"
)

// Shared lets tests open a System as Open does, round a driver of theirs.
type Shared = shared

// OpenShared is Open on p's System instead of the process's.
func OpenShared(p *Shared, d driver.Driver) (*System, error) {
	return p.open(func() (*System, error) { return newSystem(d, Options{}.config(nil)) })
}

// ClosingOf returns the end of the graph's closing, before the functions of OnClose.
func ClosingOf(g *Graph) Completion { return g.g.closer.Completion() }
