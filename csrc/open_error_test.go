package csrc_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/stretchr/testify/require"
)

func TestReasonsSayWhatToDo(t *testing.T) {
	for r := csrc.NotFound; r <= csrc.NoCgo; r++ {
		require.NotEmpty(t, r.Remedy(), "%v", r)
		require.NotContains(t, r.String(), "Reason(")
		require.EqualError(t, &csrc.OpenError{Reason: r}, r.String()+": "+r.Remedy())
	}
	require.Equal(t, "Reason(0)", csrc.Reason(0).String())
	require.Equal(t, "Reason(8)", csrc.Reason(8).String())
}
