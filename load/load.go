package load

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
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
	return errs.Name("Reading", r, []string{Automatic: "automatic", PageCache: "through the page cache", Direct: "past the page cache"})
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
	items := make([]item, len(parts))
	err = inParallel(len(parts), func(from, to int) (err error) {
		for i := from; i < to && err == nil; i++ {
			items[i], err = m.item(op, parts[i])
			items[i].part = i
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	items, segments, err := m.arrange(op, items, parts)
	if err != nil {
		return nil, err
	}
	l := loading{reading: reading{op: op, how: o.Reading, items: items}, m: m, to: segments}
	return l.run(ctx, o, on)
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
	return item{block: p.block(), tensor: p.of, index: p.of.index}, nil
}

// arrange returns items in the order in which they are read, with their places in the stream of
// bytes, and their memory. They are read in the order of the files, unless that of the
// memory makes fewer copies: neighbors in memory are one copy, and to gather them is cheap. Many small
// ones are distributed on the device.
func (m *Model) arrange(op string, items []item, parts []Part) ([]item, []bulk.Segment, error) {
	byAddress := make([]place, len(items))
	for i := range parts {
		byAddress[i] = place{parts[i].at, i}
	}
	if !slices.IsSortedFunc(byAddress, place.compare) {
		slices.SortFunc(byAddress, place.compare)
	}
	copies, end := 0, cuda.Ptr(0)
	for k, at := range byAddress {
		it := &items[at.item]
		if it.bytes == 0 {
			continue
		}
		if at.ptr < end {
			before := k - 1
			for items[byAddress[before].item].bytes == 0 {
				before--
			}
			return nil, nil, errs.Invalid(op, fmt.Sprintf("tensors %s and %s for memory that overlaps at %#x",
				errs.Words(items[byAddress[before].item].tensor.Name), errs.Words(it.tensor.Name), uint64(at.ptr)), "give each part memory of its own")
		}
		if at.ptr > end {
			copies++
		}
		end = at.ptr + cuda.Ptr(it.bytes)
	}
	memory := func(i int) (bulk.Segment, int64) {
		return bulk.Segment{Ptr: driver.Ptr(parts[i].at), Bytes: uint64(items[i].bytes)}, 0
	}
	read, to := ordered(items, m.inFiles(items), memory)
	if to = bulk.Join(to, 0); len(to) > copies && !bulk.Distributes(to) {
		order := make([]int, len(items))
		for k, at := range byAddress {
			order[k] = at.item
		}
		read, to = ordered(items, order, memory)
	}
	return read, to, nil
}

// ordered returns items in another order, with their places in the stream of bytes, and the memory that
// the stream fills. memory returns that of an item, and where in it the item starts.
func ordered(items []item, order []int, memory func(i int) (to bulk.Segment, within int64)) ([]item, []bulk.Segment) {
	read, to := make([]item, len(items)), make([]bulk.Segment, len(items))
	_ = inParallel(len(order), func(from, end int) error {
		for k := from; k < end; k++ {
			i := order[k]
			read[k] = items[i]
			to[k], read[k].start = memory(i)
		}
		return nil
	})
	start := int64(0)
	for k := range read {
		read[k].start += start
		start += int64(to[k].Bytes)
	}
	return read, to
}

// place is where an item goes.
type place struct {
	ptr  cuda.Ptr
	item int
}

func (p place) compare(o place) int {
	if p.ptr != o.ptr {
		return cmp.Compare(p.ptr, o.ptr)
	}
	return cmp.Compare(p.item, o.item)
}

// inFiles returns the order of items in the files, by their indexes. It counts how many each tensor has: a
// sort of 100,000 takes longer than to load them.
func (m *Model) inFiles(items []item) []int {
	next := make([]int, len(m.tensors)+1) // where the next item of a tensor goes
	for i := range items {
		next[items[i].index+1]++
	}
	for i := range m.tensors {
		next[i+1] += next[i]
	}
	order := make([]int, len(items))
	for i := range items {
		t := items[i].index
		order[next[t]] = i
		next[t]++
	}
	for start, t := 0, 0; t < len(m.tensors); t++ { // next is where the items of the one behind begin
		if blocks := order[start:next[t]]; len(blocks) > 1 {
			slices.SortStableFunc(blocks, func(a, b int) int { return cmp.Compare(items[a].offset, items[b].offset) })
		}
		start = next[t]
	}
	return order
}

// spread returns the memory that items of a layout go to, which are in its order. If they are many
// small ones in another order than the files', it puts them in that, each with the gap behind it, since
// the device distributes them faster than they are gathered from all over a file.
func (m *Model) spread(items []item, at cuda.Ptr, bytes int) ([]item, []bulk.Segment) {
	whole := []bulk.Segment{{Ptr: driver.Ptr(at), Bytes: uint64(bytes)}}
	if slices.IsSortedFunc(items, func(a, b item) int { return cmp.Compare(a.index, b.index) }) {
		return items, whole
	}
	moved, to := ordered(items, m.inFiles(items), func(i int) (bulk.Segment, int64) {
		start, end := items[i].start, int64(bytes)
		if i == 0 {
			start = 0
		}
		if i+1 < len(items) {
			end = items[i+1].start
		}
		return bulk.Segment{Ptr: driver.Ptr(at) + driver.Ptr(start), Bytes: uint64(end - start)}, items[i].start - start
	})
	if !bulk.Distributes(to) {
		return items, whole
	}
	return moved, to
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
	items, to := m.spread(items, at, l.Bytes)
	in := loading{reading: reading{op: op, how: o.Reading, items: items}, m: m, to: to}
	var tensors []handles.Tensor
	var copied sync.WaitGroup
	copied.Go(func() { tensors = slices.Clone(l.Tensors) }) // beside the reads, as there may be many
	digests, err := in.run(ctx, o, on)
	copied.Wait()
	if err != nil {
		return nil, err
	}
	return withDigests(l.Bytes, tensors, digests), nil
}

// withDigests returns a manifest of tensors with the digests that there are.
func withDigests(bytes int, tensors []handles.Tensor, digests []string) *handles.Manifest {
	_ = inParallel(len(tensors), func(from, to int) error {
		for i := from; i < to; i++ {
			tensors[i].Digest = cmp.Or(digests[i], tensors[i].Digest)
		}
		return nil
	})
	return &handles.Manifest{Bytes: bytes, Tensors: tensors}
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
	items := make([]item, len(l.Tensors))
	err := inParallel(len(items), func(from, to int) (err error) {
		for i := from; i < to && err == nil; i++ {
			items[i], err = m.laid(op, &l.Tensors[i], i)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	end, taken := int64(0), make([]bool, len(m.tensors))
	for i := range items {
		it := &items[i]
		if taken[it.index] || it.start < end || it.start > int64(l.Bytes) || it.bytes > int64(l.Bytes)-it.start {
			if err := l.Validate(); err != nil { // which says what is wrong
				return nil, err
			}
			return nil, errs.Invalid(op, fmt.Sprintf("tensor %s, which shares memory with another", errs.Words(it.tensor.Name)), "load one tensor of each alias group")
		}
		taken[it.index], end = true, it.start+it.bytes
	}
	return items, nil
}

// laid returns the item of a layout's tensor, which is the one after so many others.
func (m *Model) laid(op string, want *handles.Tensor, i int) (item, error) {
	at := i // where Model.Layout has it
	if at >= len(m.tensors) || m.tensors[at].Name != want.Name {
		var there bool
		if at, there = m.byName[want.Name]; !there {
			return item{}, m.noTensor(op, want.Name)
		}
	}
	t := &m.tensors[at]
	if t.Element != want.Element || !slices.Equal(t.Shape, want.Shape) || len(want.Strides) > 0 {
		return item{}, &Error{Op: op, File: t.file.path, Tensor: want.Name, kind: handles.ErrMismatch,
			Asked: fmt.Sprintf("%v %v, where the layout has %v %v and strides %v", t.Element, t.Shape, want.Element, want.Shape, want.Strides), Hint: "use a layout of this model, without strides"}
	}
	return item{block: block{offset: int64(t.Offset), bytes: int64(t.Size())}, tensor: t, index: at, start: int64(want.Offset), part: i}, nil
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
	_, err := l.run(ctx, s.o, on)
	return err
}

// loading is a reading with the memory that it is copied to.
type loading struct {
	reading
	m  *Model
	to []bulk.Segment
}

// run loads, and returns the digests of the parts. The model is entered.
func (l *loading) run(ctx context.Context, o Options, on *cuda.Stream) (digests []string, err error) {
	st, err := usable(ctx, l.op, o, on, l.to)
	if err != nil {
		return nil, err
	}
	return l.compared(o, func() error {
		return o.copies(l.op, st, func(b bulk.Options) error { return bulk.Of(st.Ctx).Fill(ctx, l.to, l.read, b) })
	})
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

// compared has read read everything, requires that no file changed meanwhile, and returns the
// digests of the parts, which it compares with those that the files declare.
func (l *loading) compared(o Options, read func() error) (digests []string, err error) {
	if err := l.direct(); err != nil {
		return nil, err
	}
	if err := l.m.unchanged(l.op); err != nil {
		return nil, err
	}
	digests = make([]string, len(l.items))
	if !o.NoDigests {
		l.sums = &sums{items: l.items, whole: func(i int, crc uint32) { digests[l.items[i].part] = digestOf(crc) }}
	}
	if err := read(); err != nil {
		return nil, err
	}
	if err := l.m.unchanged(l.op); err != nil || o.NoDigests {
		return digests, err
	}
	l.sums.end()
	return digests, inParallel(len(l.items), func(from, to int) error {
		for i := from; i < to; i++ {
			it := &l.items[i]
			got := digests[it.part] // none if only some of its bytes were read
			if want := it.want(); want != "" && got != "" && want != got {
				return &Error{Op: l.op, File: it.tensor.file.path, Tensor: it.tensor.Name, kind: ErrDigest,
					Asked: got + ", where the file declares " + want, Hint: hintFormat}
			}
		}
		return nil
	})
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
