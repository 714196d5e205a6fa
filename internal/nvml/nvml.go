// Package nvml declares what the library uses of NVML: the state of a GPU's
// fabric. csrc opens the real library; the software driver implements Library for
// its own machine.
package nvml

import (
	"errors"
	"fmt"
)

// Library reports the state of a GPU's fabric. It is safe for concurrent use.
type Library interface {
	// Fabric returns the state of the GPU with that UUID, in the form
	// GPU-xxxxxxxx-.... The error is an *Error if NVML refused the call, and wraps
	// ErrMissing if there is no NVML.
	Fabric(uuid string) (Fabric, error)
}

// Source is a driver that comes with an NVML.
type Source interface{ NVML() Library }

// ErrMissing means that no NVML could be opened, or that it is too old to know fabrics.
var ErrMissing = errors.New("NVML is not available")

// Fabric is the state of a GPU's fabric.
type Fabric struct {
	// Version of the struct that NVML filled: 1, 2 or 3. Mask exists from 2 on,
	// Summary from 3 on.
	Version int
	State   State
	// Status is the result of the registration, once State is Completed.
	Status  Return
	Cluster [16]byte
	Clique  uint32
	Mask    Mask
	Summary Summary
}

// State is the progress of the GPU's registration with its fabric.
type State uint8

const (
	StateNotSupported State = 0
	StateNotStarted   State = 1
	StateInProgress   State = 2
	StateCompleted    State = 3
)

func (s State) String() string {
	return name(uint32(s), "not supported", "not started", "in progress", "completed")
}

// Summary is the fabric's health in one word.
type Summary uint8

const (
	SummaryNotSupported    Summary = 0
	SummaryHealthy         Summary = 1
	SummaryUnhealthy       Summary = 2
	SummaryLimitedCapacity Summary = 3
)

func (s Summary) String() string {
	return name(uint32(s), "not known", "healthy", "unhealthy", "limited capacity")
}

// Mask is the health mask: fields of two bits, 1 for true and 2 for false, and one of
// four bits for a wrong configuration.
type Mask uint32

func (m Mask) is(shift int) bool { return m>>shift&3 == 1 }

// DegradedBandwidth reports whether links are down or slow.
func (m Mask) DegradedBandwidth() bool { return m.is(0) }

// RouteRecovery reports whether a route is being repaired.
func (m Mask) RouteRecovery() bool { return m.is(2) }

// RouteUnhealthy reports whether a route is broken.
func (m Mask) RouteUnhealthy() bool { return m.is(4) }

// AccessTimeoutRecovery reports whether an access timed out, so that the GPU needs a reset.
func (m Mask) AccessTimeoutRecovery() bool { return m.is(6) }

// NoPartition reports whether the GPU is assigned to no partition.
func (m Mask) NoPartition() bool { return m>>12&3 == 2 || m>>8&15 == 4 }

// Misconfigured names the wrong configuration, "" if there is none.
func (m Mask) Misconfigured() string {
	switch v := m >> 8 & 15; v {
	case 0, 1, 4: // not known, none, and no partition, which NoPartition reports
		return ""
	default:
		return name(uint32(v), "", "", "the system GUID differs within the fabric", "the chassis' serial number differs within the fabric", "",
			"too few NVLinks are up", "the GPU's firmware does not fit the fabric's", "the GPU is in the wrong place", "the GPU's state is invalid")
	}
}

// Return is an nvmlReturn_t.
type Return int32

const (
	Success          Return = 0
	Uninitialized    Return = 1
	InvalidArgument  Return = 2
	NotSupported     Return = 3
	NoPermission     Return = 4
	NotFound         Return = 6
	DriverNotLoaded  Return = 9
	LibraryNotFound  Return = 12
	FunctionNotFound Return = 13
	GPULost          Return = 15
	LibraryMismatch  Return = 18
	VersionMismatch  Return = 25
	Unknown          Return = 999
)

func (r Return) String() string {
	known := map[Return]string{
		Success: "success", Uninitialized: "uninitialized", InvalidArgument: "invalid argument", NotSupported: "not supported",
		NoPermission: "no permission", NotFound: "not found", DriverNotLoaded: "driver not loaded", LibraryNotFound: "library not found",
		FunctionNotFound: "function not found", GPULost: "GPU is lost", LibraryMismatch: "library and kernel module differ",
		VersionMismatch: "argument version mismatch", Unknown: "unknown error",
	}
	if s, ok := known[r]; ok {
		return s
	}
	return fmt.Sprintf("error %d", int32(r))
}

// Error is a call of NVML that failed.
type Error struct {
	Call   string
	Return Return
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s returned %d (%v)", e.Call, int32(e.Return), e.Return)
}

func name(v uint32, names ...string) string {
	if v < uint32(len(names)) && names[v] != "" {
		return names[v]
	}
	return fmt.Sprintf("code %d", v)
}
