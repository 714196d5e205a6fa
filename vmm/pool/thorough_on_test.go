//go:build invariants

package pool_test

// thorough: every operation ends with the consistency check, so long tests are
// cut short.
const thorough = true
