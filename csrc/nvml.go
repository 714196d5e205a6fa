//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

/*
#include <stdlib.h>
#include "csrc.h"
*/
import "C"

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/environ"
	"github.com/cuvmm/cuvmm/internal/nvml"
)

// NVMLEnv names the environment variable that says which NVML to open. Without
// it, and in programs that run with more rights than their caller, libnvidia-ml.so.1 is
// searched as the driver is, and beside the driver.
const NVMLEnv = "CUVMM_LIBNVML"

const nvmlName = "libnvidia-ml.so.1"

var _ nvml.Source = (*relaxed)(nil)

// NVML returns the library that belongs to this driver. Its first use opens it.
func (d *relaxed) NVML() nvml.Library {
	candidates := []string{nvmlName}
	if path := environ.Get(NVMLEnv); path != "" {
		candidates = []string{path}
	} else {
		for _, dir := range append([]string{filepath.Dir(d.path)}, searchFolders...) {
			candidates = append(candidates, filepath.Join(dir, nvmlName))
		}
	}
	return &nvmlLibrary{candidates: candidates}
}

type nvmlLibrary struct {
	candidates []string
	mu         sync.Mutex
	handle     C.uintptr_t // 0 until one was opened; never closed
}

// open opens the first library that the loader accepts. If there is none, a later
// call searches again.
func (l *nvmlLibrary) open() (C.uintptr_t, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.handle != 0 {
		return l.handle, nil
	}
	var refused []string
	for _, path := range l.candidates {
		name := C.CString(path)
		loaded := C.cuvmm_load(name)
		C.free(unsafe.Pointer(name))
		if loaded.handle != 0 {
			l.handle = loaded.handle
			return l.handle, nil
		}
		if _, err := os.Lstat(path); err == nil || loaded.absent == 0 && filepath.Base(path) == path {
			refused = append(refused, C.GoString(&loaded.error[0]))
		}
	}
	if len(refused) == 0 {
		return 0, fmt.Errorf("%w: no %s is installed", nvml.ErrMissing, filepath.Base(l.candidates[0]))
	}
	return 0, fmt.Errorf("%w: %s", nvml.ErrMissing, strings.Join(refused, "; "))
}

func (l *nvmlLibrary) Fabric(uuid string) (nvml.Fabric, error) {
	library, err := l.open()
	if err != nil {
		return nvml.Fabric{}, err
	}
	name := C.CString(uuid)
	defer C.free(unsafe.Pointer(name))
	f := C.cuvmm_nvml_fabric(library, name)
	switch {
	case f.result == C.CUVMM_NVML_LACKS:
		return nvml.Fabric{}, fmt.Errorf("%w: the one that is has no %s, so it is too old to know of fabrics", nvml.ErrMissing, C.GoString(f.call))
	case f.result != 0:
		return nvml.Fabric{}, &nvml.Error{Call: C.GoString(f.call), Return: nvml.Return(f.result)}
	}
	return nvml.Fabric{
		Version: int(f.version), State: nvml.State(f.state), Status: nvml.Return(f.status),
		Cluster: *(*[16]byte)(unsafe.Pointer(&f.cluster)), Clique: uint32(f.clique),
		Mask: nvml.Mask(f.mask), Summary: nvml.Summary(f.summary),
	}, nil
}
