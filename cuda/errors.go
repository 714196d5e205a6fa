package cuda

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// The sentinels of every package of this library; test for them with errors.Is. The
// error itself is an *[Error] that says what was requested, what the driver returned,
// and what to do.
var (
	// ErrOutOfMemory: the device (or host node) has not enough free memory.
	ErrOutOfMemory = errors.New("out of memory")
	// ErrOutOfAddressSpace: no address range of that size is free. Memory may
	// be plentiful.
	ErrOutOfAddressSpace = errors.New("out of address space")
	// ErrBudget: a limit that the program set itself is reached.
	ErrBudget = errors.New("budget exhausted")
	// ErrNotSupported: this driver, device or platform cannot do it. It also
	// matches errors.ErrUnsupported.
	ErrNotSupported error = &alsoError{"not supported", errors.ErrUnsupported}
	// ErrNotPermitted: it could, but this process may not.
	ErrNotPermitted = errors.New("not permitted")
	// ErrClosed: the object was closed.
	ErrClosed = errors.New("closed")
	// ErrInUse: something that lives depends on the object.
	ErrInUse = errors.New("in use")
	// ErrForeign: the object belongs to another System.
	ErrForeign = errors.New("object of another System")
	// ErrOutOfRange: an offset or a length lies outside the object.
	ErrOutOfRange = errors.New("out of range")
	// ErrCapacity: growth beyond the address range reserved for it.
	ErrCapacity = errors.New("beyond the reserved range")
	// ErrCapturing: a stream captures a graph, and this would break it.
	ErrCapturing = errors.New("a stream capture is running")
	// ErrDeviceLost: a fault destroyed the device's context. Only a new
	// process can use the device again.
	ErrDeviceLost = errors.New("device context lost")
	// ErrNoDriver: no usable driver was found.
	ErrNoDriver = errors.New("no CUDA driver")
	// ErrMoved: the buffer was moved to a larger range, and its successor, which
	// the error names by its address, is the one to change.
	ErrMoved = errors.New("moved")
	// ErrSuspended: the memory was suspended, and the error says since when. Resume of
	// its Suspension (package vmm) brings it back at the same addresses.
	ErrSuspended = errors.New("suspended")
	// ErrInvalidArgument: an argument that could never work.
	ErrInvalidArgument = errors.New("invalid argument")
)

// alsoError is a sentinel that matches another one too.
type alsoError struct {
	text string
	also error
}

func (e *alsoError) Error() string { return e.text }
func (e *alsoError) Unwrap() error { return e.also }

// Code is a result code of the driver (a CUresult). Zero is success; negative
// codes are this library's own.
type Code int32

// String gives the vendor's name and the number: "CUDA_ERROR_OUT_OF_MEMORY (2)".
func (c Code) String() string { return driver.Result(c).String() }

// Error is a failed operation.
type Error struct {
	// Op is the operation of this library, such as "vmm.Reserve".
	Op string
	// Call is the driver's entry point, such as "cuMemCreate", or empty if
	// the operation was refused before the driver was called.
	Call string
	// Code is what the driver returned, or zero.
	Code Code
	// Logged is what the driver wrote of the call to its own log, in its words. It is empty
	// before CUDA 12.9, and of calls of which the driver logs nothing.
	Logged string
	// Asked says what was requested: sizes, device, location.
	Asked string
	// Hint says what to do about it.
	Hint string

	kind  error
	cause error
}

// Error returns everything that is known, on one line.
func (e *Error) Error() string {
	asked := e.Asked
	if e.Code != 0 {
		if asked != "" {
			asked += ": "
		}
		asked += fmt.Sprintf("%s returned %s", e.Call, e.Code)
		if e.Logged != "" {
			asked += " and logged " + errs.Words(e.Logged)
		}
	}
	return errs.Line(e.Op, e.kind, asked, e.cause, e.Hint)
}

// Unwrap returns the sentinel and the cause.
func (e *Error) Unwrap() []error { return errs.Unwrap(e.kind, e.cause) }

var sentinels = map[errs.Kind]error{
	errs.OutOfMemory:       ErrOutOfMemory,
	errs.OutOfAddressSpace: ErrOutOfAddressSpace,
	errs.Budget:            ErrBudget,
	errs.NotSupported:      ErrNotSupported,
	errs.NotPermitted:      ErrNotPermitted,
	errs.Closed:            ErrClosed,
	errs.InUse:             ErrInUse,
	errs.Foreign:           ErrForeign,
	errs.OutOfRange:        ErrOutOfRange,
	errs.Capacity:          ErrCapacity,
	errs.Capturing:         ErrCapturing,
	errs.DeviceLost:        ErrDeviceLost,
	errs.NoDriver:          ErrNoDriver,
	errs.Moved:             ErrMoved,
	errs.Suspended:         ErrSuspended,
	errs.InvalidArgument:   ErrInvalidArgument,
}

func init() { errs.SetErrors(newError, sentinels) }

func newError(f errs.Failure) error {
	e := &Error{Op: f.Op, Code: Code(f.Result), Logged: f.Logged, Asked: f.Asked, Hint: f.Hint, cause: f.Err}
	if f.Result != driver.Success {
		e.Call = f.Call.String()
	}
	kind, hint := explain(f.Call, f.Result)
	if f.Kind != errs.Unspecified {
		kind = f.Kind
	}
	e.kind = sentinels[kind]
	switch {
	case e.Hint != "":
	case kind == errs.DeviceLost && f.Err != nil: // the cause says what went wrong
		e.Hint = "restart the process: it cannot use the device any more"
	default:
		e.Hint = hint
	}
	return e
}

// inconclusive reports whether a trial failed for a temporary reason (no memory, too
// many open files, a fabric that is not ready), and so says nothing about the feature.
// A driver that lacks the feature, or denies it to this process, returns one of a few
// codes.
func inconclusive(err error) bool {
	var e *Error
	if err == nil || !errors.As(err, &e) {
		return false
	}
	switch driver.Result(e.Code) {
	case driver.InvalidValue, driver.NotPermitted, driver.NotSupported, driver.MissingEntryPoint, driver.Withheld:
		return false
	}
	return true
}
