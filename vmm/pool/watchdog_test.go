package pool

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/testlog"
	"github.com/stretchr/testify/require"
)

func TestWatchdog(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	var log testlog.Log
	s, err := m.Open(cuda.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	defer func() {
		require.NoError(t, s.Close())
		require.NoError(t, m.Close())
	}()
	for _, c := range []struct {
		limit time.Duration
		after []time.Duration // when it is reported
	}{
		{0, []time.Duration{time.Minute, 2 * time.Minute, 4 * time.Minute}},
		{time.Second, []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second}},
		{-1, nil},
	} {
		p, err := New(s.Devices()[0], Options{CaptureLimit: c.limit})
		require.NoError(t, err)
		synctest.Test(t, func(t *testing.T) {
			freed := 0
			w := p.watchOver("graph 7", func() []any { freed++; return []any{"freed", freed} })
			at := time.Duration(0)
			for i, after := range c.after {
				time.Sleep(after - at - time.Nanosecond)
				synctest.Wait()
				require.Empty(t, log.Take(), "before %v", after)
				time.Sleep(time.Nanosecond)
				synctest.Wait()
				said := log.Take()
				require.Equal(t, 1, strings.Count(said, "\n"), "at %v", after)
				require.Contains(t, said, `level=WARN msg="cuvmm: a capture takes long`)
				require.Contains(t, said, fmt.Sprintf("capture=\"graph 7\" for=%v device=", after))
				require.Contains(t, said, fmt.Sprintf("freed=%d\n", i+1))
				at = after
			}
			w.stop()
			w.stop()
			time.Sleep(time.Hour)
			require.Empty(t, log.Take(), "nothing after its end")
		})
		require.NoError(t, p.Close())
	}
}
