//go:build linux && (amd64 || arm64)

package osmem

import (
	"bytes"
	"os"
	"testing"

	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/stretchr/testify/require"
)

// Some mappings are left to the rest of the program: what is refused says how many.
func TestMappingsAreLeft(t *testing.T) {
	limit := func(n int) {
		mappings.Lock()
		defer mappings.Unlock()
		mappings.limit, mappings.counted, mappings.since = n, n, 0
	}
	limit(8)
	t.Cleanup(func() { limit(0) })
	_, err := Alloc(1)
	require.ErrorIs(t, err, errMappings)
	require.Regexp(t, `vm.max_map_count\): it has \d+ of 8, `, err)
	_, err = NewShared("test", host.PageSize())
	require.ErrorIs(t, err, errMappings)
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	limit(bytes.Count(maps, []byte{'\n'}) + mappingsEach + 1) // the kernel would permit it
	_, err = Alloc(1)
	require.ErrorIs(t, err, errMappings)
	limit(-1)
	mem, err := Alloc(1)
	require.NoError(t, err, "an unknown limit is the kernel's")
	limit(8)
	require.NoError(t, Free(mem), "giving back is never refused")
}
