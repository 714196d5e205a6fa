package vmm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/budget"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/pages"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/suspend"
)

type sealedMemory = suspend.Sealed

// Memory is what can be suspended: a Buffer, an Array, a Mapping, a Sparse, or a pool.Pool. Only
// this library implements it.
type Memory interface{ sealedMemory }

// Keep says what becomes of the bytes of suspended memory.
type Keep uint8

const (
	// KeepHost keeps the bytes in host memory, and Resume copies them back.
	KeepHost Keep = iota
	// Drop keeps nothing: after Resume the contents are undefined.
	Drop
)

// String names what is kept.
func (k Keep) String() string {
	return errs.Name("Keep", k, []string{KeepHost: "kept in host memory", Drop: "dropped"})
}

// SuspendOptions determine what becomes of the bytes. The zero value keeps them in host memory.
type SuspendOptions struct {
	Keep Keep
	// Source, if it is not nil, writes the bytes anew within Resume, and nothing is kept.
	Source Source
	// ExcludeAfter is how long Suspend waits for the followers of published memory to read no more,
	// and then again to unmap it. One that takes longer is excluded: it is told (publish.ErrExcluded), and
	// keeps what it has mapped until it closes, which the Report counts and names. 0 excludes none.
	ExcludeAfter time.Duration
	// TrimPools gives back what the devices' default memory pools have and do not use, when the
	// memory has gone: that of other libraries of this process that allocate in stream order, which
	// take it from the driver again when they need it.
	TrimPools bool
	// Guard has scratch memory lie under the addresses while the memory is away, so that a stray
	// access of another library mostly reads and writes something of no meaning, and does not destroy the
	// context. It takes 64 MiB of each device, for as long as any of it is needed, and lies under
	// whole multiples of that: not under what remains of a run of memory, and not between its unmapping
	// and mapping at either end. While Resume waits for room it is gone. What it covers is in the
	// Report; want of memory for it is no error.
	Guard bool
}

// Source brings the contents of memory that was suspended.
type Source interface {
	// Fill writes n bytes at an address, which are a part of m, as work on the stream, or
	// returns when it has written them. Resume calls it for each run of memory that comes
	// back, up to the bytes in use, and of a pool for each run of live blocks (Pool.Find names
	// the one at an address), and then waits for the stream. Operations of m itself
	// still return ErrSuspended: Fill uses the address, which raw work of other goroutines can
	// use as well while Fill runs. m is the object as it was named. Memory that several share is
	// filled once, through the first of them that is resumed. Fill must not resume, suspend or
	// close m. It runs on a goroutine of its own. A panic of it is an error of Resume, as is
	// runtime.Goexit.
	Fill(ctx context.Context, s *cuda.Stream, m Memory, at cuda.Ptr, n int) error
}

// SourceAt is a Source for objects whose byte i is byte i of the reader. The blocks of a pool
// have no such order, so that it returns ErrInvalidArgument for one.
func SourceAt(r io.ReaderAt) Source { return readerSource{r} }

// ordered is memory whose bytes have an order, from an address on that is fixed for life.
type ordered interface{ Ptr() cuda.Ptr }

type readerSource struct{ r io.ReaderAt }

func (f readerSource) Fill(ctx context.Context, s *cuda.Stream, m Memory, at cuda.Ptr, n int) error {
	base := m.(ordered).Ptr() // resolve has checked that it is
	piece := make([]byte, min(n, ioBytes))
	for done := 0; done < n; {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		part := piece[:min(n-done, len(piece))]
		if got, err := f.r.ReadAt(part, int64(at-base)+int64(done)); got < len(part) {
			if err == nil || err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
		if err := s.Upload(at+cuda.Ptr(done), part); err != nil {
			return err
		}
		done += len(part)
	}
	return nil
}

// Suspension is memory that Suspend took away. It is over when all of it was resumed or closed.
// All methods are safe for concurrent use.
type Suspension struct {
	s       *suspend.Suspension
	watched life.Watched
}

// Suspend gives the memory back to the driver, and keeps its addresses: other memory takes its
// place at Resume, with the same contents, access and length. Meanwhile the GPU's memory is
// free for others, of this process or another.
//
// It waits for all work that could use the memory, as Clip does, and copies the bytes out. From
// its beginning on operations of the memory return ErrSuspended, except those that need none: see
// the package documentation. After an error nothing has changed, and when ctx ends first that is one.
// Once memory was given back Suspend does not fail any more, and ignores the end of ctx: what cannot
// be copied then stays.
//
// A chunk goes if the named memory is its only owner: memory that Fork or Move shares goes if
// all who share it are named, and is copied once. What stays is mapped as before, and Report
// says why. Memory that is used by a Host function is refused (ErrInUse), as is memory of another
// process, also if it is followed (ErrNotSupported).
//
// Published memory goes with its followers, before anything else goes: Suspend waits until
// each of them has read what it reads and unmapped the memory, and after Resume they have the new
// memory at their old addresses, as another generation. A follower may refuse (peer.ErrRefused),
// and while a Rewrite is open Suspend returns ErrInUse. See SuspendOptions.ExcludeAfter.
func Suspend(ctx context.Context, o SuspendOptions, m ...Memory) (*Suspension, error) {
	const op = "vmm.Suspend"
	if ctx == nil {
		return nil, errNilContext(op)
	}
	members, err := membersOf(op, m)
	if err != nil {
		return nil, err
	}
	in, err := o.resolve(op, m)
	if err != nil {
		return nil, err
	}
	s, err := suspend.Out(ctx, op, in, members)
	if err != nil {
		return nil, err
	}
	return made(s), nil
}

// SuspendAfter is Suspend without waiting: the memory goes out of use at once. A goroutine copies
// it out and gives it back when the work that is on the streams now is done, and the work of
// copies from and to it that are being submitted during the call. If that fails all is as
// before, and Released says why.
//
// Without a stream it returns ErrInvalidArgument; with one that captures a graph it returns
// ErrCapturing and nothing has changed. System.Drain waits for the goroutine.
func SuspendAfter(o SuspendOptions, streams []*cuda.Stream, m ...Memory) (*Suspension, error) {
	const op = "vmm.SuspendAfter"
	members, err := membersOf(op, m)
	if err != nil {
		return nil, err
	}
	in, err := o.resolve(op, m)
	if err != nil {
		return nil, err
	}
	s, err := suspend.OutAfter(op, in, members, func() (*core.Fence, error) {
		return core.FenceOf(members[0].System(), op, streams)
	})
	if err != nil {
		return nil, err
	}
	return made(s), nil
}

// made returns a Suspension for the user, whose loss is reported.
func made(s *suspend.Suspension) *Suspension {
	p := &Suspension{s: s}
	s.Watch(&p.watched)
	return p
}

func errNilContext(op string) error {
	return errs.Invalid(op, "a nil context", "pass one, such as context.Background()")
}

// membersOf checks what the caller named.
func membersOf(op string, all []Memory) ([]suspend.Member, error) {
	if len(all) == 0 {
		return nil, errs.Invalid(op, "no memory", "name the buffers, arrays, mappings, sparse ranges and pools to suspend")
	}
	seen := map[*suspend.Status]bool{}
	members := make([]suspend.Member, len(all))
	for i, m := range all {
		in := suspend.Of(m)
		switch {
		case in == nil:
			return nil, errs.Invalid(op, "nil memory", "pass buffers, arrays and mappings that were made by this package")
		case seen[in.Status()]:
			return nil, errs.Invalid(op, in.What()+" twice", "name each object once; an Array and its Buffer are one object")
		case in.System() != suspend.Of(all[0]).System():
			return nil, errs.ForeignError(op, "memory")
		}
		seen[in.Status()] = true
		members[i] = in
	}
	return members, nil
}

// resolve returns the options in the inner form.
func (o SuspendOptions) resolve(op string, all []Memory) (suspend.Options, error) {
	if o.Keep > Drop {
		return suspend.Options{}, errs.Invalid(op, o.Keep.String(), "use KeepHost or Drop")
	}
	if o.ExcludeAfter < 0 {
		return suspend.Options{}, errs.Invalid(op, fmt.Sprintf("a limit of %v", o.ExcludeAfter), "give a limit of 0 or more; 0 excludes no follower")
	}
	if s, ok := o.Source.(readerSource); ok {
		if s.r == nil {
			return suspend.Options{}, errs.Invalid(op, "SourceAt of a nil reader", "pass a reader, or nil for Source")
		}
		for _, m := range all {
			if _, ok := m.(ordered); !ok {
				return suspend.Options{}, errs.Invalid(op, "SourceAt for "+suspend.Of(m).What()+", whose bytes have no order", "keep its bytes, or write a Source that knows the blocks by their addresses")
			}
		}
	}
	in := suspend.Options{Keep: o.Keep == KeepHost && o.Source == nil, Followers: o.ExcludeAfter, Guard: o.Guard, Lack: lackOf}
	if o.TrimPools {
		in.After = func() { trimPools(all) }
	}
	if o.Source == nil {
		return in, nil
	}
	public := map[*suspend.Status]Memory{} // a Source keeps the memory reachable
	for _, m := range all {
		public[suspend.Of(m).Status()] = m
	}
	in.Fill = func(ctx context.Context, m suspend.Member, at driver.Ptr, n uint64) error {
		s, err := m.Device().Transfer()
		if err != nil {
			return err
		}
		err = returned(m.System(), "Source.Fill", func() error { return o.Source.Fill(ctx, s, public[m.Status()], cuda.Ptr(at), int(n)) })
		if waited := s.Synchronize(); err == nil {
			err = waited
		}
		return err
	}
	return in, nil
}

func lackOf(op string, m suspend.Member, h *phys.Handle, all uint64, r driver.Result, short error) error {
	var s *budget.Shortage
	if errors.As(short, &s) {
		s.Extend(all, all) // a Resume keeps no part of what it got
	}
	return createError(op, "", m.Device(), int(h.Size), all, 0, h.Asked, r, short)
}

// inner returns the inner state, or an error for a Suspension that no function made.
func (s *Suspension) inner(op string) (*suspend.Suspension, error) {
	if s == nil || s.s == nil {
		return nil, errs.Invalid(op, "a nil Suspension", "make one with Suspend or SuspendAfter")
	}
	return s.s, nil
}

// Resume brings the memory back, with none named all that still sleeps: it creates memory, maps
// it where it was, and copies the bytes in. While the device has not enough memory it waits, if
// ctx ever ends, and then returns ErrOutOfMemory. After an error all of it sleeps on, with
// nothing lost. Memory that is awake stays so, and memory that is not of this Suspension is
// ErrInvalidArgument. Resume waits for a SuspendAfter that has not ended.
func (s *Suspension) Resume(ctx context.Context, m ...Memory) error {
	const op = "vmm.Suspension.Resume"
	in, members, err := s.named(ctx, op, m)
	if err != nil {
		return err
	}
	defer runtime.KeepAlive(s) // it is not lost while this waits
	err = in.Resume(ctx, op, members)
	if e := (*cuda.Error)(nil); errors.As(err, &e) && e.Code != 0 && e.Hint == "" {
		err = fmt.Errorf("%w (the memory sleeps on, with what is kept of it: call Resume again, or Close what is not needed)", err)
	}
	return err
}

// Forget gives up the bytes that are kept of memory that sleeps, with none named of all of it:
// the host memory is free again, and after Resume the contents are undefined. Bytes that are
// shared with memory which is not named are kept. Memory that is awake stays as it is, and
// memory that is not of this Suspension is ErrInvalidArgument. Forget waits, until ctx ends, for
// a SuspendAfter or a Resume that has not ended.
func (s *Suspension) Forget(ctx context.Context, m ...Memory) error {
	const op = "vmm.Suspension.Forget"
	in, members, err := s.named(ctx, op, m)
	if err != nil {
		return err
	}
	defer runtime.KeepAlive(s)
	return in.Forget(ctx, op, members)
}

// named returns the inner state, and what the caller named of it.
func (s *Suspension) named(ctx context.Context, op string, m []Memory) (in *suspend.Suspension, members []suspend.Member, err error) {
	if ctx == nil {
		return nil, nil, errNilContext(op)
	}
	if in, err = s.inner(op); err == nil && len(m) > 0 {
		members, err = membersOf(op, m)
	}
	return in, members, err
}

// Released returns the completion of the suspension: the memory that goes is free then, as far
// as this process is concerned. Its error is that of a SuspendAfter that failed, or says that
// memory was resumed which the driver had not taken.
func (s *Suspension) Released() cuda.Completion { return s.s.Released }

// Tagged returns the buffers, sparse ranges and pools of a System that have the tag and are open,
// to suspend or resume them together; the empty tag names those without one. An array is its Buffer. What was
// imported, or follows a publication, is another process's to suspend, and not among them.
func Tagged(sys *cuda.System, t cuda.Tag) (all []Memory) {
	if sys == nil {
		return nil
	}
	core.SystemOf(sys).Live.Each(func(o *life.Object, owner life.Owner) {
		if o.Label().Tag != string(t) {
			return
		}
		switch m := owner.(type) { // the user has another handle, whose loss is reported
		case *buffer:
			if !m.closer.Closed() && m.imported == nil {
				all = append(all, m.handle())
			}
		case *pages.Range:
			if !m.Closed() {
				all = append(all, publicSparse(m, &Pages{s: m.Source(), dev: m.Device()}))
			}
		case suspend.Listed:
			if in := m.Memory(); in != nil {
				all = append(all, in)
			}
		}
	})
	return all
}

// Report says what became of memory that is suspended, in bytes.
type Report struct {
	// Memory has an entry for each object, in the order in which they were named.
	Memory []Held
	// Asked, Given and Held are the sums: Held stayed.
	Asked, Given, Held int
	// Host is how much host memory keeps the contents.
	Host int
	// Guard says what lies under the addresses with SuspendOptions.Guard.
	Guard Guard
	// Out and In are how long Preview expects the copies to take, at the rates of the latest
	// ones. They are 0 before the first, and in other reports.
	Out, In time.Duration
	// Outside has an entry for each device of the memory: what else is taken of it now.
	Outside []Outside
}

// Guard is scratch memory that lies under suspended memory's addresses, in bytes.
type Guard struct {
	// Memory is how much of the devices' memory it takes, and Covered under how much it lies.
	Memory, Covered int
	// Why says why it does not lie under more, if the driver refused that.
	Why string
}

// Held is the memory of one object. Memory that several share counts for the first of them.
type Held struct {
	// Name says what it is, and Ptr where.
	Name string
	Ptr  cuda.Ptr
	// Asked bytes of memory were to go, and Given of them went back to the driver.
	Asked, Given int
	// Rest says what keeps the others, with one entry for each reason.
	Rest []Rest
}

// Rest is memory that stayed, and why. What the driver said of several chunks is that of the first.
type Rest struct {
	Bytes int
	Why   string
}

// Report says what became of the memory at its suspension. It is empty while SuspendAfter waits
// for the GPU.
func (s *Suspension) Report() Report { return reportOf(s.s.Report()) }

// Preview says what Suspend would do, before anything moves. What other goroutines do meanwhile
// may change it.
func Preview(o SuspendOptions, m ...Memory) (Report, error) {
	const op = "vmm.Preview"
	members, err := membersOf(op, m)
	if err != nil {
		return Report{}, err
	}
	in, err := o.resolve(op, m)
	if err != nil {
		return Report{}, err
	}
	r, err := suspend.Preview(op, in, members)
	if err != nil {
		return Report{}, err
	}
	out, rates := reportOf(r), &members[0].System().Rates
	out.Out, out.In = rates.Out.Expected(r.Host), rates.In.Expected(r.Host)
	return out, nil
}

func reportOf(in suspend.Report) (r Report) {
	r.Host, r.Guard = int(in.Host), Guard{Memory: int(in.Guard.Memory), Covered: int(in.Guard.Covered)}
	if in.Guard.Err != nil {
		r.Guard.Why = in.Guard.Err.Error()
	}
	for _, h := range in.Members {
		out := Held{Name: h.Member.What(), Ptr: cuda.Ptr(h.Member.Base()), Asked: int(h.Asked), Given: int(h.Given)}
		for _, rest := range h.Rest {
			out.Rest = append(out.Rest, Rest{int(rest.Bytes), rest.Why})
		}
		r.Memory = append(r.Memory, out)
		r.Asked += out.Asked
		r.Given += out.Given
		r.Held += out.Asked - out.Given
	}
	r.Outside = outsideOf(in.Members)
	return r
}
