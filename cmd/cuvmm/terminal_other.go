//go:build !unix

package main

import "os"

// resizes returns no channel: no signal tells of a new size, which the next drawing has.
func resizes() (changed <-chan os.Signal, stop func()) { return nil, func() {} }
