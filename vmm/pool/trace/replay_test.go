package trace_test

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/vmm/pool/trace"
	"github.com/stretchr/testify/require"
)

// script is an allocator that says what it was asked.
type script struct {
	said []string
	fail string
	next int
}

var errScript = errors.New("no")

func (s *script) say(format string, args ...any) error {
	line := fmt.Sprintf(format, args...)
	s.said = append(s.said, line)
	if line == s.fail {
		return errScript
	}
	return nil
}

func (s *script) Alloc(bytes int, stream uint32, tag string) (int, error) {
	err := s.say("alloc %d on %d for %s", bytes, stream, tag)
	if err == nil {
		s.next++
	}
	return s.next, err
}

func (s *script) Free(block int, used []uint32) error { return s.say("free %d after %v", block, used) }
func (s *script) Sync() error                         { return s.say("sync") }

func TestReplay(t *testing.T) {
	all := []string{"alloc 1000 on 0 for b", "alloc 0 on 1 for a", "free 1 after [1]", "sync", "alloc 300 on 0 for a", "free 2 after []", "free 3 after []"}
	var s script
	r, err := trace.Replay(small(), &s)
	require.NoError(t, err)
	require.Equal(t, all, s.said)
	require.Equal(t, 4, r.Operations)
	require.Equal(t, r.Took/4, r.PerOperation())
	require.Zero(t, trace.Result{}.PerOperation())

	for _, c := range []struct {
		fail, want string
		said       []string
	}{
		{"alloc 0 on 1 for a", "replaying small, operation 1 of 6: no", []string{all[0], all[1], "free 1 after []"}},
		{"free 1 after [1]", "operation 3 of 6: no", append(all[:3:3], "free 2 after []")},
		{"sync", "operation 4 of 6: no", append(all[:4:4], "free 2 after []")},
		{"free 3 after []", "no", all},
	} {
		t.Run(c.fail, func(t *testing.T) {
			s := script{fail: c.fail}
			_, err := trace.Replay(small(), &s)
			require.ErrorIs(t, err, errScript)
			require.ErrorContains(t, err, c.want)
			require.Equal(t, c.said, s.said)
		})
	}

	_, err = trace.Replay(&trace.Trace{}, &s)
	require.ErrorContains(t, err, "0 streams")
}

// slow is an allocator whose allocations take as many milliseconds as they have bytes.
type slow struct{ worked []int }

func (s *slow) Alloc(bytes int, _ uint32, _ string) (int, error) {
	time.Sleep(time.Duration(bytes) * time.Millisecond)
	return 0, nil
}
func (s *slow) Free(int, []uint32) error { return nil }
func (s *slow) Sync() error              { return nil }

func (s *slow) After(op trace.Op, _ int) error {
	time.Sleep(20 * time.Millisecond)
	s.worked = append(s.worked, op.Bytes)
	return nil
}

// The time of work is not counted, and the slowest operations are told apart.
func TestReplayTimes(t *testing.T) {
	tr := &trace.Trace{Streams: 1, Tags: []string{""}}
	for i := range 12 {
		bytes := 0
		if i == 3 || i == 10 {
			bytes = 10 * i
		}
		tr.Ops = append(tr.Ops, trace.Op{Kind: trace.Alloc, ID: uint32(i), Bytes: bytes})
	}
	a := &slow{}
	r, err := trace.Replay(tr, a)
	require.NoError(t, err)
	require.Len(t, a.worked, 12)
	require.GreaterOrEqual(t, r.Took, 129*time.Millisecond)
	require.Len(t, r.Slowest, 8)
	require.True(t, slices.IsSortedFunc(r.Slowest, func(a, b trace.Slow) int { return cmp.Compare(b.Worked(), a.Worked()) }))
	require.Equal(t, r.Slowest[0], r.Longest)
	for _, want := range []trace.Slow{{Op: 10, Bytes: 100}, {Op: 3, Bytes: 30}} {
		i := slices.IndexFunc(r.Slowest, func(s trace.Slow) bool { return s.Op == want.Op })
		require.GreaterOrEqual(t, i, 0)
		require.Equal(t, want.Bytes, r.Slowest[i].Bytes)
		require.GreaterOrEqual(t, r.Slowest[i].Took, time.Duration(want.Bytes-1)*time.Millisecond)
	}
}

// waiter is an allocator whose allocations wait for all but a millisecond of their time.
type waiter struct {
	slow
	waited time.Duration
}

func (w *waiter) Alloc(bytes int, stream uint32, tag string) (int, error) {
	w.waited += time.Duration(bytes-1) * time.Millisecond
	return w.slow.Alloc(bytes, stream, tag)
}

func (w *waiter) Waited() time.Duration { return w.waited }

// What an allocator waited is told apart from what it worked.
func TestReplayTellsWaitingApart(t *testing.T) {
	tr := &trace.Trace{Streams: 1, Tags: []string{""}, Ops: []trace.Op{{Bytes: 30}, {ID: 1, Bytes: 10}}}
	r, err := trace.Replay(tr, &waiter{waited: time.Hour})
	require.NoError(t, err)
	require.Equal(t, r.Took-38*time.Millisecond, r.Worked)
	require.Len(t, r.Slowest, 2)
	longest := time.Duration(0)
	for _, s := range r.Slowest {
		require.Equal(t, time.Duration(s.Bytes-1)*time.Millisecond, s.Waited)
		require.Equal(t, s.Took-s.Waited, s.Worked())
		longest = max(longest, s.Took)
	}
	require.Equal(t, longest, r.Longest.Took)
	require.GreaterOrEqual(t, r.Slowest[0].Worked(), r.Slowest[1].Worked())
}

// follower is an allocator that says what it follows.
type follower struct {
	script
	fails bool
}

func (f *follower) After(op trace.Op, block int) error {
	if f.fails {
		return errScript
	}
	return f.say("after %v of %d with %d bytes on %d", op.Kind, block, op.Bytes, op.Stream)
}

func TestReplayFollower(t *testing.T) {
	var f follower
	_, err := trace.Replay(small(), &f)
	require.NoError(t, err)
	require.Equal(t, []string{
		"alloc 1000 on 0 for b", "after alloc of 1 with 1000 bytes on 0", "alloc 0 on 1 for a", "after alloc of 2 with 0 bytes on 1",
		"free 1 after [1]", "after free of 1 with 1000 bytes on 0", "sync", "alloc 300 on 0 for a", "after alloc of 3 with 300 bytes on 0",
		"free 2 after []", "free 3 after []",
	}, f.said, "what the trace does not free is not followed")

	f = follower{fails: true}
	_, err = trace.Replay(small(), &f)
	require.ErrorIs(t, err, errScript)
	require.ErrorContains(t, err, "operation 0 of 6")
	require.Equal(t, []string{"alloc 1000 on 0 for b", "free 1 after []"}, f.said, "the block that could not be followed is freed")
}
