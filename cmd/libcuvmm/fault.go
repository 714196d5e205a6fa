//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

// #include "front.h"
import "C"

import (
	"fmt"
	"os"
	"runtime/debug"
	"sync/atomic"
)

// fault is the panic that ended the library, with its stacks. Every later call is
// refused with it, because a panic may leave locks held and structures half changed.
var fault atomic.Pointer[string]

// failed records a recovered panic, and returns its text. The first one is also written
// to standard error: an error's message has no room for all of the stacks.
func failed(p any) string {
	f := fmt.Sprintf("cuvmm failed, and refuses all further calls: %v\n%s", p, debug.Stack())
	if fault.CompareAndSwap(nil, &f) {
		C.cuvmm_fault()
		fmt.Fprintln(os.Stderr, f)
	}
	return f
}

// background runs work that no caller waits for. Its panic must not end the process.
func background(work func()) {
	go func() {
		defer func() {
			if p := recover(); p != nil {
				failed(p)
			}
		}()
		work()
	}()
}
