package core_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/stretchr/testify/require"
)

func TestShown(t *testing.T) {
	_, s, _ := system(t, core.Config{})
	hide := s.Show("a")
	hideSame := s.Show("a")
	require.Equal(t, []any{"a", "a"}, s.Shown())
	hide()
	hide()
	require.Equal(t, []any{"a"}, s.Shown())
	hideSame()
	require.Empty(t, s.Shown())
}
