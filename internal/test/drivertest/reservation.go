package drivertest

import "github.com/cuvmm/cuvmm/internal/driver"

// reservation are the rules of cuMemAddressReserve.
var reservation = []Case{
	{
		Name: "cuMemAddressReserve of 4096 bytes",
		Says: "INVALID_VALUE: the size must be a multiple of 2 MiB",
		Run: func(t *T) {
			_, r := t.D.MemAddressReserve(4096, 0, 0)
			t.returns(driver.InvalidValue, r, "reserve 4096 bytes")
		},
	},
	{
		Name: "cuMemAddressReserve with an alignment of 1 GiB",
		Says: "success, and the address is aligned",
		Run: func(t *T) {
			// Several, so that chance does not align them all.
			for range 4 {
				p, r := t.D.MemAddressReserve(t.chunk, 1<<30, 0)
				t.ok(r, "reserve with an alignment of 1 GiB")
				t.ownAddress(p, t.chunk)
				if p%(1<<30) != 0 {
					t.Errorf("address %#x is not aligned to 1 GiB", uint64(p))
				}
			}
		},
	},
	{
		Name: "cuMemAddressReserve with an alignment of 3",
		Says: "INVALID_VALUE",
		Run: func(t *T) {
			_, r := t.D.MemAddressReserve(t.chunk, 3, 0)
			t.returns(driver.InvalidValue, r, "reserve with an alignment of 3")
		},
	},
	{
		Name: "cuMemAddressReserve of 2^40 to 2^46 bytes",
		Says: "success",
		Run: func(t *T) {
			for bits := 40; bits <= 46; bits++ {
				p, r := t.D.MemAddressReserve(1<<bits, 0, 0)
				t.ok(r, "reserve 2^%d bytes", bits)
				t.ok(t.D.MemAddressFree(p, 1<<bits), "free 2^%d bytes", bits)
			}
		},
	},
	{
		Name: "cuMemAddressReserve of 2^47 bytes",
		Says: "OUT_OF_MEMORY: the error can mean 'no address space'",
		Run: func(t *T) {
			_, r := t.D.MemAddressReserve(1<<47, 0, 0)
			t.returns(driver.OutOfMemory, r, "reserve 2^47 bytes")
		},
	},
	{
		Name: "cuMemAddressReserve with a hint at the end of an existing reservation",
		Says: "granted where free; the two stay two reservations",
		Run: func(t *T) {
			first, second := t.adjacent(t.chunk)
			t.returns(driver.InvalidValue, t.D.MemAddressFree(first, 2*t.chunk), "free both as one")
			t.end("reservation", uint64(first))
			t.end("reservation", uint64(second))
		},
	},
	{
		Name: "cuMemAddressReserve with a hint that is not a multiple of 2 MiB, or of the alignment that is asked for",
		Says: "INVALID_VALUE",
		Run: func(t *T) {
			for _, hint := range []driver.Ptr{1, 0xfff, 0x1000, 0x300000001, 1<<64 - 1} {
				_, r := t.D.MemAddressReserve(t.chunk, 0, hint)
				t.returns(driver.InvalidValue, r, "reserve with the hint %#x", uint64(hint))
			}
			_, r := t.D.MemAddressReserve(t.chunk, 1<<30, 0x300200000)
			t.returns(driver.InvalidValue, r, "reserve with an alignment of 1 GiB and the hint 0x300200000")
		},
	},
	{
		Name: "cuMemAddressReserve with a hint at the end of the process's addresses or behind them",
		Says: "OUT_OF_MEMORY",
		Run: func(t *T) {
			for _, hint := range []driver.Ptr{0x7fffffe00000, 1 << 47, 1 << 48, 1 << 63} {
				_, r := t.D.MemAddressReserve(t.chunk, 0, hint)
				t.returns(driver.OutOfMemory, r, "reserve with the hint %#x", uint64(hint))
			}
		},
	},
	{
		Name: "cuMemAddressReserve with a hint inside of a reservation, or where the driver reserves nothing, as at 0x200000",
		Says: "success, elsewhere",
		Run: func(t *T) {
			taken := t.reserve(4*t.chunk, 4*t.chunk)
			for _, hint := range []driver.Ptr{taken + driver.Ptr(t.chunk), 0x200000} {
				p, r := t.D.MemAddressReserve(t.chunk, 0, hint)
				t.ok(r, "reserve with the hint %#x", uint64(hint))
				t.ownAddress(p, t.chunk)
				if p == hint {
					t.Errorf("the hint %#x is granted", uint64(hint))
				}
			}
		},
	},
}

// adjacent makes two reservations of the given size, side by side, the second
// by a hint. The address space is shared with whatever else the process maps,
// so a free place is found first: by a reservation of both sizes that is given
// back.
func (t *T) adjacent(size uint64) (first, second driver.Ptr) {
	t.Helper()
	at, r := t.D.MemAddressReserve(2*size, 0, 0)
	t.ok(r, "reserve %d bytes", 2*size)
	t.ok(t.D.MemAddressFree(at, 2*size), "free %d bytes", 2*size)
	for i := range 2 {
		want := at + driver.Ptr(uint64(i)*size)
		p, r := t.D.MemAddressReserve(size, 0, want)
		t.ok(r, "reserve with a hint")
		t.ownAddress(p, size)
		if p != want {
			t.Fatalf("reserve with a hint at %#x, which is free: the driver gives %#x", uint64(want), uint64(p))
		}
	}
	return at, at + driver.Ptr(size)
}
