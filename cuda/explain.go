package cuda

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// explain returns what a result of a driver call means to the caller, and what to do
// about it. One code means different things from different calls.
func explain(c driver.Call, r driver.Result) (errs.Kind, string) {
	if r == driver.Success {
		return errs.Unspecified, ""
	}
	if e, ok := byCall[callResult{c, r}]; ok {
		return e.kind, e.hint
	}
	if r == driver.MissingEntryPoint {
		return errs.NotSupported, fmt.Sprintf("this driver lacks %s; it needs a driver for CUDA %s or later",
			c, driver.VersionString(c.Version()))
	}
	if e, ok := byResult[r]; ok {
		return e.kind, e.hint
	}
	if r.Lost() {
		return errs.DeviceLost, "restart the process; memory that was unmapped or never granted while the GPU used it is the usual cause"
	}
	return errs.Unspecified, ""
}

type callResult struct {
	call   driver.Call
	result driver.Result
}

type explanation struct {
	kind errs.Kind
	hint string
}

const (
	attributeHint     = "the driver's cuda.h lists the numbers that it knows (CUdevice_attribute)"
	notManagedHint    = "the range must be managed memory, within one allocation"
	notMemoryHint     = "all of the range must be memory that is mapped, or was allocated"
	stateHint         = "another process has made such a call of it meanwhile: cuvmm wake ends what it finds"
	notConcurrentHint = "a device without concurrent managed access pages nothing: do without advice and prefetches, or hide it with CUDA_VISIBLE_DEVICES"
)

var byCall = map[callResult]explanation{
	{driver.CallDeviceGetAttribute, driver.InvalidValue}: {errs.InvalidArgument, attributeHint},
	{driver.CallMemGetAllocationGranularity, driver.InvalidValue}: {errs.InvalidArgument,
		"the place must exist (numactl -H lists the host's NUMA nodes), and the driver must know all of the properties"},
	{driver.CallMemAddressReserve, driver.OutOfMemory}: {errs.OutOfAddressSpace,
		"reserve a smaller range, or with a smaller alignment; physical memory is not what ran out"},
	{driver.CallMemMap, driver.NotSupported}: {errs.InvalidArgument,
		"a physical allocation is mapped whole, from offset 0, at its full size"},
	{driver.CallMemSetAccess, driver.InvalidDevice}: {errs.NotSupported,
		"the device cannot reach that memory: check peer access between the two"},
	{driver.CallMemImportFromShareableHandle, driver.Unknown}: {errs.InvalidArgument,
		"the descriptor is not an exported CUDA allocation; on the software driver the two processes must give the same Folder, or none (sim.Options, CUVMM_SIM)"},
	{driver.CallMemImportFromShareableHandle, driver.InvalidHandle}: {errs.InvalidArgument,
		"the handle's exporter is gone or has released the memory, or is in another clique or IMEX domain: is it alive, does it hold a lease, and are both cluster UUIDs and cliques the same (nvidia-imex-ctl -N)?"},
	{driver.CallMemImportFromShareableHandle, driver.NotPermitted}: {errs.NotPermitted,
		"fabric handles are imported on the exporter's IMEX channel only, and this process has another or none"},
	{driver.CallMemImportFromShareableHandle, driver.InvalidDevice}: {errs.NotSupported,
		"the exporter's device is in this host, but hidden from this process: let it see it (CUDA_VISIBLE_DEVICES, the container's devices)"},
	{driver.CallMemImportFromShareableHandle, driver.NotSupported}: {errs.NotSupported,
		"this process cannot use that memory: by fabric handle it needs an open IMEX channel, and a GPU on the exporter's fabric where that is another host; by descriptor it must see the exporter's GPU"},
	{driver.CallMemImportFromShareableHandle, driver.IllegalState}: {errs.Unspecified,
		"the fabric's services are not ready: look whether nvidia-imex and nvidia-fabricmanager run on both hosts (nvidia-imex-ctl -N), and at their logs"},
	{driver.CallMemExportToShareableHandle, driver.InvalidValue}: {errs.InvalidArgument,
		"create the memory with this handle type; an imported handle cannot be exported again, but its descriptor can be forwarded"},
	{driver.CallMemCreate, driver.NotPermitted}: {errs.NotPermitted,
		"fabric handles need an IMEX channel that this process may open; ask for descriptors instead"},
	{driver.CallMemAllocManaged, driver.OutOfMemory}: {errs.OutOfMemory,
		"ask for less: managed memory may exceed the device's only where that has concurrent managed access, and then not what the host has beside it (on the software driver: what ulimit -v, vm.overcommit_memory and vm.max_map_count allow)"},
	{driver.CallMemAllocManaged, driver.NotSupported}: {errs.NotSupported,
		"the device has no managed memory"},
	{driver.CallMemAdvise, driver.InvalidValue}:                        {errs.InvalidArgument, notManagedHint},
	{driver.CallMemAdviseV1, driver.InvalidValue}:                      {errs.InvalidArgument, notManagedHint},
	{driver.CallMemPrefetchAsync, driver.InvalidValue}:                 {errs.InvalidArgument, notManagedHint},
	{driver.CallMemPrefetchAsyncV1, driver.InvalidValue}:               {errs.InvalidArgument, notManagedHint},
	{driver.CallMemRangeGetAttribute, driver.InvalidValue}:             {errs.InvalidArgument, notManagedHint},
	{driver.CallMemAdvise, driver.InvalidDevice}:                       {errs.NotSupported, notConcurrentHint},
	{driver.CallMemAdviseV1, driver.InvalidDevice}:                     {errs.NotSupported, notConcurrentHint},
	{driver.CallMemPrefetchAsync, driver.InvalidDevice}:                {errs.NotSupported, notConcurrentHint},
	{driver.CallMemPrefetchAsyncV1, driver.InvalidDevice}:              {errs.NotSupported, notConcurrentHint},
	{driver.CallMemPrefetchBatchAsync, driver.NotSupported}:            {errs.NotSupported, notConcurrentHint},
	{driver.CallMemPrefetchBatchAsync, driver.InvalidValue}:            {errs.InvalidArgument, notManagedHint},
	{driver.CallMemPrefetchBatchAsync, driver.InvalidDevice}:           {errs.NotSupported, notConcurrentHint},
	{driver.CallMemDiscardAndPrefetchBatchAsync, driver.InvalidValue}:  {errs.InvalidArgument, notManagedHint},
	{driver.CallMemDiscardAndPrefetchBatchAsync, driver.InvalidDevice}: {errs.NotSupported, notConcurrentHint},
	{driver.CallMemDiscardAndPrefetchBatchAsync, driver.NotSupported}:  {errs.NotSupported, notConcurrentHint},
	{driver.CallMemRangeGetAttributes, driver.InvalidValue}:            {errs.InvalidArgument, notManagedHint},
	{driver.CallPointerGetAttribute, driver.InvalidValue}: {errs.InvalidArgument,
		"no memory that the driver knows is at the address"},
	{driver.CallMemGetHandleForAddressRange, driver.InvalidValue}: {errs.InvalidArgument,
		"all of the range must be memory of one kind that is mapped, in whole pages of the host"},
	{driver.CallMemHostRegister, driver.OutOfMemory}: {errs.OutOfMemory,
		"free host memory, or raise the limits of this process's; System.TrimHost gives back what is pinned and idle"},
	{driver.CallMemHostAlloc, driver.OutOfMemory}: {errs.OutOfMemory,
		"pinned memory is taken from the host's, not the device's: close what is not used, or ask for less"},
	{driver.CallMemcpyHtoDAsync, driver.InvalidValue}:  {errs.InvalidArgument, notMemoryHint},
	{driver.CallMemcpyBatchAsync, driver.InvalidValue}: {errs.InvalidArgument, notMemoryHint},
	{driver.CallMemcpyDtoHAsync, driver.InvalidValue}:  {errs.InvalidArgument, notMemoryHint},
	{driver.CallMemcpyDtoDAsync, driver.InvalidValue}:  {errs.InvalidArgument, notMemoryHint},
	{driver.CallMemsetD8Async, driver.InvalidValue}:    {errs.InvalidArgument, notMemoryHint},
	{driver.CallStreamAttachMemAsync, driver.InvalidValue}: {errs.InvalidArgument,
		"memory is attached whole, by its first address, and never to the legacy default stream"},
	{driver.CallMulticastCreate, driver.Withheld}: {errs.NotPermitted,
		"creating a multicast object on a real driver is opt-in: open it with cuda.Options.RealMulticast"},
	{driver.CallMulticastCreate, driver.NotSupported}:         noMulticast,
	{driver.CallMulticastGetGranularity, driver.NotSupported}: noMulticast,
	{driver.CallMulticastGetGranularity, driver.InvalidValue}: {errs.InvalidArgument,
		"name no more devices than the NVLink switches connect (64 on the software driver), and handle types that the driver has"},
	{driver.CallMulticastCreate, driver.NotPermitted}: {errs.NotPermitted,
		"fabric handles need an IMEX channel that this process may open; ask for descriptors instead"},
	{driver.CallMulticastAddDevice, driver.InvalidDevice}: {errs.InvalidArgument,
		"the device has no multicast, or is in another clique than the object's"},
	{driver.CallMulticastBindMem, driver.OutOfMemory}:      multicastSlots,
	{driver.CallMulticastBindMemV1, driver.OutOfMemory}:    multicastSlots,
	{driver.CallMulticastBindAddr, driver.OutOfMemory}:     multicastSlots,
	{driver.CallMulticastBindAddrV1, driver.OutOfMemory}:   multicastSlots,
	{driver.CallMulticastBindMem, driver.InvalidValue}:     multicastBind,
	{driver.CallMulticastBindMemV1, driver.InvalidValue}:   multicastBind,
	{driver.CallMulticastBindAddr, driver.InvalidValue}:    multicastBind,
	{driver.CallMulticastBindAddrV1, driver.InvalidValue}:  multicastBind,
	{driver.CallMulticastBindMem, driver.InvalidDevice}:    notInTeam,
	{driver.CallMulticastBindMemV1, driver.InvalidDevice}:  notInTeam,
	{driver.CallMulticastBindAddr, driver.InvalidDevice}:   notInTeam,
	{driver.CallMulticastBindAddrV1, driver.InvalidDevice}: notInTeam,
	{driver.CallMulticastAddDevice, driver.InvalidValue}: {errs.InvalidArgument,
		"a device is added once, and no more devices than the object was created for; what was imported must be a multicast object"},
	{driver.CallMulticastUnbind, driver.InvalidValue}: {errs.InvalidArgument,
		"unbind exactly what was bound: the same device, offset and size"},
	{driver.CallModuleLoadData, driver.InvalidImage}: {errs.InvalidArgument,
		"pass PTX text, a cubin, or a fat binary"},
	{driver.CallModuleLoadData, driver.InvalidPTX}: {errs.InvalidArgument,
		"correct the text; where nothing more is said here, ptxas says where it does not assemble"},
	{driver.CallModuleLoadData, driver.UnsupportedPTX}: {errs.NotSupported,
		"the PTX is of a version that the driver does not know: write the .version of an older CUDA, or install a newer driver"},
	{driver.CallModuleLoadData, driver.NoBinaryForGPU}: {errs.NotSupported,
		"the image has no code for this GPU: load PTX whose .target is not above it, or a binary built for it"},
	{driver.CallModuleGetFunction, driver.NotFound}: {errs.InvalidArgument,
		"the module has no entry of that name: in C++ declare the kernel extern \"C\", or its name is a decorated one"},
	{driver.CallModuleGetFunction, driver.NotSupported}: {errs.NotSupported,
		"the software driver runs Go functions: register one under the entry's name with sim.RegisterKernel"},
	{driver.CallLaunchKernel, driver.InvalidValue}: {errs.InvalidArgument,
		"compare the arguments with the kernel's parameters, and the block with what the kernel was built for"},
	{driver.CallLaunchKernelEx, driver.InvalidValue}: {errs.InvalidArgument,
		"compare the arguments with the kernel's parameters, and the block with what the kernel was built for"},
	{driver.CallLaunchKernelEx, driver.LaunchOutOfRes}: {errs.InvalidArgument,
		"a block of that many threads needs more registers or shared memory than there are: use smaller blocks"},
	{driver.CallLaunchKernelEx, driver.CooperativeTooLarge}: {errs.InvalidArgument,
		"all blocks of a cooperative launch run at once: ask Kernel.BlocksAtOnce how many can"},
	{driver.CallFuncSetAttribute, driver.InvalidValue}: {errs.InvalidArgument,
		"the device has less shared memory than that: ask Kernel.MaxShared"},
	{driver.CallModuleGetGlobal, driver.NotFound}: {errs.InvalidArgument,
		"the module has no variable of that name; C++ compilers change names, unless they are declared extern \"C\""},
	{driver.CallLaunchKernel, driver.LaunchOutOfRes}: {errs.InvalidArgument,
		"a block of that many threads needs more registers or shared memory than there are: use smaller blocks"},
	{driver.CallCheckpointProcessLock, driver.NotReady}: {errs.InUse,
		"the process has work that does not end, as that of a stream that waits for a value: end it, or allow more time"},
	{driver.CallCheckpointProcessLock, driver.IllegalState}:       {errs.InvalidArgument, stateHint},
	{driver.CallCheckpointProcessCheckpoint, driver.IllegalState}: {errs.InvalidArgument, stateHint},
	{driver.CallCheckpointProcessRestore, driver.IllegalState}:    {errs.InvalidArgument, stateHint},
	{driver.CallCheckpointProcessUnlock, driver.IllegalState}:     {errs.InvalidArgument, stateHint},
	{driver.CallCheckpointProcessCheckpoint, driver.NotSupported}: {errs.NotSupported,
		"the process has what no checkpoint holds, as managed memory; it is locked: unlock it (cuvmm wake)"},
	{driver.CallCheckpointProcessRestore, driver.NotSupported}: {errs.NotSupported,
		"the process had imported memory, and is lost: end it"},
	{driver.CallEventElapsedTime, driver.InvalidHandle}: {errs.InvalidArgument,
		"make both events with Timing, and record both"},
	{driver.CallEventElapsedTime, driver.NotReady}: {errs.InvalidArgument,
		"both events must have passed: call Synchronize first"},
	{driver.CallInit, driver.NoDevice}: {errs.NoDriver,
		"the driver sees no GPU: check CUDA_VISIBLE_DEVICES and that the device nodes are in the container"},
	{driver.CallInit, driver.InvalidDevice}: {errs.Unspecified,
		"the driver can use no GPU that it sees: run cuvmm doctor, and look at CUDA_VISIBLE_DEVICES and at the instances of a GPU in MIG mode"},
	{driver.CallInit, driver.Unknown}: {errs.Unspecified,
		"the driver does not start: load the kernel module nvidia-uvm and make its device file (nvidia-modprobe -c 0 -u), or pass the file to the container; cuvmm doctor finds out which"},
}

var (
	noMulticast = explanation{errs.NotSupported,
		"multicast needs devices on an NVSwitch, and neither MIG nor confidential computing: does the attribute read 1?"}
	multicastSlots = explanation{errs.OutOfMemory,
		"memory is not what ran out: the switches have slots for 128 multicast objects; release one"}
	notInTeam = explanation{errs.InvalidArgument,
		"memory is bound for the device that it lies on, and that must have been added to the object"}
	multicastBind = explanation{errs.InvalidArgument,
		"offsets and sizes are multiples of the least granularity within both, on a device of the team; a shareable or imported object takes shareable memory only; nothing else may be bound there"}
)

var byResult = map[driver.Result]explanation{
	driver.InvalidValue:   {errs.InvalidArgument, ""},
	driver.OutOfMemory:    {errs.OutOfMemory, "free device memory, or ask for less"},
	driver.NotInitialized: {errs.NoDriver, "CUDA does not survive fork: start a new process with os/exec instead"},
	driver.Deinitialized:  {errs.DeviceLost, "the driver is shutting down with the process: end the work with the GPU before that"},
	driver.StubLibrary:    {errs.NoDriver, "the toolkit's stub library was loaded: put the driver's libcuda.so.1 first in the search path"},
	driver.NoDevice:       {errs.NoDriver, "the driver sees no GPU: check CUDA_VISIBLE_DEVICES and the device nodes"},
	driver.InvalidDevice:  {errs.InvalidArgument, "devices are numbered from 0; System.Devices lists them"},
	driver.InvalidContext: {errs.InvalidArgument, "the context was destroyed, or is no context of this process"},
	driver.OperatingSystem: {errs.Unspecified,
		"a system call of the driver failed: compare the open files with the limit (ulimit -n), and on the software driver look at the room in its machine's folder"},
	driver.InvalidHandle: {errs.InvalidArgument, "the handle was released, or belongs to another context"},
	driver.NotPermitted:  {errs.NotPermitted, ""},
	driver.NotSupported:  {errs.NotSupported, ""},
	driver.IllegalState: {errs.Unspecified,
		"the system is not configured consistently: check nvidia-fabricmanager and nvidia-imex"},
	driver.SystemNotReady: {errs.Unspecified, "the fabric manager is not ready: try again a little later"},
	driver.DriverMismatch: {errs.NoDriver, "the library and the kernel module are of different versions: reboot, or install one version of both"},
	driver.CompatNotSupported: {errs.NoDriver,
		"the compatibility library does not support this GPU: use the driver's own libcuda.so.1"},
	driver.CaptureUnsupported: {errs.Capturing, "the call is not allowed while a stream captures"},
	driver.CaptureInvalid:     {errs.Capturing, "the capture was broken by an earlier call: end it and capture again"},
	driver.CaptureImplicit:    {errs.Capturing, "work on the legacy stream would join the capture of a blocking stream"},
	driver.CapturedEvent:      {errs.Capturing, "the event was recorded into a capture"},
	driver.CaptureUnjoined:    {errs.Capturing, "a stream that forked from the capture was not joined back before its end"},
	driver.CaptureWrongThread: {errs.Capturing, "end the capture on the thread that began it, or capture in relaxed mode"},
}
