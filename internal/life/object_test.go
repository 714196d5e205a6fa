package life_test

import (
	"bytes"
	"log/slog"
	"runtime"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/stretchr/testify/require"
)

func TestLiveObjectsAreCountedAndNamed(t *testing.T) {
	for _, trace := range []bool{false, true} {
		l := list(slog.DiscardHandler, trace)
		var a, b life.Object
		construct(l, &a, 2<<20)
		construct(l, &b, 1000)
		n, size := l.Count(life.KindBuffer)
		require.Equal(t, 2, n)
		require.Equal(t, 2<<20+1000, size)
		b.SetBytes(3000)
		a.SetBytes(1 << 20)
		_, size = l.Count(life.KindBuffer)
		require.Equal(t, 1<<20+3000, size)
		live := l.Describe()
		require.Len(t, live, 2)
		require.Contains(t, live[0], "buffer of 1 MiB")
		require.Contains(t, live[1], "buffer of 3000 bytes")
		require.Equal(t, trace, bytes.Contains([]byte(live[0]), []byte("TestLiveObjectsAreCountedAndNamed")))
		some, all := l.DescribeBriefly(1)
		require.Equal(t, 2, all)
		require.Len(t, some, 1)
		require.Contains(t, some[0], "buffer of 1 MiB")
		require.False(t, l.IfEmpty(func() bool { return true }))
		a.Untrack()
		a.Untrack()
		b.Untrack()
		n, size = l.Count(life.KindBuffer)
		require.Zero(t, n)
		require.Zero(t, size)
		require.False(t, l.IfEmpty(func() bool { return false }))
		require.True(t, l.IfEmpty(func() bool { return true }))
	}
}

// channel is a log that another goroutine may write.
type channel chan string

func (c channel) Write(p []byte) (int, error) {
	c <- string(p)
	return len(p), nil
}

func list(log slog.Handler, trace bool) *life.List {
	l := new(life.List)
	l.Init(slog.New(log), trace)
	return l
}

// construct stands for a constructor, which a stack need not show.
func construct(l *life.List, o *life.Object, size uint64) { l.Add(o, life.KindBuffer, size, 1) }

func TestALostHandleIsReportedAndAClosedOneIsNot(t *testing.T) {
	lines := make(chan string, 4)
	l := list(slog.NewTextHandler(channel(lines), nil), false)
	type handle struct{ watched life.Watched }
	lost, closed := new(life.Object), new(life.Object)
	l.Add(lost, life.KindEvent, 0, 0)
	l.Add(closed, life.KindEvent, 0, 0)
	func() {
		a, b := &handle{}, &handle{}
		lost.Watch(&a.watched)
		closed.Watch(&b.watched)
		closed.Untrack()
		b.watched.Stop()
		b.watched.Stop()
	}()
	for deadline := time.Now().Add(time.Minute); len(lines) == 0 && time.Now().Before(deadline); {
		runtime.GC()
		time.Sleep(time.Millisecond)
	}
	require.Len(t, lines, 1)
	require.Contains(t, <-lines, "an object was lost without Close")
	require.Equal(t, 1, l.Lost())
	require.Len(t, l.Describe(), 1, "it stays")
	closed.Lost()
	require.Equal(t, 1, l.Lost(), "an object that was closed since is not lost")
	lost.Untrack()
}

func TestEveryKindHasAName(t *testing.T) {
	seen := map[string]bool{}
	for k := life.KindReservation; k <= life.KindGraph; k++ {
		require.NotEmpty(t, k.String())
		require.False(t, seen[k.String()])
		seen[k.String()] = true
	}
}
