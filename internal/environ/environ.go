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
	return os.Getenv(name)
}
