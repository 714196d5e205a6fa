package pooltest_test

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	_ "github.com/cuvmm/cuvmm/internal/test/gputest" // with it, another library captures beside each test
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/cuvmm/cuvmm/vmm/pool/pooltest"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// recorder is a test that does not fail.
type recorder struct {
	cleanups []func()
	errors   []string
	fatal    string
}

func (r *recorder) Helper()          {}
func (r *recorder) Cleanup(f func()) { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Errorf(format string, a ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, a...))
}
func (r *recorder) Fatalf(format string, a ...any) { r.fatal = fmt.Sprintf(format, a...) }

func (r *recorder) end() {
	for i := len(r.cleanups) - 1; i >= 0; i-- {
		r.cleanups[i]()
	}
}

// start gives a stream of a machine of the test's own, which fails the test for
// whatever the pool would leave.
func start(t *testing.T) *cuda.Stream {
	t.Helper()
	_, s := sim.Open(t)
	st, err := s.Devices()[0].NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, st.Close()) })
	return st
}

func take(t *testing.T, p *pool.Pool, s *cuda.Stream, bytes int, tag pool.Tag) pool.Block {
	t.Helper()
	b, err := p.Alloc(pool.Request{Bytes: bytes, Stream: s, Tag: tag})
	require.NoError(t, err)
	return b
}

func TestEverythingCameBack(t *testing.T) {
	s := start(t)
	var r recorder
	p := pooltest.New(&r, s.Device(), pool.Options{})
	require.NoError(t, p.Free(take(t, p, s, 1000, 0)))
	r.end()
	require.Empty(t, r.errors)
	_, err := p.Alloc(pool.Request{Bytes: 1, Stream: s})
	require.ErrorIs(t, err, cuda.ErrClosed)
}

func TestLeaks(t *testing.T) {
	s := start(t)
	var r recorder
	p := pooltest.New(&r, s.Device(), pool.Options{})
	tag := pool.NewTag("kv")
	_, file, line, ok := runtime.Caller(0)
	require.True(t, ok)
	for range 3 {
		_, err := p.Alloc(pool.Request{Bytes: 100, Stream: s})
		require.NoError(t, err)
	}
	b, err := p.Alloc(pool.Request{Bytes: 5 << 20, Stream: s, Tag: tag})
	require.NoError(t, err)

	require.True(t, pooltest.Check(&r, p))
	require.Len(t, r.errors, 2)
	want := fmt.Sprintf("pooltest: not freed: a block of 5242880 bytes at %v, allocated at %s:%d (", b.Ptr(), file, line+6)
	require.True(t, strings.HasPrefix(r.errors[0], want), "%s\n%s", r.errors[0], want)
	require.Contains(t, r.errors[0], `TestLeaks) for "kv"`)
	require.Contains(t, r.errors[1], "3 blocks of 300 bytes in all, the first at 0x")
	require.Contains(t, r.errors[1], fmt.Sprintf("pooltest_test.go:%d ", line+3))

	r.errors = nil
	r.end()
	require.Len(t, r.errors, 2, "and nothing that follows from it")
}

func TestCheckWithoutStacks(t *testing.T) {
	s := start(t)
	p, err := pool.New(s.Device(), pool.Options{})
	require.NoError(t, err)
	b := take(t, p, s, 100, 0)
	var r recorder
	require.True(t, pooltest.Check(&r, p))
	require.Len(t, r.errors, 1)
	require.Contains(t, r.errors[0], "without Options.Track")
	require.NoError(t, p.Free(b))
	r.errors = nil
	require.False(t, pooltest.Check(&r, p))
	require.Empty(t, r.errors)
	require.NoError(t, p.Close())
}

func TestOptionsThatAreRefused(t *testing.T) {
	s := start(t)
	var r recorder
	require.Nil(t, pooltest.New(&r, s.Device(), pool.Options{Chunk: 3}))
	require.Contains(t, r.fatal, "Options.Chunk")
	require.Empty(t, r.cleanups)
}
