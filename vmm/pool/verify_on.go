//go:build invariants

package pool

// verify checks the pool after every operation.
func (p *Pool) verify() {
	if err := p.Check(); err != nil {
		panic(err)
	}
}
