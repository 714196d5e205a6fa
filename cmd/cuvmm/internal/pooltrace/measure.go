package pooltrace

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/poolreplay"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
	"golang.org/x/sync/errgroup"
)

// measure replays a trace twice through a pool of its own.
func measure(d *cuda.Device, t *trace.Trace, m mode, o pool.Options) result {
	r := result{Trace: t.Name, Allocator: "pool", Mode: m.name}
	c := m.of(t)
	s, err := c.Summary()
	if err == nil {
		r.Operations = m.goroutines * (s.Allocs + s.Frees)
		err = r.passes(d, c, m, o)
	}
	if err != nil {
		r.Error = err.Error()
	}
	return r
}

func (r *result) passes(d *cuda.Device, t *trace.Trace, m mode, o pool.Options) (err error) {
	p, err := pool.New(d, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	replayers := make([]*counting, m.goroutines)
	var live gauge
	for i := range replayers {
		replayers[i] = &counting{poolreplay.Replayer{Pool: p, Work: m.work}, &live}
		for range t.Streams {
			s, err := d.NewStream(cuda.StreamOptions{})
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, s.Close()) }()
			replayers[i].Streams = append(replayers[i].Streams, s)
		}
	}
	for _, us := range [][2]*float64{{&r.FirstUs, &r.FirstWorkedUs}, {&r.SecondUs, &r.SecondWorkedUs}} {
		took, worked, err := r.pass(t, replayers)
		if err != nil {
			return err
		}
		live.now.Store(0) // what the trace does not free
		*us[0] = micros(took) / float64(max(r.Operations, 1))
		*us[1] = micros(worked) / float64(max(r.Operations, 1))
	}
	r.Requested, r.Reserved = int(live.peak.Load()), p.Stats().PeakReserved
	return nil
}

// pass replays the trace once in each goroutine, and waits for the GPU.
func (r *result) pass(t *trace.Trace, replayers []*counting) (took, worked time.Duration, err error) {
	results := make([]trace.Result, len(replayers))
	var group errgroup.Group
	for i, a := range replayers {
		group.Go(func() (err error) {
			results[i], err = trace.Replay(t, a)
			return errors.Join(err, a.Sync())
		})
	}
	err = group.Wait()
	for _, got := range results {
		took += got.Took
		worked += got.Worked
		r.slowest(got)
	}
	return took, worked, err
}

func (r *result) slowest(got trace.Result) {
	r.LongestUs = max(r.LongestUs, micros(got.Longest.Took))
	for _, s := range got.Slowest {
		if us := micros(s.Worked()); us > r.WorkedUs {
			r.WorkedUs, r.LongestOf = us, s.Bytes
		}
		if s.Worked() > bound(s.Bytes) {
			r.Over++
		}
	}
}

func micros(d time.Duration) float64 { return d.Seconds() * 1e6 }

// bound is the longest that an operation on a block of so many bytes may take, without
// waiting for memory that is in use.
func bound(bytes int) time.Duration {
	const gib = 1 << 30
	if bytes <= 3*gib/2 {
		return 2 * time.Millisecond
	}
	return time.Duration(float64(bytes) / gib * 1.5 * float64(time.Millisecond))
}

// gauge is how many bytes live blocks and requests under way have, of all replays together,
// and their peak.
type gauge struct{ now, peak atomic.Int64 }

func (g *gauge) add(bytes int) {
	now := g.now.Add(int64(bytes))
	for peak := g.peak.Load(); now > peak && !g.peak.CompareAndSwap(peak, now); peak = g.peak.Load() {
	}
}

// counting is a replayer that counts what is requested.
type counting struct {
	poolreplay.Replayer
	live *gauge
}

// Alloc counts the request before the pool makes memory for it, because a request of another
// goroutine may return, and its block be freed, while this one is under way.
func (c *counting) Alloc(bytes int, stream uint32, tag string) (pool.Block, error) {
	c.live.add(bytes)
	return c.Replayer.Alloc(bytes, stream, tag)
}

func (c *counting) After(op trace.Op, b pool.Block) error {
	if op.Kind == trace.Free {
		c.live.now.Add(-int64(op.Bytes))
	}
	return c.Replayer.After(op, b)
}
