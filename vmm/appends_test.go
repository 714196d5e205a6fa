package vmm_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/gputest"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// What is announced lies behind the appends of all goroutines, and what was
// announced is not waited for again.
func TestAPublicationKnowsWhoAppended(t *testing.T) {
	_, d := open(t)
	first, second, gone := stream(t, d), stream(t, d), stream(t, d)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib})
	require.NoError(t, err)
	closed(t, b)
	expect := func(h share.Hold, n int, streams ...*cuda.Stream) (mark uint64) {
		t.Helper()
		have, on, mark := h.Appended()
		require.EqualValues(t, n, have)
		want := []*core.Stream{}
		for _, s := range streams {
			want = append(want, core.StreamOf(s))
		}
		require.ElementsMatch(t, want, on)
		return mark
	}
	put := func(s *cuda.Stream, n int) { require.NoError(t, gputest.Err(b.Append(s, make([]byte, n)))) }
	put(first, 10)
	h, err := share.Of(b).Hold(testOp, "a test", 0)
	require.NoError(t, err)
	defer h.Release()
	expect(h, 10, first)
	put(second, 10)
	put(nil, 10) // is done
	mark := expect(h, 30, first, second)
	put(second, 10)
	h.Announced(mark)
	expect(h, 40, second)
	require.NoError(t, gputest.Err(b.Append(first, nil)))
	expect(h, 40, second)
	require.NoError(t, b.Resize(first, 50))
	mark = expect(h, 50, first, second)

	other, err := share.Of(b).Hold(testOp, "another", 0)
	require.NoError(t, err)
	defer other.Release()
	h.Announced(mark)
	h.Announced(0)
	expect(h, 50)
	expect(other, 50, first, second)

	put(gone, 1)
	require.NoError(t, gone.Close())
	put(first, 1)
	expect(h, 52, first)
	// A shorter buffer's next appends are new, too.
	h.Announced(expect(h, 52, first))
	require.NoError(t, b.Resize(nil, 5))
	put(second, 1)
	expect(h, 6, second)
}

// What is on its way to a buffer is on its way to those that are made from it, and so
// is what a fork copies.
func TestAPublicationKnowsWhatCameBeforeAMoveOrFork(t *testing.T) {
	_, d := open(t)
	first, second := stream(t, d), stream(t, d)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib})
	require.NoError(t, err)
	closed(t, b)
	require.NoError(t, gputest.Err(b.Append(first, make([]byte, 10))))
	fork, err := b.Fork(second, 10, vmm.ForkOptions{})
	require.NoError(t, err)
	closed(t, fork)
	moved, err := b.Move(vmm.MoveOptions{Reserve: 64 * mib})
	require.NoError(t, err)
	closed(t, moved)
	for of, want := range map[*vmm.Buffer][]*core.Stream{
		fork:  {core.StreamOf(first), core.StreamOf(second)},
		moved: {core.StreamOf(first)},
	} {
		h, err := share.Of(of).Hold(testOp, "a test", 10)
		require.NoError(t, err)
		_, on, _ := h.Appended()
		require.ElementsMatch(t, want, on)
		h.Release()
	}
}
