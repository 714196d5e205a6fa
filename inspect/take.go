package inspect

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/budget"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/pages"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/vrange"
	"github.com/cuvmm/cuvmm/vmm/pool"
)

// Take returns a snapshot of the System's memory. It is safe for concurrent use with
// everything else. A closed System shows what is left of it. For a nil System the error is
// cuda.ErrInvalidArgument.
func Take(sys *cuda.System) (Snapshot, error) { return snapshot("inspect.Take", sys, true) }

// Summarize is Take without the lists of objects: it leaves out reservations, memory,
// buffers and other objects, and the segments, streams and histories of pools. Its time
// does not depend on how much memory there is.
func Summarize(sys *cuda.System) (Snapshot, error) { return snapshot("inspect.Summarize", sys, false) }

func snapshot(op string, sys *cuda.System, whole bool) (Snapshot, error) {
	if sys == nil {
		return Snapshot{}, errs.Invalid(op, "a nil System", "pass the one that cuda.Open or auto.Open returned")
	}
	t := snapshotReader{sys: core.SystemOf(sys), whole: whole, stacks: map[string]int{}, texts: map[*string]int{}, access: map[*driver.AccessDesc]string{}}
	host, _ := os.Hostname() // empty if unknown
	t.s = Snapshot{
		Format: Format, Version: Version, Time: time.Now(), Totals: sys.Stats(), Driver: sys.Driver().String(),
		Process: Process{PID: os.Getpid(), Name: program(), Host: host},
	}
	t.devices(sys)
	if whole {
		t.sys.Live.Each(t.object)
		t.s.Reservations = apart(t.s.Reservations)
		for _, l := range sys.Leftovers() {
			t.s.Leftovers = append(t.s.Leftovers, Leftover{What: l.What, Bytes: l.Bytes, Device: known(l.Device), Error: l.Err.Error()})
		}
		slices.SortFunc(t.s.Sparse, func(a, b Sparse) int { return cmp.Compare(a.Ptr, b.Ptr) })
		slices.SortFunc(t.s.Managed, func(a, b Managed) int { return cmp.Compare(a.Ptr, b.Ptr) })
		slices.SortFunc(t.s.Buffers, func(a, b Buffer) int { return cmp.Compare(a.Ptr, b.Ptr) })
	}
	t.budgets()
	for _, x := range t.sys.Shown() {
		t.shown(x)
	}
	t.s.Took = time.Since(t.s.Time)
	return t.s, nil
}

// known returns a pointer to n, or nil for -1, which means unknown elsewhere.
func known(n int) *int {
	if n == -1 {
		return nil
	}
	return &n
}

// program returns the name of this process's program. A shared library that Go makes has
// no arguments if the C library passes none to initializers, as musl does.
func program() string {
	if len(os.Args) > 0 {
		return filepath.Base(os.Args[0])
	}
	path, err := os.Executable()
	if err != nil {
		return ""
	}
	return filepath.Base(path)
}

// apart sorts reservations, and drops those that overlap one that was read later: they
// were closed during the walk, and the later one took their addresses.
func apart(all []Reservation) []Reservation {
	read := map[Address]int{}
	for i, r := range all {
		read[r.Ptr] = i
	}
	slices.SortStableFunc(all, func(a, b Reservation) int { return cmp.Compare(a.Ptr, b.Ptr) })
	kept := all[:0]
	for _, r := range all {
		n := len(kept)
		switch {
		case n == 0 || kept[n-1].Ptr+Address(kept[n-1].Bytes) <= r.Ptr:
			kept = append(kept, r)
		case read[kept[n-1].Ptr] <= read[r.Ptr]:
			kept[n-1] = r
		}
	}
	return kept
}

// snapshotReader reads a snapshot.
type snapshotReader struct {
	sys    *core.System
	whole  bool // with the lists of objects
	s      Snapshot
	stacks map[string]int  // number of a stack by its program counters
	texts  map[*string]int // and by the address of its text, which equal stacks share
	access map[*driver.AccessDesc]string
}

func (t *snapshotReader) devices(sys *cuda.System) {
	for _, d := range sys.Devices() {
		about := Device{Ordinal: d.Ordinal(), Name: d.Name(), UUID: d.UUID().String(), Memory: d.TotalMemory()}
		if t.sys.HasContext(driver.Device(d.Ordinal())) {
			if free, _, err := d.MemoryInfo(); err == nil {
				about.Free = &free
			}
		}
		t.s.Devices = append(t.s.Devices, about)
	}
}

func (t *snapshotReader) budgets() {
	for _, b := range budget.All() {
		numbers := b.Numbers
		if t.whole {
			numbers = b.Stats
		}
		n := numbers()
		to := Budget{Serial: int(b.Serial), Name: n.Name, Limit: int(n.Limit), Committed: int(n.Committed), Peak: int(n.Peak)}
		if parent := b.Parent(); parent != nil {
			to.Parent = int(parent.Serial)
		}
		for _, u := range n.Holders {
			to.Owners = append(to.Owners, BudgetUse{Kind: u.Kind.String(), Name: u.Label.Name, Tag: u.Label.Tag, Committed: int(u.Committed), InUse: int(u.InUse)})
		}
		t.s.Budgets = append(t.s.Budgets, to)
	}
}

// object adds a live object.
func (t *snapshotReader) object(o *life.Object, owner life.Owner) {
	switch x := owner.(type) {
	case *vrange.Range:
		t.reservation(x, t.callers(o))
	case share.Memory:
		about := x.About()
		l := o.Label()
		t.s.Buffers = append(t.s.Buffers, Buffer{Ptr: Address(about.Base), Name: l.Name, Tag: l.Tag, Used: int(x.Used()), Committed: int(x.Committed()),
			Reserved: int(about.Reserved), Device: about.Device.Ordinal(), Imported: about.Imported, Stack: t.callers(o)})
	case *pages.Range:
		t.sparse(x, o)
	case *pages.Source:
		st, l := x.Stats(), o.Label()
		t.s.Sources = append(t.s.Sources, Source{Name: l.Name, Tag: l.Tag, Page: int(x.Page), Pages: st.Pages, Used: st.Used, Waiting: st.Waiting, Stack: t.callers(o)})
	case share.Managed:
		t.managed(x.InspectManaged(), t.callers(o))
	case *phys.Handle:
		t.s.Memory = append(t.s.Memory, Memory{ID: x.ID(), Bytes: int(x.Size), Location: place(x.Asked.Location),
			Mappings: int(x.Mappings.Load()), Imported: x.Imported, Exported: !x.Imported && x.Exported(), Suspended: x.Away(), Stack: t.callers(o)})
	default:
		if k := o.Kind(); k != life.KindMapping && k != life.KindPool { // which are shown elsewhere
			t.s.Others = append(t.s.Others, Other{Kind: o.Kind().String(), Bytes: int(o.Bytes()), Stack: t.callers(o)})
		}
	}
}

func (t *snapshotReader) sparse(r *pages.Range, o *life.Object) {
	n, l := r.Numbers(), o.Label()
	to := Sparse{Ptr: Address(r.Base()), Name: l.Name, Tag: l.Tag, Page: int(r.Page()), Pages: n.Pages, Mapped: n.Mapped, Shared: n.Shared,
		Freed: n.Freed, Stuck: n.Stuck, Device: r.Device().Ordinal(), Stack: t.callers(o)}
	for _, sp := range r.Live() {
		to.Spans = append(to.Spans, Span{sp.First, sp.N})
	}
	t.s.Sparse = append(t.s.Sparse, to)
}

func (t *snapshotReader) managed(m share.ManagedMemory, stack int) {
	to := Managed{Ptr: Address(m.Base), Bytes: int(m.Bytes), Device: int(m.Device), Located: m.Located, Stack: stack}
	if m.Prefetched.Type != driver.LocationNone {
		to.Prefetched = place(m.Prefetched)
	}
	for _, r := range m.Resident {
		to.Resident = append(to.Resident, Resident{int(r.Off), int(r.Bytes), place(r.At)})
	}
	t.s.Managed = append(t.s.Managed, to)
}

// mappingsAtOnce is the number of mappings read under one hold of a range's lock.
const mappingsAtOnce = 1024

func (t *snapshotReader) reservation(r *vrange.Range, stack int) {
	to := Reservation{Ptr: Address(r.Base), Bytes: int(r.Size), Granularity: int(r.Granularity), Stuck: int(r.Stuck()), Stack: stack}
	next := uint64(0)
	for batch := make([]vrange.MappingAt, 0, mappingsAtOnce); ; batch = batch[:0] {
		batch = r.Mappings(next, batch)
		for _, m := range batch {
			to.Mappings = append(to.Mappings, Mapping{Offset: int(m.Off), Bytes: int(m.Memory.Size), Memory: m.Memory.ID(),
				Access: t.grants(m.Access), Closing: m.Closing, Suspended: m.Away})
			next = m.Off + m.Memory.Size
		}
		if len(batch) < mappingsAtOnce {
			break
		}
	}
	t.s.Reservations = append(t.s.Reservations, to)
}

// grants describes an access list. Mappings share the lists, which never change.
func (t *snapshotReader) grants(all []driver.AccessDesc) string {
	if len(all) == 0 {
		return ""
	}
	text, known := t.access[&all[0]]
	if known {
		return text
	}
	var parts []string
	for _, a := range all {
		parts = append(parts, place(a.Location)+": "+mode(a.Flags))
	}
	slices.Sort(parts)
	text = strings.Join(parts, ", ")
	t.access[&all[0]] = text
	return text
}

func place(l driver.Location) string {
	return cuda.Location{Type: cuda.LocationType(l.Type), ID: int(l.ID)}.String()
}

func mode(f driver.AccessFlags) string {
	switch f {
	case driver.AccessNone:
		return "no access"
	case driver.AccessRead:
		return "read-only"
	}
	return "read-write"
}

// callers returns the number of the stack that created an object.
func (t *snapshotReader) callers(o *life.Object) int {
	pcs := o.Creation()
	if len(pcs) == 0 {
		return 0
	}
	key := fmt.Sprint(pcs)
	if n, known := t.stacks[key]; known {
		return n
	}
	var stack Stack
	frames := runtime.CallersFrames(pcs)
	for more := true; more; {
		var f runtime.Frame
		if f, more = frames.Next(); f.Function != "" && !strings.HasPrefix(f.Function, "runtime.") {
			stack = append(stack, fmt.Sprintf("%s (%s:%d)", f.Function, f.File, f.Line))
		}
	}
	t.s.Stacks = append(t.s.Stacks, stack)
	t.stacks[key] = len(t.s.Stacks)
	return len(t.s.Stacks)
}

// text returns the number of a stack that is text already. Equal stacks share it.
func (t *snapshotReader) text(stack []string) int {
	if len(stack) == 0 {
		return 0
	}
	n, known := t.texts[&stack[0]]
	if !known {
		t.s.Stacks = append(t.s.Stacks, stack)
		n = len(t.s.Stacks)
		t.texts[&stack[0]] = n
	}
	return n
}

// shown adds a pool, a publication, a follower or a lease.
func (t *snapshotReader) shown(x any) {
	switch x := x.(type) {
	case *pool.Pool:
		if device := x.Device().Ordinal(); t.whole {
			t.pool(device, x.Snapshot())
		} else {
			t.s.Pools = append(t.s.Pools, counts(device, x.Stats()))
		}
	case share.Published:
		t.publication(x.InspectPublication())
	case share.Following:
		f := x.InspectFollower()
		t.s.Followers = append(t.s.Followers, Follower{Name: f.Name, Ptr: Address(f.Base), PID: f.PID, Generation: f.Generation, Bytes: int(f.Bytes), Suspended: f.Suspended, Stuck: f.Stuck})
	case share.Leased:
		l := x.InspectLease()
		t.s.Leases = append(t.s.Leases, Lease{Bytes: int(l.Bytes), Until: l.Until, Importers: l.Importers})
	}
}

func (t *snapshotReader) publication(p share.Publication) {
	to := Publication{Name: p.Name, Ptr: Address(p.Base), Generation: p.Generation, Bytes: int(p.Bytes), Pinned: int(p.Pinned), Suspended: p.Suspended}
	for _, f := range p.Followers {
		to.Followers = append(to.Followers, Reader{PID: f.PID, UID: known(f.UID), Since: f.Since, Generation: f.Generation,
			Bytes: int(f.Bytes), Pinned: int(f.Pinned), Refused: f.Refused})
	}
	slices.SortFunc(to.Followers, func(a, b Reader) int { return a.Since.Compare(b.Since) })
	t.s.Publications = append(t.s.Publications, to)
}
