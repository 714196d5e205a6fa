// Package environ reads environment variables that choose code to load or
// files to write. A
// program that runs with more rights than its caller, by a set-user-ID or
// set-group-ID bit or by file capabilities, ignores them, as the dynamic loader
// does with its own.
package environ

import "os"

// Get returns the variable's value, or "" in a program with raised rights.
func Get(name string) string {
	if secure() {
		return ""
	}
	return Lookup(name)
}

// Lookup finds a variable's value. A shared library for programs in other languages sets it
// when it is loaded, to C's getenv: Go's copy of the environment is from the process's start,
// and lacks what the program set before it loaded the library.
var Lookup = os.Getenv
