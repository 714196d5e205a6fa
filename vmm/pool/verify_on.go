//go:build invariants

package pool

import "sync/atomic"

var (
	verified atomic.Uint64
	nested   atomic.Bool // a test runs operations inside of another, which holds the locks of Check
)

// verify checks the pool after every operation; after every hundredth, and so
// on, where it has so many chunks that each check takes long.
func (p *Pool) verify() {
	if nested.Load() {
		return
	}
	const quick = 256
	chunks := p.reserved.Load() / p.gran
	if every := 1 + chunks/quick*chunks; verified.Add(1)%every != 0 {
		return
	}
	if err := p.Check(); err != nil {
		panic(err)
	}
}
