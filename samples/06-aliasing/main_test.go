package main

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/internal/test/sampletest"
)

func TestMain(m *testing.M)   { sampletest.Main(m, main) }
func TestSample(t *testing.T) { sampletest.Test(t, sample.Name, sample.Test) }

func TestSampleNoticesWrongElements(t *testing.T) {
	got := binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, 5), 6)
	require.NoError(t, compare(got, 5))
	require.EqualError(t, compare(got, 4), "element 0 is 5, not 4")
	binary.NativeEndian.PutUint32(got[4:], 9)
	require.EqualError(t, compare(got, 5), "element 1 is 9, not 6")
}
