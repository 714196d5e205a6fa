// Package poolreplay replays traces through a pool, for cuvmm replay and for the pool's own
// tests.
package poolreplay

import (
	"errors"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
)

// Replayer is a pool as the allocator of a trace: a trace.Follower. One goroutine uses it
// at a time.
type Replayer struct {
	Pool *pool.Pool
	// Streams stand for those of the trace, by number.
	Streams []*cuda.Stream
	// Work sets each block over its whole length on its stream, so that the program
	// runs ahead of the GPU. The software driver commits memory that is set, so there
	// only the first and the last byte are.
	Work bool

	used []*cuda.Stream
}

// Alloc allocates a block of the pool.
func (r *Replayer) Alloc(bytes int, stream uint32, _ string) (pool.Block, error) {
	return r.Pool.Alloc(pool.Request{Bytes: bytes, Stream: r.Streams[stream]})
}

// Free frees it in the order of its stream and of the streams that used it.
func (r *Replayer) Free(b pool.Block, used []uint32) error {
	if len(used) == 0 {
		return r.Pool.Free(b)
	}
	r.used = r.used[:0]
	for _, u := range used {
		r.used = append(r.used, r.Streams[u])
	}
	return r.Pool.Free(b, r.used...)
}

// Sync waits for all streams.
func (r *Replayer) Sync() error {
	for _, s := range r.Streams {
		if err := s.Synchronize(); err != nil {
			return err
		}
	}
	return nil
}

// Waited returns how long requests for the streams have waited for memory that the GPU
// still used.
func (r *Replayer) Waited() (sum time.Duration) {
	for _, s := range r.Streams {
		sum += r.Pool.Waited(s)
	}
	return sum
}

// After works on the block, if Work is set.
func (r *Replayer) After(op trace.Op, b pool.Block) error {
	if !r.Work || op.Kind != trace.Alloc || op.Bytes == 0 {
		return nil
	}
	s := r.Streams[op.Stream]
	if !s.Device().System().Driver().Software {
		return s.Memset(b.Ptr(), 0, op.Bytes)
	}
	return errors.Join(s.Memset(b.Ptr(), 0, 1), s.Memset(b.Ptr()+cuda.Ptr(op.Bytes-1), 0, 1))
}

// runLength is how many operations in a row a spread trace has on one stream.
// scripts/pool-peers.py spreads in the same way.
const runLength = 256

// Spread returns a trace of one stream with its operations on several streams, 256 in a row.
// A trace that has several is returned as it is.
func Spread(t *trace.Trace, streams int) *trace.Trace {
	if t.Streams > 1 || streams == 1 {
		return t
	}
	c := *t
	c.Ops, c.Streams = slices.Clone(t.Ops), streams
	for i := range c.Ops {
		if c.Ops[i].Kind == trace.Alloc {
			c.Ops[i].Stream = uint32(i / runLength % streams)
		}
	}
	return &c
}
