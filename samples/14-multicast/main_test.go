package main

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/internal/test/sampletest"
)

func TestMain(m *testing.M)   { sampletest.Main(m, main) }
func TestSample(t *testing.T) { sampletest.Test(t, sample.Name, sample.Test) }

func TestSampleNoticesWrongNorms(t *testing.T) {
	require.NoError(t, check([]float64{3, 3}, 3))
	require.EqualError(t, check([]float64{3, 4}, 3), "device 1 has the norm 4, not 3")
	require.Error(t, check([]float64{math.NaN()}, 3))
}
