package errs_test

import (
	"errors"
	"testing"

	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/stretchr/testify/require"
)

func TestALineHasWhatThereIs(t *testing.T) {
	kind, cause := errors.New("out of memory"), errors.New("no chunk")
	require.Equal(t, "vmm.Create: out of memory: 2 MiB: no chunk; free some", errs.Line("vmm.Create", kind, "2 MiB", cause, "free some"))
	require.Equal(t, "vmm.Create: 2 MiB", errs.Line("vmm.Create", nil, "2 MiB", nil, ""))
	require.Equal(t, []error{kind, cause}, errs.Unwrap(kind, cause))
	require.Equal(t, []error{cause}, errs.Unwrap(nil, cause))
	require.Empty(t, errs.Unwrap(nil, nil))
}

func TestTwoErrorsAreOneLine(t *testing.T) {
	kind, cause := errors.New("out of memory"), errors.New("no chunk")
	got := errs.Both(kind, cause)
	require.EqualError(t, got, "out of memory; then no chunk")
	require.ErrorIs(t, got, kind)
	require.ErrorIs(t, got, cause)
	require.Equal(t, kind, errs.Both(kind, nil))
	require.Equal(t, kind, errs.Both(nil, kind))
	require.NoError(t, errs.Both(nil, nil))
}

func TestUnits(t *testing.T) {
	for n, text := range map[int]string{0: "0 bytes", 1: "1 byte", 1000: "1000 bytes", 1024: "1 KiB", 1536: "1536 bytes", 1536 << 10: "1.5 MiB", 2304 << 10: "2.25 MiB", 2052 << 10: "2052 KiB", 262140 << 10: "255.99 MiB", 262145 << 10: "256.00 MiB", 3 << 20: "3 MiB", 1 << 50: "1 PiB"} {
		require.Equal(t, text, errs.Bytes(n))
	}
	require.Equal(t, "1 mapping", errs.Count(1, "mapping"))
	require.Equal(t, "0 mappings", errs.Count(0, "mapping"))
}

func TestNamesOfValues(t *testing.T) {
	for v, want := range map[int32]string{-1: "Kind(-1)", 0: "zero", 1: "Kind(1)", 2: "two", 3: "Kind(3)"} {
		require.Equal(t, want, errs.Name("Kind", v, []string{0: "zero", 2: "two"}))
	}
}

func TestBytesAreExact(t *testing.T) {
	for n, says := range map[uint64]string{
		0: "0 bytes", 1: "1 byte", 1023: "1023 bytes", 1024: "1 KiB", 1025: "1025 bytes", 2 << 20: "2 MiB", 3 << 30: "3 GiB",
		1<<40 + 1<<30: "1025 GiB", 5 << 50: "5 PiB", 1 << 60: "1024 PiB",
	} {
		require.Equal(t, says, errs.Bytes(n))
	}
	require.Equal(t, "-2 KiB", errs.Bytes(-2048))
}

func TestCountsAreWrittenForPeople(t *testing.T) {
	require.Equal(t, "1 mapping", errs.Count(1, "mapping"))
	require.Equal(t, "0 mappings", errs.Count(0, "mapping"))
	require.Equal(t, "2 mappings", errs.Count(uint64(2), "mapping"))
	require.Equal(t, "1 byte", errs.Bytes(1))
	require.Equal(t, "1 KiB", errs.Bytes(1024))
	require.Equal(t, "1025 bytes", errs.Bytes(1025))
}
