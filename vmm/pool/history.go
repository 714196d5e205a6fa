package pool

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/epoch"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
)

// HistoryOptions change what StartHistory keeps.
type HistoryOptions struct {
	// Events is how many of the latest are kept: at most 4,194,304, which take some
	// 400 MB. 0 is 65,536.
	Events int
	// Stacks keeps the caller's stack, for about a microsecond and 200 bytes each.
	Stacks bool
}

// mostEvents is how many events a history keeps at most.
const mostEvents = 1 << 22

// Event is an allocation or a free that succeeded.
type Event struct {
	Op    trace.Kind `json:"op"` // trace.Alloc or trace.Free
	Time  time.Time  `json:"time"`
	Ptr   cuda.Ptr   `json:"ptr"`
	Bytes int        `json:"bytes"` // as requested
	Tag   Tag        `json:"tag,omitempty"`
	// Stream is the raw handle of the block's stream.
	Stream uintptr `json:"stream"`
	// Used are the raw handles of the other streams that a free named.
	Used []uintptr `json:"used,omitempty"`
	// Stack is the caller's stack, the innermost function first.
	Stack []string `json:"stack,omitempty"`
}

// History is a list of events, the oldest first.
type History []Event

// StartHistory keeps the pool's latest allocations and frees from now on, and
// discards the history so far. Each event costs several hundred nanoseconds, under a
// lock that all goroutines share.
func (p *Pool) StartHistory(o HistoryOptions) {
	if o.Events <= 0 {
		o.Events = 1 << 16
	}
	o.Events = min(o.Events, mostEvents)
	r := &ring{events: make([]event, 0, o.Events), size: o.Events}
	if o.Stacks {
		r.stacks = make([]site, o.Events)
	}
	p.setHistory(r)
}

// StopHistory stops recording, and discards the history.
func (p *Pool) StopHistory() { p.setHistory(nil) }

func (p *Pool) setHistory(r *ring) {
	back := p.aside(true)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.history.Store(r)
	for _, sh := range p.shards {
		sh.mu.Lock()
		if sh.watch == nil && r != nil {
			sh.watch = p.newWatch()
		}
		if sh.watch != nil {
			sh.watch.history = r
		}
		sh.mu.Unlock()
	}
	if p.cacheBack != nil {
		p.cacheBack()
	}
	if p.cacheBack = back; r == nil {
		p.cacheBack = nil
		back()
	}
}

// History is what was kept since StartHistory. It holds up allocations only to
// copy some of the events at a time; of the events that newer ones replace meanwhile
// the history lacks the oldest.
func (p *Pool) History() History {
	r := p.history.Load()
	if r == nil {
		return nil
	}
	var kept History
	stacks := stackNames{}
	events, sites := make([]event, 0, eventsAtOnce), make([]site, 0, eventsAtOnce)
	for from := uint64(0); ; {
		events, sites, from = r.read(from, events[:0], sites[:0])
		if len(events) == 0 {
			return kept
		}
		for i := range events {
			e := events[i].event()
			if len(sites) > 0 {
				e.Stack = stacks.of(sites[i])
			}
			kept = append(kept, e)
		}
	}
}

// eventsAtOnce is how many events History copies under one hold of the ring's lock.
const eventsAtOnce = 256

// read copies the events from a number on, or from the oldest that is still kept,
// as many as there is room for, and returns the number to go on with.
func (r *ring) read(from uint64, events []event, sites []site) ([]event, []site, uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	from = max(from, r.count-uint64(len(r.events)))
	for ; from < r.count && len(events) < cap(events); from++ {
		at := int(from % uint64(r.size))
		events = append(events, r.events[at])
		if r.stacks != nil {
			sites = append(sites, r.stacks[at])
		}
	}
	return events, sites, from
}

// ring is a history that is being kept. Its lock is a leaf: it is taken under those of
// shards.
type ring struct {
	mu     lock.Mutex[lock.Leaf]
	size   int
	count  uint64 // of all events: the latest are at their numbers modulo the size
	events []event
	stacks []site // of the events, where they are kept
}

// event is an Event as it is kept.
type event struct {
	kind   trace.Kind
	tag    Tag
	time   time.Time
	ptr    driver.Ptr
	bytes  uint64
	stream driver.Stream
	used   []driver.Stream
}

// add keeps what happened to a block, whose shard's lock is held.
func (r *ring) add(kind trace.Kind, h *header, used []epoch.Point) {
	e := event{kind: kind, tag: h.tag, time: time.Now(), ptr: h.at(), bytes: h.asked(), stream: h.home.shard.stream.Handle}
	for _, u := range used {
		e.used = append(e.used, u.Clock.Stream().Handle)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	at := int(r.count % uint64(r.size))
	if r.count++; len(r.events) < r.size {
		r.events = append(r.events, e)
	} else {
		r.events[at] = e
	}
	if r.stacks != nil {
		r.stacks[at] = caller()
	}
}

func (e *event) event() Event {
	public := Event{Op: e.kind, Time: e.time, Ptr: cuda.Ptr(e.ptr), Bytes: int(e.bytes), Tag: e.tag, Stream: uintptr(e.stream)}
	for _, u := range e.used {
		public.Used = append(public.Used, uintptr(u))
	}
	return public
}

// lines returns the frames of a stack as text.
func (s *site) lines() (all []string) {
	for _, f := range s.frames() {
		all = append(all, line(f))
	}
	return all
}

func line(f runtime.Frame) string { return fmt.Sprintf("%s (%s:%d)", f.Function, f.File, f.Line) }

// Trace is the history as a trace, to be stored, and replayed as a benchmark.
// Frees of blocks that were allocated before the history began are left out.
// Streams are numbered as they come; those beyond trace.MaxStreams share the
// numbers of the others.
func (h History) Trace(name string) *trace.Trace {
	t := &trace.Trace{Name: fitting(name), Streams: 1}
	streams := map[uintptr]uint32{}
	stream := func(handle uintptr) uint32 {
		n, known := streams[handle]
		if !known {
			n = uint32(len(streams) % trace.MaxStreams)
			streams[handle] = n
			t.Streams = max(t.Streams, int(n)+1)
		}
		return n
	}
	live := map[cuda.Ptr]uint32{}
	next := uint32(0)
	for _, e := range h {
		if e.Op == trace.Alloc {
			live[e.Ptr] = next
			t.Ops = append(t.Ops, trace.Op{
				Kind: trace.Alloc, ID: next, Bytes: e.Bytes, Stream: stream(e.Stream), Tag: tagOf(t, fitting(e.Tag.String())),
			})
			next++
			continue
		}
		id, known := live[e.Ptr]
		if !known {
			continue
		}
		delete(live, e.Ptr)
		for _, u := range e.Used {
			t.Ops = append(t.Ops, trace.Op{Kind: trace.Use, ID: id, Stream: stream(u)})
		}
		t.Ops = append(t.Ops, trace.Op{Kind: trace.Free, ID: id})
	}
	return t
}

// tagOf is the number of a tag in the trace; there is room for so many.
func tagOf(t *trace.Trace, tag string) uint32 {
	at := slices.Index(t.Tags, tag)
	switch {
	case at >= 0:
	case len(t.Tags) < trace.MaxTags:
		at = len(t.Tags)
		t.Tags = append(t.Tags, tag)
	default:
		at = 0
	}
	return uint32(at)
}

// fitting is a text that a trace takes.
func fitting(s string) string {
	return strings.ToValidUTF8(s[:min(len(s), trace.MaxText)], "")
}

// watch records every block of a shard for statistics, stacks and the history. A shard
// without these has none, so that a warm request tests one pointer.
type watch struct {
	stats   *statistics
	tags    []TagStats // of the shard, by tag
	totals  totals
	sites   map[*header]site
	history *ring
}

func (p *Pool) newWatch() *watch {
	if !p.o.Statistics && !p.o.Track && p.history.Load() == nil {
		return nil
	}
	w := &watch{stats: p.stats, history: p.history.Load()}
	if p.o.Track {
		w.sites = map[*header]site{}
	}
	return w
}

// allocated records a block that is live now. The caller holds the shard's lock.
func (w *watch) allocated(h *header) {
	if w.stats != nil {
		w.stats.allocated(w, h)
	}
	if w.sites != nil {
		w.sites[h] = caller()
	}
	if w.history != nil {
		w.history.add(trace.Alloc, h, nil)
	}
}

// freed records a block that is not live any more. The caller holds the shard's lock.
func (w *watch) freed(h *header, used []epoch.Point) {
	if w.stats != nil {
		w.stats.freed(w, h)
	}
	if w.sites != nil {
		delete(w.sites, h)
	}
	if w.history != nil {
		w.history.add(trace.Free, h, used)
	}
}
