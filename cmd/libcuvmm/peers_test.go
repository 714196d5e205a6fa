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

// A block that a stream of another device uses, which the handle alone names, is not handed out before that has
// passed. The legacy stream's handle is the same on all devices.
func TestABlockIsUsedOnAnotherDevice(t *testing.T) {
	gputest.Alone(t) // it uses the legacy stream
	gputest.EachPair(t, func(t *testing.T, d, peer *cuda.Device) {
		near, far := newWorld(t, d, 1), newWorld(t, peer, 1)
		legacy, err := far.e.stream(0)
		require.NoError(t, err)
		for name, s := range map[string]*cuda.Stream{"a stream": far.streams[0], "the legacy stream": legacy} {
			handle := s.Handle()
			for _, bytes := range []int{5000, 3 << 20} {
				for range 20 {
					b := near.alloc(bytes, 0)
					e, err := d.NewEvent(cuda.EventOptions{})
					require.NoError(t, err)
					require.NoError(t, e.Record(near.streams[0]))
					require.NoError(t, s.Wait(e))
					require.NoError(t, e.Close())
					require.NoError(t, s.Memset(cuda.Ptr(b.ptr), 2, bytes))
					require.EqualValues(t, cOK, cUse(near.handle, b.ptr, handle), name)
					near.free(b)
					near.free(near.alloc(bytes, 0)) // which writes, and would race
				}
			}
		}
		require.NoError(t, near.streams[0].Synchronize())
		require.NoError(t, legacy.Synchronize())
		require.NoError(t, far.streams[0].Synchronize())
	})
}
