package trace_test

import (
	"errors"
	"fmt"
	"testing"

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

func (s *script) Alloc(bytes uint64, stream uint32, tag string) (int, error) {
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
	require.Positive(t, r.Took)
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
