package pool_test

import (
	"flag"
	"os"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm/pool"
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

const (
	kib = 1 << 10
	mib = 1 << 20
)

// open gives a test a machine of its own and its first device.
func open(t testing.TB, o ...sim.Options) (*sim.Machine, *cuda.Device) {
	t.Helper()
	m, s := sim.Open(t, o...)
	return m, s.Devices()[0]
}

func stream(t testing.TB, d *cuda.Device) *cuda.Stream {
	t.Helper()
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// newPool makes a pool that is checked and closed when the test ends.
func newPool(t testing.TB, d *cuda.Device, o pool.Options) *pool.Pool {
	t.Helper()
	if o.Chunk == 0 {
		o.Chunk = 2 * mib // little memory has many
	}
	p, err := pool.New(d, o)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, p.Check())
		require.NoError(t, p.Close())
		require.NoError(t, p.Check())
	})
	return p
}

// alloc is a block, which the test frees.
func alloc(t testing.TB, p *pool.Pool, s *cuda.Stream, bytes int) pool.Block {
	t.Helper()
	b, err := p.Alloc(pool.Request{Bytes: bytes, Stream: s})
	require.NoError(t, err)
	return b
}

func free(t testing.TB, p *pool.Pool, b pool.Block, streams ...*cuda.Stream) {
	t.Helper()
	require.NoError(t, p.Free(b, streams...))
}

// patient lets misses wait until events of idle streams have passed, on a loaded
// machine too.
func patient(t testing.TB) {
	t.Helper()
	t.Cleanup(pool.SetMostLag(10 * time.Second))
}

// hold stops the stream's work until Release, or until the test ends.
func hold(t testing.TB, m *sim.Machine, s *cuda.Stream) {
	t.Helper()
	m.Hold(s.Handle())
	t.Cleanup(func() { m.Release(s.Handle()) })
}

// calls are the driver calls since ResetCounts, without those of Check.
func calls(m *sim.Machine) map[string]int {
	c := m.Counts()
	delete(c, "cuMemGetAccess")
	return c
}

// within fails the test unless f ends in time.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(testTimeout):
		t.Fatal(what)
	}
}
