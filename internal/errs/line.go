package errs

import "strings"

// Line formats an error on one line: the operation, the kind of failure, what was
// requested, the cause, and what to do about it. Empty parts are left out.
func Line(op string, kind error, asked string, cause error, hint string) string {
	parts := []string{op}
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
