package kernels

import (
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// The names are what the text declares, all of them.
func TestEntries(t *testing.T) {
	var declared []string
	for _, found := range regexp.MustCompile(`(?m)^\.visible \.entry (\w+)\(`).FindAllSubmatch(Basic, -1) {
		declared = append(declared, string(found[1]))
	}
	require.Equal(t, []string{VectorAdd, Fill, Sum, AliasAdd}, declared)
}

// The driver's compiler takes nothing but ASCII.
func TestText(t *testing.T) {
	for i, b := range Basic {
		require.True(t, b == '\n' || b == '\t' || b >= ' ' && b <= '~', "byte %d is %#x", i, b)
	}
}
