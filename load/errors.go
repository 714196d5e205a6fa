package load

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// Errors of files; test for them with errors.Is. The error itself is an *[Error], or a
// *cuda.Error if the driver refused or an argument can never work.
var (
	// ErrFormat: the file, or the index of a folder, is not what the format demands.
	ErrFormat = errors.New("invalid file")
	// ErrElement: elements of a type that this library has not.
	ErrElement = errors.New("unknown element type")
	// ErrNoTensor: the model has no tensor of that name.
	ErrNoTensor = errors.New("no such tensor")
	// ErrChanged: the file was written since it was opened.
	ErrChanged = errors.New("the file changed")
	// ErrDigest: the bytes that were read do not have the digest that the file declares.
	ErrDigest = errors.New("digest mismatch")
)

// Error is what is wrong with a file.
type Error struct {
	// Op is the operation, such as "load.OpenSafetensors".
	Op string
	// File is the path, unless it is about memory, and Tensor the name of the tensor, if it is about one.
	File, Tensor string
	// Asked is what was found, and Hint the remedy.
	Asked, Hint string

	kind, cause error
}

// Error returns all of it on one line.
func (e *Error) Error() string {
	var at []string
	if e.File != "" {
		at = append(at, errs.Plain(e.File))
	}
	if e.Tensor != "" {
		at = append(at, "tensor "+errs.Words(e.Tensor))
	}
	asked := strings.Join(at, ", ")
	if e.Asked != "" {
		asked += ": " + e.Asked
	}
	return errs.Line(e.Op, e.kind, asked, e.cause, e.Hint)
}

// Unwrap returns the sentinel and the cause.
func (e *Error) Unwrap() []error { return errs.Unwrap(e.kind, e.cause) }

// hintFormat is the hint for files of which nothing can be read.
const hintFormat = "fetch the file again, or have it written anew"

// badHeader is what a header breaks. Its opener adds operation and file.
func badHeader(tensor, format string, args ...any) *Error {
	return &Error{Tensor: tensor, Asked: fmt.Sprintf(format, args...), Hint: hintFormat, kind: ErrFormat}
}

// of completes an error that was made without them.
func (e *Error) of(op, file string) *Error {
	e.Op, e.File = op, file
	return e
}

// ioError returns an error of the operating system, whose own text need not name the file again.
func ioError(op, file, what string, err error) *Error {
	if path := new(fs.PathError); errors.As(err, &path) {
		err = path.Err
	}
	if link := new(os.LinkError); errors.As(err, &link) {
		err = link.Err
	}
	return &Error{Op: op, File: file, Asked: what, cause: err}
}

// errNoLayout is the error of a manifest that is missing.
func errNoLayout(op string) error {
	return errs.Invalid(op, "no layout", "pass one of Model.Layout")
}
