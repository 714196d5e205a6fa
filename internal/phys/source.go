package phys

import (
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/fd"
)

// source is the descriptor that imported memory came by.
type source struct {
	fd   int
	done func()
}

// KeepSource gives a handle of imported memory the descriptor that it came by, which
// the handle owns until the memory is given back; done is called when it is closed.
// Export then duplicates it: the driver exports only what this process created, but a
// descriptor can be passed on for as long as it is open, even after its maker is dead.
// The driver reports less of imported memory than was granted, so the caller says what
// that was. No one else may use the handle yet.
func (h *Handle) KeepSource(n int, granted driver.AllocationFlags, done func()) {
	h.source = &source{n, done}
	h.Asked.Flags = granted
	h.Asked.RequestedHandleTypes = driver.HandlePosixFD
}

func (h *Handle) dropSource() {
	if s := h.source; s != nil {
		h.source = nil
		_ = fd.Close(s.fd) // the number is given back in any case
		s.done()
	}
}

// passOn returns another descriptor of imported memory.
func (h *Handle) passOn(op string) (int, error) {
	asked := errs.Bytes(h.Size) + " of imported memory"
	if h.source == nil {
		return -1, errs.New(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: asked, Hint: passOnHint})
	}
	n, err := fd.Dup(h.source.fd)
	if err != nil {
		return -1, errs.New(errs.Failure{Op: op, Asked: "a descriptor of " + asked, Err: err,
			Hint: "close files that are not needed, or raise the limit of open files (ulimit -n)"})
	}
	return n, nil
}

const passOnHint = "the driver exports memory only from the process that created it: let that one share it, or take the memory with the option KeepDescriptors (handles.ImportOptions, FollowOptions), which lets it be passed on"
