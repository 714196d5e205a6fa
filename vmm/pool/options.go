package pool

import (
	"fmt"
	"math/bits"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/vmm"
)

// Options change how a pool works. The zero value works.
type Options struct {
	// Memory is what the pool's memory is like; see vmm.Properties.
	Memory vmm.Properties
	// Access says who may touch all of the pool's memory, beside the device. A
	// peer costs about a millisecond for every chunk that is made, and chunks
	// that a peer was granted never move.
	Access []vmm.Access

	// SmallMax is up to which size, in bytes, requests are served from slabs of
	// a size class: at most the granularity; 0 is an eighth of it (256 KiB).
	SmallMax int
	// Chunk is the size in bytes of the chunks that larger requests are served
	// from, and that move; a multiple of the granularity; 0 is 32 times that
	// (64 MiB). See the package documentation for what it trades.
	Chunk int
	// ExactFrom is the size in bytes from which a request gets a chunk of its
	// own; 0 is 512 times the granularity (1 GiB).
	ExactFrom int
	// Slack is how much more memory than the most that was ever requested at
	// once the pool may make before it moves free chunks together instead, as a
	// share of that: 0 is 1/4, a negative value is none at all. The pool begins
	// with 1/32 at most, and takes more only while its holes fit so badly that
	// moving would cost more time than the requests.
	Slack float64

	// Limit is the most physical memory, in bytes, that the pool may have; 0 is
	// no limit. A Chunk must fit it; the default chunk is smaller below 1 GiB.
	// SetLimit changes it.
	Limit int
	// Wait is how long a request that finds no memory waits for blocks that were
	// freed and that the GPU still uses: 0 is a second, a negative value not at
	// all.
	Wait time.Duration
	// OnExhausted is asked before a request is refused; see Exhausted.
	OnExhausted func(Exhausted) (retry bool)
	// Statistics counts by tag, and the pool's peaks over all streams. It costs
	// some ten nanoseconds a request, and more where several goroutines allocate
	// at once.
	Statistics bool
	// Track keeps the stack that allocated each live block. It costs about a
	// microsecond a request.
	Track bool
	// CaptureLimit has captures that take longer reported through the System's
	// logger; 0 is a minute, a negative value never.
	CaptureLimit time.Duration
}

func withDevice(d *cuda.Device, access []vmm.Access) []vmm.Access {
	for _, a := range access {
		if a.Location == d.Location() {
			return access
		}
	}
	return append([]vmm.Access{{Location: d.Location(), Mode: vmm.ReadWrite}}, access...)
}

// chunksInLimit are how many chunks of the default size a limit leaves room for.
const chunksInLimit = 16

// sizes checks the sizes among the options and decides the defaults.
func (p *Pool) sizes(op string) error {
	bad := func(name string, n int, hint string) error {
		return core.Invalid(op, fmt.Sprintf("Options.%s is %d", name, n), hint)
	}
	or := func(n int, def uint64) uint64 {
		if n == 0 {
			return def
		}
		return uint64(n)
	}
	o := p.o
	switch {
	case o.SmallMax < 0 || uint64(o.SmallMax) > p.gran || o.SmallMax%quantum != 0:
		return bad("SmallMax", o.SmallMax, fmt.Sprintf("use a multiple of %d up to the granularity, %s", quantum, core.Bytes(p.gran)))
	case o.Chunk < 0 || uint64(o.Chunk)%p.gran != 0 || o.Chunk > maxBytes:
		return bad("Chunk", o.Chunk, fmt.Sprintf("use a multiple of the granularity, %s", core.Bytes(p.gran)))
	case o.ExactFrom < 0:
		return bad("ExactFrom", o.ExactFrom, "use a size in bytes, or 0 for the default")
	case o.Limit < 0:
		return bad("Limit", o.Limit, "use a size in bytes, or 0 for no limit")
	case o.Limit > 0 && o.Chunk > o.Limit:
		return bad("Chunk", o.Chunk, fmt.Sprintf("use at most Options.Limit, %s, or 0 for a size that fits it", core.Bytes(uint64(o.Limit))))
	}
	p.smallMax = or(o.SmallMax, p.gran/8)
	p.midQuantum = max(quantum, uint64(1)<<(bits.Len64(p.smallMax)-1)/64)
	p.chunk = or(o.Chunk, 32*p.gran)
	if o.Chunk == 0 && o.Limit > 0 {
		p.chunk = min(p.chunk, max(p.gran, uint64(o.Limit)/chunksInLimit/p.gran*p.gran))
	}
	p.exactFrom = max(or(o.ExactFrom, 512*p.gran), p.smallMax+1)
	p.classes = newClasses(p.smallMax)
	return nil
}
