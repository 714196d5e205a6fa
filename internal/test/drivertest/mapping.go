package drivertest

import (
	"github.com/cuvmm/cuvmm/internal/driver"
)

// mapping are the rules of cuMemMap and of addresses that are not mapped.
var mapping = []Case{
	{
		Name: "cuMemMap with an offset other than 0",
		Says: "NOT_SUPPORTED",
		Run: func(t *T) {
			h := t.create(2 * t.chunk)
			p := t.reserve(2 * t.chunk)
			t.returns(driver.NotSupported, t.D.MemMap(p, t.chunk, t.chunk, h), "map the second half")
		},
	},
	{
		Name: "cuMemMap with a size that is not the handle's full size, smaller or larger",
		Says: "NOT_SUPPORTED",
		Run: func(t *T) {
			h := t.create(2 * t.chunk)
			p := t.reserve(4 * t.chunk)
			t.returns(driver.NotSupported, t.D.MemMap(p, t.chunk, 0, h), "map half of the handle")
			t.returns(driver.NotSupported, t.D.MemMap(p, 4*t.chunk, 0, h), "map twice the handle")
			t.bind(p, 2*t.chunk, h)
		},
	},
	{
		Name: "cuMemMap over a mapped range",
		Says: "INVALID_VALUE",
		Run: func(t *T) {
			p := t.reserve(2 * t.chunk)
			t.bind(p, t.chunk, t.create(t.chunk))
			t.returns(driver.InvalidValue, t.D.MemMap(p, t.chunk, 0, t.create(t.chunk)), "map over a mapping")
			t.returns(driver.InvalidValue, t.D.MemMap(p, 2*t.chunk, 0, t.create(2*t.chunk)), "map over a mapping and free room")
		},
	},
	{
		Name: "cuMemMap of one handle at two addresses, and at 1,024",
		Says: "success: every address reaches the same bytes",
		Run: func(t *T) {
			const aliases = 1024
			h := t.create(t.chunk)
			p := t.reserve(aliases * t.chunk)
			at := func(i uint64) driver.Ptr { return p + driver.Ptr(i*t.chunk) }
			for i := range uint64(2) {
				t.bind(at(i), t.chunk, h)
			}
			t.allow(p, 2*t.chunk)
			t.fill(t.device, at(0), t.chunk, 0x31)
			t.reads(t.device, at(1), t.chunk, 0x31)
			for i := uint64(2); i < aliases; i++ {
				t.bind(at(i), t.chunk, h)
			}
			t.allow(at(2), (aliases-2)*t.chunk)
			t.fill(t.device, at(aliases-1), t.chunk, 0x32)
			for _, i := range []uint64{0, 1, aliases / 2} {
				t.reads(t.device, at(i), t.chunk, 0x32)
			}
		},
	},
	{
		Name: "memory that a stream has yet to write through one address, mapped at another meanwhile, written through that on the same stream, and unmapped at the first once that work has passed",
		Says: "in the order of the stream, whichever address is used",
		Run: func(t *T) {
			h := t.create(t.chunk)
			p := t.reserve(2 * t.chunk)
			from, to := p, p+driver.Ptr(t.chunk)
			t.bind(from, t.chunk, h)
			t.allow(from, t.chunk)
			held := t.hold(t.ctx, t.stream)
			t.ok(t.D.MemsetD8Async(t.ctx, from, 0x33, t.chunk, t.stream), "write through the first address")
			e, r := t.D.EventCreate(t.ctx, driver.EventDisableTiming)
			t.ok(r, "make an event")
			defer func() { t.ok(t.D.EventDestroy(t.ctx, e), "destroy the event") }()
			t.ok(t.D.EventRecord(t.ctx, e, t.stream), "record it")
			t.bind(to, t.chunk, h)
			t.allow(to, t.chunk)
			t.didNotWait(held, "mapping it elsewhere")
			t.ok(t.D.MemsetD8Async(t.ctx, to, 0x34, t.chunk/2, t.stream), "write a half through the second")
			held.release()
			t.ok(t.D.EventSynchronize(t.ctx, e), "wait for the first write")
			t.ok(t.D.MemUnmap(from, t.chunk), "unmap the first address")
			t.ok(t.D.StreamSynchronize(t.ctx, t.stream), "wait for the second write")
			t.reads(t.device, to, t.chunk/2, 0x34)
			t.reads(t.device, to+driver.Ptr(t.chunk/2), t.chunk/2, 0x33)
		},
	},
	{
		Name: "copy or memset at an address that is reserved and not mapped",
		Says: "INVALID_VALUE; the context stays usable",
		Run: func(t *T) {
			p := t.reserve(t.chunk)
			good, _ := t.memory(t.chunk)
			const n = 4096
			for _, call := range []struct {
				name string
				r    driver.Result
			}{
				{"memset", t.F.MemsetD8(t.ctx, p, 1, n)},
				{"copy from the host", t.F.MemcpyHtoD(t.ctx, p, t.page, n)},
				{"copy to the host", t.F.MemcpyDtoH(t.ctx, t.page, p, n)},
				{"copy on the device, to it", t.F.MemcpyDtoD(t.ctx, p, good, n)},
				{"copy on the device, from it", t.F.MemcpyDtoD(t.ctx, good, p, n)},
				{"asynchronous memset", t.D.MemsetD8Async(t.ctx, p, 1, n, t.stream)},
				{"asynchronous copy from the host", t.D.MemcpyHtoDAsync(t.ctx, p, t.page, n, t.stream)},
				{"asynchronous copy to the host", t.D.MemcpyDtoHAsync(t.ctx, t.page, p, n, t.stream)},
			} {
				t.returns(driver.InvalidValue, call.r, "%s", call.name)
			}
			t.works(t.device, good, t.chunk)
		},
	},
}

// access are the rules of cuMemSetAccess.
var access = []Case{
	{
		Name: "cuMemSetAccess over several whole mappings, even across two adjacent reservations",
		Says: "success in one call",
		Run: func(t *T) {
			size := 2 * t.chunk
			p, _ := t.adjacent(size)
			for i := range uint64(4) {
				t.bind(p+driver.Ptr(i*t.chunk), t.chunk, t.create(t.chunk))
			}
			t.allow(p, 2*size)
			for i := range uint64(4) {
				t.works(t.device, p+driver.Ptr(i*t.chunk), t.chunk)
			}
		},
	},
	{
		Name: "cuMemSetAccess over part of a mapping",
		Says: "INVALID_VALUE",
		Run: func(t *T) {
			p, _ := t.memory(2 * t.chunk)
			rw := grant(driver.AccessReadWrite, deviceLocation(t.Device))
			t.returns(driver.InvalidValue, t.D.MemSetAccess(p, t.chunk, rw), "set access of the first half")
			t.returns(driver.InvalidValue, t.D.MemSetAccess(p+driver.Ptr(t.chunk), t.chunk, rw), "set access of the second half")
		},
	},
	{
		Name: "cuMemSetAccess over a range that is not mapped",
		Says: "INVALID_VALUE",
		Run: func(t *T) {
			p := t.reserve(3 * t.chunk)
			t.bind(p, t.chunk, t.create(t.chunk))
			rw := grant(driver.AccessReadWrite, deviceLocation(t.Device))
			t.returns(driver.InvalidValue, t.D.MemSetAccess(p+driver.Ptr(2*t.chunk), t.chunk, rw), "set access where nothing is mapped")
			t.returns(driver.InvalidValue, t.D.MemSetAccess(p, 2*t.chunk, rw), "set access over a mapping and a gap")
		},
	},
	{
		Name: "cuMemSetAccess to READ, to NONE, and back",
		Says: "success, and cuMemGetAccess reads 1, 0, 3",
		Run: func(t *T) {
			p, _ := t.memory(t.chunk)
			here := deviceLocation(t.Device)
			for _, flags := range []driver.AccessFlags{driver.AccessRead, driver.AccessNone, driver.AccessReadWrite} {
				t.ok(t.D.MemSetAccess(p, t.chunk, grant(flags, here)), "set access %d", flags)
				got, r := t.D.MemGetAccess(here, p)
				t.ok(r, "get access")
				if got != flags {
					t.Errorf("access reads %d, was set to %d", got, flags)
				}
			}
			t.works(t.device, p, t.chunk)
		},
	},
	{
		Name: "cuMemSetAccess granting HOST or HOST_NUMA on device memory",
		Says: "NOT_SUPPORTED",
		Run: func(t *T) {
			p, _ := t.memory(t.chunk)
			for _, l := range []driver.Location{onHost().Location, onNode(0).Location} {
				t.returns(driver.NotSupported, t.D.MemSetAccess(p, t.chunk, grant(driver.AccessReadWrite, l)), "grant %+v", l)
			}
			t.works(t.device, p, t.chunk)
		},
	},
	{
		Name:  "one reservation mapped with memory of two devices, both granted in one call",
		Says:  "success",
		Needs: needs(twoDevices),
		Run: func(t *T) {
			p := t.reserve(2 * t.chunk)
			for i := range 2 {
				t.bind(p+driver.Ptr(uint64(i)*t.chunk), t.chunk, t.create(t.chunk, onDevice(t.devices[i].Device)))
			}
			both := grant(driver.AccessReadWrite, deviceLocation(t.devices[0].Device), deviceLocation(t.devices[1].Device))
			t.ok(t.D.MemSetAccess(p, 2*t.chunk, both), "grant both devices")
			t.works(t.devices[0], p, 2*t.chunk)
			t.works(t.devices[1], p, 2*t.chunk)
			t.fill(t.devices[0], p, 2*t.chunk, 0x41)
			t.reads(t.devices[1], p, 2*t.chunk, 0x41)
		},
	},
}

// ends are the rules of what gives memory and addresses back.
var ends = []Case{
	{
		Name: "cuMemUnmap of part of a mapping",
		Says: "INVALID_VALUE",
		Run: func(t *T) {
			p, _ := t.memory(2 * t.chunk)
			t.returns(driver.InvalidValue, t.D.MemUnmap(p, t.chunk), "unmap the first half")
			t.returns(driver.InvalidValue, t.D.MemUnmap(p+driver.Ptr(t.chunk), t.chunk), "unmap the second half")
			t.works(t.device, p, 2*t.chunk)
		},
	},
	{
		Name: "cuMemUnmap over several whole mappings",
		Says: "success",
		Run: func(t *T) {
			p := t.reserve(3 * t.chunk)
			for i := range uint64(3) {
				t.ok(t.D.MemMap(p+driver.Ptr(i*t.chunk), t.chunk, 0, t.create(t.chunk)), "map")
			}
			t.ok(t.D.MemUnmap(p, 3*t.chunk), "unmap three mappings")
			// Nothing is left there.
			t.bind(p, 3*t.chunk, t.create(3*t.chunk))
		},
	},
	{
		Name: "cuMemUnmap of a range that is reserved and not mapped",
		Says: "success",
		Run: func(t *T) {
			p := t.reserve(t.chunk)
			t.ok(t.D.MemUnmap(p, t.chunk), "unmap what is not mapped")
		},
	},
	{
		Name: "cuMemAddressFree while mapped",
		Says: "INVALID_VALUE",
		Run: func(t *T) {
			p, _ := t.memory(t.chunk)
			t.returns(driver.InvalidValue, t.D.MemAddressFree(p, t.chunk), "free the address of a mapping")
			t.works(t.device, p, t.chunk)
		},
	},
	{
		Name: "cuMemAddressFree of part of a reservation, or twice",
		Says: "INVALID_VALUE",
		Run: func(t *T) {
			p := t.reserve(2 * t.chunk)
			t.returns(driver.InvalidValue, t.D.MemAddressFree(p, t.chunk), "free the first half")
			t.returns(driver.InvalidValue, t.D.MemAddressFree(p+driver.Ptr(t.chunk), t.chunk), "free the second half")
			t.end("reservation", uint64(p))
			t.returns(driver.InvalidValue, t.D.MemAddressFree(p, 2*t.chunk), "free twice")
		},
	},
	{
		Name: "cuMemRelease while mapped",
		Says: "success; the memory lives until the last unmap",
		Run: func(t *T) {
			size := roundUp(64<<20, t.chunk)
			before := t.free(t.device)
			p, h := t.memory(size)
			t.fill(t.device, p, size, 0x51)
			t.release(h)
			t.reads(t.device, p, size, 0x51)
			mapped := t.free(t.device)
			if mapped+size > before {
				t.Errorf("of %d free bytes %d are left while %d are mapped", before, mapped, size)
			}
			t.unmap(p)
			if now := t.free(t.device); now < mapped+size {
				t.Errorf("%d bytes are free after unmap, %d before it, want %d more", now, mapped, size)
			}
		},
	},
	{
		Name:  "† cuMemRelease of a handle that is none",
		Says:  "the process crashes",
		Needs: needs(softwareDriver),
		Run: func(t *T) {
			c := t.child("release a junk handle")
			c.Start()
			var ready bool
			c.Recv(&ready)
			if err := c.Exit(); err == nil {
				t.Error("the process lives on")
			}
			t.Logf("the child's last words:\n%s", c.Log())
		},
	},
	{
		Name: "cuMemRetainAllocationHandle",
		Says: "the same handle value, one more reference",
		Run: func(t *T) {
			size := roundUp(64<<20, t.chunk)
			p, h := t.memory(size)
			for _, at := range []driver.Ptr{p, p + driver.Ptr(size) - 1} {
				again, r := t.F.MemRetainAllocationHandle(at)
				t.ok(r, "retain")
				t.ownHandle(again)
				if again != h {
					t.Errorf("the handle reads %#x at offset %d, want %#x", uint64(again), at-p, uint64(h))
				}
			}
			taken := t.free(t.device)
			t.unmap(p)
			for i := range 3 {
				if got := t.free(t.device); got > taken+size/2 {
					t.Errorf("the memory is gone while %d references are left", 3-i)
				}
				t.release(h)
			}
			if got := t.free(t.device); got < taken+size {
				t.Errorf("%d bytes are free after the last release, %d before, want %d more", got, taken, size)
			}
		},
	},
}

func init() {
	roles["release a junk handle"] = func(c *child) {
		c.send(true)
		_ = c.d.MemRelease(0xdead0001)
	}
}

func roundUp(n, to uint64) uint64 { return (n + to - 1) / to * to }
