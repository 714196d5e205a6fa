package pool

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/stretchr/testify/require"
)

// lines is a log that goroutines share.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

// since returns what was written since its last call.
func (l *lines) since() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.text.Reset()
	return l.text.String()
}

func TestWatchdog(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	var log lines
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
				require.Empty(t, log.since(), "before %v", after)
				time.Sleep(time.Nanosecond)
				synctest.Wait()
				said := log.since()
				require.Equal(t, 1, strings.Count(said, "\n"), "at %v", after)
				require.Contains(t, said, `level=WARN msg="cuvmm: a capture takes long`)
				require.Contains(t, said, fmt.Sprintf("capture=\"graph 7\" for=%v device=", after))
				require.Contains(t, said, fmt.Sprintf("freed=%d\n", i+1))
				at = after
			}
			w.stop()
			w.stop()
			time.Sleep(time.Hour)
			require.Empty(t, log.since(), "nothing after its end")
		})
		require.NoError(t, p.Close())
	}
}
