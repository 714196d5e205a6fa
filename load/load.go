package load

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/bulk"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/vmm"
)

// Reading is how files are read.
type Reading uint8

const (
	// Automatic takes what the page cache has from there, and reads the rest past it, if the file
	// system can do that and says how it is aligned (Linux 6.1), else through it.
	Automatic Reading = iota
	// PageCache reads all through the page cache.
	PageCache
	// Direct reads large runs past the page cache even if that has them.
	Direct
)

// String names the way.
func (r Reading) String() string {
	switch r {
	case Automatic:
		return "automatic"
	case PageCache:
		return "through the page cache"
	case Direct:
		return "past the page cache"
	}
	return fmt.Sprintf("Reading(%d)", uint8(r))
}

// Options are how a load or a save runs. The zero value is good.
type Options struct {
	// Reading is how files are read.
	Reading Reading
	// NoDigests leaves the digests out. They cost 6 % of a core for each GB/s.
	NoDigests bool
	// Threads is how many threads read or write; 0 chooses up to 16.
	Threads int
	// Progress, if it is not nil, is called ten times a second and at the end, by one goroutine
	// at a time, which the end waits for.
	Progress func(Progress)
}

// Progress is how far a load or a save has come.
type Progress struct {
	// Done and Total are bytes.
	Done, Total int
	// Rate is bytes a second since the beginning.
	Rate float64
	// Remaining is how long the rest takes at that rate; 0 before the first byte.
	Remaining time.Duration
}

func (o Options) check(op string) error {
	switch {
	case o.Reading > Direct:
		return errs.Invalid(op, o.Reading.String(), "use Automatic, PageCache or Direct")
	case o.Threads < 0 || o.Threads > 1024:
		return errs.Invalid(op, fmt.Sprintf("%d threads", o.Threads), "use 1 to 1024, or 0")
	}
	return nil
}

// watched runs f with a meter that Progress sees.
func (o Options) watched(sys *core.System, f func(*bulk.Meter) error) error {
	m := new(bulk.Meter)
	if o.Progress == nil {
		return f(m)
	}
	show := func() {
		p := m.Progress()
		sys.Hook("load.Options.Progress", func() { o.Progress(Progress{int(p.Done), int(p.Total), p.Rate, p.Remaining}) })
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				show()
			case <-stop:
				return
			}
		}
	}()
	err := f(m)
	close(stop)
	<-stopped
	show()
	return err
}

// Load loads the parts, each to its memory, and returns when all of it is there. Their order is
// its own. The copies come after the work that is on the stream, whose later work sees them. The
// stream's device, which needs access to the memory, makes them on streams of the library.
//
// It returns a digest of each part ("crc32c:0a1b2c3d"), in the order of the parts, and compares those of whole
// tensors with the file's, if that has some (ErrDigest). A file that was written since it was
// opened is an error (ErrChanged). After an error the contents of the memory are undefined. When
// ctx ends Load returns once the reads under way have. Copies that it submitted may be in flight then:
// later work on the stream comes behind them, as does the closing of the memory.
//
// Load only knows addresses: the memory must not be closed, shortened or suspended meanwhile.
func (m *Model) Load(ctx context.Context, o Options, on *cuda.Stream, parts ...Part) (digests []string, err error) {
	const op = "load.Model.Load"
	if err := m.enter(op); err != nil {
		return nil, err
	}
	defer m.leave()
	items := make([]item, 0, len(parts))
	for i, p := range parts {
		it, err := m.item(op, p)
		if err != nil {
			return nil, err
		}
		it.part = i
		items = append(items, it)
	}
	segments, err := m.arrange(op, items, parts)
	if err != nil {
		return nil, err
	}
	l := loading{reading: reading{op: op, how: o.Reading, items: items}, m: m, to: segments}
	digests = make([]string, len(parts))
	err = l.run(ctx, o, on, func(it *item, digest string) { digests[it.part] = digest })
	if err != nil {
		return nil, err
	}
	return digests, nil
}

// item checks a part and returns its place in a file.
func (m *Model) item(op string, p Part) (item, error) {
	if p.of == nil {
		return item{}, errZeroPart(op)
	}
	if i := p.of.index; i >= len(m.tensors) || &m.tensors[i] != p.of {
		return item{}, errs.Invalid(op, fmt.Sprintf("a part of tensor %s of another model", errs.Words(p.of.Name)), "take parts from the model that loads them")
	}
	if n := p.Size(); n != p.room || n > 0 && p.at == 0 {
		return item{}, errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange,
			Asked: fmt.Sprintf("%s of tensor %s for %s of memory at %#x", errs.Bytes(n), errs.Words(p.of.Name), errs.Bytes(p.room), uint64(p.at)),
			Hint:  "name memory of Part.Size bytes with Part.To"})
	}
	return item{block: p.block(), tensor: p.of}, nil
}

// arrange puts items in the order in which they are read, with their places in the stream of
// bytes, and returns the memory. They are read in the order of the files, unless that of the
// memory makes fewer copies: neighbors in memory are one copy, and to gather them is cheap. Many small
// ones are distributed on the device.
func (m *Model) arrange(op string, items []item, parts []Part) ([]bulk.Segment, error) {
	at := func(it *item) cuda.Ptr { return parts[it.part].at }
	segments := func(items []item) []bulk.Segment {
		all := make([]bulk.Segment, len(items))
		for i := range items {
			all[i] = bulk.Segment{Ptr: driver.Ptr(at(&items[i])), Bytes: uint64(items[i].bytes)}
		}
		return bulk.Join(all, 0)
	}
	byAddress := func(a, b item) int { return cmp.Compare(at(&a), at(&b)) }
	if !slices.IsSortedFunc(items, byAddress) {
		slices.SortStableFunc(items, byAddress)
	}
	for i := 1; i < len(items); i++ {
		if a, b := &items[i-1], &items[i]; b.bytes > 0 && at(a)+cuda.Ptr(a.bytes) > at(b) {
			return nil, errs.Invalid(op, fmt.Sprintf("tensors %s and %s for memory that overlaps at %#x", errs.Words(a.tensor.Name), errs.Words(b.tensor.Name), uint64(at(b))),
				"give each part memory of its own")
		}
	}
	to := segments(items)
	byFile := make([]item, 0, len(items))
	for _, i := range m.inFiles(items) {
		byFile = append(byFile, items[i])
	}
	if other := segments(byFile); len(other) <= len(to) || bulk.Distributes(other) {
		copy(items, byFile)
		to = other
	}
	start := int64(0)
	for i := range items {
		items[i].start = start
		start += items[i].bytes
	}
	return to, nil
}

// inFiles returns the order of items in the files, by their indexes. It counts how many each tensor has: a
// sort of 100,000 takes longer than to load them.
func (m *Model) inFiles(items []item) []int {
	next := make([]int, len(m.tensors)+1) // where the next item of a tensor goes
	for i := range items {
		next[items[i].tensor.index+1]++
	}
	for i := range m.tensors {
		next[i+1] += next[i]
	}
	order := make([]int, len(items))
	for i := range items {
		t := items[i].tensor.index
		order[next[t]] = i
		next[t]++
	}
	for start, t := 0, 0; t < len(m.tensors); t++ { // next is where the items of the one behind begin
		blocks := order[start:next[t]]
		slices.SortStableFunc(blocks, func(a, b int) int { return cmp.Compare(items[a].offset, items[b].offset) })
		start = next[t]
	}
	return order
}

// spread returns the memory that items of a layout go to, which are in its order. If they are many
// small ones in another order than the files', it puts them in that, each with the gap behind it, since
// the device distributes them faster than they are gathered from all over a file.
func (m *Model) spread(items []item, at cuda.Ptr, bytes int) ([]item, []bulk.Segment) {
	whole := []bulk.Segment{{Ptr: driver.Ptr(at), Bytes: uint64(bytes)}}
	if slices.IsSortedFunc(items, func(a, b item) int { return cmp.Compare(a.tensor.index, b.tensor.index) }) {
		return items, whole
	}
	order := m.inFiles(items)
	all, moved, start := make([]bulk.Segment, len(items)), make([]item, len(items)), int64(0)
	for k, i := range order {
		from, to := items[i].start, int64(bytes)
		if i == 0 {
			from = 0
		}
		if i+1 < len(items) {
			to = items[i+1].start
		}
		all[k] = bulk.Segment{Ptr: driver.Ptr(at) + driver.Ptr(from), Bytes: uint64(to - from)}
		moved[k] = items[i]
		moved[k].start += start - from
		start += to - from
	}
	if !bulk.Distributes(all) {
		return items, whole
	}
	return moved, all
}

// LoadAll loads the tensors of a layout, which Model.Layout returned or which is another one of
// some of its tensors, to the memory of so many bytes at an address, and returns the layout with the
// digests. Bytes between tensors become zero. Otherwise it is as Load, and faster for many small
// tensors, since their memory is one.
func (m *Model) LoadAll(ctx context.Context, o Options, on *cuda.Stream, l *handles.Manifest, at cuda.Ptr, bytes int) (*handles.Manifest, error) {
	const op = "load.Model.LoadAll"
	if err := m.enter(op); err != nil {
		return nil, err
	}
	defer m.leave()
	items, err := m.laidOut(op, l)
	if err != nil {
		return nil, err
	}
	if bytes < l.Bytes || at == 0 && l.Bytes > 0 {
		return nil, errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange,
			Asked: fmt.Sprintf("a layout of %s for %s of memory at %#x", errs.Bytes(l.Bytes), errs.Bytes(bytes), uint64(at)), Hint: "pass memory of Manifest.Bytes bytes"})
	}
	made := &handles.Manifest{Bytes: l.Bytes, Tensors: slices.Clone(l.Tensors)}
	items, to := m.spread(items, at, l.Bytes)
	in := loading{reading: reading{op: op, how: o.Reading, items: items}, m: m, to: to}
	err = in.run(ctx, o, on, func(it *item, digest string) { made.Tensors[it.part].Digest = digest })
	if err != nil {
		return nil, err
	}
	return made, nil
}

// laidOut checks a layout and returns its items. There may be very many tensors, so it makes as
// little of each as it can: names and shapes are checked by being the model's.
func (m *Model) laidOut(op string, l *handles.Manifest) ([]item, error) {
	if l == nil {
		return nil, errNoLayout(op)
	}
	if l.Bytes < 0 {
		return nil, l.Validate()
	}
	items, end := make([]item, len(l.Tensors)), 0
	taken := make([]bool, len(m.tensors))
	for i := range l.Tensors {
		want := &l.Tensors[i]
		at := i // where Model.Layout has it
		if at >= len(m.tensors) || m.tensors[at].Name != want.Name {
			var there bool
			if at, there = m.byName[want.Name]; !there {
				return nil, m.noTensor(op, want.Name)
			}
		}
		t := &m.tensors[at]
		if t.Element != want.Element || !slices.Equal(t.Shape, want.Shape) || len(want.Strides) > 0 {
			return nil, &Error{Op: op, File: t.file.path, Tensor: want.Name, kind: handles.ErrMismatch,
				Asked: fmt.Sprintf("%v %v, where the layout has %v %v and strides %v", t.Element, t.Shape, want.Element, want.Shape, want.Strides), Hint: "use a layout of this model, without strides"}
		}
		n := t.Size()
		if taken[at] || want.Offset < end || want.Offset > l.Bytes || n > l.Bytes-want.Offset {
			if err := l.Validate(); err != nil { // which says what is wrong
				return nil, err
			}
			return nil, errs.Invalid(op, fmt.Sprintf("tensor %s, which shares memory with another", errs.Words(want.Name)), "load one tensor of each alias group")
		}
		taken[at], end = true, want.Offset+n
		items[i] = item{block: block{offset: int64(t.Offset), bytes: int64(n)}, tensor: t, start: int64(want.Offset), part: i}
	}
	return items, nil
}

// Source returns a Source for one object of memory that LoadAll filled with that layout:
// suspended memory gets its bytes from the files again. Bytes behind the layout are left as they
// are. The model must be open when the memory is resumed.
func (m *Model) Source(o Options, l *handles.Manifest) (vmm.Source, error) {
	const op = "load.Model.Source"
	items, err := m.laidOut(op, l)
	if err != nil {
		return nil, err
	}
	return &source{m, o, items, l.Bytes}, nil
}

type source struct {
	m     *Model
	o     Options
	items []item
	bytes int
}

func (s *source) Fill(ctx context.Context, on *cuda.Stream, mem vmm.Memory, at cuda.Ptr, n int) error {
	const op = "load.Source.Fill"
	if err := s.m.enter(op); err != nil {
		return err
	}
	defer s.m.leave()
	of, ok := mem.(interface{ Ptr() cuda.Ptr })
	if !ok {
		return errs.Invalid(op, "memory whose bytes have no order", "suspend the layout's own buffer with this source, and a pool by itself")
	}
	base := int(at - of.Ptr())
	if n = min(n, s.bytes-base); n <= 0 {
		return nil
	}
	l := loading{reading: reading{op: op, how: s.o.Reading, items: s.items, base: int64(base)}, m: s.m,
		to: []bulk.Segment{{Ptr: driver.Ptr(at), Bytes: uint64(n)}}}
	return l.run(ctx, s.o, on, func(*item, string) {})
}

// loading is a reading with the memory that it is copied to.
type loading struct {
	reading
	m  *Model
	to []bulk.Segment
}

// run loads, and calls f with the digest of each item. The model is entered.
func (l *loading) run(ctx context.Context, o Options, on *cuda.Stream, f func(it *item, digest string)) error {
	st, err := usable(ctx, l.op, o, on, l.to)
	if err != nil {
		return err
	}
	return l.compared(o, func() error {
		return o.copies(l.op, st, func(b bulk.Options) error { return bulk.Of(st.Ctx).Fill(ctx, l.to, l.read, b) })
	}, f)
}

// copies runs copies that come after the work on the stream, and are seen by Progress. Copies
// that are in flight behind an error come before the stream's later work.
func (o Options) copies(op string, st *core.Stream, copy func(bulk.Options) error) error {
	err := o.watched(st.Ctx.System(), func(m *bulk.Meter) error {
		return copy(bulk.Options{Op: op, After: []*core.Stream{st}, Meter: m, Threads: o.Threads})
	})
	if err != nil {
		err = errors.Join(err, st.AfterUnsettled(op))
	}
	return err
}

// compared has read read everything, requires that no file changed meanwhile, compares the
// digests, and calls f with that of each item.
func (l *loading) compared(o Options, read func() error, f func(it *item, digest string)) error {
	if err := l.direct(); err != nil {
		return err
	}
	if err := l.m.unchanged(l.op); err != nil {
		return err
	}
	if !o.NoDigests {
		l.sums = newSums(l.items)
	}
	if err := read(); err != nil {
		return err
	}
	if err := l.m.unchanged(l.op); err != nil || o.NoDigests {
		return err
	}
	var err error
	const size = len(digestName) + 8
	text := make([]byte, 0, size*len(l.items))
	l.sums.each(func(_ int, crc uint32) { text = appendDigest(text, crc) })
	digests := string(text) // one for all of them
	l.sums.each(func(i int, _ uint32) {
		it, digest := &l.items[i], digests[:size]
		digests = digests[size:]
		if want := it.want(); want != "" && want != digest && err == nil {
			err = &Error{Op: l.op, File: it.tensor.file.path, Tensor: it.tensor.Name, kind: ErrDigest,
				Asked: digest + ", where the file declares " + want, Hint: hintFormat}
		}
		f(it, digest)
	})
	return err
}

// direct requires that all files can be read past the page cache, if they must be.
func (l *loading) direct() error {
	if l.how != Direct {
		return nil
	}
	for _, f := range l.m.files {
		if f.Align() == 0 {
			return &Error{Op: l.op, File: f.path, Asked: "reading past the page cache", Hint: "use Automatic: this file system does not say how it can", kind: cuda.ErrNotSupported}
		}
	}
	return nil
}

// usable returns the inner stream, if stream and memory can be used.
func usable(ctx context.Context, op string, o Options, on *cuda.Stream, memory []bulk.Segment) (*core.Stream, error) {
	if ctx == nil {
		return nil, errs.Invalid(op, "a nil context", "pass one, such as context.Background()")
	}
	if err := o.check(op); err != nil {
		return nil, err
	}
	st := core.StreamOf(on)
	if st == nil {
		return nil, errs.NilStream(op)
	}
	if err := st.UseWithoutWork(op, st.Ctx.System()); err != nil {
		return nil, err
	}
	st.Release()
	for _, s := range memory {
		if err := st.Ctx.System().CheckNotSuspended(op, s.Ptr, s.Bytes); err != nil {
			return nil, err
		}
	}
	return st, nil
}
