//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/stretchr/testify/require"
)

// The pools of a process that uses several devices reach each other: a program copies a block
// to another device, and back, and gathers from all, whether the block was there before the
// other device's pool or not. Between devices that do not reach each other nothing is granted.
func TestPoolsOfSeveralDevicesReachEachOther(t *testing.T) {
	gputest.Alone(t) // it uses the legacy stream
	t.Setenv("CUVMM_DRIVER", "sim")
	t.Setenv("CUVMM_SIM", `{"Devices": [{}, {}, {"Unreachable": [0, 1]}]}`)
	const bytes = 3 << 20
	var handles []uint64
	var pools []*entry
	var blocks, segments []uintptr
	add := func(i int) {
		b, _, err := pools[i].alloc(bytes, 0, 0)
		require.NoError(t, err)
		g, err := pools[i].newSegment(bytes, "")
		require.NoError(t, err)
		blocks, segments = append(blocks, uintptr(b.Ptr)), append(segments, g)
	}
	for device := range 3 {
		h, err := openPool(device, 0, "")
		require.NoError(t, err)
		p, err := poolOf(h)
		require.NoError(t, err)
		handles, pools = append(handles, h), append(pools, p)
		add(device)
	}
	add(0)
	add(1)
	at := []int{0, 1, 2, 0, 1} // the device of each
	for i, from := range at {
		for j, to := range at {
			if from == to || from == 2 || to == 2 {
				continue
			}
			for _, of := range [][]uintptr{blocks, segments} {
				for _, on := range []int{from, to} { // PyTorch copies on either's stream
					s, err := pools[on].stream(0)
					require.NoError(t, err)
					require.NoError(t, s.Copy(cuda.Ptr(of[j]), cuda.Ptr(of[i]), bytes))
					require.NoError(t, s.Synchronize())
				}
			}
		}
	}
	for i, d := range at {
		require.NoError(t, pools[d].free(blocks[i]))
		require.NoError(t, pools[d].freeSegment(segments[i], 0))
	}
	for _, h := range handles {
		require.NoError(t, closePool(h))
	}
}
