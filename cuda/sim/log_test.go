package sim

import (
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// What failed a call is in the driver's log, in the vendor's form, as much of it as fits.
func TestTheDriverLogsWhyCallsFailed(t *testing.T) {
	r := start(t, Options{})
	before, res := r.LogsCurrent()
	r.ok(res)
	r.is(driver.InvalidValue, r.MemsetD8Async(r.ctx, 0x1000, 0, 4, 0))
	r.is(driver.InvalidValue, r.MemsetD8Async(r.ctx, 0x2000, 0, 4, 0))
	text := make([]byte, 1000)
	after, n, res := r.LogsDumpToMemory(before, text)
	r.ok(res)
	require.Equal(t, before+2, after)
	lines := strings.Split(strings.TrimSuffix(string(text[:n]), "\n"), "\n")
	require.Len(t, lines, 2)
	require.Regexp(t, `^\[\d\d:\d\d:\d\d\.\d\d\d\]\[\d+\]\[CUDA\]\[E\]\[cuMemsetD8Async\] .*illegal address 0x1000: `, lines[0])
	require.Zero(t, text[n])

	_, n, res = r.LogsDumpToMemory(before, text[:len(lines[1])+2])
	r.ok(res)
	require.Equal(t, lines[1]+"\n", string(text[:n]), "the latest that fits")
	_, n, res = r.LogsDumpToMemory(after, text)
	r.ok(res)
	require.Zero(t, n)
	for range mostLogged + 10 {
		r.is(driver.InvalidValue, r.MemsetD8Async(r.ctx, 0x1000, 0, 4, 0))
	}
	_, n, res = r.LogsDumpToMemory(0, make([]byte, 1<<20))
	r.ok(res)
	require.Positive(t, n)
	require.Len(t, r.m.log.lines, mostLogged)
}

// An error says what the driver logged of its call, and of no other.
func TestErrorsSayWhatTheDriverLogged(t *testing.T) {
	for version, logged := range map[int]bool{12080: false, 12090: true} {
		_, sys := Open(t, Options{DriverVersion: version})
		stream, err := sys.Devices()[0].NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		err = stream.Memset(0x1000, 0, 64)
		var e *cuda.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, logged, strings.Contains(e.Logged, "illegal address 0x1000"), e.Logged)
		require.Equal(t, logged, strings.Contains(err.Error(), ` and logged "cuMemsetD8Async on `), err.Error())
		require.NoError(t, stream.Close())
	}
}
