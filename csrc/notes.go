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
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"unsafe"
)

// The loader runs a library's constructors, and a second Go runtime does not
// live in one process. So a library is looked at before it is loaded: ELF notes
// in its file say who made it.
const (
	goNote       = "Go"    // of the Go linker, in all that it links
	softwareNote = "cuvmm" // of cmd/libcuda
)

// checkMaker returns the reason not to load what the loader would take for a
// path or a bare name, or 0.
func checkMaker(path string) (Reason, string) {
	files := []string{path}
	if filepath.Base(path) == path {
		files = wouldLoad(path)
	}
	for _, file := range files {
		owners, err := noteOwners(file)
		switch {
		case err != nil || !owners[goNote]: // the loader says what is wrong with a file
		case owners[softwareNote]:
			return SoftwareDriver, file + " was not loaded"
		default:
			return NotLoaded, file + " is built with Go, and a process cannot have two Go runtimes"
		}
	}
	return 0, ""
}

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

var errNotELF = errors.New("csrc: not a 64-bit little-endian ELF file")

// noteOwners returns the owners of the notes in an ELF file.
func noteOwners(path string) (map[string]bool, error) {
	const (
		fileHeader, programHeader = 64, 56
		typeNote                  = 4
		maxNotes                  = 1 << 16
	)
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.Join(err, errNotELF)
	}
	le := binary.LittleEndian
	head := make([]byte, fileHeader)
	if _, err := io.ReadFull(f, head); err != nil || string(head[:6]) != "\x7fELF\x02\x01" {
		return nil, errNotELF
	}
	owners := map[string]bool{}
	p := make([]byte, programHeader)
	for i := range int64(le.Uint16(head[56:])) {
		if _, err := f.ReadAt(p, int64(le.Uint64(head[32:]))+i*int64(le.Uint16(head[54:]))); err != nil {
			return nil, err
		}
		size := le.Uint64(p[32:])
		if le.Uint32(p) != typeNote || size > maxNotes {
			continue
		}
		notes := make([]byte, size)
		if _, err := f.ReadAt(notes, int64(le.Uint64(p[8:]))); err != nil {
			return nil, err
		}
		addOwners(owners, notes, max(4, le.Uint64(p[48:])))
	}
	return owners, nil
}

// addOwners reads the notes of one segment, which are aligned to so many bytes.
func addOwners(owners map[string]bool, notes []byte, align uint64) {
	const header = 12
	for len(notes) >= header {
		name, desc := uint64(binary.LittleEndian.Uint32(notes)), uint64(binary.LittleEndian.Uint32(notes[4:]))
		rest := notes[header:]
		if name > uint64(len(rest)) {
			return
		}
		owners[strings.TrimRight(string(rest[:name]), "\x00")] = true
		next := (header + name + 3) / 4 * 4
		next = (next + desc + align - 1) / align * align
		if next > uint64(len(notes)) {
			return
		}
		notes = notes[next:]
	}
}
