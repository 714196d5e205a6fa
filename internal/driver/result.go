package driver

import "fmt"

// Result is a CUresult or, if negative, a result of this library's own.
type Result int32

const (
	Success             Result = 0
	InvalidValue        Result = 1
	OutOfMemory         Result = 2
	NotInitialized      Result = 3
	Deinitialized       Result = 4
	StubLibrary         Result = 34
	DeviceUnavailable   Result = 46
	NoDevice            Result = 100
	InvalidDevice       Result = 101
	InvalidImage        Result = 200
	InvalidContext      Result = 201
	MapFailed           Result = 205
	UnmapFailed         Result = 206
	AlreadyMapped       Result = 208
	NoBinaryForGPU      Result = 209
	NotMapped           Result = 211
	ECCUncorrectable    Result = 214
	UnsupportedLimit    Result = 215
	PeerUnsupported     Result = 217
	InvalidPTX          Result = 218
	NVLinkUncorrectable Result = 220
	JITCompilerNotFound Result = 221
	UnsupportedPTX      Result = 222
	Contained           Result = 226
	FileNotFound        Result = 301
	OperatingSystem     Result = 304
	InvalidHandle       Result = 400
	IllegalState        Result = 401
	NotFound            Result = 500
	NotReady            Result = 600
	IllegalAddress      Result = 700
	LaunchOutOfRes      Result = 701
	LaunchTimeout       Result = 702
	PeerEnabled         Result = 704
	PeerNotEnabled      Result = 705
	ContextDestroyed    Result = 709
	Assert              Result = 710
	HostRegistered      Result = 712
	HostNotRegistered   Result = 713
	HardwareStackError  Result = 714
	IllegalInstruction  Result = 715
	MisalignedAddress   Result = 716
	InvalidAddrSpace    Result = 717
	InvalidPC           Result = 718
	LaunchFailed        Result = 719
	CooperativeTooLarge Result = 720
	TensorMemoryLeak    Result = 721
	NotPermitted        Result = 800
	NotSupported        Result = 801
	SystemNotReady      Result = 802
	DriverMismatch      Result = 803
	CompatNotSupported  Result = 804
	MPSClientTerminated Result = 810

	CaptureUnsupported Result = 900
	CaptureInvalid     Result = 901
	CaptureMerge       Result = 902
	CaptureUnmatched   Result = 903
	CaptureUnjoined    Result = 904
	CaptureIsolation   Result = 905
	CaptureImplicit    Result = 906
	CapturedEvent      Result = 907
	CaptureWrongThread Result = 908

	ExternalDevice Result = 911
	Unknown        Result = 999

	// MissingEntryPoint: the running driver does not have the entry point, or
	// has it only in a later form than the one declared.
	MissingEntryPoint Result = -1
	// Withheld: this library does not make the call on a real driver unless it
	// was asked to.
	Withheld Result = -2
)

// resultNames are the vendor's names, also of the results that this library treats like
// any other and gives no constant.
var resultNames = map[Result]string{
	Success: "SUCCESS", InvalidValue: "INVALID_VALUE", OutOfMemory: "OUT_OF_MEMORY",
	NotInitialized: "NOT_INITIALIZED", Deinitialized: "DEINITIALIZED",
	5: "PROFILER_DISABLED", 6: "PROFILER_NOT_INITIALIZED", 7: "PROFILER_ALREADY_STARTED", 8: "PROFILER_ALREADY_STOPPED",
	StubLibrary: "STUB_LIBRARY", 36: "CALL_REQUIRES_NEWER_DRIVER", DeviceUnavailable: "DEVICE_UNAVAILABLE",

	NoDevice: "NO_DEVICE", InvalidDevice: "INVALID_DEVICE", 102: "DEVICE_NOT_LICENSED",

	InvalidImage: "INVALID_IMAGE", InvalidContext: "INVALID_CONTEXT", 202: "CONTEXT_ALREADY_CURRENT",
	MapFailed: "MAP_FAILED", UnmapFailed: "UNMAP_FAILED", 207: "ARRAY_IS_MAPPED", AlreadyMapped: "ALREADY_MAPPED",
	NoBinaryForGPU: "NO_BINARY_FOR_GPU", 210: "ALREADY_ACQUIRED", NotMapped: "NOT_MAPPED",
	212: "NOT_MAPPED_AS_ARRAY", 213: "NOT_MAPPED_AS_POINTER", ECCUncorrectable: "ECC_UNCORRECTABLE",
	UnsupportedLimit: "UNSUPPORTED_LIMIT", 216: "CONTEXT_ALREADY_IN_USE", PeerUnsupported: "PEER_ACCESS_UNSUPPORTED",
	InvalidPTX: "INVALID_PTX", 219: "INVALID_GRAPHICS_CONTEXT", NVLinkUncorrectable: "NVLINK_UNCORRECTABLE",
	JITCompilerNotFound: "JIT_COMPILER_NOT_FOUND", UnsupportedPTX: "UNSUPPORTED_PTX_VERSION", 223: "JIT_COMPILATION_DISABLED",
	224: "UNSUPPORTED_EXEC_AFFINITY", 225: "UNSUPPORTED_DEVSIDE_SYNC", Contained: "CONTAINED",

	300: "INVALID_SOURCE", FileNotFound: "FILE_NOT_FOUND", 302: "SHARED_OBJECT_SYMBOL_NOT_FOUND",
	303: "SHARED_OBJECT_INIT_FAILED", OperatingSystem: "OPERATING_SYSTEM",
	InvalidHandle: "INVALID_HANDLE", IllegalState: "ILLEGAL_STATE", 402: "LOSSY_QUERY",
	NotFound: "NOT_FOUND", NotReady: "NOT_READY",

	IllegalAddress: "ILLEGAL_ADDRESS", LaunchOutOfRes: "LAUNCH_OUT_OF_RESOURCES", LaunchTimeout: "LAUNCH_TIMEOUT",
	703: "LAUNCH_INCOMPATIBLE_TEXTURING", PeerEnabled: "PEER_ACCESS_ALREADY_ENABLED", PeerNotEnabled: "PEER_ACCESS_NOT_ENABLED",
	708: "PRIMARY_CONTEXT_ACTIVE", ContextDestroyed: "CONTEXT_IS_DESTROYED", Assert: "ASSERT", 711: "TOO_MANY_PEERS",
	HostRegistered: "HOST_MEMORY_ALREADY_REGISTERED", HostNotRegistered: "HOST_MEMORY_NOT_REGISTERED",
	HardwareStackError: "HARDWARE_STACK_ERROR", IllegalInstruction: "ILLEGAL_INSTRUCTION",
	MisalignedAddress: "MISALIGNED_ADDRESS", InvalidAddrSpace: "INVALID_ADDRESS_SPACE", InvalidPC: "INVALID_PC",
	LaunchFailed: "LAUNCH_FAILED", CooperativeTooLarge: "COOPERATIVE_LAUNCH_TOO_LARGE", TensorMemoryLeak: "TENSOR_MEMORY_LEAK",

	NotPermitted: "NOT_PERMITTED", NotSupported: "NOT_SUPPORTED", SystemNotReady: "SYSTEM_NOT_READY",
	DriverMismatch: "SYSTEM_DRIVER_MISMATCH", CompatNotSupported: "COMPAT_NOT_SUPPORTED_ON_DEVICE",
	805: "MPS_CONNECTION_FAILED", 806: "MPS_RPC_FAILURE", 807: "MPS_SERVER_NOT_READY", 808: "MPS_MAX_CLIENTS_REACHED",
	809: "MPS_MAX_CONNECTIONS_REACHED", MPSClientTerminated: "MPS_CLIENT_TERMINATED",
	811: "CDP_NOT_SUPPORTED", 812: "CDP_VERSION_MISMATCH",

	CaptureUnsupported: "STREAM_CAPTURE_UNSUPPORTED", CaptureInvalid: "STREAM_CAPTURE_INVALIDATED",
	CaptureMerge: "STREAM_CAPTURE_MERGE", CaptureUnmatched: "STREAM_CAPTURE_UNMATCHED",
	CaptureUnjoined: "STREAM_CAPTURE_UNJOINED", CaptureIsolation: "STREAM_CAPTURE_ISOLATION",
	CaptureImplicit: "STREAM_CAPTURE_IMPLICIT", CapturedEvent: "CAPTURED_EVENT",
	CaptureWrongThread: "STREAM_CAPTURE_WRONG_THREAD", 909: "TIMEOUT", 910: "GRAPH_EXEC_UPDATE_FAILURE",
	ExternalDevice: "EXTERNAL_DEVICE", 912: "INVALID_CLUSTER_SIZE", 913: "FUNCTION_NOT_LOADED",
	914: "INVALID_RESOURCE_TYPE", 915: "INVALID_RESOURCE_CONFIGURATION", 916: "KEY_ROTATION", 917: "STREAM_DETACHED",
	918:     "GRAPH_RECAPTURE_FAILURE",
	Unknown: "UNKNOWN",
}

// Name returns the vendor's name: "CUDA_ERROR_OUT_OF_MEMORY". ok is false if
// there is no such result.
func (r Result) Name() (name string, ok bool) {
	switch name, ok := resultNames[r]; {
	case r == Success:
		return "CUDA_SUCCESS", true
	case ok:
		return "CUDA_ERROR_" + name, true
	}
	return "", false
}

// String gives the vendor's name: "CUDA_ERROR_OUT_OF_MEMORY (2)".
func (r Result) String() string {
	switch name, ok := r.Name(); {
	case r == Success:
		return name
	case r == MissingEntryPoint:
		return "missing entry point"
	case r == Withheld:
		return "withheld"
	case ok:
		return fmt.Sprintf("%s (%d)", name, int32(r))
	default:
		return fmt.Sprintf("CUDA error %d", int32(r))
	}
}

// Lost reports whether the result means that the context is gone: from then on
// every call on it fails, and only a new process helps.
func (r Result) Lost() bool {
	switch r {
	case ECCUncorrectable, NVLinkUncorrectable, IllegalAddress, LaunchTimeout, ContextDestroyed,
		Assert, HardwareStackError, IllegalInstruction, MisalignedAddress, InvalidAddrSpace,
		InvalidPC, LaunchFailed, Contained, TensorMemoryLeak, MPSClientTerminated, ExternalDevice, Deinitialized:
		return true
	}
	return false
}
