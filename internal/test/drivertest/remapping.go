package drivertest

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// remapping are the rules of addresses that outlive the memory behind them.
var remapping = []Case{
	{
		Name: "memory that is unmapped and mapped again at the same address",
		Says: "success: it has its bytes",
		Run: func(t *T) {
			p, h := t.memory(2 * t.chunk)
			t.fill(t.device, p, 2*t.chunk, 0x61)
			for range 3 {
				t.unmap(p)
				t.bind(p, 2*t.chunk, h)
				t.allow(p, 2*t.chunk)
				t.reads(t.device, p, 2*t.chunk, 0x61)
			}
		},
	},
	{
		Name: "access to a mapping that follows another at its address, in a run whose others have access",
		Says: "none: cuMemGetAccess reads 0 until it is granted; the others keep theirs",
		Run: func(t *T) {
			p, handles := t.run(3)
			middle := p + driver.Ptr(t.chunk)
			t.unmap(middle)
			t.bind(middle, t.chunk, handles[1])
			for _, flags := range []driver.AccessFlags{driver.AccessNone, driver.AccessReadWrite} {
				for i, want := range []driver.AccessFlags{driver.AccessReadWrite, flags, driver.AccessReadWrite} {
					got, r := t.D.MemGetAccess(deviceLocation(t.Device), p+driver.Ptr(uint64(i)*t.chunk))
					t.ok(r, "get access of mapping %d", i)
					if got != want {
						t.Errorf("access to mapping %d reads %d, want %d", i, got, want)
					}
				}
				t.allow(middle, t.chunk)
			}
			t.works(t.device, p, 3*t.chunk)
		},
	},
	{
		Name: "one mapping of a run that one call granted is unmapped, and other memory mapped and granted there alone",
		Says: "success: the others keep their bytes and their access, meanwhile and afterwards",
		Run: func(t *T) {
			p, _ := t.run(3)
			middle, last := p+driver.Ptr(t.chunk), p+driver.Ptr(2*t.chunk)
			t.fill(t.device, p, 3*t.chunk, 0x62)
			neighbors := func() {
				t.Helper()
				for _, at := range []driver.Ptr{p, last} {
					t.reads(t.device, at, t.chunk, 0x62)
					t.works(t.device, at, t.chunk)
					t.fill(t.device, at, t.chunk, 0x62)
				}
			}
			t.unmap(middle)
			neighbors()
			t.returns(driver.InvalidValue, t.D.MemsetD8Async(t.ctx, middle, 0, 64, t.stream), "memset where nothing is mapped")
			t.bind(middle, t.chunk, t.create(t.chunk))
			neighbors()
			t.allow(middle, t.chunk)
			t.fill(t.device, middle, t.chunk, 0x63)
			neighbors()
			t.reads(t.device, middle, t.chunk, 0x63)
		},
	},
	{
		Name: "the memory of a run, unmapped one by one in any order, and mapped again in another, each at another's address",
		Says: "success: each address reads what is mapped there now",
		Run: func(t *T) {
			const n = 16
			p, handles := t.run(n)
			at := func(i int) driver.Ptr { return p + driver.Ptr(uint64(i)*t.chunk) }
			for i := range n {
				t.fill(t.device, at(i), t.chunk, byte(i))
			}
			// Odd numbers have no factor in common with n: each of these is an order.
			for i := range n {
				t.unmap(at(5 * i % n))
			}
			for i := range n {
				t.bind(at(7*i%n), t.chunk, handles[11*i%n])
			}
			t.allow(p, n*t.chunk)
			for i := range n {
				t.reads(t.device, at(7*i%n), t.chunk, byte(11*i%n))
			}
		},
	},
	{
		Name: "four mappings are unmapped, and one of their size is mapped there; and the other way round",
		Says: "success",
		Run: func(t *T) {
			p, small := t.run(4)
			size := 4 * t.chunk
			large := t.create(size)
			each := func(do func(at driver.Ptr, i int)) {
				for i := range small {
					do(p+driver.Ptr(uint64(i)*t.chunk), i)
				}
			}
			t.fill(t.device, p, size, 0x64)
			each(func(at driver.Ptr, _ int) { t.unmap(at) })
			t.bind(p, size, large)
			t.allow(p, size)
			t.fill(t.device, p, size, 0x65)
			t.reads(t.device, p, size, 0x65)
			t.unmap(p)
			each(func(at driver.Ptr, i int) { t.bind(at, t.chunk, small[i]) })
			t.allow(p, size)
			t.reads(t.device, p, size, 0x64)
		},
	},
	{
		Name: "one handle mapped at every address of a range that no other memory is mapped at, then replaced at one of them",
		Says: "success: the other addresses still reach it, and copies go across",
		Run: func(t *T) {
			const n = 9
			p := t.reserve(n * t.chunk)
			at := func(i int) driver.Ptr { return p + driver.Ptr(uint64(i)*t.chunk) }
			null := t.create(t.chunk)
			want := [n]byte{}
			for i := range n {
				h := null
				if want[i] = 0x66; i%4 == 0 {
					h, want[i] = t.create(t.chunk), byte(i)
				}
				t.bind(at(i), t.chunk, h)
			}
			t.allow(p, n*t.chunk)
			for i := range n {
				t.fill(t.device, at(i), t.chunk, want[i])
			}
			t.unmap(at(2))
			t.bind(at(2), t.chunk, t.create(t.chunk))
			t.allow(at(2), t.chunk)
			want[2] = 0x67
			t.fill(t.device, at(2), t.chunk, want[2])
			to, _ := t.memory(n * t.chunk)
			t.ok(t.D.MemcpyDtoDAsync(t.ctx, to, p, n*t.chunk, t.stream), "copy the range")
			for i := range n {
				t.reads(t.device, to+driver.Ptr(uint64(i)*t.chunk), t.chunk, want[i])
			}
		},
	},
	{
		Name: "cuMemUnmap over two mappings and what is not mapped between them",
		Says: "success: both are gone",
		Run: func(t *T) {
			p, _ := t.run(3)
			t.unmap(p + driver.Ptr(t.chunk))
			t.ok(t.D.MemUnmap(p, 3*t.chunk), "unmap the run")
			for _, i := range []uint64{0, 2} {
				t.disown("mapping", uint64(p)+i*t.chunk)
			}
			t.bind(p, 3*t.chunk, t.create(3*t.chunk))
		},
	},
	{
		Name: "memory is copied to registered host memory, private or of a memory file, unmapped and released; new memory is mapped at its address, and the copy comes back",
		Says: "success: the memory is free meanwhile, and the bytes are there again",
		Run: func(t *T) {
			size := roundUp(16<<20, t.chunk)
			private := t.pageable(int(size))
			_, file := t.memoryFile(int(size))
			for _, host := range []unsafe.Pointer{private, file} {
				t.register(host, size)
				p, h := t.memory(size)
				half := driver.Ptr(size / 2)
				t.fill(t.device, p, size/2, 0x68)
				t.fill(t.device, p+half, size/2, 0x69)
				taken := t.free(t.device)
				t.ok(t.D.MemcpyDtoHAsync(t.ctx, host, p, size, t.stream), "copy out")
				t.ok(t.D.StreamSynchronize(t.ctx, t.stream), "copy out")
				t.unmap(p)
				t.release(h)
				if now := t.free(t.device); now < taken+size {
					t.Errorf("%d bytes are free, %d were before, want %d more", now, taken, size)
				}
				t.bind(p, size, t.create(size))
				t.allow(p, size)
				t.fill(t.device, p, size, 0)
				t.ok(t.D.MemcpyHtoDAsync(t.ctx, p, host, size, t.stream), "copy back")
				t.reads(t.device, p, size/2, 0x68)
				t.reads(t.device, p+half, size/2, 0x69)
			}
		},
	},
}

// run is so many chunks, each of an allocation of its own, mapped side by side and granted
// to the case's device in one call.
func (t *T) run(chunks int) (p driver.Ptr, handles []driver.MemHandle) {
	t.Helper()
	size := uint64(chunks) * t.chunk
	p = t.reserve(size)
	for i := range chunks {
		handles = append(handles, t.create(t.chunk))
		t.bind(p+driver.Ptr(uint64(i)*t.chunk), t.chunk, handles[i])
	}
	t.allow(p, size)
	return p, handles
}
