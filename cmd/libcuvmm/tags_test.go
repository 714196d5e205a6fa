//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import (
	"bytes"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// filled is a segment with its bytes.
type filled struct {
	ptr  uintptr
	data []byte
}

func (w *world) segment(n int, tag cuda.Tag, value byte) filled {
	p, err := w.e.newSegment(n, tag)
	require.NoError(w.t, err)
	require.NoError(w.t, w.streams[0].Memset(cuda.Ptr(p), value, n))
	return filled{p, bytes.Repeat([]byte{value}, n)}
}

func (w *world) has(all ...filled) {
	w.t.Helper()
	for _, f := range all {
		got := make([]byte, len(f.data))
		require.NoError(w.t, w.streams[0].Download(got, cuda.Ptr(f.ptr)))
		require.True(w.t, bytes.Equal(f.data, got), "the bytes at %#x", f.ptr)
	}
}

func (w *world) drop(all ...filled) {
	for _, f := range all {
		require.NoError(w.t, w.e.freeSegment(f.ptr, w.streams[0].Handle()))
	}
}

func state(t *testing.T, tag cuda.Tag) tagged {
	for _, d := range describeTags() {
		if d.Tag == tag {
			return d
		}
	}
	t.Fatalf("no tag %q in %+v", tag, describeTags())
	return tagged{}
}

// Each tag sleeps and wakes for itself, with its bytes, and a pool with what has no tag.
func TestTagsSleepAndWake(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newWorld(t, d, 1)
		weights, more, cache := w.segment(3<<20, "weights", 1), w.segment(5<<20, "weights", 2), w.segment(4<<20, "cache", 3)
		b := w.alloc(1000, 0)
		for range 2 {
			r, err := suspendTags("suspend", []cuda.Tag{"weights", "cache"}, vmm.SuspendOptions{})
			require.NoError(t, err)
			require.GreaterOrEqual(t, r.Given, 12<<20)
			require.Equal(t, r.Given, r.Host)
			require.True(t, state(t, "weights").Suspended)
			require.False(t, state(t, "").Suspended)
			require.Equal(t, []uint64{uint64(cache.ptr)}, []uint64{state(t, "cache").Ranges[0][0]})
			w.write(b, 0)
			require.ErrorIs(t, w.streams[0].Memset(cuda.Ptr(cache.ptr), 1, 1), cuda.ErrSuspended, "used by mistake")

			require.NoError(t, resumeTags([]cuda.Tag{"cache"}, time.Minute))
			w.has(cache)
			require.ErrorIs(t, w.streams[0].Memset(cuda.Ptr(more.ptr), 1, 1), cuda.ErrSuspended)
			require.NoError(t, resumeTags(nil, 0))
			w.has(weights, more, cache)
		}
		_, err := suspendTags("suspend", nil, vmm.SuspendOptions{Keep: vmm.Drop})
		require.NoError(t, err)
		for _, d := range describeTags() {
			require.True(t, d.Suspended, "%+v", d)
		}
		_, status := cAlloc(w.handle, 1000, w.streams[0].Handle())
		require.EqualValues(t, cSuspended, status)
		require.EqualValues(t, cOK, cFree(w.handle, b.ptr), "while it sleeps")
		require.NoError(t, resumeTags(nil, 0))
		w.drop(weights, more, cache)
	})
}

func TestWhatSleepingTagsRefuse(t *testing.T) {
	_, sys := sim.Open(t, sim.Options{Devices: []sim.DeviceOptions{{}, {}}})
	w := newWorld(t, sys.Devices()[0], 1)
	kv, other := w.segment(1<<20, "kv", 1), w.segment(1<<20, "other", 2)
	one := []cuda.Tag{"kv"}
	suspended := func(tags ...cuda.Tag) error {
		_, err := suspendTags("suspend", tags, vmm.SuspendOptions{})
		return err
	}
	require.ErrorIs(t, suspended("kv", "unknown"), cuda.ErrInvalidArgument)
	require.False(t, state(t, "kv").Suspended, "nothing has changed")
	require.ErrorIs(t, resumeTags([]cuda.Tag{"unknown"}, 0), cuda.ErrInvalidArgument)
	require.NoError(t, resumeTags(one, 0), "it is awake")
	require.NoError(t, suspended("kv", "kv"))
	require.ErrorIs(t, suspended("other", "kv"), cuda.ErrSuspended)
	require.False(t, state(t, "other").Suspended)

	_, err := w.e.newSegment(1<<20, "kv")
	require.ErrorIs(t, err, cuda.ErrSuspended)
	require.ErrorContains(t, err, `tag "kv", which sleeps; resume it first`)
	_, err = openPool(0, 0, "kv")
	require.ErrorIs(t, err, cuda.ErrSuspended)
	_, err = openPool(1, 0, "")
	require.ErrorIs(t, err, cuda.ErrSuspended, "its device would have to reach what sleeps")
	require.NoError(t, suspended(), "what is awake")
	require.NoError(t, suspended(), "nothing is")
	w.drop(kv) // the last memory of a tag that sleeps
	require.NoError(t, resumeTags(one, 0))
	require.ErrorIs(t, suspended("kv"), cuda.ErrInvalidArgument)
	require.NoError(t, resumeTags(nil, 0))
	w.has(other)
	w.drop(other)
}

// Bytes that are discarded take no host memory, and no time to come back.
func TestDiscardingTags(t *testing.T) {
	_, sys := sim.Open(t)
	w := newWorld(t, sys.Devices()[0], 1)
	kept, lost, gone := w.segment(2<<20, "kept", 1), w.segment(4<<20, "lost", 2), w.segment(4<<20, "gone", 3)
	_, err := suspendTags("suspend", []cuda.Tag{"kept", "lost"}, vmm.SuspendOptions{})
	require.NoError(t, err)
	require.Equal(t, 6<<20, sys.Stats().KeptBytes)
	require.NoError(t, discardTags([]cuda.Tag{"lost", "gone"}))
	require.Equal(t, 2<<20, sys.Stats().KeptBytes)
	require.Zero(t, sys.Stats().AllocatedBytes)
	require.NoError(t, resumeTags(nil, 0))
	w.has(kept)
	for _, f := range []filled{lost, gone} {
		require.NoError(t, w.streams[0].Memset(cuda.Ptr(f.ptr), 9, len(f.data)))
	}
	w.drop(kept, lost, gone)
}

// Segments come and go while their tags sleep and wake: none is awake in a tag that sleeps.
func TestTagsSleepBesideAllocations(t *testing.T) {
	_, sys := sim.Open(t)
	w := newWorld(t, sys.Devices()[0], 1)
	stay := w.segment(1<<20, "a", 5)
	stop := make(chan struct{})
	var working sync.WaitGroup
	for range 3 {
		working.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				p, err := w.e.newSegment(1<<16, "a")
				if err != nil {
					require.ErrorIs(t, err, cuda.ErrSuspended)
					continue
				}
				require.NoError(t, w.e.freeSegment(p, w.streams[0].Handle()))
			}
		})
	}
	for range 15 {
		_, err := suspendTags("suspend", []cuda.Tag{"a"}, vmm.SuspendOptions{})
		require.NoError(t, err)
		for _, m := range memoryOf([]cuda.Tag{"a"}) {
			_, err := vmm.Preview(vmm.SuspendOptions{}, m)
			if !errors.Is(err, cuda.ErrClosed) {
				require.ErrorIs(t, err, cuda.ErrSuspended)
			}
		}
		require.NoError(t, resumeTags([]cuda.Tag{"a"}, time.Minute))
	}
	close(stop)
	working.Wait()
	w.has(stay)
	w.drop(stay)
}
