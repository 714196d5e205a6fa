//go:build !invariants

package pool_test

const thorough = false
