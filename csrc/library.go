//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

import (
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
)

// unfit returns why the loader must not be given a file, or 0. The loader blocks
// on a named pipe. It maps a library by its headers alone: if these promise more
// than the file has, the first access is SIGBUS. And it runs the library's
// constructors, of which those of a second Go runtime end the process. Every
// other fault the loader reports better.
func unfit(path string) (Reason, string) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return 0, ""
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	switch {
	case err != nil:
		return 0, ""
	case !info.Mode().IsRegular():
		return NotLoaded, fmt.Sprintf("it is no regular file but %v", info.Mode().Type())
	}
	programs := programsOf(f)
	if end := segmentsEnd(programs); end > uint64(info.Size()) {
		return NotLoaded, fmt.Sprintf("the file is cut short: it has %d bytes, and its headers describe %d; copy it again", info.Size(), end)
	}
	switch owners := noteOwners(f, programs); {
	case !owners[goNote]:
		return 0, ""
	case owners[softwareNote]:
		return SoftwareDriver, "it was not loaded"
	default:
		return NotLoaded, "it is built with Go, and a process cannot have two Go runtimes"
	}
}

// programsOf returns a 64-bit library's program headers; none if the file is no
// such library, or its headers are not all there.
func programsOf(f io.ReaderAt) []elf.Prog64 {
	var h elf.Header64
	if binary.Read(io.NewSectionReader(f, 0, 64), binary.LittleEndian, &h) != nil ||
		string(h.Ident[:4]) != elf.ELFMAG || elf.Class(h.Ident[elf.EI_CLASS]) != elf.ELFCLASS64 {
		return nil
	}
	const size = 56
	if h.Phentsize != size {
		return nil
	}
	programs := make([]elf.Prog64, h.Phnum)
	if binary.Read(io.NewSectionReader(f, int64(h.Phoff), int64(h.Phnum)*size), binary.LittleEndian, programs) != nil {
		return nil
	}
	return programs
}

// segmentsEnd returns the end of the last segment that the loader maps or reads.
func segmentsEnd(programs []elf.Prog64) (end uint64) {
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

// Notes in a library name its makers.
const (
	goNote       = "Go"    // the Go linker, in everything that it links
	softwareNote = "cuvmm" // cmd/libcuda
)

// noteOwners returns the owners of a library's notes.
func noteOwners(f io.ReaderAt, programs []elf.Prog64) map[string]bool {
	const maxNotes = 1 << 16 // bytes
	owners := map[string]bool{}
	for _, p := range programs {
		if elf.ProgType(p.Type) != elf.PT_NOTE || p.Filesz > maxNotes {
			continue
		}
		notes := make([]byte, p.Filesz)
		if _, err := f.ReadAt(notes, int64(p.Off)); err == nil {
			addOwners(owners, notes, p.Align == 8)
		}
	}
	return owners
}

// addOwners reads the notes of one segment, aligned to eight bytes if wide and
// else to four.
func addOwners(owners map[string]bool, notes []byte, wide bool) {
	const header = 12
	align := uint64(4)
	if wide {
		align = 8
	}
	for len(notes) >= header {
		name, desc := uint64(binary.LittleEndian.Uint32(notes)), uint64(binary.LittleEndian.Uint32(notes[4:]))
		rest := notes[header:]
		if name > uint64(len(rest)) {
			return
		}
		owners[strings.TrimRight(string(rest[:name]), "\x00")] = true
		next := roundUp(roundUp(header+name, 4)+desc, align)
		if next > uint64(len(notes)) {
			return
		}
		notes = notes[next:]
	}
}

func roundUp(n, to uint64) uint64 { return (n + to - 1) / to * to }
