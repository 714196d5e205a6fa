// Package errs makes the errors that users see, and the words of their text: sizes,
// counts, and what cannot be an element in GPU memory. A failure is described once
// ([Failure]); the package cuda turns it into its error type. The error types of
// cuda, handles and fabric/rendezvous share how they are written and unwrapped.
package errs

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

// New makes the error that users see.
func New(f Failure) error { return newError(f) }

// Invalid is the error for an argument that no driver needs to be asked about.
func Invalid(op, asked, hint string) error {
	return New(Failure{Op: op, Kind: InvalidArgument, Asked: asked, Hint: hint})
}

// ClosedError is the refusal of an operation on a closed object.
func ClosedError(op, what string) error {
	return New(Failure{Op: op, Kind: Closed, Asked: "the " + what + " is closed",
		Hint: "use it before its Close or CloseAfter"})
}

// ForeignError is the refusal of an object of another System.
func ForeignError(op, what string) error {
	return New(Failure{Op: op, Kind: Foreign, Asked: "the " + what + " belongs to another System",
		Hint: "use objects that were made from the same System"})
}
