// Package driver is the interface that both drivers implement: the real one
// (csrc) and the software driver (cuda/sim).
//
// There is one method per driver entry point that the library uses, named
// after the entry point without its "cu". Parameters are plain values, structs
// and results travel by value (a pointer to a local through an interface would
// escape to the heap), and a slice is only ever taken from memory that its
// owner keeps. No policy lives here: a method makes one driver call and says
// what it answered.
//
// # What belongs to the thread
//
// The driver keeps a current context and a stream capture mode per operating
// system thread, and goroutines move between threads. So a call that needs a
// context takes it as its first argument, makes it current for the duration of
// the call and restores what was there; a zero Context leaves the thread's
// context alone. And every call runs in the relaxed capture mode, restored
// afterwards, so that no call made through a Driver breaks anybody's stream
// capture. [Driver.Foreign] gives the form that does not switch the mode: it
// stands for other people's callers in tests.
//
// All methods are safe for concurrent use.
package driver

import "unsafe"

// Driver is the driver API as the library uses it.
type Driver interface {
	// Describe says which driver this is.
	Describe() Description
	// Has reports whether the running driver has the entry point. Calling one
	// that it lacks answers MissingEntryPoint.
	Has(c Call) bool
	// Foreign returns the form of this driver whose calls run in whatever
	// capture mode the calling thread is in, as the calls of other libraries
	// do. It exists for tests.
	Foreign() Foreign

	Init() Result
	DriverGetVersion() (version int32, r Result)

	DeviceGetCount() (n int32, r Result)
	DeviceGet(ordinal int32) (Device, Result)
	DeviceGetName(d Device) (string, Result)
	DeviceGetUUID(d Device) (UUID, Result)
	DeviceTotalMem(d Device) (uint64, Result)
	DeviceGetAttribute(a DeviceAttribute, d Device) (int32, Result)
	DeviceCanAccessPeer(d, peer Device) (bool, Result)
	DevicePrimaryCtxRetain(d Device) (Context, Result)
	DevicePrimaryCtxRelease(d Device) Result
	DevicePrimaryCtxGetState(d Device) (flags uint32, active bool, r Result)

	// CtxCreate makes a context and, unlike the entry point, leaves the
	// thread's current context as it was.
	CtxCreate(flags uint32, d Device) (Context, Result)
	CtxDestroy(c Context) Result
	CtxGetCurrent() (Context, Result)
	CtxGetDevice(c Context) (Device, Result)

	StreamCreate(c Context, flags StreamFlags) (Stream, Result)
	StreamDestroy(c Context, s Stream) Result
	StreamQuery(c Context, s Stream) Result
	StreamSynchronize(c Context, s Stream) Result
	StreamWaitEvent(c Context, s Stream, e Event) Result
	StreamGetCtx(c Context, s Stream) (Context, Result)
	StreamGetFlags(c Context, s Stream) (StreamFlags, Result)
	StreamGetID(c Context, s Stream) (uint64, Result)
	StreamWriteValue64(c Context, s Stream, p Ptr, v uint64) Result
	// StreamWaitValue64 holds the stream until the word at p is at least v
	// (compared cyclically, as the driver's GEQ does).
	StreamWaitValue64(c Context, s Stream, p Ptr, v uint64) Result

	StreamIsCapturing(c Context, s Stream) (CaptureStatus, Result)
	// StreamGetCaptureInfo also names the capture: its id is unique in the
	// process, and the streams that joined it answer the same one.
	StreamGetCaptureInfo(c Context, s Stream) (status CaptureStatus, id uint64, r Result)
	StreamBeginCapture(c Context, s Stream, m CaptureMode) Result
	StreamEndCapture(c Context, s Stream) (Graph, Result)
	GraphInstantiate(c Context, g Graph) (GraphExec, Result)
	GraphLaunch(c Context, g GraphExec, s Stream) Result
	GraphDestroy(g Graph) Result
	GraphExecDestroy(g GraphExec) Result
	// GraphGetNodeCount is cuGraphGetNodes asked for the count alone.
	GraphGetNodeCount(g Graph) (uint64, Result)

	EventCreate(c Context, flags EventFlags) (Event, Result)
	EventRecord(c Context, e Event, s Stream) Result
	EventQuery(c Context, e Event) Result
	EventSynchronize(c Context, e Event) Result
	EventElapsedTime(c Context, start, end Event) (ms float32, r Result)
	EventDestroy(c Context, e Event) Result

	// Host pointers are memory that the Go collector does not own.
	MemcpyHtoDAsync(c Context, dst Ptr, src unsafe.Pointer, n uint64, s Stream) Result
	MemcpyDtoHAsync(c Context, dst unsafe.Pointer, src Ptr, n uint64, s Stream) Result
	MemcpyDtoDAsync(c Context, dst, src Ptr, n uint64, s Stream) Result
	MemsetD8Async(c Context, dst Ptr, v uint8, n uint64, s Stream) Result
	MemsetD32Async(c Context, dst Ptr, v uint32, words uint64, s Stream) Result

	MemAlloc(c Context, n uint64) (Ptr, Result)
	MemFree(c Context, p Ptr) Result
	MemAllocAsync(c Context, n uint64, s Stream) (Ptr, Result)
	MemFreeAsync(c Context, p Ptr, s Stream) Result
	MemGetInfo(c Context) (free, total uint64, r Result)
	MemHostAlloc(c Context, n uint64, flags HostAllocFlags) (unsafe.Pointer, Result)
	MemFreeHost(c Context, p unsafe.Pointer) Result
	MemHostRegister(c Context, p unsafe.Pointer, n uint64, flags HostRegisterFlags) Result
	MemHostUnregister(c Context, p unsafe.Pointer) Result
	MemHostGetDevicePointer(c Context, p unsafe.Pointer) (Ptr, Result)
	// PointerGetAttribute answers the attribute's value widened to 64 bits.
	PointerGetAttribute(c Context, a PointerAttribute, p Ptr) (uint64, Result)

	MemAddressReserve(size, align uint64, hint Ptr) (Ptr, Result)
	MemAddressFree(p Ptr, size uint64) Result
	MemCreate(size uint64, prop AllocationProp) (MemHandle, Result)
	// MemRelease must never be given a handle that is not live: the real
	// driver crashes the process on one.
	MemRelease(h MemHandle) Result
	MemMap(p Ptr, size, offset uint64, h MemHandle) Result
	MemUnmap(p Ptr, size uint64) Result
	MemSetAccess(p Ptr, size uint64, desc []AccessDesc) Result
	MemGetAccess(l Location, p Ptr) (AccessFlags, Result)
	MemGetAllocationGranularity(prop AllocationProp, g GranularityOption) (uint64, Result)
	MemGetAllocationPropertiesFromHandle(h MemHandle) (AllocationProp, Result)
	MemRetainAllocationHandle(p Ptr) (MemHandle, Result)
	// MemExportToShareableHandle makes a new handle of exactly one type. A
	// descriptor belongs to the caller, who closes it.
	MemExportToShareableHandle(h MemHandle, t HandleTypes) (ShareableHandle, Result)
	// MemImportFromShareableHandle does not consume a descriptor.
	MemImportFromShareableHandle(s ShareableHandle, t HandleTypes) (MemHandle, Result)
	// MemGetHandleForAddressRange makes a DMA-BUF descriptor of a mapped
	// range. It belongs to the caller.
	MemGetHandleForAddressRange(c Context, p Ptr, size uint64) (fd int32, r Result)

	// MulticastCreate makes a multicast object: a handle that MemMap, MemRelease
	// and the shareable handles take as they take memory. On a real driver it is
	// Withheld unless that was asked for.
	MulticastCreate(p MulticastProp) (MemHandle, Result)
	// MulticastAddDevice lasts for the object's life. Until all devices are
	// added, the binding calls and MemMap of the object block, and nothing ends
	// that.
	MulticastAddDevice(mc MemHandle, d Device) Result
	// MulticastBindMem and MulticastBindAddr name the device whose replica the
	// memory becomes; the first forms, of drivers before 13.1, take the device
	// that the memory is on. Offsets and sizes are in bytes.
	MulticastBindMem(mc MemHandle, d Device, mcOffset uint64, h MemHandle, offset, size uint64) Result
	MulticastBindMemV1(mc MemHandle, mcOffset uint64, h MemHandle, offset, size uint64) Result
	MulticastBindAddr(mc MemHandle, d Device, mcOffset uint64, p Ptr, size uint64) Result
	MulticastBindAddrV1(mc MemHandle, mcOffset uint64, p Ptr, size uint64) Result
	// MulticastUnbind takes the offset and size of a bind.
	MulticastUnbind(mc MemHandle, d Device, mcOffset, size uint64) Result
	MulticastGetGranularity(p MulticastProp, g GranularityOption) (uint64, Result)

	// MemAllocManaged makes memory that the host and the devices reach at one
	// address, and whose pages move to whoever touches them. MemFree frees it.
	MemAllocManaged(c Context, n uint64, flags AttachFlags) (Ptr, Result)
	MemAdvise(c Context, p Ptr, n uint64, a Advice, l Location) Result
	// MemAdviseV1 and MemPrefetchAsyncV1 are the forms of drivers before 12.2,
	// which take a device's ordinal, or DeviceCPU.
	MemAdviseV1(c Context, p Ptr, n uint64, a Advice, device int32) Result
	MemPrefetchAsync(c Context, p Ptr, n uint64, to Location, s Stream) Result
	MemPrefetchAsyncV1(c Context, p Ptr, n uint64, device int32, s Stream) Result
	// The batches take ranges by start and size, as many of both. The range i
	// goes to the location of the last first[k] that is at most i; first begins
	// with 0 and is as long as to. The arrays are read before the call answers.
	MemPrefetchBatchAsync(c Context, p []Ptr, sizes []uint64, to []Location, first []uint64, s Stream) Result
	MemDiscardBatchAsync(c Context, p []Ptr, sizes []uint64, s Stream) Result
	MemDiscardAndPrefetchBatchAsync(c Context, p []Ptr, sizes []uint64, to []Location, first []uint64, s Stream) Result
	// MemRangeGetAttribute fills out, which has one element, or for
	// RangeAccessedBy as many as are asked for.
	MemRangeGetAttribute(c Context, a RangeAttribute, p Ptr, n uint64, out []int32) Result
	// MemRangeGetAttributes fills out with the attributes one after the other,
	// as many elements of each as counts says. At most eight attributes.
	MemRangeGetAttributes(c Context, a []RangeAttribute, counts []uint64, p Ptr, n uint64, out []int32) Result
	// StreamAttachMemAsync attaches the whole of the managed memory that starts
	// at p, whose size is n or given as 0.
	StreamAttachMemAsync(c Context, s Stream, p Ptr, n uint64, flags AttachFlags) Result

	// ModuleLoadData takes PTX text or a binary image; the driver copies it.
	ModuleLoadData(c Context, image []byte) (Module, Result)
	// ModuleLoadDataEx also writes to log what the compiler has against PTX text,
	// up to a NUL. The log is not empty.
	ModuleLoadDataEx(c Context, image, log []byte) (Module, Result)
	ModuleUnload(c Context, m Module) Result
	ModuleGetFunction(c Context, m Module, name string) (Function, Result)
	// FuncGetParamInfo says where the kernel's parameter of that index lies in
	// the block of parameters, in bytes. Behind the last it is InvalidValue.
	FuncGetParamInfo(c Context, f Function, index uint64) (offset, size uint64, r Result)
	// LaunchKernel takes the kernel's parameters as one packed block in the
	// kernel's own layout.
	LaunchKernel(c Context, f Function, l LaunchConfig, params []byte, s Stream) Result
}

// Foreign is a driver as another library in the process would call it: in the
// capture mode of the calling thread. It has, besides, the calls that this
// library never makes because they harm others.
type Foreign interface {
	Driver

	// ThreadExchangeStreamCaptureMode sets the calling thread's mode and
	// answers the one before.
	ThreadExchangeStreamCaptureMode(m CaptureMode) (CaptureMode, Result)
	CtxSetCurrent(c Context) Result
	CtxSynchronize(c Context) Result
	MemcpyHtoD(c Context, dst Ptr, src unsafe.Pointer, n uint64) Result
	MemcpyDtoH(c Context, dst unsafe.Pointer, src Ptr, n uint64) Result
	MemcpyDtoD(c Context, dst, src Ptr, n uint64) Result
	MemsetD8(c Context, dst Ptr, v uint8, n uint64) Result
}

// HostTouched is what a driver has that cannot see the CPU's accesses to managed
// memory: it is told of them, before they are made. Only the software driver
// has it; the result says whether the CPU may touch the memory now.
type HostTouched interface {
	HostTouch(p Ptr, n uint64, write bool) Result
}

// Culprit is what a driver has that knows what destroyed a context: the answer is
// in words, and empty where nothing did. Only the software driver has it.
type Culprit interface {
	Culprit(c Context) string
}

// Description says which driver answers.
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
	Stream    uintptr
	Event     uintptr
	Module    uintptr
	Function  uintptr
	Graph     uintptr
	GraphExec uintptr
	// MemHandle is a CUmemGenericAllocationHandle.
	MemHandle uint64
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
