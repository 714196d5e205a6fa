package pooltrace

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
	"github.com/stretchr/testify/require"
)

func file(t *testing.T, name, text string) string {
	t.Helper()
	name = filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
	return name
}

func TestReplay(t *testing.T) {
	list := file(t, "mine.json", "[[0, 4194304], [1, 3000000], [0, 0], [2, 8388608]]")
	var out bytes.Buffer
	require.NoError(t, run([]string{"replay", "-driver", "sim", "-modes", "all", "-many", "3", "-json", list}, &out))
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.Len(t, lines, 4)
	for i, name := range []string{"idle", "behind", "streams", "goroutines"} {
		var r result
		require.NoError(t, json.Unmarshal([]byte(lines[i]), &r))
		require.Equal(t, "mine", r.Trace)
		require.Equal(t, "pool", r.Allocator)
		require.Equal(t, name, r.Mode)
		if name == "goroutines" {
			require.Equal(t, 12, r.Operations)
			require.GreaterOrEqual(t, r.Requested, 1000000+2796203, "of one")
			require.LessOrEqual(t, r.Requested, 3*(1000000+2796203), "of all at once")
		} else {
			require.Equal(t, 4, r.Operations)
			require.Equal(t, 3000000+8388608, r.Requested)
		}
		require.GreaterOrEqual(t, r.Reserved, r.Requested)
		require.Positive(t, r.FirstUs)
		require.Positive(t, r.LongestUs)
	}

	out.Reset()
	require.NoError(t, run([]string{"replay", "-driver", "sim", list}, &out))
	require.Contains(t, out.String(), "| mine | idle | 4 | 0.01 |")
	require.Contains(t, out.String(), "| mine | behind | 4 | 0.01 |")
	for _, form := range []string{"-json", "-json=false"} {
		require.ErrorIs(t, run([]string{"replay", "-driver", "sim", form, list}, fullDisk{}), io.ErrShortWrite, form)
	}
}

// What goes wrong with one trace is told on its line, the others are replayed,
// and the command fails.
func TestReplayFails(t *testing.T) {
	large, small := file(t, "large.json", "[[0, 3221225472]]"), file(t, "small.json", "[[0, 1]]")
	var out bytes.Buffer
	err := run([]string{"replay", "-driver", "sim", "-memory", "1", "-modes", "behind", large, small}, &out)
	require.ErrorContains(t, err, "1 of 2 replays failed: their lines say why")
	require.Contains(t, out.String(), "| large | behind | failed: replaying large, operation 0 of 1: ")
	require.Contains(t, out.String(), "| small | behind | 1 |")
}

// What is requested includes the requests under way, whose memory the pool already makes.
func TestARequestUnderWayCounts(t *testing.T) {
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	c := &counting{live: &gauge{}}
	var counted int64
	c.Streams = []*cuda.Stream{s}
	c.Pool, err = pool.New(d, pool.Options{Limit: 2 << 20, OnExhausted: func(pool.Exhausted) bool {
		counted = c.live.peak.Load()
		return false
	}})
	require.NoError(t, err)
	_, err = c.Alloc(8<<20, 0, "")
	require.ErrorIs(t, err, cuda.ErrBudget)
	require.Equal(t, int64(8<<20), counted)
	require.NoError(t, c.Pool.Close())
	require.NoError(t, s.Close())
}

// A limit may be a fraction of a GiB.
func TestLimit(t *testing.T) {
	large := file(t, "large.json", "[[0, 1073741824]]")
	var out bytes.Buffer
	require.Error(t, run([]string{"replay", "-driver", "sim", "-modes", "idle", "-limit", "0.5", large}, &out))
	require.Contains(t, out.String(), "the limit is 512 MiB")
	require.NoError(t, run([]string{"replay", "-driver", "sim", "-modes", "idle", "-limit", "1.5", large}, &out))
}

func TestWrongArguments(t *testing.T) {
	bad := file(t, "bad.json", "[[0, 1],\n[0, 2]]")
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"replay"}, "replay needs the files of traces"},
		{[]string{"replay", "-modes", "busy", bad}, `there is no mode "busy"`},
		{[]string{"replay", "-many", "1", bad}, "-many 1: use 2 to 1024"},
		{[]string{"replay", bad}, bad + ": reading a trace, line 2, operation 1 (byte 15): block 0 is allocated, but lives since operation 0"},
		{[]string{"replay", bad + "x"}, "no such file"},
	} {
		var out bytes.Buffer
		require.ErrorContains(t, run(c.args, &out), c.want)
	}
}

func TestSpread(t *testing.T) {
	const runLength = 256
	tr := &trace.Trace{Streams: 1, Tags: []string{""}}
	for i := range 3 * runLength {
		tr.Ops = append(tr.Ops, trace.Op{Kind: trace.Alloc, ID: uint32(i), Bytes: 9})
	}
	m := modes(2)
	require.Same(t, tr, m[0].of(tr))
	spread := m[2].of(tr)
	require.NoError(t, spread.Check())
	require.Equal(t, 2, spread.Streams)
	for i, want := range map[int]uint32{0: 0, runLength - 1: 0, runLength: 1, 2*runLength - 1: 1, 2 * runLength: 0} {
		require.Equal(t, want, spread.Ops[i].Stream)
	}
	require.Equal(t, 9, spread.Ops[0].Bytes)
	require.Equal(t, 5, m[3].of(tr).Ops[0].Bytes)
	require.Zero(t, tr.Ops[runLength].Stream, "the trace itself stays as it is")
	own := &trace.Trace{Streams: 2, Tags: []string{""}, Ops: []trace.Op{{Kind: trace.Alloc, Bytes: 9, Stream: 1}}}
	require.Same(t, own, m[2].of(own), "a trace with streams keeps them")
}

func TestBound(t *testing.T) {
	require.Equal(t, 2*time.Millisecond, bound(3<<29))
	require.Equal(t, 6*time.Millisecond, bound(4<<30))
	var r result
	r.slowest(trace.Result{
		Longest: trace.Slow{Bytes: 7, Took: 9 * time.Millisecond, Waited: 8 * time.Millisecond},
		Slowest: []trace.Slow{
			{Bytes: 4 << 30, Took: 5 * time.Millisecond}, {Bytes: 1, Took: 3 * time.Millisecond},
			{Bytes: 7, Took: 9 * time.Millisecond, Waited: 8 * time.Millisecond},
		},
	})
	require.Equal(t, 1, r.Over, "what an operation waits does not count")
	require.InDelta(t, 9000, r.LongestUs, 1e-6)
	require.InDelta(t, 5000, r.WorkedUs, 1e-6)
	require.Equal(t, 4<<30, r.LongestOf)
	require.Contains(t, r.row(), "| 9.00 [5.00 *] | 4096.0 |")
}

// The recorded traces are read, and the pool replays them on the software driver.
func TestRecordedTraces(t *testing.T) {
	files, err := filepath.Glob("../../../../vmm/pool/testdata/traces/*.gz")
	require.NoError(t, err)
	if _, err := os.Stat("../../../../go.mod"); err != nil {
		needs.Lacks(t, "the sources, where the traces are: %v", err)
	}
	require.Len(t, files, 5)
	var out bytes.Buffer
	require.NoError(t, run(append([]string{"replay", "-driver", "sim", "-modes", "behind", "-json"}, files...), &out))
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	for i, want := range []struct {
		name string
		gib  float64
	}{{"evaluation", 27.07}, {"moe", 18.47}, {"pipeline", 1.98}, {"server", 11.71}, {"speech", 5.85}} {
		var r result
		require.NoError(t, json.Unmarshal([]byte(lines[i]), &r))
		require.Equal(t, want.name, r.Trace)
		require.Equal(t, 90_000, r.Operations)
		require.InDelta(t, want.gib, float64(r.Requested)/(1<<30), 0.01)
	}
}
