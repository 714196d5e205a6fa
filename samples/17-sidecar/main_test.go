//go:build linux

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/stretchr/testify/require"
)

// The sample runs itself again as its other processes, which in a test is the test.
func TestMain(m *testing.M) {
	if app.Started() {
		main()
		return
	}
	os.Exit(m.Run())
}

func TestSampleGoesOnWithoutItsPublisher(t *testing.T) {
	var out strings.Builder
	require.NoError(t, sample.Test(t.Context(), nil, []string{"-driver", "sim"}, nil, &out))
	require.Contains(t, out.String(), "kills the publisher")
	require.Contains(t, out.String(), "goes on after")
	require.Contains(t, out.String(), "at the same address: true")
}
