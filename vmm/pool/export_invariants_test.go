//go:build invariants

package pool

// Nested runs operations inside of another operation, which holds the locks that Check takes:
// they end without it.
func Nested(f func()) {
	nested.Store(true)
	defer nested.Store(false)
	f()
}
