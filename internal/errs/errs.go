// Package errs makes the errors that users see, and formats their parts: sizes, counts,
// and types that cannot be elements in GPU memory. A [Failure] describes what failed;
// the package cuda turns it into its error type. The error types of cuda, handles and
// fabric/rendezvous share how they are written and unwrapped.
package errs

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// Kind classifies a failure for the caller: each kind has one sentinel in cuda.
type Kind uint8

const (
	// Unspecified takes the kind from the driver's result.
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
	Suspended
	InvalidArgument
)

// Failure is everything that is known of a failed operation. All packages make errors
// from it: cuda owns the error type that users see, and converts.
type Failure struct {
	// Op is the operation of this library: "vmm.Reserve".
	Op string
	// Kind, if the result alone does not tell.
	Kind Kind
	// Call and Result are the driver call that failed and what it returned; Result is
	// Success if the operation was refused before any call.
	Call   driver.Call
	Result driver.Result
	// Logged is what the driver wrote of the call to its own log, if it keeps one.
	Logged string
	// Object is what the operation was on, if the program gave that a name: "buffer
	// \"weights\"".
	Object string
	// Asked says what was requested, in the caller's terms.
	Asked string
	// Hint says what to do about it. If it is empty, cuda looks it up by call and result.
	Hint string
	// Err is the cause, if there is one.
	Err error
}

// newError and sentinels are set by cuda.
var (
	newError  = func(f Failure) error { return fmt.Errorf("%s: %s", f.Op, f.Asked) }
	sentinels map[Kind]error
)

// SetErrors sets how failures become errors, and the sentinel of each kind. cuda calls it
// once.
func SetErrors(f func(Failure) error, kinds map[Kind]error) { newError, sentinels = f, kinds }

func (k Kind) sentinel() error { return sentinels[k] }

// New makes the error that users see.
func New(f Failure) error {
	if f.Object != "" {
		f.Asked = f.Object + ": " + f.Asked
	}
	return newError(f)
}

// Invalid returns the error for an argument that is refused without a driver call.
func Invalid(op, asked, hint string) error {
	return New(Failure{Op: op, Kind: InvalidArgument, Asked: asked, Hint: hint})
}

// NilDevice returns the error for a Device that is nil or that no function made.
func NilDevice(op string) error {
	return Invalid(op, "a nil device", "take one from System.Devices")
}

// NilStream returns the error for a Stream that is nil or that no function made.
func NilStream(op string) error {
	return Invalid(op, "a nil stream", "make one with Device.NewStream or BorrowStream")
}

// NoFunction returns the error for a nil function that is to work on memory.
func NoFunction(op string) error {
	return Invalid(op, "no function", "pass the function that works on the memory")
}

// ClosedError returns the error for an operation on a closed object.
func ClosedError(op, what string) error {
	return New(Failure{Op: op, Kind: Closed, Asked: "the " + what + " is closed",
		Hint: "use it before its Close or CloseAfter"})
}

// ForeignError returns the error for an object of another System.
func ForeignError(op, what string) error {
	return New(Failure{Op: op, Kind: Foreign, Asked: "the " + what + " belongs to another System",
		Hint: "use objects that were made from the same System"})
}
