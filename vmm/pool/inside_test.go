package pool

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/epoch"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A block that was freed stays stale however often its memory comes and goes: a
// quick stream counts to 32 bits within minutes.
func TestGenerationsDoNotComeRoundAgain(t *testing.T) {
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	p, err := New(d, Options{})
	require.NoError(t, err)
	b, err := p.Alloc(Request{Bytes: 100, Stream: s})
	require.NoError(t, err)
	require.NoError(t, p.Free(b))
	for range 1 << 8 {
		b.h.gen += 1 << 24
	}
	again, err := p.Alloc(Request{Bytes: 100, Stream: s})
	require.NoError(t, err)
	require.Equal(t, b.h, again.h)
	require.ErrorIs(t, p.Free(b), cuda.ErrClosed)
	require.NoError(t, p.Free(again))
	require.NoError(t, p.Close())
	require.NoError(t, s.Close())
}

// A capture that waits for workspaces that are being closed does not hold up their
// Close.
func TestWorkspacesAreLockedBeforeThePool(t *testing.T) {
	m, sys := sim.Open(t)
	d := sys.Devices()[0]
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	p, err := New(d, Options{})
	require.NoError(t, err)
	ws, err := p.Prepare(s)
	require.NoError(t, err)
	graph := make(chan *cuda.Graph)
	ws.mu.Lock() // as Close has it
	go func() {
		g, _, err := p.Capture(s, CaptureOptions{Workspaces: ws}, func() error { return nil })
		assert.NoError(t, err)
		graph <- g
	}()
	for m.Count("cuStreamBeginCapture") == 0 {
		time.Sleep(time.Millisecond)
	}
	for range 20 {
		time.Sleep(time.Millisecond)
		require.Eventually(t, func() bool {
			if p.mu.TryLock() {
				p.mu.Unlock()
				return true
			}
			return false
		}, time.Minute, time.Millisecond, "the pool is locked by a capture that waits")
	}
	ws.mu.Unlock()
	g := <-graph
	require.NoError(t, g.Close())
	require.NoError(t, ws.Close())
	require.NoError(t, p.Close())
	require.NoError(t, s.Close())
}

// A request gives up when other requests take the memory each time.
func TestARequestThatComesTooLateEachTimeGivesUp(t *testing.T) {
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	p, err := New(d, Options{})
	require.NoError(t, err)
	b, err := p.Alloc(Request{Bytes: 100, Stream: s})
	require.NoError(t, err)
	r := escalation{p: p, sh: b.h.home.shard, seen: p.passes.Load() + 1} // something passed since
	r.lagging = backoff{looks: 2 * idleLooks, since: time.Now().Add(-time.Hour)}
	r.lock()
	require.True(t, r.catchUp())
	require.Zero(t, r.lagging, "what was waited for in vain begins anew when the GPU has moved on")
	r.lagged = r.lagged.Add(-2 * time.Second)
	require.False(t, r.catchUp())
	r.unlock()
	require.NoError(t, p.Free(b))
	require.NoError(t, p.Close())
	require.NoError(t, s.Close())
}

// A request that waits for another stream asks the driver about its event once a look.
func TestWhatIsInFlightIsAskedOnce(t *testing.T) {
	m, sys := sim.Open(t)
	d := sys.Devices()[0]
	busy, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	p, err := New(d, Options{})
	require.NoError(t, err)
	b, err := p.Alloc(Request{Bytes: 100, Stream: s})
	require.NoError(t, err)
	late, err := p.Alloc(Request{Bytes: 64 << 20, Stream: busy})
	require.NoError(t, err)
	m.Hold(busy.Handle())
	require.NoError(t, busy.Memset(late.Ptr(), 1, 1))
	require.NoError(t, p.Free(late))

	sh, behind := b.h.home.shard, &late.h.home.shard.clock
	require.Equal(t, []*epoch.Clock{behind}, p.lag(sh))
	m.ResetCounts()
	require.Equal(t, []*epoch.Clock{behind}, p.lag(sh))
	require.False(t, p.pollStreams(p.offering(sh)))
	require.Equal(t, 1, m.Count("cuEventQuery"))

	m.Release(busy.Handle())
	require.NoError(t, p.Free(b))
	require.NoError(t, p.Close())
	require.NoError(t, busy.Close())
	require.NoError(t, s.Close())
}

// Driver calls on a region take turns: one that waits comes before the next piece of the one
// that is under way.
func TestPiecesTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &region{turn: make(chan struct{}, 1)}
		var order []string
		piece := func(name string) error {
			return r.inTurn(func() error {
				order = append(order, name)
				if len(order) == 1 {
					go func() {
						_ = r.inTurn(func() error {
							order = append(order, "small")
							return nil
						})
					}()
					synctest.Wait() // until that waits
				}
				return nil
			})
		}
		for range 3 {
			require.NoError(t, piece("large"))
		}
		require.Equal(t, []string{"large", "small", "large", "large"}, order)
		require.ErrorIs(t, r.inTurn(func() error { return cuda.ErrClosed }), cuda.ErrClosed)
	})
}
