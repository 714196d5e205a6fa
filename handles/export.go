package handles

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/vmm"
)

// exportShare is the part of the limit of open files that descriptors of
// exported memory may take: one in so many.
const exportShare = 4

// exportBudget bounds how many descriptors of exported memory this process has
// open: they count against the same limit as its files and sockets.
type exportBudget struct {
	mu   sync.Mutex
	used int
	// kept are those of used that imported memory keeps.
	kept  int
	freed chan struct{} // closed, and made anew, when some are given back
}

var exports = exportBudget{freed: make(chan struct{})}

// share is how many may be open, and this process's limit of open files.
func (b *exportBudget) share(op string) (most int, limit uint64, err error) {
	limit, err = fd.Limit()
	if err != nil {
		return 0, 0, systemError(op, "the limit of open files", err)
	}
	return int(max(1, min(limit/exportShare, 1<<20))), limit, nil
}

// try takes n if they are left.
func (b *exportBudget) try(op string, n int) (bool, error) {
	most, _, err := b.share(op)
	if err != nil {
		return false, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if most-b.used < n {
		return false, nil
	}
	b.used += n
	return true, nil
}

// keep takes one for as long as imported memory lives. It does not wait. What all of
// those leave is enough for a full message, so that sharing always goes on.
func (b *exportBudget) keep(op string) error {
	most, limit, err := b.share(op)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if room := max(0, most-chunkBatch); b.kept >= room || b.used >= most {
		return failure(op, ErrOpenFiles, fmt.Sprintf("%d descriptors of imported memory are kept, of at most %d with this process's limit of %d open files, and %d are open of memory that is being shared",
			b.kept, room, limit, b.used-b.kept), "take memory in larger chunks or without KeepDescriptors, or raise the limit (ulimit -n)")
	}
	b.used++
	b.kept++
	return nil
}

// giveKept gives back what keep took.
func (b *exportBudget) giveKept() {
	b.mu.Lock()
	b.kept--
	b.mu.Unlock()
	b.give(1)
}

// take takes at most n, and no fewer than least, of what is left, and waits for
// that until the context ends.
func (b *exportBudget) take(ctx context.Context, op string, least, n int) (int, error) {
	most, limit, err := b.share(op)
	if err != nil {
		return 0, err
	}
	for {
		b.mu.Lock()
		free, freed := most-b.used, b.freed
		if free >= least {
			n = min(n, free)
			b.used += n
			b.mu.Unlock()
			return n, nil
		}
		used := b.used
		b.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			return 0, tooMany(op, fmt.Sprintf("%d descriptors of shared memory are open", used), most, limit).because(context.Cause(ctx))
		}
	}
}

// ever refuses a number that can never be open at a time.
func (b *exportBudget) ever(op string, n int) error {
	most, limit, err := b.share(op)
	if err == nil && n > most {
		err = tooMany(op, fmt.Sprintf("%d descriptors of shared memory at a time", n), most, limit)
	}
	return err
}

func tooMany(op, asked string, most int, limit uint64) *Error {
	return failure(op, ErrOpenFiles,
		fmt.Sprintf("%s, of at most %d, which is 1/%d of this process's limit of %d open files", asked, most, exportShare, limit),
		"share less at a time, or in larger chunks, or raise the limit (ulimit -n)")
}

func (b *exportBudget) give(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= n
	close(b.freed)
	b.freed = make(chan struct{})
}

// exported are descriptors of chunks, which count against the budget until
// close. They are closed before the chunks are released.
type exported struct{ fds []*FD }

// exportSome makes descriptors of the first of the chunks, at most chunkBatch,
// and fewer where the budget has no more. It waits for the budget, at most for a
// limit.
func exportSome(ctx context.Context, op string, chunks []*phys.Handle, limit time.Duration) (*exported, error) {
	if len(chunks) == 0 {
		return &exported{}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	n, err := exports.take(ctx, op, 1, min(len(chunks), chunkBatch))
	if err != nil {
		return nil, err
	}
	e := &exported{fds: make([]*FD, 0, n)}
	for _, h := range chunks[:n] {
		f, err := kept.export(op, h)
		if err != nil {
			exports.give(n - len(e.fds))
			e.close()
			return nil, err
		}
		e.fds = append(e.fds, f)
	}
	return e, nil
}

func (e *exported) close() {
	_ = closeAll(e.fds) // the numbers are given back whatever it answers
	if len(e.fds) > 0 {
		exports.give(len(e.fds))
	}
	e.fds = nil
}

// describe fills in what a descriptor says of memory: where it lies, what was
// granted, its chunks. What the driver granted to some of them alone counts as
// not granted.
func describe(op string, d *Descriptor, on *core.System, asked driver.AllocationProp, chunks []*phys.Handle) error {
	d.Handle, d.Exporter = vmm.HandleTypes(asked.RequestedHandleTypes)&(vmm.PosixFD|vmm.Fabric), Self()
	d.Location = cuda.Location{Type: cuda.LocationType(asked.Location.Type), ID: int(asked.Location.ID)}
	if d.Location.Type == cuda.LocationDevice {
		if d.Device = cuda.UUID(on.UUID(driver.Device(d.Location.ID))); d.Device == (cuda.UUID{}) {
			return failure(op, cuda.ErrNotSupported, fmt.Sprintf("memory of %v", d.Location),
				"the driver does not tell the device's UUID, by which the other process finds it: install a later one")
		}
	}
	d.Compressible, d.RDMA = len(chunks) > 0, len(chunks) > 0
	d.Chunks = make([]uint64, len(chunks))
	for i, h := range chunks {
		granted, err := h.Granted(op)
		if err != nil {
			return err
		}
		d.Chunks[i] = h.Size
		d.Compressible = d.Compressible && granted.Flags.CompressionType == driver.CompressionGeneric
		d.RDMA = d.RDMA && granted.Flags.GPUDirectRDMACapable != 0
	}
	return nil
}
