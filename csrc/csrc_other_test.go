//go:build !linux || !cgo || !(amd64 || arm64) || cuvmm_nocgo

package csrc_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/stretchr/testify/require"
)

func TestOpenWithoutCgo(t *testing.T) {
	d, err := csrc.Open(csrc.Options{})
	require.Nil(t, d)
	var e *csrc.OpenError
	require.ErrorAs(t, err, &e)
	require.Equal(t, csrc.NoCgo, e.Reason)
	require.ErrorContains(t, err, "CGO_ENABLED=1")
}
