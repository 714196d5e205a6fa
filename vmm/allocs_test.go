//go:build !invariants

package vmm_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// The locks that check their order allocate.
func TestAppendWithinCommittedMemoryAllocatesNothing(t *testing.T) {
	_, d := open(t)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib})
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	require.NoError(t, b.Grow(64*mib))
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if _, err := b.AppendUndefined(64); err != nil {
			t.Error(err)
		}
	}))
}
