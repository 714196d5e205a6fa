// Libcuvmm is the pool of package vmm/pool as a C library, and as PyTorch's
// allocator:
//
//	go build -buildmode=c-shared -o libcuvmm.so ./cmd/libcuvmm && cp cmd/libcuvmm/libcuvmm.h .
//
// libcuvmm.h has its calls; the functions that PyTorch takes begin with
// cuvmm_torch_, and python/cuvmm/torch.py passes them to it. It opens the driver
// that cuda/auto chooses, the software driver included.
//
// Go's runtime does not survive fork, so the C front refuses calls in a child. A panic is
// recovered at the call, and all later calls are refused with its text.
package main

import (
	"fmt"
	"os"
)

// A shared library's main is never called.
func main() {
	fmt.Fprintln(os.Stderr, "libcuvmm is a library: go build -buildmode=c-shared -o libcuvmm.so ./cmd/libcuvmm")
	os.Exit(2)
}
