package cuda

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// Why a call's codes need no words of their own.
const (
	foreign   = "the library never makes the call"
	codeSays  = "what the code means from any call is all that can be said"
	asked     = "its codes are read by the code that calls it, and no error is made of them"
	elsewhere = "its error is reported under another call that has rows"
)

// withoutRows are the calls without rows of their own.
var withoutRows = map[driver.Call]string{
	driver.CallDriverGetVersion: codeSays, driver.CallDeviceGetCount: codeSays, driver.CallDeviceGet: codeSays, driver.CallDeviceGetName: codeSays,
	driver.CallDeviceGetUUID: codeSays, driver.CallDeviceTotalMem: codeSays, driver.CallDeviceCanAccessPeer: codeSays,
	driver.CallDevicePrimaryCtxRetain: codeSays, driver.CallDevicePrimaryCtxRelease: codeSays, driver.CallCtxGetDevice: codeSays,
	driver.CallStreamCreate: codeSays, driver.CallStreamDestroy: codeSays, driver.CallStreamQuery: codeSays, driver.CallStreamSynchronize: codeSays,
	driver.CallStreamWaitEvent: codeSays, driver.CallStreamGetCtx: codeSays, driver.CallStreamWriteValue64: codeSays, driver.CallStreamWaitValue64: codeSays,
	driver.CallStreamIsCapturing: codeSays, driver.CallStreamGetCaptureInfo: codeSays, driver.CallStreamBeginCapture: codeSays, driver.CallStreamEndCapture: codeSays,
	driver.CallGraphInstantiate: codeSays, driver.CallGraphLaunch: codeSays, driver.CallGraphDestroy: codeSays, driver.CallGraphExecDestroy: codeSays,
	driver.CallEventCreate: codeSays, driver.CallEventRecord: codeSays, driver.CallEventQuery: codeSays, driver.CallEventSynchronize: codeSays, driver.CallEventDestroy: codeSays,
	driver.CallDeviceGetDefaultMemPool: codeSays, driver.CallMemPoolGetAttribute: codeSays, driver.CallMemPoolTrimTo: codeSays,
	driver.CallMemFree: codeSays, driver.CallMemAllocAsync: codeSays, driver.CallMemFreeAsync: codeSays, driver.CallMemGetInfo: codeSays, driver.CallMemFreeHost: codeSays,
	driver.CallMemHostUnregister: codeSays, driver.CallMemHostGetDevicePointer: codeSays,
	driver.CallMemAddressFree: codeSays, driver.CallMemRelease: codeSays, driver.CallMemUnmap: codeSays, driver.CallMemGetAccess: codeSays,
	driver.CallMemGetAllocationPropertiesFromHandle: codeSays,
	driver.CallModuleUnload:                         codeSays, driver.CallFuncGetAttribute: codeSays,
	driver.CallStreamCreateWithPriority: codeSays, driver.CallCtxGetStreamPriorityRange: codeSays, driver.CallStreamGetPriority: codeSays,
	driver.CallOccupancyMaxActiveBlocksPerMultiprocessor: codeSays, driver.CallLaunchHostFunc: codeSays,
	driver.CallLogsCurrent: asked, driver.CallLogsDumpToMemory: asked, driver.CallCheckpointProcessGetState: codeSays,
	driver.CallMemAlloc: codeSays, driver.CallFuncGetParamInfo: asked, driver.CallModuleLoadDataEx: elsewhere,

	driver.CallMemDiscardBatchAsync: foreign, driver.CallThreadExchangeStreamCaptureMode: foreign, driver.CallDevicePrimaryCtxGetState: foreign,
	driver.CallCtxCreate: foreign, driver.CallCtxDestroy: foreign, driver.CallCtxGetCurrent: foreign, driver.CallCtxSetCurrent: foreign, driver.CallCtxSynchronize: foreign,
	driver.CallStreamGetFlags: foreign, driver.CallStreamGetID: foreign, driver.CallGraphGetNodeCount: foreign, driver.CallMemcpyHtoD: foreign, driver.CallMemcpyDtoH: foreign,
	driver.CallMemcpyDtoD: foreign, driver.CallMemsetD8: foreign, driver.CallMemsetD32Async: foreign, driver.CallMemRetainAllocationHandle: foreign,
}

// A new call gets rows, or a reason here.
func TestEveryCallIsExplained(t *testing.T) {
	rows := map[driver.Call]bool{}
	for k := range byCall {
		rows[k.call] = true
	}
	for c := range driver.Call(driver.CallCount) {
		reason, without := withoutRows[c]
		require.False(t, rows[c] && without, "%v has rows: take it out of the list (%s)", c, reason)
		require.True(t, rows[c] || without, "%v has neither rows in explain.go nor a reason here", c)
	}
}
