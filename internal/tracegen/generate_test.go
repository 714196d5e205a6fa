package tracegen_test

import (
	"bytes"
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/cuvmm/cuvmm/internal/tracegen"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	mib = 1 << 20
	gib = 1 << 30

	seeds  = 20
	golden = "testdata/golden.txt"
)

var update = flag.Bool("update-golden", false, "write "+golden+": results with other traces can then no longer be compared with earlier ones")

// The same seed gives the same trace for ever: results of other versions and of
// other allocators are compared by it.
func TestGolden(t *testing.T) {
	var all bytes.Buffer
	line := func(tr *trace.Trace, of string) {
		b, err := tr.MarshalBinary()
		require.NoError(t, err)
		s, err := tr.Summary()
		require.NoError(t, err)
		fmt.Fprintf(&all, "%-12s %-22s ops %6d peak %11d %x\n", tr.Name, of, len(tr.Ops), s.PeakBytes, sha256.Sum256(b))
	}
	for _, g := range tracegen.Generators() {
		for seed := range uint64(seeds) {
			line(g.Make(tracegen.Config{Seed: seed}), "full")
		}
		line(g.Make(tracegen.Config{Seed: 7, Streams: 4, Divisor: 100}), "4 streams, divisor 100")
	}
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(golden, all.Bytes(), 0o644))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(want), all.String(), "a generator makes other traces than before")
}

func TestGenerators(t *testing.T) {
	for _, g := range tracegen.Generators() {
		t.Run(g.Name, func(t *testing.T) {
			for seed := range uint64(seeds) {
				full := g.Make(tracegen.Config{Seed: seed})
				s, err := full.Summary()
				require.NoError(t, err)
				require.Equal(t, fmt.Sprintf("%s-%d", g.Name, seed), full.Name)
				require.Equal(t, 1, full.Streams)
				require.Zero(t, s.Uses)
				require.Zero(t, s.LiveBlocks, "everything goes back at the end")
				require.GreaterOrEqual(t, s.PeakBytes, 4*gib)
				require.LessOrEqual(t, s.PeakBytes, 16*gib)
				require.GreaterOrEqual(t, s.Allocs, 5_000)
				require.LessOrEqual(t, s.Allocs, 65_000)
				require.GreaterOrEqual(t, s.Syncs, 5)
			}
		})
	}
}

// A trace of smaller blocks is the same program.
func TestDivisor(t *testing.T) {
	for _, g := range tracegen.Generators() {
		full, small := g.Make(tracegen.Config{Seed: 3}), g.Make(tracegen.Config{Seed: 3, Divisor: 64})
		require.Len(t, small.Ops, len(full.Ops))
		for i, op := range full.Ops {
			op.Bytes = (op.Bytes + 63) / 64
			require.Equal(t, op, small.Ops[i])
		}
		s, err := small.Summary()
		require.NoError(t, err)
		require.LessOrEqual(t, s.PeakBytes, 260*mib)
	}
}

// With more streams each program puts work on all of them, and asks for the
// same blocks in the same order.
func TestStreams(t *testing.T) {
	for _, g := range tracegen.Generators() {
		t.Run(g.Name, func(t *testing.T) {
			one, two := g.Make(tracegen.Config{Seed: 5}), g.Make(tracegen.Config{Seed: 5, Streams: 2})
			require.NoError(t, two.Check())
			require.Equal(t, 2, two.Streams)
			used := map[uint32]int{}
			sizes := func(tr *trace.Trace) (all []int) {
				for _, op := range tr.Ops {
					if op.Kind == trace.Alloc {
						all = append(all, op.Bytes)
					}
				}
				return all
			}
			for _, op := range two.Ops {
				if op.Kind == trace.Alloc || op.Kind == trace.Use {
					used[op.Stream]++
				}
			}
			require.Len(t, used, 2)
			require.Equal(t, sizes(one), sizes(two))
		})
	}
}

// Sizes differ from step to step, for most seeds: that is what makes holes.
func TestStepsDiffer(t *testing.T) {
	for _, g := range []tracegen.Generator{{Name: "training", Make: tracegen.Training}, {Name: "lora", Make: tracegen.LoRA}} {
		differ := 0
		for seed := range uint64(seeds) {
			var steps [][]int
			var sizes []int
			for _, op := range g.Make(tracegen.Config{Seed: seed}).Ops {
				switch op.Kind {
				case trace.Alloc:
					sizes = append(sizes, op.Bytes)
				case trace.Sync:
					steps = append(steps, sizes)
					sizes = nil
				}
			}
			if fmt.Sprint(steps[1][:50]) != fmt.Sprint(steps[2][:50]) {
				differ++
			}
		}
		t.Logf("%s: %d of %d", g.Name, differ, seeds)
		require.GreaterOrEqual(t, differ, 3*seeds/5)
	}
}
