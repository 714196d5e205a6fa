package core_test

import (
	"bytes"
	"log/slog"
	"runtime"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/stretchr/testify/require"
)

func TestLiveObjectsAreCountedAndNamed(t *testing.T) {
	for _, trace := range []bool{false, true} {
		_, s, _ := system(t, core.Config{TraceLeaks: trace})
		var a, b core.Object
		construct(s, &a, 2<<20)
		construct(s, &b, 1000)
		n, size := s.LiveCount(core.KindBuffer)
		require.Equal(t, 2, n)
		require.Equal(t, 2<<20+1000, size)
		b.Resize(3000)
		a.Resize(1 << 20)
		_, size = s.LiveCount(core.KindBuffer)
		require.Equal(t, 1<<20+3000, size)
		live := s.LiveObjects()
		require.Len(t, live, 2)
		require.Contains(t, live[0], "buffer of 1 MiB")
		require.Contains(t, live[1], "buffer of 3000 bytes")
		require.Equal(t, trace, bytes.Contains([]byte(live[0]), []byte("TestLiveObjectsAreCountedAndNamed")))
		require.ErrorContains(t, s.InUse(), "live objects: buffer of 1 MiB")
		a.Untrack()
		a.Untrack()
		b.Untrack()
		n, size = s.LiveCount(core.KindBuffer)
		require.Zero(t, n)
		require.Zero(t, size)
		require.True(t, s.Retire())
	}
}

// channel is a log that another goroutine may write.
type channel chan string

func (c channel) Write(p []byte) (int, error) {
	c <- string(p)
	return len(p), nil
}

// construct stands for a constructor, which a stack need not show.
func construct(s *core.System, o *core.Object, size uint64) { s.Track(o, core.KindBuffer, size) }

func TestALostShellIsReportedAndAClosedOneIsNot(t *testing.T) {
	lines := make(chan string, 4)
	_, s, _ := system(t, core.Config{Log: slog.New(slog.NewTextHandler(channel(lines), nil))})
	type shell struct{ watched core.Watched }
	lost, closed := new(core.Object), new(core.Object)
	s.Track(lost, core.KindEvent, 0)
	s.Track(closed, core.KindEvent, 0)
	func() {
		a, b := &shell{}, &shell{}
		a.watched.Begin(lost)
		b.watched.Begin(closed)
		closed.Untrack()
		b.watched.Stop()
		b.watched.Stop()
	}()
	for deadline := time.Now().Add(10 * time.Second); len(lines) == 0 && time.Now().Before(deadline); {
		runtime.GC()
		time.Sleep(time.Millisecond)
	}
	require.Len(t, lines, 1)
	require.Contains(t, <-lines, "an object was lost without Close")
	require.Equal(t, 1, s.LostCount())
	require.Len(t, s.LiveObjects(), 1, "it stays")
	closed.Lost()
	require.Equal(t, 1, s.LostCount(), "an object that was closed since is not lost")
	lost.Untrack()
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

func TestEveryKindHasAName(t *testing.T) {
	seen := map[string]bool{}
	for k := core.KindReservation; k <= core.KindGraph; k++ {
		require.NotEmpty(t, k.String())
		require.False(t, seen[k.String()])
		seen[k.String()] = true
	}
}

func TestCountsAreWrittenForPeople(t *testing.T) {
	require.Equal(t, "1 mapping", errs.Count(1, "mapping"))
	require.Equal(t, "0 mappings", errs.Count(0, "mapping"))
	require.Equal(t, "2 mappings", errs.Count(uint64(2), "mapping"))
	require.Equal(t, "1 byte", errs.Bytes(1))
	require.Equal(t, "1 KiB", errs.Bytes(1024))
	require.Equal(t, "1025 bytes", errs.Bytes(1025))
}
