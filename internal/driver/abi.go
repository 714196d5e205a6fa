package driver

import "structs"

// The structs below have the C layout of the 64-bit driver API; abi_test.go
// pins every size and offset to the values measured with the vendor's header.

// Location is CUmemLocation.
type Location struct {
	_    structs.HostLayout
	Type LocationType
	ID   int32
}

// AllocationProp is CUmemAllocationProp.
type AllocationProp struct {
	_                    structs.HostLayout
	Type                 AllocationType
	RequestedHandleTypes HandleTypes
	Location             Location
	Win32HandleMetaData  uintptr
	Flags                AllocationFlags
}

// AllocationFlags is the allocFlags member of CUmemAllocationProp.
type AllocationFlags struct {
	_                    structs.HostLayout
	CompressionType      CompressionType
	GPUDirectRDMACapable uint8
	Usage                AllocationUsage
	_                    [4]byte
}

// MulticastProp is CUmulticastObjectProp. HandleTypes are the same bits as in
// AllocationProp; Flags must be 0.
type MulticastProp struct {
	_           structs.HostLayout
	NumDevices  uint32
	Size        uint64
	HandleTypes uint64
	Flags       uint64
}

// AccessDesc is CUmemAccessDesc.
type AccessDesc struct {
	_        structs.HostLayout
	Location Location
	Flags    AccessFlags
}

// CopyAttributes is CUmemcpyAttributes. The hints are for managed memory.
type CopyAttributes struct {
	_                structs.HostLayout
	Order            CopyOrder
	SrcHint, DstHint Location
	Flags            uint32
}

// CopyOrder is when a copy reads its source.
type CopyOrder uint32

// CopyInStreamOrder reads it behind the earlier work of the stream.
const CopyInStreamOrder CopyOrder = 1

// LockArgs is CUcheckpointLockArgs.
type LockArgs struct {
	_         structs.HostLayout
	TimeoutMS uint32
	_         [15]uint32
}

// ShareableHandle holds either of the two shareable forms: a descriptor in its
// first four bytes, in host order, or a fabric handle in all 64.
type ShareableHandle [64]byte

// LaunchConfig is the geometry of a kernel launch: blocks in the grid, threads
// in a block, and bytes of dynamic shared memory.
type LaunchConfig struct {
	GridX, GridY, GridZ    uint32
	BlockX, BlockY, BlockZ uint32
	SharedBytes            uint32
}

type (
	LocationType      uint32
	AllocationType    uint32
	HandleTypes       uint32
	AccessFlags       uint32
	CompressionType   uint8
	AllocationUsage   uint16
	GranularityOption uint32
	DeviceAttribute   int32
	PointerAttribute  int32
	MemPoolAttribute  int32
	StreamFlags       uint32
	EventFlags        uint32
	HostAllocFlags    uint32
	HostRegisterFlags uint32
	CaptureStatus     uint32
	ProcessState      uint32
	CaptureMode       uint32
	AttachFlags       uint32
	Advice            uint32
	RangeAttribute    uint32
	FuncAttribute     int32
	RangeHandleFlags  uint64
)

// RangeHandlePCIe has other devices reach the memory by PCIe, also where there is a faster way.
const RangeHandlePCIe RangeHandleFlags = 1

const (
	LocationNone            LocationType = 0
	LocationDevice          LocationType = 1
	LocationHost            LocationType = 2
	LocationHostNUMA        LocationType = 3
	LocationHostNUMACurrent LocationType = 4

	AllocationPinned  AllocationType = 1
	AllocationManaged AllocationType = 2

	HandleNone    HandleTypes = 0
	HandlePosixFD HandleTypes = 1
	HandleWin32   HandleTypes = 2
	HandleKMT     HandleTypes = 4
	HandleFabric  HandleTypes = 8

	AccessNone      AccessFlags = 0
	AccessRead      AccessFlags = 1
	AccessReadWrite AccessFlags = 3

	CompressionNone    CompressionType = 0
	CompressionGeneric CompressionType = 1

	UsageNone AllocationUsage = 0
	// UsageTilePool is memory for sparse arrays.
	UsageTilePool AllocationUsage = 1
	// UsageHWDecompress is memory that the decompression engine may touch.
	UsageHWDecompress AllocationUsage = 2

	GranularityMinimum     GranularityOption = 0
	GranularityRecommended GranularityOption = 1

	StreamDefault     StreamFlags = 0
	StreamNonBlocking StreamFlags = 1

	EventDefault       EventFlags = 0
	EventBlockingSync  EventFlags = 1
	EventDisableTiming EventFlags = 2

	HostAllocPortable  HostAllocFlags = 1
	HostAllocDeviceMap HostAllocFlags = 2

	HostRegisterPortable  HostRegisterFlags = 1
	HostRegisterDeviceMap HostRegisterFlags = 2

	CaptureNone        CaptureStatus = 0
	CaptureActive      CaptureStatus = 1
	CaptureInvalidated CaptureStatus = 2

	CaptureGlobal      CaptureMode = 0
	CaptureThreadLocal CaptureMode = 1
	CaptureRelaxed     CaptureMode = 2
)

// What the calls for checkpoints made of a process.
const (
	ProcessRunning      ProcessState = 0
	ProcessLocked       ProcessState = 1
	ProcessCheckpointed ProcessState = 2
	ProcessFailed       ProcessState = 3
)

const (
	// AttrSharedPerBlock is what a kernel can have without more ado, and
	// AttrSharedPerBlockOptIn what it can have at most, in bytes.
	AttrSharedPerBlock          DeviceAttribute = 8
	AttrMultiprocessorCount     DeviceAttribute = 16
	AttrIntegrated              DeviceAttribute = 18
	AttrPCIBusID                DeviceAttribute = 33
	AttrPCIDeviceID             DeviceAttribute = 34
	AttrPCIDomainID             DeviceAttribute = 50
	AttrUnifiedAddressing       DeviceAttribute = 41
	AttrComputeMajor            DeviceAttribute = 75
	AttrComputeMinor            DeviceAttribute = 76
	AttrManagedMemory           DeviceAttribute = 83
	AttrPageableMemoryAccess    DeviceAttribute = 88
	AttrConcurrentManagedAccess DeviceAttribute = 89
	AttrStreamMemOps64          DeviceAttribute = 122
	AttrDirectManagedFromHost   DeviceAttribute = 101
	AttrCooperativeLaunch       DeviceAttribute = 95
	AttrSharedPerBlockOptIn     DeviceAttribute = 97
	AttrVirtualMemoryManagement DeviceAttribute = 102
	AttrHandlePosixFD           DeviceAttribute = 103
	AttrGenericCompression      DeviceAttribute = 107
	AttrRDMAWithVMM             DeviceAttribute = 110
	AttrMemoryPools             DeviceAttribute = 115
	AttrRDMA                    DeviceAttribute = 116
	AttrDMABuf                  DeviceAttribute = 124
	AttrHandleFabric            DeviceAttribute = 128
	AttrMulticast               DeviceAttribute = 132
	AttrHostNUMAID              DeviceAttribute = 134
	AttrHostNUMAVirtualMemory   DeviceAttribute = 141
	AttrHostVirtualMemory       DeviceAttribute = 145
)

// Function attributes: the static shared memory of a kernel, and the most dynamic
// shared memory that it may be launched with, in bytes.
const (
	FuncSharedBytes           FuncAttribute = 1
	FuncMaxDynamicSharedBytes FuncAttribute = 8
)

// Pointer attributes. PointerMemoryType is 1 for host, 2 for device and
// 4 for unified memory; PointerRangeStart and PointerRangeSize describe the
// allocation that holds the address.
const (
	PointerContext       PointerAttribute = 1 // 8 bytes
	PointerMemoryType    PointerAttribute = 2 // 4 bytes
	PointerIsManaged     PointerAttribute = 8 // 1 byte, as all truth values
	PointerDeviceOrdinal PointerAttribute = 9 // 4 bytes
	PointerRangeStart    PointerAttribute = 11
	PointerRangeSize     PointerAttribute = 12
	PointerMapped        PointerAttribute = 13
)

// Bytes returns how many bytes of the caller's the attribute's value takes, of those that
// the library does not ask for, too.
func (a PointerAttribute) Bytes() int {
	switch a {
	case PointerIsManaged, 10 /* legacy IPC */, PointerMapped, 15 /* RDMA */ :
		return 1
	case PointerMemoryType, 6 /* synchronous copies */, PointerDeviceOrdinal, 16 /* access */ :
		return 4
	}
	return 8
}

// Attributes of a memory pool, in bytes: what it has from the device, and what of that programs use.
const (
	MemPoolReserved MemPoolAttribute = 5
	MemPoolUsed     MemPoolAttribute = 7
)

// Attachments of managed memory: to every stream of every device, to none
// until a stream is named, or to one stream (never at the allocation).
const (
	AttachGlobal AttachFlags = 1
	AttachHost   AttachFlags = 2
	AttachSingle AttachFlags = 4
)

const (
	AdviseSetReadMostly          Advice = 1
	AdviseUnsetReadMostly        Advice = 2
	AdviseSetPreferredLocation   Advice = 3
	AdviseUnsetPreferredLocation Advice = 4
	AdviseSetAccessedBy          Advice = 5
	AdviseUnsetAccessedBy        Advice = 6
)

// Range attributes of managed memory. Those of a type and an id are of drivers
// from 12.2 on; the older ones return a device's ordinal, DeviceCPU or
// DeviceInvalid.
const (
	RangeReadMostly        RangeAttribute = 1
	RangePreferredLocation RangeAttribute = 2
	RangeAccessedBy        RangeAttribute = 3
	RangeLastPrefetch      RangeAttribute = 4
	RangePreferredType     RangeAttribute = 5
	RangePreferredID       RangeAttribute = 6
	RangeLastPrefetchType  RangeAttribute = 7
	RangeLastPrefetchID    RangeAttribute = 8
)

// What stands for the host, and for no device, when the driver takes or returns
// a device's ordinal.
const (
	DeviceCPU     int32 = -1
	DeviceInvalid int32 = -2
)
