//go:build !linux || !cgo || !(amd64 || arm64) || cuvmm_nocgo

package cbench

import (
	"errors"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// Available reports whether this build has the C side. Without it Open fails,
// so there is no Library to call.
const Available = false

var errNoCgo = errors.New("no C loops: built without cgo, or not for linux on amd64 or arm64")

func EmptyLoop(int) time.Duration { panic(errNoCgo) }

type Library struct{}

func Open(string) (*Library, error) { return nil, errNoCgo }

func (*Library) CaptureSteps(driver.Context, driver.Stream, int) (time.Duration, driver.Result) {
	panic(errNoCgo)
}

func (*Library) GranularitySteps(driver.Device, int) (time.Duration, driver.Result) {
	panic(errNoCgo)
}

func (*Library) VMMCycle(driver.Device, uint64, int) (time.Duration, driver.Result) {
	panic(errNoCgo)
}

func (*Library) GrowLoop(driver.Device, uint64, [][]uint64) (time.Duration, driver.Result) {
	panic(errNoCgo)
}

func (*Library) CopyLoop(driver.Context, driver.Stream, driver.Ptr, unsafe.Pointer, uint64, uint64, int) (time.Duration, driver.Result) {
	panic(errNoCgo)
}

func (*Library) NewRing(driver.Context, int, uint64) (*Ring, driver.Result) { panic(errNoCgo) }

type Ring struct{}

func (*Ring) Load(string, bool, uint64, driver.Ptr) (time.Duration, driver.Result) { panic(errNoCgo) }

func (*Ring) Free() { panic(errNoCgo) }

type CaptureHolder struct{}

func (*CaptureHolder) Start(*Library, driver.Context, driver.Stream, driver.CaptureMode) (driver.Result, error) {
	return 0, errNoCgo
}

func (*CaptureHolder) End() driver.Result { return driver.Success }
