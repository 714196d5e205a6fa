//go:build !unix

package main

import "os"

// resizes returns no channel: these systems have no signal. The next drawing has the new
// size.
func resizes() (changed <-chan os.Signal, stop func()) { return nil, func() {} }
