//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo && !invariants

package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
	"github.com/stretchr/testify/require"
)

// The cache makes the pool hold no more for programs that have much memory. It keeps none of their large
// blocks, which would lie where chunks could be free.
func TestTheCacheCostsLargeProgramsNoMemory(t *testing.T) {
	for _, name := range []string{"pipeline", "speech"} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join("..", "..", "vmm", "pool", "testdata", "traces", name+".json.gz")
			needs.File(t, path)
			f, err := os.Open(path)
			require.NoError(t, err)
			tr, err := trace.Read(f, name)
			require.NoError(t, err)
			require.NoError(t, f.Close())
			_, sys := sim.Open(t)
			w := newWorld(t, sys.Devices()[0], tr.Streams)
			plain, err := pool.New(w.d, pool.Options{})
			require.NoError(t, err)
			p := &program{w: w, plain: plain, twins: map[uintptr]pool.Block{}}
			live := map[uint32]uintptr{}
			for _, op := range tr.Ops {
				switch op.Kind {
				case trace.Alloc:
					live[op.ID] = p.alloc(op.Bytes)
				case trace.Free:
					p.free(live[op.ID])
					delete(live, op.ID)
				}
			}
			held, without := w.e.pool.Stats().PeakReserved, plain.Stats().PeakReserved
			t.Logf("%d MiB, without the cache %d", held>>20, without>>20)
			require.LessOrEqual(t, float64(held), 1.015*float64(without)) // which differs by 0.005 from run to run
			for _, b := range live {
				p.free(b)
			}
			require.NoError(t, plain.Close())
		})
	}
}
