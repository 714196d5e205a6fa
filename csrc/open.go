//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "csrc.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// relaxed is the form of this library's own calls, each of them one crossing into C.
type relaxed struct{ table }

// foreign is the form whose calls leave the capture mode alone, with the calls
// that this library never makes.
type foreign struct{ table }

// table is the entry points in one of the two forms.
type table struct {
	c       C.cuvmm_driver
	has     *[driver.CallCount]bool
	path    string
	foreign *foreign
	// multicast says whether multicast objects may be created.
	multicast *atomic.Bool
}

var (
	_ driver.Driver  = (*relaxed)(nil)
	_ driver.Foreign = (*foreign)(nil)
)

// Describe names the file that the library was loaded from.
func (t *table) Describe() driver.Description { return driver.Description{Path: t.path} }

func (t *table) Has(c driver.Call) bool { return c >= 0 && int(c) < driver.CallCount && t.has[c] }

func (t *table) Foreign() driver.Foreign { return t.foreign }

const soname = "libcuda.so.1"

// searched are the folders tried after the loader's own. The compatibility
// library of a toolkit (/usr/local/cuda/compat) is not among them: it fits only
// some GPUs and some kernel drivers, so it is opt-in, by name.
var searched = []string{
	"/usr/local/nvidia/lib64", // container platforms
	"/usr/local/nvidia/lib",
	map[string]string{"amd64": "/usr/lib/x86_64-linux-gnu", "arm64": "/usr/lib/aarch64-linux-gnu"}[runtime.GOARCH],
	"/usr/lib64",
	"/usr/lib",
	"/usr/lib/wsl/lib",       // Windows' driver in WSL
	"/run/opengl-driver/lib", // NixOS
}

// Open loads the driver's library and takes its entry points. It makes no
// other driver call, not even cuInit. The first library that is a usable
// driver is taken; the error is an *OpenError. Opening a library again returns
// the same Driver. Open is safe for concurrent use.
func Open(opt Options) (*Driver, error) {
	d, err := find(opt)
	if d != nil && opt.Multicast {
		driver.Of(d).(*relaxed).multicast.Store(true)
	}
	return d, err
}

func find(opt Options) (*Driver, error) {
	if opt.Path != "" {
		d, a := try(opt.Path)
		if d != nil {
			return d, nil
		}
		if a.Reason == NotFound {
			a.Reason = NotLoaded
		}
		return nil, &OpenError{Reason: a.Reason, Attempts: []Attempt{a}}
	}
	candidates := []string{soname}
	for _, dir := range searched {
		candidates = append(candidates, filepath.Join(dir, soname))
	}
	return open(candidates)
}

func open(candidates []string) (*Driver, error) {
	e := &OpenError{Reason: NotFound}
	for _, path := range candidates {
		d, a := try(path)
		if d != nil {
			return d, nil
		}
		e.Attempts = append(e.Attempts, a)
		if e.Reason == NotFound {
			e.Reason = a.Reason
		}
		if a.Reason == SoftwareDriver {
			break // it lies where the driver would, so nothing behind it is meant
		}
	}
	return nil, e
}

var opened struct {
	sync.Mutex
	byHandle map[C.uintptr_t]*Driver // the loader gives a file one handle
}

func try(path string) (*Driver, Attempt) {
	refuse := func(r Reason, format string, args ...any) (*Driver, Attempt) {
		return nil, Attempt{Path: path, Reason: r, Detail: fmt.Sprintf(format, args...)}
	}
	if filepath.Base(path) != path {
		// A link to nothing is not an absent driver, but a broken one.
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
			return refuse(NotFound, "no such file")
		}
	}
	if strings.IndexByte(path, 0) >= 0 {
		return refuse(NotLoaded, "the path has a NUL in it")
	}
	files := []string{path}
	if filepath.Base(path) == path {
		files = wouldLoad(path)
	}
	for _, file := range files {
		if reason, why := unfit(file); reason != 0 {
			if file != path {
				why = file + ": " + why
			}
			return refuse(reason, "%s", why)
		}
	}
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))

	opened.Lock()
	defer opened.Unlock()
	loaded := C.cuvmm_load(name)
	if loaded.handle == 0 {
		if loaded.absent != 0 && filepath.Base(path) == path {
			return refuse(NotFound, "not in the loader's path")
		}
		return refuse(NotLoaded, "%s", strings.TrimPrefix(C.GoString(&loaded.error[0]), path+": "))
	}
	if d := opened.byHandle[loaded.handle]; d != nil {
		C.cuvmm_unload(loaded.handle) // the count alone: the first one stays
		return d, Attempt{}
	}
	lib := C.cuvmm_inspect(loaded.handle)
	d, a := adopt(&lib, refuse)
	if d == nil {
		// Left loaded, it would be what others in the process get by the name.
		C.cuvmm_unload(loaded.handle)
		return nil, a
	}
	if opened.byHandle == nil {
		opened.byHandle = map[C.uintptr_t]*Driver{}
	}
	opened.byHandle[loaded.handle] = d
	return d, Attempt{}
}

func adopt(lib *C.cuvmm_library, refuse func(Reason, string, ...any) (*Driver, Attempt)) (*Driver, Attempt) {
	version := int32(lib.version)
	switch {
	case lib.has_init == 0:
		return refuse(NotCUDA, "it has no cuInit")
	case driver.Result(lib.result) == driver.StubLibrary:
		return refuse(Stub, "it returns %v", driver.StubLibrary)
	case lib.proc == 0 && version != 0:
		return refuse(TooOld, "it is CUDA %s and has no cuGetProcAddress", driver.VersionString(version))
	case lib.proc == 0:
		return refuse(TooOld, "it has no cuGetProcAddress")
	case version == 0: // then it is not known which forms of its entry points it would return
		return refuse(NotCUDA, "it does not tell its version: cuDriverGetVersion returns %v", driver.Result(lib.result))
	case version < MinVersion:
		return refuse(TooOld, "it is CUDA %s", driver.VersionString(version))
	}

	c := C.cuvmm_new()
	if c == 0 {
		return refuse(NotLoaded, "no memory for its entry points")
	}
	has := new([driver.CallCount]bool)
	for call := range driver.Call(driver.CallCount) {
		// A driver that is older than the form would return an earlier one,
		// whose parameters are others.
		has[call] = call.Version() <= version && resolve(c, lib, C.uint32_t(call), call.Entry(), call.Version())
	}
	resolve(c, lib, C.CUVMM_POP, "cuCtxPopCurrent", 4000)
	for _, call := range []driver.Call{driver.CallInit, driver.CallCtxGetCurrent, driver.CallCtxSetCurrent} {
		if !has[call] {
			C.cuvmm_delete(c)
			return refuse(NotCUDA, "its cuGetProcAddress does not give %v", call)
		}
	}
	own := C.cuvmm_relaxed(c)
	if own == 0 {
		C.cuvmm_delete(c)
		return refuse(NotLoaded, "no memory for its entry points")
	}
	path := C.GoString(&lib.path[0])
	if abs, err := filepath.Abs(path); err == nil {
		path = abs // the loader keeps a relative name as it was given
	}
	multicast := new(atomic.Bool)
	f := &foreign{table{c: c, has: has, path: path, multicast: multicast}}
	f.table.foreign = f
	return &Driver{driver.NewHolder(&relaxed{table{c: own, has: has, path: path, foreign: f, multicast: multicast}})}, Attempt{}
}

// resolve fills in the entry point at a place of the table, in the form of a
// version, and reports whether the driver has it.
func resolve(c C.cuvmm_driver, lib *C.cuvmm_library, at C.uint32_t, entry string, version int32) bool {
	e := C.CString(entry)
	defer C.free(unsafe.Pointer(e))
	return C.cuvmm_resolve(c, lib.proc, lib.form, at, e, C.int32_t(version)) == 1
}
