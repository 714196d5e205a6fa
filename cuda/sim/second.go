package sim

import (
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

type capture struct{}
type joined struct{}
type graph struct{}
type graphExec struct{}
type module struct {
	context *gpuContext
	object  *object
}
type function struct{}
type async struct{}
type dmabuf struct{ file *osmem.Shared }

func (d dmabuf) close()                                  {}
func (r *async) refuses() string                         { return "" }
func (m *Machine) dropModule(mod *module)                {}
func (s *stream) endCapture()                            {}
func (s *stream) capture(t task) driver.Result           { return driver.NotSupported }
func (s *stream) captureWait(e *event) driver.Result     { return driver.NotSupported }
func (s *stream) captureRecord(e *event) driver.Result   { return driver.NotSupported }
func (c *gpuContext) guardLegacy() driver.Result         { return driver.Success }
func (s *stream) guardWait() driver.Result               { return driver.Success }
func (e *event) guardCaptured() driver.Result            { return driver.Success }
func (a *api) guardCaptures(c driver.Call) driver.Result { return driver.Success }
func (a *api) StreamWriteValue64(c driver.Context, s driver.Stream, p driver.Ptr, v uint64) driver.Result {
	return driver.NotSupported
}
func (a *api) StreamWaitValue64(c driver.Context, s driver.Stream, p driver.Ptr, v uint64) driver.Result {
	return driver.NotSupported
}
func (a *api) StreamIsCapturing(c driver.Context, s driver.Stream) (driver.CaptureStatus, driver.Result) {
	return 0, driver.Success
}
func (a *api) StreamGetCaptureInfo(c driver.Context, s driver.Stream) (driver.CaptureStatus, uint64, driver.Result) {
	return 0, 0, driver.Success
}
func (a *api) StreamBeginCapture(c driver.Context, s driver.Stream, m driver.CaptureMode) driver.Result {
	return driver.NotSupported
}
func (a *api) StreamEndCapture(c driver.Context, s driver.Stream) (driver.Graph, driver.Result) {
	return 0, driver.NotSupported
}
func (a *api) GraphInstantiate(c driver.Context, g driver.Graph) (driver.GraphExec, driver.Result) {
	return 0, driver.NotSupported
}
func (a *api) GraphLaunch(c driver.Context, g driver.GraphExec, s driver.Stream) driver.Result {
	return driver.NotSupported
}
func (a *api) GraphDestroy(g driver.Graph) driver.Result         { return driver.NotSupported }
func (a *api) GraphExecDestroy(g driver.GraphExec) driver.Result { return driver.NotSupported }
func (a *api) GraphGetNodeCount(g driver.Graph) (uint64, driver.Result) {
	return 0, driver.NotSupported
}
func (a *api) MemAllocAsync(c driver.Context, n uint64, s driver.Stream) (driver.Ptr, driver.Result) {
	return 0, driver.NotSupported
}
func (a *api) MemFreeAsync(c driver.Context, p driver.Ptr, s driver.Stream) driver.Result {
	return driver.NotSupported
}
func (a *api) MemGetHandleForAddressRange(c driver.Context, p driver.Ptr, size uint64) (int32, driver.Result) {
	return 0, driver.NotSupported
}
func (a *api) ModuleLoadData(c driver.Context, image []byte) (driver.Module, driver.Result) {
	return 0, driver.NotSupported
}
func (a *api) ModuleUnload(c driver.Context, m driver.Module) driver.Result {
	return driver.NotSupported
}
func (a *api) ModuleGetFunction(c driver.Context, m driver.Module, name string) (driver.Function, driver.Result) {
	return 0, driver.NotSupported
}
func (a *api) LaunchKernel(c driver.Context, f driver.Function, l driver.LaunchConfig, params []byte, s driver.Stream) driver.Result {
	return driver.NotSupported
}
func (a *api) ThreadExchangeStreamCaptureMode(m driver.CaptureMode) (driver.CaptureMode, driver.Result) {
	if r := a.enter(driver.CallThreadExchangeStreamCaptureMode); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	t := a.m.thread()
	old := t.mode
	t.mode = m
	a.m.setThread(t)
	return old, driver.Success
}
