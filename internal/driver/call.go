package driver

import (
	"fmt"
	"strings"
)

// Call names a driver entry point.
type Call int

const (
	CallInit Call = iota
	CallDriverGetVersion
	CallDeviceGetCount
	CallDeviceGet
	CallDeviceGetName
	CallDeviceGetUUID
	CallDeviceTotalMem
	CallDeviceGetAttribute
	CallDeviceCanAccessPeer
	CallDevicePrimaryCtxRetain
	CallDevicePrimaryCtxRelease
	CallDevicePrimaryCtxGetState
	CallCtxCreate
	CallCtxDestroy
	CallCtxGetCurrent
	CallCtxSetCurrent
	CallCtxGetDevice
	CallCtxSynchronize
	CallStreamCreate
	CallStreamDestroy
	CallStreamQuery
	CallStreamSynchronize
	CallStreamWaitEvent
	CallStreamGetCtx
	CallStreamGetFlags
	CallStreamGetID
	CallStreamWriteValue64
	CallStreamWaitValue64
	CallStreamIsCapturing
	CallStreamGetCaptureInfo
	CallStreamBeginCapture
	CallStreamEndCapture
	CallThreadExchangeStreamCaptureMode
	CallGraphInstantiate
	CallGraphLaunch
	CallGraphDestroy
	CallGraphExecDestroy
	CallGraphGetNodeCount
	CallEventCreate
	CallEventRecord
	CallEventQuery
	CallEventSynchronize
	CallEventElapsedTime
	CallEventDestroy
	CallMemcpyHtoDAsync
	CallMemcpyDtoHAsync
	CallMemcpyDtoDAsync
	CallMemsetD8Async
	CallMemsetD32Async
	CallMemcpyHtoD
	CallMemcpyDtoH
	CallMemcpyDtoD
	CallMemsetD8
	CallMemAlloc
	CallMemFree
	CallMemAllocAsync
	CallMemFreeAsync
	CallMemGetInfo
	CallMemHostAlloc
	CallMemFreeHost
	CallMemHostRegister
	CallMemHostUnregister
	CallMemHostGetDevicePointer
	CallPointerGetAttribute
	CallMemAddressReserve
	CallMemAddressFree
	CallMemCreate
	CallMemRelease
	CallMemMap
	CallMemUnmap
	CallMemSetAccess
	CallMemGetAccess
	CallMemGetAllocationGranularity
	CallMemGetAllocationPropertiesFromHandle
	CallMemRetainAllocationHandle
	CallMemExportToShareableHandle
	CallMemImportFromShareableHandle
	CallMemGetHandleForAddressRange
	CallMulticastCreate
	CallMulticastAddDevice
	CallMulticastBindMem
	CallMulticastBindMemV1
	CallMulticastBindAddr
	CallMulticastBindAddrV1
	CallMulticastUnbind
	CallMulticastGetGranularity
	CallMemAllocManaged
	CallMemAdvise
	CallMemAdviseV1
	CallMemPrefetchAsync
	CallMemPrefetchAsyncV1
	CallMemPrefetchBatchAsync
	CallMemDiscardBatchAsync
	CallMemDiscardAndPrefetchBatchAsync
	CallMemRangeGetAttribute
	CallMemRangeGetAttributes
	CallStreamAttachMemAsync
	CallModuleLoadData
	CallModuleLoadDataEx
	CallModuleUnload
	CallModuleGetFunction
	CallFuncGetParamInfo
	CallLaunchKernel

	// CallCount is how many entry points there are.
	CallCount int = iota
)

// calls holds, for each entry point, the CUDA version whose declaration the
// library was written for. cuGetProcAddress is asked for that version, so a
// later driver answers with the form that is declared here.
var calls = [CallCount]struct {
	name    string
	version int32
}{
	CallInit:                                 {"cuInit", 2000},
	CallDriverGetVersion:                     {"cuDriverGetVersion", 2020},
	CallDeviceGetCount:                       {"cuDeviceGetCount", 2000},
	CallDeviceGet:                            {"cuDeviceGet", 2000},
	CallDeviceGetName:                        {"cuDeviceGetName", 2000},
	CallDeviceGetUUID:                        {"cuDeviceGetUuid", 11040},
	CallDeviceTotalMem:                       {"cuDeviceTotalMem", 3020},
	CallDeviceGetAttribute:                   {"cuDeviceGetAttribute", 2000},
	CallDeviceCanAccessPeer:                  {"cuDeviceCanAccessPeer", 4000},
	CallDevicePrimaryCtxRetain:               {"cuDevicePrimaryCtxRetain", 7000},
	CallDevicePrimaryCtxRelease:              {"cuDevicePrimaryCtxRelease", 11000},
	CallDevicePrimaryCtxGetState:             {"cuDevicePrimaryCtxGetState", 7000},
	CallCtxCreate:                            {"cuCtxCreate", 3020},
	CallCtxDestroy:                           {"cuCtxDestroy", 4000},
	CallCtxGetCurrent:                        {"cuCtxGetCurrent", 4000},
	CallCtxSetCurrent:                        {"cuCtxSetCurrent", 4000},
	CallCtxGetDevice:                         {"cuCtxGetDevice", 2000},
	CallCtxSynchronize:                       {"cuCtxSynchronize", 2000},
	CallStreamCreate:                         {"cuStreamCreate", 2000},
	CallStreamDestroy:                        {"cuStreamDestroy", 4000},
	CallStreamQuery:                          {"cuStreamQuery", 2000},
	CallStreamSynchronize:                    {"cuStreamSynchronize", 2000},
	CallStreamWaitEvent:                      {"cuStreamWaitEvent", 3020},
	CallStreamGetCtx:                         {"cuStreamGetCtx", 9020},
	CallStreamGetFlags:                       {"cuStreamGetFlags", 5050},
	CallStreamGetID:                          {"cuStreamGetId", 12000},
	CallStreamWriteValue64:                   {"cuStreamWriteValue64", 11070},
	CallStreamWaitValue64:                    {"cuStreamWaitValue64", 11070},
	CallStreamIsCapturing:                    {"cuStreamIsCapturing", 10000},
	CallStreamGetCaptureInfo:                 {"cuStreamGetCaptureInfo", 10010},
	CallStreamBeginCapture:                   {"cuStreamBeginCapture", 10010},
	CallStreamEndCapture:                     {"cuStreamEndCapture", 10000},
	CallThreadExchangeStreamCaptureMode:      {"cuThreadExchangeStreamCaptureMode", 10010},
	CallGraphInstantiate:                     {"cuGraphInstantiateWithFlags", 11040},
	CallGraphLaunch:                          {"cuGraphLaunch", 10000},
	CallGraphDestroy:                         {"cuGraphDestroy", 10000},
	CallGraphExecDestroy:                     {"cuGraphExecDestroy", 10000},
	CallGraphGetNodeCount:                    {"cuGraphGetNodes", 10000},
	CallEventCreate:                          {"cuEventCreate", 2000},
	CallEventRecord:                          {"cuEventRecord", 2000},
	CallEventQuery:                           {"cuEventQuery", 2000},
	CallEventSynchronize:                     {"cuEventSynchronize", 2000},
	CallEventElapsedTime:                     {"cuEventElapsedTime", 2000},
	CallEventDestroy:                         {"cuEventDestroy", 4000},
	CallMemcpyHtoDAsync:                      {"cuMemcpyHtoDAsync", 3020},
	CallMemcpyDtoHAsync:                      {"cuMemcpyDtoHAsync", 3020},
	CallMemcpyDtoDAsync:                      {"cuMemcpyDtoDAsync", 3020},
	CallMemsetD8Async:                        {"cuMemsetD8Async", 3020},
	CallMemsetD32Async:                       {"cuMemsetD32Async", 3020},
	CallMemcpyHtoD:                           {"cuMemcpyHtoD", 3020},
	CallMemcpyDtoH:                           {"cuMemcpyDtoH", 3020},
	CallMemcpyDtoD:                           {"cuMemcpyDtoD", 3020},
	CallMemsetD8:                             {"cuMemsetD8", 3020},
	CallMemAlloc:                             {"cuMemAlloc", 3020},
	CallMemFree:                              {"cuMemFree", 3020},
	CallMemAllocAsync:                        {"cuMemAllocAsync", 11020},
	CallMemFreeAsync:                         {"cuMemFreeAsync", 11020},
	CallMemGetInfo:                           {"cuMemGetInfo", 3020},
	CallMemHostAlloc:                         {"cuMemHostAlloc", 2020},
	CallMemFreeHost:                          {"cuMemFreeHost", 2000},
	CallMemHostRegister:                      {"cuMemHostRegister", 6050},
	CallMemHostUnregister:                    {"cuMemHostUnregister", 4000},
	CallMemHostGetDevicePointer:              {"cuMemHostGetDevicePointer", 3020},
	CallPointerGetAttribute:                  {"cuPointerGetAttribute", 4000},
	CallMemAddressReserve:                    {"cuMemAddressReserve", 10020},
	CallMemAddressFree:                       {"cuMemAddressFree", 10020},
	CallMemCreate:                            {"cuMemCreate", 10020},
	CallMemRelease:                           {"cuMemRelease", 10020},
	CallMemMap:                               {"cuMemMap", 10020},
	CallMemUnmap:                             {"cuMemUnmap", 10020},
	CallMemSetAccess:                         {"cuMemSetAccess", 10020},
	CallMemGetAccess:                         {"cuMemGetAccess", 10020},
	CallMemGetAllocationGranularity:          {"cuMemGetAllocationGranularity", 10020},
	CallMemGetAllocationPropertiesFromHandle: {"cuMemGetAllocationPropertiesFromHandle", 10020},
	CallMemRetainAllocationHandle:            {"cuMemRetainAllocationHandle", 11000},
	CallMemExportToShareableHandle:           {"cuMemExportToShareableHandle", 10020},
	CallMemImportFromShareableHandle:         {"cuMemImportFromShareableHandle", 10020},
	CallMemGetHandleForAddressRange:          {"cuMemGetHandleForAddressRange", 11070},
	CallMulticastCreate:                      {"cuMulticastCreate", 12010},
	CallMulticastAddDevice:                   {"cuMulticastAddDevice", 12010},
	CallMulticastBindMem:                     {"cuMulticastBindMem", 13010},
	CallMulticastBindMemV1:                   {"cuMulticastBindMem_v1", 12010},
	CallMulticastBindAddr:                    {"cuMulticastBindAddr", 13010},
	CallMulticastBindAddrV1:                  {"cuMulticastBindAddr_v1", 12010},
	CallMulticastUnbind:                      {"cuMulticastUnbind", 12010},
	CallMulticastGetGranularity:              {"cuMulticastGetGranularity", 12010},
	CallMemAllocManaged:                      {"cuMemAllocManaged", 6000},
	CallMemAdvise:                            {"cuMemAdvise", 12020},
	CallMemAdviseV1:                          {"cuMemAdvise_v1", 8000},
	CallMemPrefetchAsync:                     {"cuMemPrefetchAsync", 12020},
	CallMemPrefetchAsyncV1:                   {"cuMemPrefetchAsync_v1", 8000},
	CallMemPrefetchBatchAsync:                {"cuMemPrefetchBatchAsync", 13000},
	CallMemDiscardBatchAsync:                 {"cuMemDiscardBatchAsync", 13000},
	CallMemDiscardAndPrefetchBatchAsync:      {"cuMemDiscardAndPrefetchBatchAsync", 13000},
	CallMemRangeGetAttribute:                 {"cuMemRangeGetAttribute", 8000},
	CallMemRangeGetAttributes:                {"cuMemRangeGetAttributes", 8000},
	CallStreamAttachMemAsync:                 {"cuStreamAttachMemAsync", 6000},
	CallModuleLoadData:                       {"cuModuleLoadData", 2000},
	CallModuleLoadDataEx:                     {"cuModuleLoadDataEx", 2010},
	CallModuleUnload:                         {"cuModuleUnload", 2000},
	CallModuleGetFunction:                    {"cuModuleGetFunction", 2000},
	CallFuncGetParamInfo:                     {"cuFuncGetParamInfo", 12040},
	CallLaunchKernel:                         {"cuLaunchKernel", 4000},
}

// String is the entry point's name: "cuMemCreate". Where the library uses two
// forms of one entry point, the older one ends in "_v1".
func (c Call) String() string {
	if c < 0 || int(c) >= CallCount {
		return fmt.Sprintf("Call(%d)", int(c))
	}
	return calls[c].name
}

// Entry is the name that cuGetProcAddress knows: which form it gives is decided
// by the version.
func (c Call) Entry() string { return strings.TrimSuffix(c.String(), "_v1") }

// Version is the CUDA version that first had the entry point in the declared
// form, as the driver counts: 1000 times the major number plus 10 times the
// minor one.
func (c Call) Version() int32 { return calls[c].version }

// CallByName finds an entry point by its name.
func CallByName(name string) (Call, bool) {
	for c := range calls {
		if calls[c].name == name {
			return Call(c), true
		}
	}
	return 0, false
}

// VersionString writes a driver version for people: 12020 is "12.2".
func VersionString(v int32) string { return fmt.Sprintf("%d.%d", v/1000, v%1000/10) }
