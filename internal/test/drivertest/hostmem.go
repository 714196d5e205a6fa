package drivertest

import (
	"os"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// pageable is ordinary host memory that ends with the case.
func (t *T) pageable(n int) unsafe.Pointer {
	t.Helper()
	b, err := pageable(n)
	if err != nil {
		t.Fatal(err)
	}
	return t.ownPages(b)
}

// ownPages returns the address of pages that the system mapped for the case.
func (t *T) ownPages(b []byte) unsafe.Pointer {
	p := unsafe.Pointer(&b[0])
	t.own("pages", uint64(uintptr(p)), func() driver.Result {
		if err := freePageable(b); err != nil {
			t.Error(err)
		}
		return driver.Success
	})
	return p
}

// memoryFile is n bytes of a file in memory, and their address in this process.
func (t *T) memoryFile(n int) (*os.File, unsafe.Pointer) {
	t.Helper()
	file, err := memoryFile(int64(n))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	pages, err := mapFile(file, n)
	if err != nil {
		t.Fatal(err)
	}
	return file, t.ownPages(pages)
}

// register makes host memory known to the case's context.
func (t *T) register(host unsafe.Pointer, n uint64) {
	t.Helper()
	t.ok(t.D.MemHostRegister(t.ctx, host, n, driver.HostRegisterPortable|driver.HostRegisterDeviceMap), "register")
	t.own("registered memory", uint64(uintptr(host)), func() driver.Result { return t.D.MemHostUnregister(t.ctx, host) })
}
