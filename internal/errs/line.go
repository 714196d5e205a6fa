package errs

import "strings"

// both are an error and what then failed too.
type both struct{ first, then error }

func (b both) Error() string   { return b.first.Error() + "; then " + b.then.Error() }
func (b both) Unwrap() []error { return []error{b.first, b.then} }

// Both joins an error and what failed because of it, such as a Close, on one line. Either may be nil.
func Both(first, then error) error {
	switch {
	case first == nil:
		return then
	case then == nil:
		return first
	}
	return both{first, then}
}

// Line formats an error on one line: the operation, the kind of failure, what was
// requested, the cause, and what to do about it. Empty parts are left out.
func Line(op string, kind error, asked string, cause error, hint string) string {
	var parts []string
	if op != "" {
		parts = append(parts, op)
	}
	if kind != nil {
		parts = append(parts, kind.Error())
	}
	if asked != "" {
		parts = append(parts, asked)
	}
	if cause != nil {
		parts = append(parts, cause.Error())
	}
	line := strings.Join(parts, ": ")
	if hint != "" {
		line += "; " + hint
	}
	return line
}

// Unwrap returns the sentinel and the cause of an error, for errors.Is and errors.As.
func Unwrap(kind, cause error) (all []error) {
	for _, err := range []error{kind, cause} {
		if err != nil {
			all = append(all, err)
		}
	}
	return all
}
