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
		value, _ := variable(name)
		if list, given := variable(visibleEnv); given && name == sim.MachineEnv {
			value, _ = hide(value, list)
		}
		return value
	}
}

// variable returns a variable of C's environment.
func variable(name string) (value string, given bool) {
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	v := C.getenv(c)
	return C.GoString(v), v != nil
}

// machine is the machine that the library's calls use. The first call makes it, unless a
// test has set it.
var machine struct {
	once sync.Once
	d    driver.Foreign
	lack driver.Result // without one
	m    *sim.Machine  // of the environment
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
		if list, given := variable(visibleEnv); given {
			described, _ := variable(sim.MachineEnv)
			if _, some := hide(described, list); !some {
				complain("%s=%q hides every device", visibleEnv, list)
				machine.lack = driver.NoDevice
				return
			}
		}
		m, err := sim.NewFromEnvironment()
		if err != nil {
			complain("%v", err)
			machine.lack = driver.SystemNotReady
			return
		}
		machine.d, machine.m = driver.Of(m).Foreign(), m
		C.cuvmm_report_at_exit()
	})
	if machine.d == nil {
		return nil, machine.lack
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
