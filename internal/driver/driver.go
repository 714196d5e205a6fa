// Package driver defines the interface that both drivers implement: the real
// one (csrc) and the software driver (cuda/sim).
//
// There is one method per driver entry point that the library uses, named
// after the entry point without its "cu". Parameters are plain values, structs
// and results travel by value (a pointer to a local through an interface would
// escape to the heap), and slices refer to memory that the caller keeps
// alive. No policy lives here: a method makes one driver call and returns
// its results.
//
// # What belongs to the thread
//
// The driver keeps a current context and a stream capture mode per operating
// system thread, and goroutines move between threads. So a call that needs a
// context takes it as its first argument, makes it current for the duration of
// the call and restores what was there; a zero Context leaves the thread's
// context alone. And every call runs in the relaxed capture mode, restored
// afterwards, so that no call made through a Driver breaks another library's
// stream capture. [Driver.Foreign] returns the form that does not switch the
// mode: it stands for other libraries' calls in tests.
//
// All methods are safe for concurrent use.
//
// # The table of entry points
//
// The two interfaces below are the one table of the driver's calls. A row is a
// method and, as the last line of its comment, the entry point behind it:
//
//	//cu:entry 10020 cuMemCreate(uint64_t *h, size_t size, const cuvmm_prop *prop, uint64_t flags=0)
//	MemCreate(size uint64, prop AllocationProp) (h MemHandle, r Result)
//
// The number is the CUDA version whose declaration this is: cuGetProcAddress is
// called with that version, so a later driver returns the declared form too. The
// name is that of the symbol: the call behind cuMemAlloc_v2 is named cuMemAlloc.
// Where the library uses two forms of one entry point, the older one's name ends
// in "_v1".
//
// A C parameter takes the method's parameter of its name, or fills in the
// result of its name. Any other has a value: a constant, len(slice), or
// bytes(slice); len(a,b) requires two slices of one length. A method's first
// parameter of type Context that the entry point does not take is the context
// to make current. Opaque handles are uintptr_t and enumerations are 32-bit
// integers, structs are those of csrc.h.
//
//   - "entry": everything is generated, and the call runs in the relaxed mode
//     ("entry 2000 bare": the call leaves the thread alone; "asking": it does, unless it
//     names a default stream, since it finds its context by the stream and is harmless to
//     captures in every mode, which docs/driver-facts.md has as measured);
//   - "hand": csrc's wrapper and method are written by hand, and cmd/libcuda's
//     export, since the call has strings, images, descriptors, or a rule of its
//     own.
//
// go generate makes the Call constants (calls.go), csrc's entries.h, calls.h,
// calls.c, calls.go and directives.go, and cmd/libcuda's exports.c and exports.go
// from it; exports.c also has the names of the results. A test of gen fails if they are
// stale.
package driver

import "unsafe"

// Driver is the driver API as the library uses it.
type Driver interface {
	// Describe says which driver this is.
	Describe() Description
	// Has reports whether the running driver has the entry point. Calling one
	// that it lacks returns MissingEntryPoint.
	Has(c Call) bool
	// Foreign returns the form of this driver whose calls run in whatever
	// capture mode the calling thread is in, as the calls of other libraries
	// do. It exists for tests.
	Foreign() Foreign

	//cu:entry 2000 bare cuInit(uint32_t flags=0)
	Init() Result
	//cu:entry 2020 bare cuDriverGetVersion(int32_t *version)
	DriverGetVersion() (version int32, r Result)

	//cu:entry 2000 cuDeviceGetCount(int32_t *n)
	DeviceGetCount() (n int32, r Result)
	//cu:entry 2000 cuDeviceGet(int32_t *d, int32_t ordinal)
	DeviceGet(ordinal int32) (d Device, r Result)
	//cu:hand 2000 cuDeviceGetName(char *name, int32_t len, int32_t d)
	DeviceGetName(d Device) (name string, r Result)
	//cu:entry 11040 cuDeviceGetUuid_v2(cuvmm_uuid *uuid, int32_t d)
	DeviceGetUUID(d Device) (uuid UUID, r Result)
	//cu:entry 3020 cuDeviceTotalMem_v2(size_t *n, int32_t d)
	DeviceTotalMem(d Device) (n uint64, r Result)
	//cu:entry 2000 cuDeviceGetAttribute(int32_t *value, int32_t a, int32_t d)
	DeviceGetAttribute(a DeviceAttribute, d Device) (value int32, r Result)
	//cu:entry 4000 cuDeviceCanAccessPeer(int32_t *can, int32_t d, int32_t peer)
	DeviceCanAccessPeer(d, peer Device) (can bool, r Result)
	//cu:entry 7000 cuDevicePrimaryCtxRetain(uintptr_t *primary, int32_t d)
	DevicePrimaryCtxRetain(d Device) (primary Context, r Result)
	//cu:entry 11000 cuDevicePrimaryCtxRelease_v2(int32_t d)
	DevicePrimaryCtxRelease(d Device) Result
	//cu:entry 7000 cuDevicePrimaryCtxGetState(int32_t d, uint32_t *flags, int32_t *active)
	DevicePrimaryCtxGetState(d Device) (flags uint32, active bool, r Result)

	//cu:entry 2000 cuCtxGetDevice(int32_t *d)
	CtxGetDevice(c Context) (d Device, r Result)

	//cu:entry 2000 cuStreamCreate(uintptr_t *s, uint32_t flags)
	StreamCreate(c Context, flags StreamFlags) (s Stream, r Result)
	// StreamCreateWithPriority clamps the priority to the context's range.
	//
	//cu:entry 5050 cuStreamCreateWithPriority(uintptr_t *s, uint32_t flags, int32_t priority)
	StreamCreateWithPriority(c Context, flags StreamFlags, priority int32) (s Stream, r Result)
	// CtxGetStreamPriorityRange returns numbers of which the greatest priority is
	// the least.
	//
	//cu:entry 5050 cuCtxGetStreamPriorityRange(int32_t *least, int32_t *greatest)
	CtxGetStreamPriorityRange(c Context) (least, greatest int32, r Result)
	//cu:entry 5050 cuStreamGetPriority(uintptr_t s, int32_t *priority)
	StreamGetPriority(c Context, s Stream) (priority int32, r Result)
	//cu:entry 4000 cuStreamDestroy_v2(uintptr_t s)
	StreamDestroy(c Context, s Stream) Result
	//cu:entry 2000 cuStreamQuery(uintptr_t s)
	StreamQuery(c Context, s Stream) Result
	//cu:entry 2000 cuStreamSynchronize(uintptr_t s)
	StreamSynchronize(c Context, s Stream) Result
	//cu:entry 3020 cuStreamWaitEvent(uintptr_t s, uintptr_t e, uint32_t flags=0)
	StreamWaitEvent(c Context, s Stream, e Event) Result
	//cu:entry 9020 cuStreamGetCtx(uintptr_t s, uintptr_t *of)
	StreamGetCtx(c Context, s Stream) (of Context, r Result)
	// StreamWriteValue64 makes the stream's earlier writes visible before the
	// value.
	//
	//cu:entry 11070 cuStreamWriteValue64_v2(uintptr_t s, uint64_t p, uint64_t v, uint32_t flags=0)
	StreamWriteValue64(c Context, s Stream, p Ptr, v uint64) Result
	// StreamWaitValue64 holds the stream until the word at p is at least v
	// (compared cyclically, as the driver's GEQ does).
	//
	//cu:entry 11070 cuStreamWaitValue64_v2(uintptr_t s, uint64_t p, uint64_t v, uint32_t flags=0)
	StreamWaitValue64(c Context, s Stream, p Ptr, v uint64) Result

	// NewHostFunc makes a function that streams call (LaunchHostFunc). reached is
	// called each time a stream comes to it, one call at a time for all functions, so
	// it must be quick and wait for nothing.
	NewHostFunc(reached func()) HostFunc
	// ReleaseHostFunc ends a function. The caller knows that no stream comes to it any
	// more: the work behind every launch has passed, or its context is lost. released
	// is called once, after the last call of reached has returned.
	ReleaseHostFunc(f HostFunc, released func())
	// LaunchHostFunc puts a call of the function on the stream. On a stream that
	// captures, each launch of the graph calls it. In a lost context it is not called.
	//
	//cu:hand 10000 cuLaunchHostFunc(uintptr_t s, uintptr_t f, uintptr_t data)
	LaunchHostFunc(c Context, s Stream, f HostFunc) Result

	//cu:entry 10000 asking cuStreamIsCapturing(uintptr_t s, uint32_t *status)
	StreamIsCapturing(c Context, s Stream) (status CaptureStatus, r Result)
	// StreamGetCaptureInfo also returns the capture's id, which is unique in the
	// process and the same for every stream that joined the capture.
	//
	//cu:entry 10010 cuStreamGetCaptureInfo(uintptr_t s, uint32_t *status, uint64_t *id)
	StreamGetCaptureInfo(c Context, s Stream) (status CaptureStatus, id uint64, r Result)
	//cu:entry 10010 cuStreamBeginCapture_v2(uintptr_t s, uint32_t m)
	StreamBeginCapture(c Context, s Stream, m CaptureMode) Result
	//cu:entry 10000 cuStreamEndCapture(uintptr_t s, uintptr_t *g)
	StreamEndCapture(c Context, s Stream) (g Graph, r Result)
	//cu:entry 11040 cuGraphInstantiateWithFlags(uintptr_t *exec, uintptr_t g, uint64_t flags=0)
	GraphInstantiate(c Context, g Graph) (exec GraphExec, r Result)
	//cu:entry 10000 cuGraphLaunch(uintptr_t g, uintptr_t s)
	GraphLaunch(c Context, g GraphExec, s Stream) Result
	//cu:entry 10000 cuGraphDestroy(uintptr_t g)
	GraphDestroy(g Graph) Result
	//cu:entry 10000 cuGraphExecDestroy(uintptr_t g)
	GraphExecDestroy(g GraphExec) Result

	//cu:entry 2000 cuEventCreate(uintptr_t *e, uint32_t flags)
	EventCreate(c Context, flags EventFlags) (e Event, r Result)
	//cu:entry 2000 cuEventRecord(uintptr_t e, uintptr_t s)
	EventRecord(c Context, e Event, s Stream) Result
	//cu:entry 2000 cuEventQuery(uintptr_t e)
	EventQuery(c Context, e Event) Result
	//cu:entry 2000 cuEventSynchronize(uintptr_t e)
	EventSynchronize(c Context, e Event) Result
	//cu:entry 2000 cuEventElapsedTime(float *ms, uintptr_t start, uintptr_t end)
	EventElapsedTime(c Context, start, end Event) (ms float32, r Result)
	//cu:entry 4000 cuEventDestroy_v2(uintptr_t e)
	EventDestroy(c Context, e Event) Result

	// Host pointers are memory that the Go collector does not own.

	//cu:entry 3020 cuMemcpyHtoDAsync_v2(uint64_t dst, const void *src, size_t n, uintptr_t s)
	MemcpyHtoDAsync(c Context, dst Ptr, src unsafe.Pointer, n uint64, s Stream) Result
	//cu:entry 3020 cuMemcpyDtoHAsync_v2(void *dst, uint64_t src, size_t n, uintptr_t s)
	MemcpyDtoHAsync(c Context, dst unsafe.Pointer, src Ptr, n uint64, s Stream) Result
	//cu:entry 3020 cuMemcpyDtoDAsync_v2(uint64_t dst, uint64_t src, size_t n, uintptr_t s)
	MemcpyDtoDAsync(c Context, dst, src Ptr, n uint64, s Stream) Result
	// MemcpyBatchAsync makes copies between memory that the driver knows, in no order among each
	// other. The copy i has the attributes of the last first[k] that is at most i; first begins with 0
	// and is as long as attrs. The arrays are read before the call returns.
	//
	//cu:entry 13000 cuMemcpyBatchAsync_v2(const uint64_t *dst, const uint64_t *src, const size_t *sizes, size_t count=len(dst,src,sizes), const cuvmm_copy *attrs, const size_t *first, size_t n=len(attrs,first), uintptr_t s)
	MemcpyBatchAsync(c Context, dst, src []Ptr, sizes []uint64, attrs []CopyAttributes, first []uint64, s Stream) Result
	//cu:entry 3020 cuMemsetD8Async(uint64_t dst, uint8_t v, size_t n, uintptr_t s)
	MemsetD8Async(c Context, dst Ptr, v uint8, n uint64, s Stream) Result

	//cu:entry 3020 cuMemAlloc_v2(uint64_t *p, size_t n)
	MemAlloc(c Context, n uint64) (p Ptr, r Result)
	//cu:entry 3020 cuMemFree_v2(uint64_t p)
	MemFree(c Context, p Ptr) Result
	//cu:entry 11020 cuMemAllocAsync(uint64_t *p, size_t n, uintptr_t s)
	MemAllocAsync(c Context, n uint64, s Stream) (p Ptr, r Result)
	//cu:entry 11020 cuMemFreeAsync(uint64_t p, uintptr_t s)
	MemFreeAsync(c Context, p Ptr, s Stream) Result
	//cu:entry 11020 cuDeviceGetDefaultMemPool(uintptr_t *pool, int32_t d)
	DeviceGetDefaultMemPool(d Device) (pool MemPool, r Result)
	//cu:entry 11020 cuMemPoolGetAttribute(uintptr_t pool, int32_t a, uint64_t *value)
	MemPoolGetAttribute(pool MemPool, a MemPoolAttribute) (value uint64, r Result)
	//cu:entry 11020 cuMemPoolTrimTo(uintptr_t pool, size_t keep)
	MemPoolTrimTo(pool MemPool, keep uint64) Result
	//cu:entry 3020 cuMemGetInfo_v2(size_t *free, size_t *total)
	MemGetInfo(c Context) (free, total uint64, r Result)
	//cu:entry 2020 cuMemHostAlloc(void **p, size_t n, uint32_t flags)
	MemHostAlloc(c Context, n uint64, flags HostAllocFlags) (p unsafe.Pointer, r Result)
	//cu:entry 2000 cuMemFreeHost(void *p)
	MemFreeHost(c Context, p unsafe.Pointer) Result
	//cu:entry 6050 cuMemHostRegister_v2(void *p, size_t n, uint32_t flags)
	MemHostRegister(c Context, p unsafe.Pointer, n uint64, flags HostRegisterFlags) Result
	//cu:entry 4000 cuMemHostUnregister(void *p)
	MemHostUnregister(c Context, p unsafe.Pointer) Result
	//cu:entry 3020 cuMemHostGetDevicePointer_v2(uint64_t *dev, void *p, uint32_t flags=0)
	MemHostGetDevicePointer(c Context, p unsafe.Pointer) (dev Ptr, r Result)
	// PointerGetAttribute returns the attribute's 1, 4 or 8 bytes widened to 64
	// bits.
	//
	//cu:entry 4000 cuPointerGetAttribute(uint64_t *value, int32_t a, uint64_t p)
	PointerGetAttribute(c Context, a PointerAttribute, p Ptr) (value uint64, r Result)

	//cu:entry 10020 cuMemAddressReserve(uint64_t *p, size_t size, size_t align, uint64_t hint, uint64_t flags=0)
	MemAddressReserve(size, align uint64, hint Ptr) (p Ptr, r Result)
	//cu:entry 10020 cuMemAddressFree(uint64_t p, size_t size)
	MemAddressFree(p Ptr, size uint64) Result
	//cu:entry 10020 cuMemCreate(uint64_t *h, size_t size, const cuvmm_prop *prop, uint64_t flags=0)
	MemCreate(size uint64, prop AllocationProp) (h MemHandle, r Result)
	// MemRelease must never be given a handle that is not live: the real
	// driver crashes the process on one.
	//
	//cu:entry 10020 cuMemRelease(uint64_t h)
	MemRelease(h MemHandle) Result
	//cu:entry 10020 cuMemMap(uint64_t p, size_t size, size_t offset, uint64_t h, uint64_t flags=0)
	MemMap(p Ptr, size, offset uint64, h MemHandle) Result
	//cu:entry 10020 cuMemUnmap(uint64_t p, size_t size)
	MemUnmap(p Ptr, size uint64) Result
	//cu:entry 10020 cuMemSetAccess(uint64_t p, size_t size, const cuvmm_access *desc, size_t count=len(desc))
	MemSetAccess(p Ptr, size uint64, desc []AccessDesc) Result
	//cu:entry 10020 cuMemGetAccess(uint64_t *flags, const cuvmm_location *l, uint64_t p)
	MemGetAccess(l Location, p Ptr) (flags AccessFlags, r Result)
	//cu:entry 10020 cuMemGetAllocationGranularity(size_t *n, const cuvmm_prop *prop, uint32_t g)
	MemGetAllocationGranularity(prop AllocationProp, g GranularityOption) (n uint64, r Result)
	//cu:entry 10020 cuMemGetAllocationPropertiesFromHandle(cuvmm_prop *prop, uint64_t h)
	MemGetAllocationPropertiesFromHandle(h MemHandle) (prop AllocationProp, r Result)
	// MemExportToShareableHandle makes a new handle of exactly one type. A
	// descriptor belongs to the caller, which closes it.
	//
	//cu:hand 10020 cuMemExportToShareableHandle(void *out, uint64_t h, uint32_t t, uint64_t flags)
	MemExportToShareableHandle(h MemHandle, t HandleTypes) (s ShareableHandle, r Result)
	// MemImportFromShareableHandle does not consume a descriptor.
	//
	//cu:hand 10020 cuMemImportFromShareableHandle(uint64_t *h, uintptr_t os, uint32_t t)
	MemImportFromShareableHandle(s ShareableHandle, t HandleTypes) (h MemHandle, r Result)
	// MemGetHandleForAddressRange makes a DMA-BUF descriptor of a mapped
	// range. It belongs to the caller. Drivers before CUDA 12.8 have no flags.
	//
	//cu:hand 11070 cuMemGetHandleForAddressRange(void *out, uint64_t p, size_t size, uint32_t t, uint64_t flags)
	MemGetHandleForAddressRange(c Context, p Ptr, size uint64, flags RangeHandleFlags) (fd int32, r Result)

	// MulticastCreate makes a multicast object, whose handle MemMap, MemRelease
	// and the calls for shareable handles take as they take memory's. A real
	// driver returns Withheld unless multicast was opted into.
	//
	//cu:hand 12010 cuMulticastCreate(uint64_t *h, const cuvmm_multicast *p)
	MulticastCreate(p MulticastProp) (h MemHandle, r Result)
	// MulticastAddDevice lasts for the object's life. Until all devices are
	// added, the binding calls and MemMap of the object block, and nothing ends
	// that.
	//
	//cu:entry 12010 cuMulticastAddDevice(uint64_t mc, int32_t d)
	MulticastAddDevice(mc MemHandle, d Device) Result
	// MulticastBindMem and MulticastBindAddr name the device whose replica the
	// memory becomes; the first forms, of drivers before 13.1, take the device
	// that the memory is on. Offsets and sizes are in bytes.
	//
	//cu:entry 13010 cuMulticastBindMem_v2(uint64_t mc, int32_t d, size_t mcOffset, uint64_t h, size_t offset, size_t size, uint64_t flags=0)
	MulticastBindMem(mc MemHandle, d Device, mcOffset uint64, h MemHandle, offset, size uint64) Result
	//cu:entry 12010 cuMulticastBindMem_v1(uint64_t mc, size_t mcOffset, uint64_t h, size_t offset, size_t size, uint64_t flags=0)
	MulticastBindMemV1(mc MemHandle, mcOffset uint64, h MemHandle, offset, size uint64) Result
	//cu:entry 13010 cuMulticastBindAddr_v2(uint64_t mc, int32_t d, size_t mcOffset, uint64_t p, size_t size, uint64_t flags=0)
	MulticastBindAddr(mc MemHandle, d Device, mcOffset uint64, p Ptr, size uint64) Result
	//cu:entry 12010 cuMulticastBindAddr_v1(uint64_t mc, size_t mcOffset, uint64_t p, size_t size, uint64_t flags=0)
	MulticastBindAddrV1(mc MemHandle, mcOffset uint64, p Ptr, size uint64) Result
	// MulticastUnbind takes the offset and size of a bind.
	//
	//cu:entry 12010 cuMulticastUnbind(uint64_t mc, int32_t d, size_t mcOffset, size_t size)
	MulticastUnbind(mc MemHandle, d Device, mcOffset, size uint64) Result
	//cu:entry 12010 cuMulticastGetGranularity(size_t *n, const cuvmm_multicast *p, uint32_t g)
	MulticastGetGranularity(p MulticastProp, g GranularityOption) (n uint64, r Result)

	// MemAllocManaged makes memory that the host and the devices reach at one
	// address, and whose pages move to the processor that touches them. MemFree
	// frees it.
	//
	//cu:entry 6000 cuMemAllocManaged(uint64_t *p, size_t n, uint32_t flags)
	MemAllocManaged(c Context, n uint64, flags AttachFlags) (p Ptr, r Result)
	//cu:entry 12020 cuMemAdvise_v2(uint64_t p, size_t n, uint32_t a, cuvmm_location l)
	MemAdvise(c Context, p Ptr, n uint64, a Advice, l Location) Result
	// MemAdviseV1 and MemPrefetchAsyncV1 are the forms of drivers before 12.2,
	// which take a device's ordinal, or DeviceCPU.
	//
	//cu:entry 8000 cuMemAdvise_v1(uint64_t p, size_t n, uint32_t a, int32_t device)
	MemAdviseV1(c Context, p Ptr, n uint64, a Advice, device int32) Result
	//cu:entry 12020 cuMemPrefetchAsync_v2(uint64_t p, size_t n, cuvmm_location to, uint32_t flags=0, uintptr_t s)
	MemPrefetchAsync(c Context, p Ptr, n uint64, to Location, s Stream) Result
	//cu:entry 8000 cuMemPrefetchAsync_v1(uint64_t p, size_t n, int32_t device, uintptr_t s)
	MemPrefetchAsyncV1(c Context, p Ptr, n uint64, device int32, s Stream) Result
	// The batches take ranges by start and size, as many of both. The range i
	// goes to the location of the last first[k] that is at most i; first begins
	// with 0 and is as long as to. The arrays are read before the call returns.
	//
	//cu:entry 13000 cuMemPrefetchBatchAsync(const uint64_t *p, const size_t *sizes, size_t count=len(p,sizes), const cuvmm_location *to, const size_t *first, size_t n=len(to,first), uint64_t flags=0, uintptr_t s)
	MemPrefetchBatchAsync(c Context, p []Ptr, sizes []uint64, to []Location, first []uint64, s Stream) Result
	//cu:entry 13000 cuMemDiscardAndPrefetchBatchAsync(const uint64_t *p, const size_t *sizes, size_t count=len(p,sizes), const cuvmm_location *to, const size_t *first, size_t n=len(to,first), uint64_t flags=0, uintptr_t s)
	MemDiscardAndPrefetchBatchAsync(c Context, p []Ptr, sizes []uint64, to []Location, first []uint64, s Stream) Result
	// MemRangeGetAttribute fills out, which has one element, or for
	// RangeAccessedBy as many as are wanted.
	//
	//cu:entry 8000 cuMemRangeGetAttribute(int32_t *out, size_t size=bytes(out), uint32_t a, uint64_t p, size_t n)
	MemRangeGetAttribute(c Context, a RangeAttribute, p Ptr, n uint64, out []int32) Result
	// MemRangeGetAttributes fills out with the attributes one after the other,
	// as many elements of each as counts says. At most eight attributes.
	//
	//cu:hand 8000 cuMemRangeGetAttributes(void **out, size_t *sizes, uint32_t *a, size_t count, uint64_t p, size_t n)
	MemRangeGetAttributes(c Context, a []RangeAttribute, counts []uint64, p Ptr, n uint64, out []int32) Result
	// StreamAttachMemAsync attaches the whole of the managed memory that starts
	// at p, whose size is n or given as 0.
	//
	//cu:entry 6000 cuStreamAttachMemAsync(uintptr_t s, uint64_t p, size_t n, uint32_t flags)
	StreamAttachMemAsync(c Context, s Stream, p Ptr, n uint64, flags AttachFlags) Result

	// ModuleLoadData takes PTX text or a binary image; the driver copies it.
	//
	//cu:hand 2000 cuModuleLoadData(uintptr_t *m, const void *image)
	ModuleLoadData(c Context, image []byte) (m Module, r Result)
	// ModuleLoadDataEx also writes the compiler's complaints about PTX text to
	// log, up to a NUL. The log is not empty.
	//
	//cu:hand 2010 cuModuleLoadDataEx(uintptr_t *m, const void *image, uint32_t n, uint32_t *options, void **values)
	ModuleLoadDataEx(c Context, image, log []byte) (m Module, r Result)
	//cu:entry 2000 cuModuleUnload(uintptr_t m)
	ModuleUnload(c Context, m Module) Result
	//cu:hand 2000 cuModuleGetFunction(uintptr_t *f, uintptr_t m, const char *name)
	ModuleGetFunction(c Context, m Module, name string) (f Function, r Result)
	// FuncGetParamInfo returns the place of the kernel's parameter of that index
	// in the block of parameters, in bytes. Behind the last parameter it returns
	// InvalidValue.
	//
	//cu:entry 12040 cuFuncGetParamInfo(uintptr_t f, size_t index, size_t *offset, size_t *size)
	FuncGetParamInfo(c Context, f Function, index uint64) (offset, size uint64, r Result)
	// LaunchKernel takes the kernel's parameters as one packed block in the
	// kernel's own layout.
	//
	//cu:hand 4000 cuLaunchKernel(uintptr_t f, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz, uint32_t shared, uintptr_t s, void **params, void **extra)
	LaunchKernel(c Context, f Function, l LaunchConfig, params []byte, s Stream) Result
	// LaunchKernelEx is LaunchKernel with the attribute that all blocks run at once.
	//
	//cu:hand 11060 cuLaunchKernelEx(const void *config, uintptr_t f, void **params, void **extra)
	LaunchKernelEx(c Context, f Function, l LaunchConfig, params []byte, s Stream) Result
	//cu:entry 2020 cuFuncGetAttribute(int32_t *value, int32_t attribute, uintptr_t f)
	FuncGetAttribute(c Context, attribute FuncAttribute, f Function) (value int32, r Result)
	//cu:entry 9000 cuFuncSetAttribute(uintptr_t f, int32_t attribute, int32_t value)
	FuncSetAttribute(c Context, f Function, attribute FuncAttribute, value int32) Result
	// OccupancyMaxActiveBlocksPerMultiprocessor returns how many blocks of so many
	// threads and bytes of dynamic shared memory run on a multiprocessor at once.
	//
	//cu:entry 6050 cuOccupancyMaxActiveBlocksPerMultiprocessor(int32_t *blocks, uintptr_t f, int32_t threads, size_t shared)
	OccupancyMaxActiveBlocksPerMultiprocessor(c Context, f Function, threads int32, shared uint64) (blocks int32, r Result)
	// ModuleGetGlobal returns the address and the size of a module's variable.
	//
	//cu:hand 3020 cuModuleGetGlobal_v2(uint64_t *p, size_t *bytes, uintptr_t m, const char *name)
	ModuleGetGlobal(c Context, m Module, name string) (p Ptr, bytes uint64, r Result)

	// LogsCurrent returns the end of the driver's log of errors, which keeps a hundred
	// entries of all threads.
	//
	//cu:entry 12090 bare cuLogsCurrent(uint32_t *end, uint32_t flags=0)
	LogsCurrent() (end LogPosition, r Result)
	// LogsDumpToMemory writes the entries from a position on to text, a line each, the
	// latest if not all fit, and returns their end and how many bytes it wrote.
	//
	//cu:hand 12090 cuLogsDumpToMemory(uint32_t *iterator, char *buffer, size_t *size, uint32_t flags)
	LogsDumpToMemory(from LogPosition, text []byte) (end LogPosition, n uint64, r Result)

	// The calls for checkpoints name another process by its number. Its own calls wait
	// from the lock until the unlock.
	//
	//cu:entry 12080 bare cuCheckpointProcessGetState(int32_t pid, uint32_t *state)
	CheckpointProcessGetState(pid int32) (state ProcessState, r Result)
	// CheckpointProcessLock waits for the process's work, at most for so many
	// milliseconds, or without an end if that is 0: then it returns NotReady.
	//
	//cu:entry 12080 bare cuCheckpointProcessLock(int32_t pid, const cuvmm_lock *args)
	CheckpointProcessLock(pid int32, args LockArgs) Result
	//cu:entry 12080 bare cuCheckpointProcessCheckpoint(int32_t pid, void *args=NULL)
	CheckpointProcessCheckpoint(pid int32) Result
	//cu:entry 12080 bare cuCheckpointProcessRestore(int32_t pid, void *args=NULL)
	CheckpointProcessRestore(pid int32) Result
	//cu:entry 12080 bare cuCheckpointProcessUnlock(int32_t pid, void *args=NULL)
	CheckpointProcessUnlock(pid int32) Result
}

// Foreign is a driver as another library in the process would call it: in the
// capture mode of the calling thread. It has, besides, the calls that this
// library never makes: calls that break other libraries' work, and calls that
// only tests need.
type Foreign interface {
	Driver

	// ThreadExchangeStreamCaptureMode sets the calling thread's mode and
	// returns the one before.
	//
	//cu:hand 10010 cuThreadExchangeStreamCaptureMode(uint32_t *m)
	ThreadExchangeStreamCaptureMode(m CaptureMode) (before CaptureMode, r Result)

	// CtxCreate makes a context and, unlike the entry point, leaves the
	// thread's current context as it was.
	//
	//cu:hand 3020 cuCtxCreate_v2(uintptr_t *made, uint32_t flags, int32_t d)
	CtxCreate(flags uint32, d Device) (made Context, r Result)
	//cu:entry 4000 cuCtxDestroy_v2(uintptr_t c)
	CtxDestroy(c Context) Result
	//cu:entry 4000 cuCtxGetCurrent(uintptr_t *current)
	CtxGetCurrent() (current Context, r Result)
	//cu:entry 4000 cuCtxSetCurrent(uintptr_t c)
	CtxSetCurrent(c Context) Result
	//cu:entry 2000 cuCtxSynchronize()
	CtxSynchronize(c Context) Result

	//cu:entry 5050 cuStreamGetFlags(uintptr_t s, uint32_t *flags)
	StreamGetFlags(c Context, s Stream) (flags StreamFlags, r Result)
	//cu:entry 12000 cuStreamGetId(uintptr_t s, uint64_t *id)
	StreamGetID(c Context, s Stream) (id uint64, r Result)
	// GraphGetNodeCount is cuGraphGetNodes without a list to fill.
	//
	//cu:entry 10000 cuGraphGetNodes(uintptr_t g, uintptr_t *nodes=NULL, size_t *n)
	GraphGetNodeCount(g Graph) (n uint64, r Result)

	//cu:entry 3020 cuMemcpyHtoD_v2(uint64_t dst, const void *src, size_t n)
	MemcpyHtoD(c Context, dst Ptr, src unsafe.Pointer, n uint64) Result
	//cu:entry 3020 cuMemcpyDtoH_v2(void *dst, uint64_t src, size_t n)
	MemcpyDtoH(c Context, dst unsafe.Pointer, src Ptr, n uint64) Result
	//cu:entry 3020 cuMemcpyDtoD_v2(uint64_t dst, uint64_t src, size_t n)
	MemcpyDtoD(c Context, dst, src Ptr, n uint64) Result
	//cu:entry 3020 cuMemsetD8_v2(uint64_t dst, uint8_t v, size_t n)
	MemsetD8(c Context, dst Ptr, v uint8, n uint64) Result
	//cu:entry 3020 cuMemsetD32Async(uint64_t dst, uint32_t v, size_t words, uintptr_t s)
	MemsetD32Async(c Context, dst Ptr, v uint32, words uint64, s Stream) Result

	// MemDiscardBatchAsync is not ordered with later work, if earlier work is not
	// done: that loses what the later work writes.
	//
	//cu:entry 13000 cuMemDiscardBatchAsync(const uint64_t *p, const size_t *sizes, size_t count=len(p,sizes), uint64_t flags=0, uintptr_t s)
	MemDiscardBatchAsync(c Context, p []Ptr, sizes []uint64, s Stream) Result

	//cu:entry 11000 cuMemRetainAllocationHandle(uint64_t *h, uint64_t p)
	MemRetainAllocationHandle(p Ptr) (h MemHandle, r Result)
}

// HostTouched is what a driver has that cannot see the CPU's accesses to managed
// memory: it is told of them, before they are made. Only the software driver
// has it; the result says whether the CPU may touch the memory now.
type HostTouched interface {
	HostTouch(p Ptr, n uint64, write bool) Result
}

// Locator is what a driver has that knows where the pages of managed memory are. Its method is
// cuMemGetLocationInfo of CUDA 13.4. That call is no row of the table, and the real driver does
// not have the method: its declaration in C was not public when this was written, and a driver
// that is called by a guessed one writes over the caller's memory. The rules are those of NVIDIA's
// binding for Python.
type Locator interface {
	// MemGetLocationInfo fills out with a location for each summary bytes of a range of managed
	// memory: the most frequent one among pages that are sampling bytes apart. A sampling of 0
	// leaves the distance to the driver. A version before LocatorVersion returns MissingEntryPoint.
	MemGetLocationInfo(p Ptr, n, summary, sampling uint64, out []Location) Result
}

// LocatorVersion is the CUDA version that first had Locator's call.
const LocatorVersion int32 = 13040

// Culprit is what a driver has that knows what destroyed a context. It returns a
// sentence, or "" if nothing did. Only the software driver has it.
type Culprit interface {
	Culprit(c Context) string
}

// Hosted is what cmd/libcuda needs of the software driver besides, to be a
// driver for programs in other languages.
type Hosted interface {
	// NewThread forgets what belonged to the calling thread: an earlier thread
	// of the same number has ended.
	NewThread()
	// WithoutFunction lists the module's kernels for which no Go function stands.
	WithoutFunction(m Module) []string
	// KernelParams returns where each parameter lies in the block of parameters;
	// none for a handle that is not a kernel's.
	KernelParams(f Function) []KernelParam
	// CallInOrder has the stream call f, which later work of the stream waits for.
	CallInOrder(c Context, s Stream, f func()) Result

	// ContextFlags returns the flags that a context was made with, and SetPrimaryFlags
	// sets those of a device's primary context, whether it is there or not.
	ContextFlags(c Context) uint32
	SetPrimaryFlags(d Device, flags uint32) Result
	// ResetPrimary destroys what a device's primary context owns, and the context until it is
	// retained again. What retained it still does, and its handle stays.
	ResetPrimary(d Device) Result
	// SetPeerAccess lets kernels of the calling thread's context reach memory that the
	// peer allocated, or no longer.
	SetPeerAccess(peer Context, on bool) Result
	// HostFlags returns the flags of pinned memory that holds an address.
	HostFlags(p unsafe.Pointer) (flags HostAllocFlags, ok bool)

	// IPCHandle returns the legacy handle of allocated memory, IPCOpen maps that of
	// another process of the machine, and IPCClose ends that.
	IPCHandle(p Ptr) (ShareableHandle, Result)
	IPCOpen(s ShareableHandle) (Ptr, Result)
	IPCClose(p Ptr) Result
}

// KernelParam is a parameter's place in the block of parameters, in bytes.
type KernelParam struct{ Offset, Size uint64 }

// Description identifies a driver.
type Description struct {
	// Software is true for the software driver.
	Software bool
	// Path is the file of the real driver's library.
	Path string
	// Machine names the software driver's machine.
	Machine string
}

// The driver's handles. They are numbers: what owns them is decided above.
type (
	Device    int32
	Context   uintptr
	MemPool   uintptr
	Stream    uintptr
	Event     uintptr
	Module    uintptr
	Function  uintptr
	Graph     uintptr
	GraphExec uintptr
	// HostFunc is a function of NewHostFunc, and no handle of the vendor's.
	HostFunc uint64
	// MemHandle is a CUmemGenericAllocationHandle.
	MemHandle uint64
	// LogPosition is a CUlogIterator.
	LogPosition uint32
	// Ptr is a CUdeviceptr.
	Ptr  uint64
	UUID [16]byte
)

// Streams that no one created.
const (
	// StreamNull is the legacy stream when used as a handle of its own.
	StreamNull Stream = 0
	// StreamLegacy is CU_STREAM_LEGACY.
	StreamLegacy Stream = 1
	// StreamPerThread is CU_STREAM_PER_THREAD: another stream on every thread,
	// so meaningless from a goroutine.
	StreamPerThread Stream = 2
)
