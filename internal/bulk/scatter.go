package bulk

import (
	"fmt"
	"sync"
	"unsafe"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// A driver call for each of many small segments takes far longer than the link does for their bytes. So
// a piece with many goes to a staging area on the device in one copy, with a table behind it, and a
// kernel distributes it from there.
const (
	// leastScattered is how many segments are worth the staging area, and what the kernel costs the
	// first time.
	leastScattered = 128
	// scatterRoom is the room of a piece, on both sides: the staging areas of all threads are 32 MiB.
	scatterRoom = leastPiece
	// Threads of a block, which takes an entry at a time, and the most blocks.
	scatterThreads, scatterBlocks = 128, 1024
	entryBytes                    = uint64(unsafe.Sizeof(kernels.ScatterEntry{}))
)

// distributor is the kernel in a context. It is loaded when it is needed first.
type distributor struct {
	once     sync.Once
	module   driver.Module
	function driver.Function // 0 if the context takes no kernels: then each segment is copied
}

func (d *distributor) load(c *core.Context) driver.Function {
	d.once.Do(func() {
		drv := c.System().Drv
		m, r := drv.ModuleLoadData(c.Handle, append(kernels.Distribute[:len(kernels.Distribute):len(kernels.Distribute)], 0))
		if c.Observe(r) != driver.Success {
			return
		}
		d.module = m
		if f, r := drv.ModuleGetFunction(c.Handle, m, kernels.Scatter); c.Observe(r) == driver.Success {
			d.function = f
		}
	})
	return d.function
}

// unload is for the System's end. After an error it can be called again.
func (d *distributor) unload(c *core.Context) error {
	if d.module == 0 {
		return nil
	}
	r := c.Teardown(func() driver.Result { return c.System().Drv.ModuleUnload(c.Handle, d.module) })
	if r != driver.Success {
		return c.CallError("cuda.System.Close", driver.CallModuleUnload, r, "the kernel that distributes small copies")
	}
	d.module = 0
	return nil
}

// scatter is how the pieces of one stream of bytes are distributed.
type scatter struct {
	function driver.Function
	table    uint64 // bytes of a piece's room
}

// Distributes reports whether Fill has a kernel distribute segments, if the device takes one and may write them: many
// small ones, at any addresses, then take about as long as one.
func Distributes(segments []Segment) bool { return newPlan(segments).table() > 0 }

// table returns how many bytes of a piece's room the table of its segments takes, or 0 if each is copied.
func (p *plan) table() uint64 {
	n := uint64(len(p.segments))
	if n < leastScattered || p.bytes/n >= WorthJoining {
		return 0
	}
	// What comes before the table, to begin at a multiple of 16, and the table itself.
	table := 16 + entryBytes*uint64(p.most(scatterRoom))
	if table = (table + stepUnit - 1) / stepUnit * stepUnit; table > scatterRoom/4 {
		return 0 // segments of some bytes each
	}
	return table
}

// scatterOf returns how a plan's pieces are distributed, or nil if each of its segments is copied.
func (e *Engine) scatterOf(p *plan) *scatter {
	table := p.table()
	if table == 0 {
		return nil
	}
	may := e.reach(driver.AccessReadWrite)
	for _, s := range p.segments {
		if !may.has(s) {
			return nil
		}
	}
	f := e.distributor.load(e.ctx)
	if f == 0 {
		return nil
	}
	return &scatter{f, table}
}

// leastGranule is what mappings are multiples of at least.
const leastGranule = 64 << 10

// reach remembers which addresses the driver said are memory that a device may use. A copy to or from another address is
// an error; a kernel that uses it destroys the context, and a batch of copies takes it for host memory.
type reach struct {
	e        *Engine
	least    driver.AccessFlags
	granule  driver.Ptr
	mapped   map[driver.Ptr]bool
	last     driver.Ptr // in mapped
	from, to driver.Ptr // plain memory of the device
}

func (e *Engine) reach(least driver.AccessFlags) *reach {
	granule := driver.Ptr(max(e.ctx.AddressGranularity.Load(), leastGranule))
	return &reach{e: e, least: least, granule: granule, mapped: map[driver.Ptr]bool{}, last: ^driver.Ptr(0)}
}

// has reports whether the device may use all of a segment, as far as the driver says.
func (r *reach) has(s Segment) bool {
	here := driver.Location{Type: driver.LocationDevice, ID: int32(r.e.ctx.Device)}
	for at, end := s.Ptr, s.Ptr+driver.Ptr(s.Bytes); at < end; {
		if r.from <= at && at < r.to {
			at = r.to
			continue
		}
		if g := at / r.granule; g != r.last && !r.mapped[g] {
			flags, res := r.e.sys().Drv.MemGetAccess(here, at)
			if res != driver.Success {
				if r.from, r.to = r.e.plain(at); r.to <= at {
					return false
				}
				continue
			}
			if flags < r.least {
				return false
			}
			r.mapped[g], r.last = true, g
		}
		at = (at/r.granule + 1) * r.granule
	}
	return true
}

// plain returns the memory of the device at an address that is not mapped there, or none.
func (e *Engine) plain(at driver.Ptr) (from, to driver.Ptr) {
	drv, c := e.sys().Drv, e.ctx.Handle
	on, r := drv.PointerGetAttribute(c, driver.PointerDeviceOrdinal, at)
	if r != driver.Success || driver.Device(on) != e.ctx.Device {
		return 0, 0
	}
	start, r1 := drv.PointerGetAttribute(c, driver.PointerRangeStart, at)
	size, r2 := drv.PointerGetAttribute(c, driver.PointerRangeSize, at)
	if r1 != driver.Success || r2 != driver.Success {
		return 0, 0
	}
	return driver.Ptr(start), driver.Ptr(start + size)
}

// most returns how many segments n bytes may have parts of, at most.
func (p *plan) most(n uint64) (most int) {
	end := 0
	for i, s := range p.segments {
		for end < len(p.starts) && p.starts[end] < p.starts[i]+s.Bytes+n {
			end++
		}
		most = max(most, end-i)
	}
	return most
}

// stage makes the staging areas of a worker, each in the order of the stream on which its flight is
// from now on. Without memory for them it copies each segment.
func (w *worker) stage(room uint64) {
	if w.scatter == nil {
		return
	}
	for i := range w.flights {
		f := &w.flights[i]
		p, r := f.drv().MemAllocAsync(f.ctx().Handle, room, f.stream().Handle)
		if f.ctx().Observe(r) != driver.Success {
			return
		}
		w.staging[i], f.fixed = p, true
	}
}

// unstage gives the staging areas back behind the work that uses them.
func (w *worker) unstage() {
	for i, p := range w.staging {
		if p == 0 {
			continue
		}
		f := &w.flights[i]
		c, s := f.ctx(), f.stream()
		free := func() driver.Result {
			if r := c.System().Drv.MemFreeAsync(c.Handle, p, s.Handle); !r.Lost() {
				return r
			}
			return c.System().Drv.MemFree(c.Handle, p) // a lost context has no order
		}
		again := func() error {
			if r := c.Teardown(free); r != driver.Success {
				return c.CallError(f.op, driver.CallMemFreeAsync, r, "a staging area")
			}
			return nil
		}
		if err := again(); err != nil {
			c.System().Left("a staging area", 0, c.Device, err, again)
		}
	}
}

// distribute submits n bytes of a piece, which begin at byte at of its room: a copy and a kernel.
func (w *worker) distribute(i, at, n int, offset uint64) error {
	f, room := &w.flights[i], w.rooms[i]
	lead, table := at&^15, (at+n+15)&^15
	entries := unsafe.Slice((*kernels.ScatterEntry)(unsafe.Pointer(&room[table])), (len(room)-table)/int(entryBytes))
	count := 0
	_ = w.plan.each(offset, uint64(n), func(dev driver.Ptr, in, size uint64) error {
		entries[count] = kernels.ScatterEntry{To: uint64(dev), Offset: uint32(at - lead + int(in)), Bytes: uint32(size)}
		count++
		return nil
	})
	c, s, staging := f.ctx(), f.stream(), w.staging[i]
	whole := uint64(table-lead) + uint64(count)*entryBytes
	if r := f.drv().MemcpyHtoDAsync(c.Handle, staging, unsafe.Pointer(&room[lead]), whole, s.Handle); r != driver.Success {
		return c.CallError(f.op, driver.CallMemcpyHtoDAsync, r, fmt.Sprintf("%s to a staging area", errs.Bytes(whole)))
	}
	f.open.bytes += uint64(n)
	f.open.copies++
	params := [3]uint64{uint64(staging), uint64(staging) + uint64(table-lead), uint64(count)}
	config := driver.LaunchConfig{GridX: uint32(min(count, scatterBlocks)), GridY: 1, GridZ: 1, BlockX: scatterThreads, BlockY: 1, BlockZ: 1}
	block := unsafe.Slice((*byte)(unsafe.Pointer(&params)), unsafe.Sizeof(params))
	if r := f.drv().LaunchKernel(c.Handle, w.scatter.function, config, block, s.Handle); r != driver.Success {
		return c.CallError(f.op, driver.CallLaunchKernel, r, errs.Count(count, "small copy"))
	}
	return f.mark()
}
