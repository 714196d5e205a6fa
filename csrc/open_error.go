package csrc

import (
	"fmt"
	"strings"
)

// Options says where the driver's library is.
type Options struct {
	// Path is the library's file, or a bare name for the loader to find. It is
	// then the only one tried. Empty means libcuda.so.1 by the loader, then in
	// the folders that containers and distributions put it.
	Path string
	// Multicast allows the driver to create multicast objects. Once it was
	// given, it holds for the library in this process.
	Multicast bool
}

// Reason says why no driver was opened.
type Reason int

const (
	// NotFound: no library lies in any place searched, so no driver is
	// installed here. It is never the reason for a path that was given.
	NotFound Reason = iota + 1
	// NotLoaded: there is a library, or a path was given, and the loader
	// refused it.
	NotLoaded
	// NotCUDA: the library was loaded and is no CUDA driver.
	NotCUDA
	// Stub: the library is the toolkit's stand-in for linking.
	Stub
	// TooOld: the driver is older than [MinVersion].
	TooOld
	// SoftwareDriver: the library is the software driver's libcuda, which a Go
	// program must not load.
	SoftwareDriver
	// NoCgo: this program was built without the real driver's code.
	NoCgo
)

// MinVersion is the oldest CUDA version of a driver that can be opened, 11.3:
// the first with cuGetProcAddress. The calls of virtual memory (10.2, 11.0)
// and the capture mode's exchange (10.1) are older.
const MinVersion = 11030

var reasons = map[Reason]struct{ text, remedy string }{
	NotFound: {"no CUDA driver is installed",
		"install NVIDIA's driver, give the container its libraries (--gpus, or the nvidia runtime), name the file (CUVMM_LIBCUDA, cuda.Options.Library), or use the software driver (CUVMM_DRIVER=sim, auto.Software)"},
	NotLoaded: {"the CUDA driver's library cannot be loaded",
		"mend what the loader names: a wrong path, file mode, a broken link, an empty file left in an image, another machine's architecture"},
	NotCUDA: {"the library is no CUDA driver",
		"name the driver's libcuda.so.1, not another library"},
	Stub: {"the library is the toolkit's stub for linking, not a driver",
		"take the toolkit's stubs folder out of LD_LIBRARY_PATH, or name the driver's own libcuda.so.1"},
	TooOld: {"the CUDA driver is too old, it needs CUDA 11.3 or later",
		"update NVIDIA's driver to release 465 or later"},
	SoftwareDriver: {"the library is the software driver's libcuda, for programs in other languages: a Go program has that driver built in, and cannot load another Go runtime",
		"open the software driver (CUVMM_DRIVER=sim or auto, auto.Software), or name the driver's own libcuda.so.1"},
	NoCgo: {"this program was built without cgo, so it has no real driver",
		"rebuild with CGO_ENABLED=1 on linux/amd64 or linux/arm64 (and without the tag cuvmm_nocgo), or use the software driver"},
}

// String says the reason in words.
func (r Reason) String() string {
	if s, ok := reasons[r]; ok {
		return s.text
	}
	return fmt.Sprintf("Reason(%d)", int(r))
}

// Remedy says what to do about it.
func (r Reason) Remedy() string { return reasons[r].remedy }

// Attempt is one library that was tried.
type Attempt struct {
	Path   string
	Reason Reason
	// Detail says what the loader or the library returned.
	Detail string
}

// OpenError is the error of [Open].
type OpenError struct {
	// Reason is that of the first attempt that found anything, else NotFound.
	Reason Reason
	// Attempts are in the order they were made.
	Attempts []Attempt
}

func (e *OpenError) Error() string {
	var absent, tried []string
	for _, a := range e.Attempts {
		if a.Reason == NotFound {
			absent = append(absent, a.Path)
		} else {
			tried = append(tried, a.Path+": "+a.Detail)
		}
	}
	if len(absent) > 0 {
		tried = append(tried, "nothing at "+strings.Join(absent, ", "))
	}
	text := fmt.Sprintf("%v: %s", e.Reason, e.Reason.Remedy())
	if len(tried) > 0 {
		text += " (" + strings.Join(tried, "; ") + ")"
	}
	return text
}
