//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

/*
#include <stdlib.h>
#include "csrc.h"
*/
import "C"

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"unsafe"
)

// wouldLoad returns the files that the loader may take for a bare name: the first
// in the folders that it searches, and the one in its cache, which comes before
// the last of these folders.
func wouldLoad(name string) (files []string) {
	folders := C.cuvmm_search_path()
	defer C.free(unsafe.Pointer(folders))
	for _, dir := range strings.Split(C.GoString(folders), "\n") {
		file := filepath.Join(dir, name)
		if _, err := os.Stat(file); dir != "" && err == nil {
			files = append(files, file)
			break
		}
	}
	if cache, err := os.ReadFile("/etc/ld.so.cache"); err == nil {
		files = append(files, cached(cache, name)...)
	}
	return files
}

// cached returns what the loader's cache has for a name.
func cached(cache []byte, name string) (files []string) {
	const header, entry, maxEntries = 48, 24, 1 << 20
	at := bytes.Index(cache, []byte("glibc-ld.so.cache1.1"))
	if at < 0 || len(cache)-at < header {
		return nil
	}
	cache = cache[at:]
	text := func(offset uint32) string {
		if uint64(offset) >= uint64(len(cache)) {
			return ""
		}
		s, _, _ := bytes.Cut(cache[offset:], []byte{0})
		return string(s)
	}
	n := min(int(binary.LittleEndian.Uint32(cache[20:])), maxEntries, (len(cache)-header)/entry)
	for i := range n {
		e := cache[header+i*entry:]
		if text(binary.LittleEndian.Uint32(e[4:])) == name {
			files = append(files, text(binary.LittleEndian.Uint32(e[8:])))
		}
	}
	return files
}
