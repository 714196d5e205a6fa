package pool_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

func TestAllocationsAsNodesOfTheGraph(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s := stream(t, d)
		p := newPool(t, d, pool.Options{Statistics: true, Track: true})
		out := alloc(t, p, s, 100)
		var left pool.Block
		var segments []pool.Segment
		g, st := captured(t, p, s, pool.CaptureOptions{Nodes: true}, func() error {
			b, err := p.Alloc(pool.Request{Bytes: 3 * mib, Stream: s})
			if err != nil {
				return err
			}
			if left, err = p.Alloc(pool.Request{Bytes: 1000, Stream: s}); err != nil {
				return err
			}
			found, ok := p.Find(b.Ptr())
			require.True(t, ok)
			require.Equal(t, b, found)
			require.NoError(t, p.Check())
			segments = p.Snapshot().Segments
			return errors.Join(s.Memset(b.Ptr(), 5, 3*mib), s.Copy(left.Ptr(), b.Ptr(), 100), s.Copy(out.Ptr(), left.Ptr(), 100), p.Free(b))
		})
		require.Equal(t, 2, st.Served)
		require.Len(t, segments, 1, "nodes are no memory of the pool")
		require.Zero(t, st.Grown, "the driver serves them")
		require.ErrorIs(t, p.Free(left), cuda.ErrClosed, "the end of the capture freed it")
		require.Equal(t, 1, p.Stats().Blocks)
		for range 2 {
			require.NoError(t, g.Launch(s))
			got := make([]byte, 100)
			require.NoError(t, s.Download(got, out.Ptr()))
			require.Equal(t, bytes.Repeat([]byte{5}, 100), got)
		}
		require.NoError(t, g.Close())
		free(t, p, out)
	})
}

// A node that other streams of the capture use is freed behind all of them.
func TestANodeThatAnotherStreamUses(t *testing.T) {
	for seed := range uint64(20) {
		m, d := open(t, sim.Options{Seed: seed})
		s, side := stream(t, d), stream(t, d)
		fork, joined := event(t, d), event(t, d)
		p := newPool(t, d, pool.Options{})
		g, _ := captured(t, p, s, pool.CaptureOptions{Nodes: true}, func() error {
			b, err := p.Alloc(pool.Request{Bytes: 3 * mib, Stream: s})
			if err != nil {
				return err
			}
			return errors.Join(fork.Record(s), side.Wait(fork), side.Memset(b.Ptr(), 1, 3*mib), p.Free(b, side), joined.Record(side), s.Wait(joined))
		})
		require.NoError(t, g.Launch(s))
		require.NoError(t, s.Synchronize(), m.Fault())
		require.NoError(t, g.Close())
	}
}

// If the stream of a node is closed, the pool makes no driver call for it.
func TestANodeWhoseStreamIsGone(t *testing.T) {
	m, d := open(t)
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	p := newPool(t, d, pool.Options{})
	_, end := captureElsewhere(t, s)
	c, err := p.BeginCapture(s, pool.CaptureOptions{Nodes: true})
	require.NoError(t, err)
	b, left := alloc(t, p, s, 100), alloc(t, p, s, 100)
	end()
	require.NoError(t, s.Close())
	require.ErrorIs(t, p.Free(b), cuda.ErrClosed)
	_, err = c.End()
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.ErrorIs(t, p.Free(left), cuda.ErrClosed)
	require.Zero(t, m.Count("cuMemFreeAsync"))
	require.NoError(t, c.Close())
}

// Nodes are freed while the capture that they belong to goes on, however its body
// ends.
func TestNodesAreFreedBeforeAPanicEndsTheCapture(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	var made []string
	m.OnCall(func(call string) {
		if call == "cuMemFreeAsync" || call == "cuStreamEndCapture" {
			made = append(made, call)
		}
	})
	require.Panics(t, func() {
		_, _, _ = p.Capture(s, pool.CaptureOptions{Nodes: true}, func() error {
			alloc(t, p, s, 100)
			panic("no")
		})
	})
	m.OnCall(nil)
	require.Equal(t, []string{"cuMemFreeAsync", "cuStreamEndCapture"}, made)
	require.Zero(t, p.Stats().Blocks)
}
