package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Move makes a second buffer with a range of reserve bytes, rounded up to the
// granularity, for one whose range has become too small. It maps the same
// memory at the new address: nothing is copied. The old buffer stays as it is,
// with the same bytes at its own address, until it is closed; from now on each
// grows on its own. Work through the two addresses must be ordered by streams
// or events (see the package documentation). A buffer that follows a publication
// is not moved (cuda.ErrNotPermitted).
func Move(old *Buffer, reserve int) (*Buffer, error) {
	const op = "vmm.Move"
	if old == nil {
		return nil, errNilBuffer(op)
	}
	in := old.b
	if err := in.enter(op); err != nil {
		return nil, err
	}
	defer in.leave()
	if in.imported != nil && in.imported.followed {
		return nil, core.Error(core.Failure{Op: op, Kind: core.NotPermitted, Asked: "another range for a buffer that follows a publication",
			Hint: "what the publisher takes back would stay mapped there: follow it anew with a larger FollowOptions.Reserve"})
	}
	committed := in.committed.Load()
	if reserve <= 0 || reserve > maxBytes || uint64(reserve) < committed {
		return nil, core.Invalid(op, fmt.Sprintf("a range of %s, with %d committed", core.Count(reserve, "byte"), committed),
			fmt.Sprintf("reserve at least %s, and more than the old range to grow further", core.Bytes(committed)))
	}
	res, err := reserveFor(op, in.dev, uint64(reserve), 0, in.gran)
	if err != nil {
		return nil, err
	}
	b := &buffer{dev: in.dev, res: res, prop: in.prop, gran: in.gran, chosen: in.chosen, plan: in.plan, access: in.access, imported: in.imported.moved()}
	handles := make([]*phys.Handle, len(in.chunks))
	for i, c := range in.chunks {
		c.phys.Retain()
		handles[i] = c.phys
	}
	if len(handles) > 0 {
		b.chunks, err = res.mapRun(op, nil, 0, handles, in.access)
	}
	if err != nil {
		for _, h := range handles {
			h.Release() // never the last count: the old buffer holds one
		}
		return nil, res.abandon(op, err)
	}
	b.committed.Store(committed)
	b.used.Store(in.used.Load())
	b.track(committed)
	return b.shell(), nil
}
