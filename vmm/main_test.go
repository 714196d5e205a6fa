package vmm_test

import (
	"flag"
	"os"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// CI explores the same random cases every time, so that what it says is about
// the change; elsewhere each run explores new ones.
func TestMain(m *testing.M) {
	if os.Getenv("CI") != "" {
		if err := flag.Set("rapid.seed", "20261121"); err != nil {
			panic(err)
		}
	}
	goleak.VerifyTestMain(m)
}

const mib = 1 << 20

// testOp is the operation that tests say they are.
const testOp = "test"

// open gives a test a machine of its own and its first device. Everything must
// be closed when the test ends.
func open(t testing.TB, o ...sim.Options) (*sim.Machine, *cuda.Device) {
	t.Helper()
	m, s := sim.Open(t, o...)
	d, err := s.Device(0)
	require.NoError(t, err)
	return m, d
}

func stream(t testing.TB, d *cuda.Device) *cuda.Stream {
	t.Helper()
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

type closer interface{ Close() error }

func closed(t testing.TB, c closer) {
	t.Helper()
	t.Cleanup(func() { require.NoError(t, c.Close()) })
}

// pattern is n bytes that differ from place to place.
func pattern(n, seed int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i*7 + i>>8*13 + i>>16*29 + i>>24*31 + seed)
	}
	return p
}
