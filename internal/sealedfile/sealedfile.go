// Package sealedfile makes files in memory whose contents can no longer change, so that what a process
// checks is what it uses, whoever else has the file.
package sealedfile

import "errors"

// ErrNotSealed is returned for the descriptor of a file that could still change.
var ErrNotSealed = errors.New("not a sealed memory file")
