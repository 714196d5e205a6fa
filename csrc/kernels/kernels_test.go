package kernels

import (
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// The names are what the text declares, all of them.
func TestEntries(t *testing.T) {
	declared := func(text []byte) (names []string) {
		for _, found := range regexp.MustCompile(`(?m)^\.visible \.entry (\w+)\(`).FindAllSubmatch(text, -1) {
			names = append(names, string(found[1]))
		}
		return names
	}
	require.Equal(t, []string{VectorAdd, Fill, Sum, AliasAdd}, declared(Basic))
	require.Equal(t, []string{Scatter}, declared(Distribute))
}

// The driver's compiler takes nothing but ASCII.
func TestText(t *testing.T) {
	for i, b := range append(Basic[:len(Basic):len(Basic)], Distribute...) {
		require.True(t, b == '\n' || b == '\t' || b >= ' ' && b <= '~', "byte %d is %#x", i, b)
	}
}
