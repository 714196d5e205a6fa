package pool

import (
	"cmp"
	"fmt"
	"math/bits"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/vmm"
)

// Options change how a pool works. The zero value works.
type Options struct {
	// Memory are the properties of the pool's memory. It is RDMA-capable only with
	// vmm.RDMARequired, because such memory takes longer to move.
	Memory vmm.Properties
	// Access lists further devices that may access all of the pool's memory. Granting
	// a peer takes about a millisecond for each new chunk, and chunks that a peer was
	// granted never move. Pool.Grant adds devices later.
	Access []vmm.Access

	// SmallMax is the largest request, in bytes, that slabs of a size class serve: at
	// most the granularity. 0 is an eighth of that (256 KiB).
	SmallMax int
	// Chunk is the size, in bytes, of the chunks that serve larger requests, and that
	// move: a multiple of the granularity. 0 is 16 times that (32 MiB), or 32 times for
	// a pool with Access. The package documentation says what the size trades.
	Chunk int
	// Limit is the most physical memory, in bytes, that the pool may have: at least
	// the granularity, and a Chunk. 0 is no limit. The default chunk is smaller if the
	// limit, or the device's memory, is below 512 MiB. SetLimit changes it.
	Limit int
	// Wait is how long a request that finds no memory waits for freed blocks that the
	// GPU still uses. 0 is a second. A negative value means never: then a request makes
	// new memory even if the GPU is about to pass enough on other streams.
	Wait time.Duration
	// Decay is how long the pool keeps memory that it does not need. It gives back, in
	// small pieces, what exceeds its greatest need of the last Decay to twice that. 0 is
	// a minute; a negative value means never.
	Decay time.Duration
	// OnExhausted is called before a request is refused; see Exhausted.
	OnExhausted func(Exhausted) (retry bool)
	// Statistics counts by tag, and keeps the pool's peaks over all streams. It costs
	// about ten nanoseconds a request, and more if several goroutines allocate at once.
	Statistics bool
	// Track keeps the stack that allocated each live block. It costs about a
	// microsecond a request.
	Track bool
	// Name is what errors and snapshots call the pool. Names need not differ. A name has at
	// most 128 bytes of printable UTF-8, without spaces at its ends.
	Name string
	// Tag is the group that the pool belongs to. Request.Tag says what a block is for.
	Tag cuda.Tag
	// Budget limits the pool's memory together with that of other owners; Limit counts within
	// it. Before the budget refuses memory to one of them, the pool gives free memory back,
	// and then the functions of the budget's OnPressure are called. nil is no limit.
	Budget *cuda.Budget
	// CaptureLimit is the duration after which the System's logger reports a capture
	// that goes on. 0 is a minute; a negative value means never.
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

// chunksInRoom are how many chunks of the default size a limit, and the device's memory,
// have room for.
const chunksInRoom = 16

// memory is the size of the memory of the device that the pool's memory lies on, or 0 for
// a pool of host memory.
func (p *Pool) memory() int {
	if p.home == nil {
		return 0
	}
	return p.home.TotalMemory()
}

// addressed is what the lengths of regions are multiples of, in bytes: the memory, or that
// of the pool's device for a pool of host memory.
func (p *Pool) addressed() uint64 { return uint64(cmp.Or(p.memory(), p.dev.TotalMemory())) }

// where is where the memory lies, for errors.
func (p *Pool) where() string {
	if p.home == nil {
		return cuda.Location{Type: cuda.LocationType(p.prop.Location.Type), ID: int(p.prop.Location.ID)}.String()
	}
	return p.home.String()
}

// sizes checks the sizes among the options and decides the defaults.
func (p *Pool) sizes(op string) error {
	bad := func(name string, n int, hint string) error {
		return errs.Invalid(op, fmt.Sprintf("Options.%s is %d", name, n), hint)
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
		return bad("SmallMax", o.SmallMax, fmt.Sprintf("use a multiple of %d up to the granularity, %s", quantum, errs.Bytes(p.gran)))
	case o.Chunk < 0 || uint64(o.Chunk)%p.gran != 0 || o.Chunk > maxBytes:
		return bad("Chunk", o.Chunk, fmt.Sprintf("use a multiple of the granularity, %s", errs.Bytes(p.gran)))
	case o.Limit != 0 && (o.Limit < 0 || uint64(o.Limit) < p.gran):
		return bad("Limit", o.Limit, p.limitHint())
	case p.memory() > 0 && o.Chunk > p.memory():
		return bad("Chunk", o.Chunk, fmt.Sprintf("use at most the device's memory, %s, or 0 for a size that fits it", errs.Bytes(p.memory())))
	case o.Limit > 0 && o.Chunk > o.Limit:
		return bad("Chunk", o.Chunk, fmt.Sprintf("use at most Options.Limit, %s, or 0 for a size that fits it", errs.Bytes(uint64(o.Limit))))
	}
	p.smallMax = or(o.SmallMax, p.gran/8)
	p.midQuantum = max(quantum, uint64(1)<<(bits.Len64(p.smallMax)-1)/64)
	p.chunk = or(o.Chunk, 16*p.gran)
	if o.Chunk == 0 && len(o.Access) > 0 { // which is granted chunk by chunk
		p.chunk *= 2
	}
	for _, room := range []int{o.Limit, p.memory()} {
		if o.Chunk == 0 && room > 0 {
			p.chunk = min(p.chunk, max(p.gran, uint64(room)/chunksInRoom/p.gran*p.gran))
		}
	}
	p.classes = newClasses(p.smallMax, p.gran)
	return nil
}

func (p *Pool) limitHint() string {
	return fmt.Sprintf("use at least the granularity, %s, or 0 for no limit", errs.Bytes(p.gran))
}

// SetLimit changes the most physical memory, in bytes, that the pool may have: at
// least the granularity, or 0 for no limit. If the pool has more, it gives free
// memory that the GPU has passed back at once; what is still above the limit stays,
// and the pool makes no more until it is below. What is live of a suspended pool comes back
// whatever its limit.
func (p *Pool) SetLimit(bytes int) error {
	const op = "pool.SetLimit"
	if err := p.made(op); err != nil {
		return err
	}
	if bytes != 0 && (bytes < 0 || uint64(bytes) < p.gran) {
		return errs.Invalid(op, fmt.Sprintf("%d bytes", bytes), p.limitHint())
	}
	p.limit.Store(uint64(bytes))
	if have := p.reserved.Load(); bytes > 0 && have > uint64(bytes) && p.status.Sleep() == nil {
		_, err := p.Trim(int(have - uint64(bytes)))
		return err
	}
	return nil
}

// impossible returns why a request is refused that no free could make room for, or
// nil. It spares giving anything up for such a request.
func (p *Pool) impossible(w *want) *shortage {
	n := p.lacks(w)
	if l := p.limit.Load(); l > 0 && n > l {
		return &shortage{kind: errs.Budget, size: n}
	}
	if m := p.memory(); m > 0 && n > uint64(m) {
		return &shortage{kind: errs.OutOfMemory, size: n}
	}
	return nil
}
