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

// relaxed makes this library's own calls in the relaxed capture mode: each is one crossing into C.
type relaxed struct{ table }

// foreign makes calls as another library does: it leaves the capture mode alone, and has the
// calls that this library never makes.
type foreign struct{ table }

// table is the driver's entry points, called in one of these two ways.
type table struct {
	c        C.cuvmm_driver
	resolved *[driver.CallCount]bool
	path     string
	foreign  *foreign
	// multicast says whether multicast objects may be created.
	multicast *atomic.Bool
}

var (
	_ driver.Driver  = (*relaxed)(nil)
	_ driver.Direct  = (*relaxed)(nil)
	_ driver.Foreign = (*foreign)(nil)
)

// Describe names the file that the library was loaded from.
func (t *table) Describe() driver.Description { return driver.Description{Path: t.path} }

func (t *table) Has(c driver.Call) bool { return c >= 0 && int(c) < driver.CallCount && t.resolved[c] }

// EntryPoint makes it a driver.Direct.
func (t *table) EntryPoint(c driver.Call) uintptr {
	if !t.Has(c) {
		return 0
	}
	return uintptr(C.cuvmm_entry_point(t.c, C.uint32_t(c)))
}

func (t *table) Foreign() driver.Foreign { return t.foreign }

const soname = "libcuda.so.1"

// searchFolders are tried after the loader's own folders. The compatibility library of a
// toolkit (/usr/local/cuda/compat) is not among them: it fits only some GPUs and some kernel
// drivers, so it is opt-in, by name.
var searchFolders = []string{
	"/usr/local/nvidia/lib64", // container platforms
	"/usr/local/nvidia/lib",
	map[string]string{"amd64": "/usr/lib/x86_64-linux-gnu", "arm64": "/usr/lib/aarch64-linux-gnu"}[runtime.GOARCH],
	"/usr/lib64",
	"/usr/lib",
	"/usr/lib/wsl/lib",       // Windows' driver in WSL
	"/run/opengl-driver/lib", // NixOS
}

// Open loads the driver's library and resolves its entry points. It makes no other driver
// call, not even cuInit. It returns the first library that is a usable driver; the error is an
// *OpenError. Opening a library again returns the same Driver. Open is safe for concurrent
// use.
func Open(opt Options) (*Driver, error) {
	d, err := openLibrary(opt)
	if d != nil && opt.Multicast {
		driver.Of(d).(*relaxed).multicast.Store(true)
	}
	return d, err
}

// openLibrary opens the library that opt names, or the first usable one.
func openLibrary(opt Options) (*Driver, error) {
	if opt.Path != "" {
		d, a := load(opt.Path)
		if d != nil {
			return d, nil
		}
		if a.Reason == NotFound {
			a.Reason = NotLoaded
		}
		return nil, &OpenError{Reason: a.Reason, Attempts: []Attempt{a}}
	}
	candidates := []string{soname}
	for _, dir := range searchFolders {
		candidates = append(candidates, filepath.Join(dir, soname))
	}
	return openFirst(candidates)
}

// openFirst opens the first usable library. It stops at the software driver, which was
// installed on purpose where a driver is looked for.
func openFirst(candidates []string) (*Driver, error) {
	e := &OpenError{Reason: NotFound}
	for _, path := range candidates {
		d, a := load(path)
		if d != nil {
			return d, nil
		}
		e.Attempts = append(e.Attempts, a)
		if e.Reason == NotFound {
			e.Reason = a.Reason
		}
		if a.Reason == SoftwareDriver {
			break
		}
	}
	return nil, e
}

var opened struct {
	sync.Mutex
	byHandle map[C.uintptr_t]*Driver // the loader gives a file one handle
}

// load loads one library, or says why it is not a usable driver.
func load(path string) (*Driver, Attempt) {
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
		C.cuvmm_unload(loaded.handle) // which only lowers the loader's count
		return d, Attempt{}
	}
	lib := C.cuvmm_inspect(loaded.handle)
	d, a := newDriver(&lib, refuse)
	if d == nil {
		// If it stayed loaded, other code in the process would get it by the name.
		C.cuvmm_unload(loaded.handle)
		return nil, a
	}
	if opened.byHandle == nil {
		opened.byHandle = map[C.uintptr_t]*Driver{}
	}
	opened.byHandle[loaded.handle] = d
	return d, Attempt{}
}

// newDriver resolves the entry points of a library, or says why it is not a usable driver.
func newDriver(lib *C.cuvmm_library, refuse func(Reason, string, ...any) (*Driver, Attempt)) (*Driver, Attempt) {
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
	case version == 0: // then the forms of the entry points that it returns are unknown
		return refuse(NotCUDA, "it does not tell its version: cuDriverGetVersion returns %v", driver.Result(lib.result))
	case version < MinVersion:
		return refuse(TooOld, "it is CUDA %s", driver.VersionString(version))
	}

	c := C.cuvmm_new()
	if c == 0 {
		return refuse(NotLoaded, "no memory for its entry points")
	}
	resolved := new([driver.CallCount]bool)
	for call := range driver.Call(driver.CallCount) {
		// A driver that is older than the form would return an earlier one, which has other
		// parameters.
		resolved[call] = call.Version() <= version && resolve(c, lib, C.uint32_t(call), call.Entry(), call.Version())
	}
	resolve(c, lib, C.CUVMM_POP, "cuCtxPopCurrent", 4000)
	for _, call := range []driver.Call{driver.CallInit, driver.CallCtxGetCurrent, driver.CallCtxSetCurrent} {
		if !resolved[call] {
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
	f := &foreign{table{c: c, resolved: resolved, path: path, multicast: multicast}}
	f.table.foreign = f
	return &Driver{driver.NewHolder(&relaxed{table{c: own, resolved: resolved, path: path, foreign: f, multicast: multicast}})}, Attempt{}
}

// resolve stores an entry point in the table, in the form of a version, and reports whether
// the driver has it.
func resolve(c C.cuvmm_driver, lib *C.cuvmm_library, at C.uint32_t, entry string, version int32) bool {
	e := C.CString(entry)
	defer C.free(unsafe.Pointer(e))
	return C.cuvmm_resolve(c, lib.proc, lib.form, at, e, C.int32_t(version)) == 1
}
