//go:build linux

package adversary

import (
	"encoding/binary"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// The books of a machine are damaged at random. A process that opens it gets an error, or
// a machine that works or says why not, and never crashes or hangs.
func TestDamagedBooks(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "machine")
	m, err := sim.New(sim.Options{Folder: folder, Devices: []sim.DeviceOptions{{}, {}}})
	require.NoError(t, err)
	sys, err := m.OpenOwned(cuda.Options{})
	require.NoError(t, err)
	b, err := vmm.NewBuffer(sys.Devices()[0], vmm.BufferOptions{Reserve: 4 << 20})
	require.NoError(t, err)
	good, err := os.ReadFile(filepath.Join(folder, "machine"))
	require.NoError(t, err)
	other := filepath.Join(t.TempDir(), "machine")
	for round := range times(60) {
		r := rand.New(rand.NewPCG(uint64(round), 5))
		bad := append([]byte{}, good...)
		for range 1 + r.IntN(4) {
			at := r.IntN(len(bad) - 8)
			if r.IntN(4) > 0 { // where something is
				at = []int{0, 8, 24, 32, 40, 48, 56, 64, 72 + 8*r.IntN(256), 4096 + r.IntN(2000), 65536 + r.IntN(4096)}[r.IntN(11)]
			}
			binary.LittleEndian.PutUint64(bad[at:], []uint64{0, 1, ^uint64(0), 1 << 63, r.Uint64(), r.Uint64N(1 << 17)}[r.IntN(6)])
		}
		if r.IntN(20) == 0 {
			bad = bad[:r.IntN(len(bad))]
		}
		require.NoError(t, os.RemoveAll(other))
		require.NoError(t, os.Mkdir(other, 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(other, "machine"), bad, 0o600))
		require.NotPanics(t, func() {
			_ = within(t, "a machine with damaged books", func() error { return use(other) })
		}, "round %d", round)
	}
	require.NoError(t, b.Close())
	require.NoError(t, sys.Close())
}

// use uses a machine as far as it goes.
func use(folder string) error {
	_, _ = sim.Inspect(folder)
	m, err := sim.New(sim.Options{Folder: folder, Devices: []sim.DeviceOptions{{}, {}}})
	if err != nil {
		return err
	}
	sys, err := m.OpenOwned(cuda.Options{})
	if err != nil {
		return err
	}
	b, err := vmm.NewBuffer(sys.Devices()[0], vmm.BufferOptions{Reserve: 4 << 20})
	if err == nil {
		_ = b.Grow(1 << 20)
		_ = b.Close()
	}
	return sys.Close()
}
