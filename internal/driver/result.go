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
	UnsupportedPTX      Result = 222
	FileNotFound        Result = 301
	OperatingSystem     Result = 304
	InvalidHandle       Result = 400
	IllegalState        Result = 401
	NotFound            Result = 500
	NotReady            Result = 600
	IllegalAddress      Result = 700
	LaunchOutOfRes      Result = 701
	LaunchTimeout       Result = 702
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
	NotPermitted        Result = 800
	NotSupported        Result = 801
	SystemNotReady      Result = 802
	DriverMismatch      Result = 803
	CompatNotSupported  Result = 804
	Contained           Result = 921

	CaptureUnsupported Result = 900
	CaptureInvalid     Result = 901
	CaptureMerge       Result = 902
	CaptureUnmatched   Result = 903
	CaptureUnjoined    Result = 904
	CaptureIsolation   Result = 905
	CaptureImplicit    Result = 906
	CapturedEvent      Result = 907
	CaptureWrongThread Result = 908
	Unknown            Result = 999

	// MissingEntryPoint: the running driver does not have the entry point, or
	// has it only in a later form than the one declared.
	MissingEntryPoint Result = -1
	// Withheld: this library does not make the call on a real driver unless it
	// was asked to.
	Withheld Result = -2
)

var resultNames = map[Result]string{
	Success: "SUCCESS", InvalidValue: "INVALID_VALUE", OutOfMemory: "OUT_OF_MEMORY",
	NotInitialized: "NOT_INITIALIZED", Deinitialized: "DEINITIALIZED",
	StubLibrary: "STUB_LIBRARY", DeviceUnavailable: "DEVICE_UNAVAILABLE",
	NoDevice: "NO_DEVICE", InvalidDevice: "INVALID_DEVICE", InvalidImage: "INVALID_IMAGE",
	InvalidContext: "INVALID_CONTEXT", MapFailed: "MAP_FAILED", UnmapFailed: "UNMAP_FAILED",
	AlreadyMapped: "ALREADY_MAPPED", NoBinaryForGPU: "NO_BINARY_FOR_GPU", NotMapped: "NOT_MAPPED",
	ECCUncorrectable: "ECC_UNCORRECTABLE", UnsupportedLimit: "UNSUPPORTED_LIMIT",
	PeerUnsupported: "PEER_ACCESS_UNSUPPORTED", InvalidPTX: "INVALID_PTX",
	NVLinkUncorrectable: "NVLINK_UNCORRECTABLE", UnsupportedPTX: "UNSUPPORTED_PTX_VERSION",
	FileNotFound: "FILE_NOT_FOUND", OperatingSystem: "OPERATING_SYSTEM",
	InvalidHandle: "INVALID_HANDLE", IllegalState: "ILLEGAL_STATE", NotFound: "NOT_FOUND",
	NotReady: "NOT_READY", IllegalAddress: "ILLEGAL_ADDRESS",
	LaunchOutOfRes: "LAUNCH_OUT_OF_RESOURCES", LaunchTimeout: "LAUNCH_TIMEOUT",
	ContextDestroyed: "CONTEXT_IS_DESTROYED", Assert: "ASSERT",
	HostRegistered: "HOST_MEMORY_ALREADY_REGISTERED", HostNotRegistered: "HOST_MEMORY_NOT_REGISTERED",
	HardwareStackError: "HARDWARE_STACK_ERROR", IllegalInstruction: "ILLEGAL_INSTRUCTION",
	MisalignedAddress: "MISALIGNED_ADDRESS", InvalidAddrSpace: "INVALID_ADDRESS_SPACE",
	InvalidPC: "INVALID_PC", LaunchFailed: "LAUNCH_FAILED", CooperativeTooLarge: "COOPERATIVE_LAUNCH_TOO_LARGE",
	NotPermitted: "NOT_PERMITTED", NotSupported: "NOT_SUPPORTED",
	SystemNotReady: "SYSTEM_NOT_READY", DriverMismatch: "SYSTEM_DRIVER_MISMATCH",
	CompatNotSupported: "COMPAT_NOT_SUPPORTED_ON_DEVICE",
	CaptureUnsupported: "STREAM_CAPTURE_UNSUPPORTED", CaptureInvalid: "STREAM_CAPTURE_INVALIDATED",
	CaptureMerge: "STREAM_CAPTURE_MERGE", CaptureUnmatched: "STREAM_CAPTURE_UNMATCHED",
	CaptureUnjoined: "STREAM_CAPTURE_UNJOINED", CaptureIsolation: "STREAM_CAPTURE_ISOLATION",
	CaptureImplicit: "STREAM_CAPTURE_IMPLICIT", CapturedEvent: "CAPTURED_EVENT",
	CaptureWrongThread: "STREAM_CAPTURE_WRONG_THREAD", Contained: "CONTAINED", Unknown: "UNKNOWN",
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
		InvalidPC, LaunchFailed, Contained, Deinitialized:
		return true
	}
	return false
}
