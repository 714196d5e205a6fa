package managed_test

import (
	"flag"
	"os"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// CI explores the same random cases every time; elsewhere each run explores new
// ones.
func TestMain(m *testing.M) {
	if os.Getenv("CI") != "" {
		if err := flag.Set("rapid.seed", "20261121"); err != nil {
			panic(err)
		}
	}
	goleak.VerifyTestMain(m)
}

const mib = 1 << 20

// open gives a test a machine of its own and its first device. Everything must
// be closed when the test ends.
func open(t testing.TB, o ...sim.Options) (*sim.Machine, *cuda.Device) {
	t.Helper()
	m, s := sim.Open(t, o...)
	return m, s.Devices()[0]
}

// devices describes a machine of n of them.
func devices(n int) sim.Options { return sim.Options{Devices: make([]sim.DeviceOptions, n)} }

// another is the device in a System of its own, round the same driver.
func another(t testing.TB, d *cuda.Device) *cuda.Device {
	t.Helper()
	sys, err := gputest.Wrap(core.SystemOf(d.System()).Drv, nil)
	require.NoError(t, err)
	closed(t, sys)
	return sys.Devices()[0]
}

type closer interface{ Close() error }

func closed(t testing.TB, c closer) {
	t.Helper()
	t.Cleanup(func() { require.NoError(t, c.Close()) })
}

func stream(t testing.TB, d *cuda.Device) *cuda.Stream {
	t.Helper()
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	closed(t, s)
	return s
}

// legacy is the legacy default stream, borrowed.
func legacy(t testing.TB, d *cuda.Device) *cuda.Stream {
	t.Helper()
	s, err := d.BorrowStream(0)
	require.NoError(t, err)
	closed(t, s)
	return s
}

func buffer(t testing.TB, d *cuda.Device, n int, o ...managed.Options) *managed.Buffer {
	t.Helper()
	b, err := managed.New(d, n, append(o, managed.Options{})[0])
	require.NoError(t, err)
	closed(t, b)
	return b
}

// pattern is n bytes that differ from place to place.
func pattern(n, seed int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i*7 + i>>8*13 + i>>16*29 + seed)
	}
	return p
}
