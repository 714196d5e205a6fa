package vmm

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// imported is the additional state of a buffer of imported memory. It is nil for a buffer
// of the process's own memory, and its methods then allow everything.
type imported struct {
	most driver.AccessFlags // the most access that is ever granted; written under changes and mu
	// sealed says what the memory is that Seal made read-only; empty otherwise.
	sealed string
	// followed is set if the length is that of a publication that is followed, and own if
	// the buffer grows with this process's own memory behind the imported chunks. Only
	// changes of the buffer write them.
	followed, own atomic.Bool
	// kept is set if a broker gives the memory to another process after this one.
	kept atomic.Bool
}

// moved returns the state of a second buffer of the same memory, with its own range.
func (i *imported) moved() *imported {
	if i == nil {
		return nil
	}
	m := &imported{most: i.most, sealed: i.sealed}
	m.followed.Store(i.followed.Load())
	m.own.Store(i.own.Load())
	return m
}

// full returns the error of a growth past the imported memory.
func (i *imported) full(op string, have, need uint64, size int) error {
	return errs.New(errs.Failure{Op: op, Kind: errs.Capacity,
		Asked: fmt.Sprintf("%s, with %d imported", counted(need, size), have/uint64(size)),
		Hint:  "the memory is another process's: only its owner makes it longer, and shares it anew or announces it"})
}

// mayGrow refuses n more bytes of length, or, if n is 0, a shorter length, unless the
// user of the buffer decides that.
func (i *imported) mayGrow(op string, used, n, committed uint64, size int) error {
	switch {
	case i == nil:
		return nil
	case i.own.Load():
		return nil
	case i.followed.Load():
		return errs.New(errs.Failure{Op: op, Kind: errs.NotPermitted, Asked: "another length of a buffer that follows a publication",
			Hint: "its length is the publisher's to announce"})
	case i.kept.Load():
		return errs.New(errs.Failure{Op: op, Kind: errs.NotPermitted, Asked: "another length of memory that a broker keeps",
			Hint: "all of it is published at once: ask the broker for memory of another size under another name"})
	case n > committed-used:
		return i.full(op, committed, used+n, size)
	}
	return nil
}

// readOnlyHint is the remedy for memory that can only be read.
func (i *imported) readOnlyHint() string {
	if i.sealed != "" {
		return "what others read never changes: write another version of it"
	}
	return "import or follow the memory without the option ReadOnly"
}

// mayAccess refuses access beyond what the memory was imported for.
func (i *imported) mayAccess(op string, changes accessList) error {
	if i == nil {
		return nil
	}
	for _, c := range changes {
		if c.Flags > i.most {
			memory := "memory that was imported " + AccessMode(i.most).String()
			if i.sealed != "" {
				memory = "the memory of " + i.sealed
			}
			return errs.New(errs.Failure{Op: op, Kind: errs.NotPermitted,
				Asked: fmt.Sprintf("%v access to %s", AccessMode(c.Flags), memory), Hint: i.readOnlyHint()})
		}
	}
	return nil
}

func init() {
	share.SetMake(func(op string, o share.ImportOptions) (any, error) {
		b, err := importBuffer(op, o)
		if err != nil {
			return nil, err
		}
		return b.public(), nil
	})
}

// importBuffer makes a buffer of imported memory.
func importBuffer(op string, o share.ImportOptions) (*buffer, error) {
	mode := ReadWrite
	if o.ReadOnly {
		mode = ReadOnly
	}
	label := life.Label{Name: o.Name}
	if err := label.Check(op); err != nil {
		return nil, err
	}
	named := []Access{{o.Device.Location(), mode}}
	if l := o.Memory.Location; l.Type != driver.LocationDevice {
		// The CPU reaches it too.
		named = append(named, Access{cuda.Location{Type: cuda.LocationType(l.Type), ID: int(l.ID)}, mode})
	}
	access, err := checkAccess(op, o.Device.System(), o.Memory.Location, named)
	if err != nil {
		return nil, err
	}
	var size uint64
	for _, h := range o.Chunks {
		size += h.Size
	}
	if o.Length > size || o.Reserve > 0 && o.Reserve < size {
		return nil, errs.Invalid(op, fmt.Sprintf("a length of %s and a range of %d for %d imported", errs.Count(o.Length, "byte"), o.Reserve, size),
			"declare what there is")
	}
	// A range is never empty, and its addresses are aligned for every chunk.
	unit, err := vrange.Granularity(op, o.Device)
	if err != nil {
		return nil, err
	}
	unit = max(unit, o.Granularity)
	res, err := reserve(op, o.Device, int(roundUp(max(size, o.Reserve, 1), unit)), ReserveOptions{Align: alignFor(o.Align, o.Granularity), Hint: o.Hint})
	if err != nil {
		return nil, err
	}
	b := &buffer{dev: o.Device, res: res, prop: o.Memory, gran: o.Granularity, align: o.Align, access: access,
		imported: &imported{most: driver.AccessFlags(mode)}}
	b.imported.followed.Store(o.Followed)
	b.track(0, label)
	if err := b.attachLocked(op, o.Chunks); err != nil {
		b.Untrack()
		return nil, res.Abandon(op, err)
	}
	b.used.Store(o.Length)
	return b, nil
}

// attachLocked maps chunks behind the committed ones. The caller holds changes, or the
// buffer is not shared yet.
func (b *buffer) attachLocked(op string, chunks []*phys.Handle) error {
	if err := b.settleTailLocked(op); err != nil || len(chunks) == 0 {
		return err
	}
	maps, err := b.res.Map(op, nil, b.committed.Load(), chunks, b.access)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.addLocked(maps)
	b.grown.Add(1)
	b.SetBytes(b.committed.Load())
	return nil
}

// Attach implements share.Memory.
func (b *buffer) Attach(op string, chunks []*phys.Handle) error {
	if err := b.enterGrowth(op, func(*buffer, int) uint64 { return vrange.End }, 0); err != nil {
		return err
	}
	defer b.leave()
	if b.imported == nil {
		return errs.Invalid(op, "imported chunks for a buffer of this process's own memory", "attach them to a buffer of imported memory")
	}
	return b.attachLocked(op, chunks)
}

// SetLen implements share.Memory.
func (b *buffer) SetLen(op string, n uint64) error {
	if err := b.enter(op, following); err != nil {
		return err
	}
	defer b.leave()
	if have := b.committed.Load(); b.imported == nil || n > have {
		return errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange, Asked: fmt.Sprintf("a length of %s, with %d imported", errs.Count(n, "byte"), have),
			Hint: "attach the chunks first"})
	}
	b.used.Store(n)
	return nil
}

// Leave implements share.Memory.
func (b *buffer) Leave(ctx context.Context) (back func(), err error) {
	left, err := b.status.Leave(ctx)
	return func() {
		for _, r := range left {
			r.Back()
		}
	}, err
}

// Own implements share.Memory.
func (b *buffer) Own(op string) error {
	if err := b.enter(op, following); err != nil {
		return err
	}
	defer b.leave()
	switch {
	case b.imported == nil:
		return nil
	case b.imported.most != driver.AccessReadWrite:
		b.imported.followed.Store(false) // it neither grows, since nothing could write that, nor is written
		return nil
	}
	plan, err := ChunkPlan{}.resolve(op, b.gran)
	if err != nil {
		return err
	}
	b.plan = plan
	b.imported.followed.Store(false)
	b.imported.own.Store(true)
	return nil
}

// SetKept implements share.Memory.
func (b *buffer) SetKept() {
	if b.imported != nil {
		b.imported.kept.Store(true)
	}
}

// Seal implements share.Memory.
func (b *buffer) Seal(op, what string) error {
	if err := b.enter(op, moving); err != nil { // one that was moved is mapped at another address, too
		return err
	}
	if b.imported == nil {
		b.leave()
		return errs.Invalid(op, "memory of this process's own", "seal memory that was imported")
	}
	b.mu.Lock()
	b.imported.most, b.imported.sealed = driver.AccessRead, what // before another change can grant more
	b.mu.Unlock()
	var writers []Access
	for _, a := range b.access {
		if a.Flags > driver.AccessRead {
			writers = append(writers, Access{cuda.Location{Type: cuda.LocationType(a.Location.Type), ID: int(a.Location.ID)}, ReadOnly})
		}
	}
	b.leave()
	if len(writers) == 0 {
		return nil
	}
	return b.setAccess(op, writers)
}

// About implements share.Memory.
func (b *buffer) About() share.About {
	about := share.About{Device: b.dev, Base: b.res.Base, Asked: b.prop, Granularity: b.gran, Reserved: b.res.Size, Tag: cuda.Tag(b.Label().Tag)}
	if i := b.imported; i != nil {
		about.Imported, about.Followed, about.Kept = true, i.followed.Load(), i.kept.Load()
	}
	return about
}

// Used implements share.Memory.
func (b *buffer) Used() uint64 { return b.used.Load() }

// Committed implements share.Memory.
func (b *buffer) Committed() uint64 { return b.committed.Load() }

// View implements share.Memory.
func (b *buffer) View(op string, n uint64) (share.View, error) {
	if !b.closer.Acquire() {
		return share.View{}, b.errClosed(op)
	}
	defer b.closer.Release()
	b.mu.RLock()
	defer b.mu.RUnlock()
	if err := b.checkStill(op, exporting, 0, n, 1); err != nil {
		return share.View{}, err
	}
	var v share.View
	for _, m := range b.chunks {
		if m.Off >= n {
			break
		}
		v.Chunks = append(v.Chunks, share.ChunkOf(m.Memory, m.Off))
	}
	return v, nil
}
