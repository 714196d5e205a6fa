//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

import (
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"syscall"
)

// unfit says why the loader must not be given a file, or returns "". The loader
// waits for ever at a named pipe, and maps a library by its headers alone: where
// these promise more than the file has, the first access is SIGBUS. What else is
// wrong the loader says better.
func unfit(path string) string {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	switch {
	case err != nil:
		return ""
	case !info.Mode().IsRegular():
		return fmt.Sprintf("it is no regular file but %v", info.Mode().Type())
	}
	if end := segmentsEnd(f); end > uint64(info.Size()) {
		return fmt.Sprintf("the file is cut short: it has %d bytes, and its headers describe %d; copy it again", info.Size(), end)
	}
	return ""
}

// segmentsEnd returns where the last segment of a 64-bit library ends that the
// loader maps or reads; 0 if the file is none, or its headers are not all there.
func segmentsEnd(f io.ReaderAt) (end uint64) {
	var h elf.Header64
	if binary.Read(io.NewSectionReader(f, 0, 64), binary.LittleEndian, &h) != nil ||
		string(h.Ident[:4]) != elf.ELFMAG || elf.Class(h.Ident[elf.EI_CLASS]) != elf.ELFCLASS64 {
		return 0
	}
	const size = 56
	if h.Phentsize != size {
		return 0
	}
	programs := make([]elf.Prog64, h.Phnum)
	if binary.Read(io.NewSectionReader(f, int64(h.Phoff), int64(h.Phnum)*size), binary.LittleEndian, programs) != nil {
		return 0
	}
	for _, p := range programs {
		if t := elf.ProgType(p.Type); t == elf.PT_LOAD || t == elf.PT_DYNAMIC {
			if p.Off+p.Filesz < p.Off {
				return ^uint64(0)
			}
			end = max(end, p.Off+p.Filesz)
		}
	}
	return end
}
