package core

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// Kind is what a failure is to the caller: each has one sentinel in cuda.
type Kind uint8

const (
	// Unspecified leaves it to the driver's result to say.
	Unspecified Kind = iota
	OutOfMemory
	OutOfAddressSpace
	Budget
	NotSupported
	NotPermitted
	Closed
	InUse
	Foreign
	OutOfRange
	Capacity
	Capturing
	DeviceLost
	NoDriver
	Moved
	InvalidArgument
)

// Failure is everything that is known of a failed operation. It is how the
// rooms make errors: cuda owns the error type that users see, and turns one
// into the other.
type Failure struct {
	// Op is the operation of this library: "vmm.Reserve".
	Op string
	// Kind, where the result alone does not tell.
	Kind Kind
	// Call and Result are the driver call that failed and its answer; Result
	// is Success where the operation was refused before any call.
	Call   driver.Call
	Result driver.Result
	// Asked says what was asked for, in the caller's terms.
	Asked string
	// Hint says what to do about it. Empty: cuda knows one by call and result.
	Hint string
	// Err is the cause, where there is one.
	Err error
}

// newError is set by cuda.
var newError = func(f Failure) error { return fmt.Errorf("%s: %s", f.Op, f.Asked) }

// SetErrors tells the package how failures become errors. cuda calls it once.
func SetErrors(f func(Failure) error) { newError = f }

// Error makes the error that users see.
func Error(f Failure) error { return newError(f) }

// Invalid is the error for an argument that no driver needs to be asked about.
func Invalid(op, asked, hint string) error {
	return Error(Failure{Op: op, Kind: InvalidArgument, Asked: asked, Hint: hint})
}

// Count writes how many there are, for a noun that forms its plural with an s:
// "1 mapping", "3 mappings".
func Count[N ~int | ~int64 | ~uint64](n N, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// waiting says that closed objects are pending.
func waiting(n int) string {
	if n == 1 {
		return "1 closed object waits for the GPU"
	}
	return fmt.Sprintf("%d closed objects wait for the GPU", n)
}

// Waiting says how many closed objects wait for the GPU.
func (s *System) Waiting() string { return waiting(s.PendingReclaims()) }

// Withheld is what to do where the software driver answers that there is no
// memory while it has so much free: then the system has none, or a test had it
// fail. Of a real driver, and where memory ran out, it is empty.
func (s *System) Withheld(size, free uint64) string {
	if size > free || !s.Drv.Describe().Software {
		return ""
	}
	return "the software driver has that much, but the system gave it none: look at ulimit -v and vm.overcommit_memory, or for an injected fault"
}

// Bytes writes a size for people: exact in the largest unit that divides it,
// otherwise in bytes.
func Bytes[N ~int | ~int64 | ~uint64](n N) string {
	if n == 1 {
		return "1 byte"
	}
	units := []string{"bytes", "KiB", "MiB", "GiB", "TiB", "PiB"}
	u, v := 0, n
	for v != 0 && v%1024 == 0 && u < len(units)-1 {
		v, u = v/1024, u+1
	}
	return fmt.Sprintf("%d %s", v, units[u])
}
