//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

// #include "csrc.h"
import "C"

import (
	"bufio"
	"encoding/binary"
	"io"
	"os"
	"sync"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// hostFuncs are the functions that streams call. The driver calls a C function
// (hostfunc.c), which writes the function's number into a pipe; a goroutine reads it
// and calls reached. Releases go through the pipe too, so they come behind the calls
// that were made before. The goroutine exists from the first launch until no function
// is left; the pipe stays.
var hostFuncs struct {
	mu      sync.Mutex
	last    uint64
	byID    map[uint64]*hostFunc
	r, w    *os.File
	reading bool
}

type hostFunc struct{ reached, released func() }

// releaseBit marks a number in the pipe that releases the function.
const releaseBit = 1 << 63

func (t *table) NewHostFunc(reached func()) driver.HostFunc {
	h := &hostFuncs
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.byID == nil {
		h.byID = map[uint64]*hostFunc{}
	}
	h.last++
	h.byID[h.last] = &hostFunc{reached: reached}
	return driver.HostFunc(h.last)
}

func (t *table) ReleaseHostFunc(f driver.HostFunc, released func()) {
	h := &hostFuncs
	h.mu.Lock()
	if !h.reading { // nothing was launched
		delete(h.byID, uint64(f))
		h.mu.Unlock()
		released()
		return
	}
	h.byID[uint64(f)].released = released
	h.mu.Unlock()
	// Outside of the lock: the reader takes it, and the pipe may be full.
	send(uint64(f) | releaseBit)
}

func (t *table) LaunchHostFunc(c driver.Context, s driver.Stream, f driver.HostFunc) driver.Result {
	if !startHostFuncs() {
		return driver.OperatingSystem
	}
	return driver.Result(C.cuvmm_LaunchHostFunc(t.c, C.uintptr_t(c), C.uintptr_t(s), C.uint64_t(f)))
}

// startHostFuncs makes the pipe, unless it is there, and starts its reader, unless it
// runs. It reports false if the process may open no more files.
func startHostFuncs() bool {
	h := &hostFuncs
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.reading {
		return true
	}
	if h.r == nil {
		r, w, err := os.Pipe()
		if err != nil {
			return false
		}
		h.r, h.w = r, w
		C.cuvmm_host_funcs_to(C.int(w.Fd())) // which makes writing block, as the C function wants
	}
	h.reading = true
	go readHostFuncs()
	return true
}

func send(number uint64) {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], number)
	if _, err := hostFuncs.w.Write(b[:]); err != nil {
		panic("csrc: the pipe of host functions: " + err.Error()) // it is never closed
	}
}

// readHostFuncs calls what streams have come to, until no function is left.
func readHostFuncs() {
	from := bufio.NewReader(hostFuncs.r)
	var b [8]byte
	for {
		if _, err := io.ReadFull(from, b[:]); err != nil {
			panic("csrc: the pipe of host functions: " + err.Error()) // it is never closed
		}
		number := binary.NativeEndian.Uint64(b[:])
		if f, last := receiveHostFunc(number); last {
			f.released()
			return
		} else if number&releaseBit != 0 {
			f.released()
		} else if f != nil {
			f.reached()
		}
	}
}

// receiveHostFunc returns the function of a number from the pipe. A released one is
// forgotten; last says that it was the last, and that the reader ends.
func receiveHostFunc(number uint64) (f *hostFunc, last bool) {
	h := &hostFuncs
	h.mu.Lock()
	defer h.mu.Unlock()
	id := number &^ releaseBit
	f = h.byID[id]
	if number&releaseBit != 0 {
		delete(h.byID, id)
		if len(h.byID) == 0 {
			h.reading = false
			return f, true
		}
	}
	return f, false
}
