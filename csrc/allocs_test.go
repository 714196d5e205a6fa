//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// No call allocates, except the one that returns a string.
func TestCallsDoNotAllocate(t *testing.T) {
	f := buildFake(t)
	own := f.open(t)
	f.quiet(true)
	params, image := make([]byte, 64), []byte(".version 8.0")
	for _, form := range []struct {
		name string
		d    driver.Driver
	}{{"own", own}, {"foreign", own.Foreign()}} {
		d := form.d
		for name, call := range map[string]func(){
			"Init":                                 func() { d.Init() },
			"DriverGetVersion":                     func() { d.DriverGetVersion() },
			"DeviceGetAttribute":                   func() { d.DeviceGetAttribute(driver.AttrDMABuf, device) },
			"DeviceGetUUID":                        func() { d.DeviceGetUUID(device) },
			"DevicePrimaryCtxGetState":             func() { own.Foreign().DevicePrimaryCtxGetState(device) },
			"CtxGetCurrent":                        func() { own.Foreign().CtxGetCurrent() },
			"StreamQuery":                          func() { d.StreamQuery(ours, stream) },
			"StreamSynchronize":                    func() { d.StreamSynchronize(ours, stream) },
			"StreamWaitEvent":                      func() { d.StreamWaitEvent(ours, stream, event) },
			"StreamWriteValue64":                   func() { d.StreamWriteValue64(ours, stream, ptr, 1) },
			"StreamIsCapturing":                    func() { d.StreamIsCapturing(ours, stream) },
			"StreamGetCaptureInfo":                 func() { d.StreamGetCaptureInfo(ours, stream) },
			"GraphLaunch":                          func() { d.GraphLaunch(ours, gexec, stream) },
			"EventCreate":                          func() { d.EventCreate(ours, driver.EventDisableTiming) },
			"EventRecord":                          func() { d.EventRecord(ours, event, stream) },
			"EventQuery":                           func() { d.EventQuery(ours, event) },
			"EventElapsedTime":                     func() { d.EventElapsedTime(ours, event, event) },
			"EventDestroy":                         func() { d.EventDestroy(ours, event) },
			"MemcpyHtoDAsync":                      func() { d.MemcpyHtoDAsync(ours, ptr, hostPtr, 64, stream) },
			"MemcpyDtoHAsync":                      func() { d.MemcpyDtoHAsync(ours, hostPtr, ptr, 64, stream) },
			"MemcpyDtoDAsync":                      func() { d.MemcpyDtoDAsync(ours, ptr, ptr, 64, stream) },
			"MemsetD8Async":                        func() { d.MemsetD8Async(ours, ptr, 1, 64, stream) },
			"MemAllocAsync":                        func() { d.MemAllocAsync(ours, 64, stream) },
			"MemFree":                              func() { d.MemFree(ours, ptr) },
			"MemGetInfo":                           func() { d.MemGetInfo(ours) },
			"PointerGetAttribute":                  func() { d.PointerGetAttribute(ours, driver.PointerContext, ptr) },
			"MemAddressReserve":                    func() { d.MemAddressReserve(1<<21, 0, 0) },
			"MemAddressFree":                       func() { d.MemAddressFree(ptr, 1<<21) },
			"MemCreate":                            func() { d.MemCreate(1<<21, prop) },
			"MemRelease":                           func() { d.MemRelease(handle) },
			"MemMap":                               func() { d.MemMap(ptr, 1<<21, 0, handle) },
			"MemUnmap":                             func() { d.MemUnmap(ptr, 1<<21) },
			"MemSetAccess":                         func() { d.MemSetAccess(ptr, 1<<21, grants) },
			"MemGetAccess":                         func() { d.MemGetAccess(prop.Location, ptr) },
			"MemGetAllocationGranularity":          func() { d.MemGetAllocationGranularity(prop, driver.GranularityMinimum) },
			"MemGetAllocationPropertiesFromHandle": func() { d.MemGetAllocationPropertiesFromHandle(handle) },
			"MemRetainAllocationHandle":            func() { own.Foreign().MemRetainAllocationHandle(ptr) },
			"MemExportToShareableHandle": func() {
				s, _ := d.MemExportToShareableHandle(handle, driver.HandlePosixFD)
				unix.Close(descriptorOf(s))
			},
			"MemImportFromShareableHandle": func() { d.MemImportFromShareableHandle(ofDescriptor(1), driver.HandlePosixFD) },
			"ModuleLoadData":               func() { d.ModuleLoadData(ours, image) },
			"ModuleGetFunction":            func() { d.ModuleGetFunction(ours, module, "fill") },
			"FuncGetParamInfo":             func() { d.FuncGetParamInfo(ours, fn, 0) },
			"LaunchKernel":                 func() { d.LaunchKernel(ours, fn, launch, params, stream) },
		} {
			require.Zero(t, testing.AllocsPerRun(20, call), "%s of the %s form", name, form.name)
		}
	}
}
