//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

// #include <stdlib.h>
// #include "libcuda.h"
import "C"

import (
	"fmt"
	"os"
	"sync"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/environ"
)

// Variables that the program set before it loaded the library count, too.
func init() {
	environ.Lookup = func(name string) string {
		c := C.CString(name)
		defer C.free(unsafe.Pointer(c))
		return C.GoString(C.getenv(c))
	}
}

// machine is the machine that the library's calls use. The first call makes it, unless a
// test has set it.
var machine struct {
	once sync.Once
	d    driver.Foreign
}

// use makes the calls use a test's machine.
func use(m *sim.Machine) {
	machine.once.Do(func() {})
	machine.d = driver.Of(m).Foreign()
}

// opened returns the machine's driver, in the form whose calls run in the
// calling thread's capture mode.
func opened() (driver.Foreign, driver.Result) {
	machine.once.Do(func() {
		m, err := sim.NewFromEnvironment()
		if err != nil {
			complain("%v", err)
			return
		}
		machine.d = driver.Of(m).Foreign()
	})
	if machine.d == nil {
		return nil, driver.SystemNotReady
	}
	return machine.d, driver.Success
}

// complain writes to standard error what no result code can express.
func complain(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "libcuda (software driver): %s\n", fmt.Sprintf(format, args...))
}

// code converts a result to the vendor's number. The library's own results, which are
// negative, mean that the machine lacks the call.
func code(r driver.Result) C.int32_t {
	if r < 0 {
		r = driver.NotSupported
	}
	return C.int32_t(r)
}

func truth(b bool) int32 {
	if b {
		return 1
	}
	return 0
}

//export cuvmm_driver_version
func cuvmm_driver_version() C.int32_t {
	d, r := opened()
	if r != driver.Success {
		return 0
	}
	version, _ := d.DriverGetVersion()
	return C.int32_t(version)
}
