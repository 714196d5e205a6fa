package cuda

import (
	"io/fs"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/limits"
)

// ReadDeviceLimits has limits on device memory be read from the files of another machine, until
// restore is called.
func ReadDeviceLimits(root fs.FS) (restore func()) {
	real := readDeviceLimits
	readDeviceLimits = func() (map[string]limits.Limit, error) { return limits.ReadDevices(root) }
	return func() { readDeviceLimits = real }
}

// Shared lets tests open a System as Open does, round a driver of theirs.
type Shared = shared

// OpenShared is Open on p's System instead of the process's.
func OpenShared(p *Shared, d driver.Driver) (*System, error) {
	return p.open(func() (*System, error) { return newSystem(d, Options{}.config(nil)) })
}

// ClosingOf returns the end of the graph's closing, before the functions of OnClose.
func ClosingOf(g *Graph) Completion { return g.g.closer.Completion() }
