package drivertest

import (
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// discards are the rules of how discards of managed memory are ordered with the
// work beside them. The driver is called as programs do, without waiting in
// between: that is where it differs from its documentation.
var discards = []Case{
	{
		Name:  "memset, plain batch discard and memset on one stream, and the same with the discard on another stream that events order between the two, with nothing awaited in between",
		Says:  "the CPU reads something else than what was written last, not every time: behind work that is not done yet the driver orders a plain discard with nothing, events and synchronizations included",
		Needs: needs(concurrentAccess, batches, cpuReaches),
		Run: func(t *T) {
			for name, discard := range map[string]func(o *overwriting){
				"on one stream": func(o *overwriting) { o.plain(o.s) },
				"on another":    func(o *overwriting) { o.via(o.plain) },
			} {
				lost := 0
				o := t.overwriting()
				for range patientRounds {
					if !o.round(discard) {
						lost++
						break
					}
				}
				if lost == 0 {
					t.Errorf("%s: the second memset was kept in %d of %d rounds: the driver orders plain discards now", name, patientRounds, patientRounds)
				}
			}
		},
	},
	{
		Name:  "memset, synchronize, plain batch discard and memset on one stream, also while another stream works",
		Says:  "the CPU reads what was written last: on an idle stream the discard is done inside the call",
		Needs: needs(concurrentAccess, batches, cpuReaches),
		Run: func(t *T) {
			o := t.overwriting()
			busy := t.newStream(t.ctx, driver.StreamNonBlocking)
			h := t.hold(t.ctx, busy)
			o.always("an idle stream", func(o *overwriting) {
				t.ok(t.D.StreamSynchronize(t.ctx, o.s), "synchronize")
				o.plain(o.s)
			})
			t.didNotWait(h, "a discard")
		},
	},
	{
		Name:  "memset, plain batch discard, prefetch to the device or to HOST and memset on one stream, with nothing awaited in between",
		Says:  "the CPU reads what was written last",
		Needs: needs(concurrentAccess, batches, cpuReaches),
		Run: func(t *T) {
			o := t.overwriting()
			for _, to := range []driver.Location{deviceLocation(t.Device), theHost} {
				o.always("a prefetch behind it", func(o *overwriting) {
					o.plain(o.s)
					t.ok(t.prefetch(o.p, o.n, to, o.s), "prefetch")
				})
			}
		},
	},
	{
		Name:  "memset, batch discard-and-prefetch to the device, to HOST or to HOST_NUMA and memset on one stream, and the same with the discard on another stream that events order between the two, with nothing awaited in between",
		Says:  "the CPU reads what was written last",
		Needs: needs(concurrentAccess, batches, locationForms, cpuReaches),
		Run: func(t *T) {
			o := t.overwriting()
			for _, to := range []driver.Location{deviceLocation(t.Device), theHost, nodeZero} {
				both := func(s driver.Stream) {
					t.ok(t.D.MemDiscardAndPrefetchBatchAsync(t.ctx, []driver.Ptr{o.p}, []uint64{o.n}, []driver.Location{to}, []uint64{0}, s), "discard and prefetch")
				}
				o.always("on one stream", func(o *overwriting) { both(o.s) })
				o.always("on another", func(o *overwriting) { o.via(both) })
			}
		},
	},
	{
		Name:  "memset, prefetch or batch prefetch to the device or to HOST, and memset on one stream, and the same with the prefetch on another stream that events order between the two, with nothing awaited in between",
		Says:  "the CPU reads what was written last",
		Needs: needs(concurrentAccess, batches, cpuReaches),
		Run: func(t *T) {
			o := t.overwriting()
			for _, to := range []driver.Location{deviceLocation(t.Device), theHost} {
				one := func(s driver.Stream) { t.ok(t.prefetch(o.p, o.n, to, s), "prefetch") }
				batch := func(s driver.Stream) {
					t.ok(t.D.MemPrefetchBatchAsync(t.ctx, []driver.Ptr{o.p, o.p + driver.Ptr(o.n/2)}, []uint64{o.n / 2, o.n / 2}, []driver.Location{to}, []uint64{0}, s), "batch prefetch")
				}
				for _, fetch := range []func(driver.Stream){one, batch} {
					o.always("on one stream", func(o *overwriting) { fetch(o.s) })
					o.always("on another", func(o *overwriting) { o.via(fetch) })
				}
			}
		},
	},
	{
		Name:  "memset, batch discard-and-prefetch of parts of an allocation, in pages of 4 KiB, and memset of them on one stream",
		Says:  "what lies beside the parts keeps its contents",
		Needs: needs(concurrentAccess, batches, cpuReaches),
		Run: func(t *T) {
			o := t.overwriting()
			page := uint64(osPage)
			var parts []driver.Ptr
			var sizes []uint64
			inside := map[uint64]bool{} // pages
			for i := range uint64(4) {
				first, n := i*o.n/4/page+1+i, 3+5*i
				parts, sizes = append(parts, o.p+driver.Ptr(first*page)), append(sizes, n*page)
				for k := range n {
					inside[first+k] = true
				}
			}
			for range 3 {
				t.ok(t.D.MemsetD8Async(t.ctx, o.p, 0x11, o.n, o.s), "memset of all")
				t.ok(t.D.MemDiscardAndPrefetchBatchAsync(t.ctx, parts, sizes, []driver.Location{deviceLocation(t.Device)}, []uint64{0}, o.s), "discard and prefetch")
				for i, p := range parts {
					t.ok(t.D.MemsetD8Async(t.ctx, p, 0x22, sizes[i], o.s), "memset of a part")
				}
				t.ok(t.D.StreamSynchronize(t.ctx, o.s), "synchronize")
				data := o.bytes()
				for at := uint64(0); at < o.n; at += page {
					want := byte(0x11)
					if inside[at/page] {
						want = 0x22
					}
					if data[at] != want || data[at+page-1] != want {
						t.Fatalf("the page at %#x reads %#x and %#x, want %#x", at, data[at], data[at+page-1], want)
					}
				}
			}
		},
	},
	{
		Name:  "managed memory that is freed behind a plain batch discard on a busy stream, and new memory at its address",
		Says:  "keeps what is written to it: the free waits for the discard",
		Needs: needs(concurrentAccess, batches, cpuReaches),
		Run: func(t *T) {
			for range 3 {
				o := t.overwriting()
				t.ok(t.D.MemsetD8Async(t.ctx, o.p, 0x11, o.n, o.s), "memset")
				o.plain(o.s)
				t.end("managed memory", uint64(o.p))
				o.p = t.managed(o.n)
				t.ok(t.D.MemsetD8Async(t.ctx, o.p, 0x22, o.n, o.s), "memset of the new memory")
				o.reads(0x22, "new memory")
			}
		},
	},
}

// patientRounds is how often a write that may be lost is tried: on an H200 the
// first round of 64 MiB lost it every time.
const patientRounds = 20

// overwriting is managed memory that is written, discarded and written again.
type overwriting struct {
	t           *T
	s, other    driver.Stream
	before, end driver.Event
	p           driver.Ptr
	n           uint64
	v           byte
}

func (t *T) overwriting() *overwriting {
	t.Helper()
	o := &overwriting{t: t, n: 64 * mib, s: t.newStream(t.ctx, driver.StreamNonBlocking), other: t.newStream(t.ctx, driver.StreamNonBlocking),
		before: t.newEvent(t.ctx), end: t.newEvent(t.ctx)}
	if t.software {
		o.n = 2 * mib
	}
	o.p = t.managed(o.n)
	return o
}

// plain discards all of the memory, without a prefetch.
func (o *overwriting) plain(s driver.Stream) {
	o.t.Helper()
	o.t.ok(o.t.F.MemDiscardBatchAsync(o.t.ctx, []driver.Ptr{o.p}, []uint64{o.n}, s), "discard")
}

// via has f work on the other stream, in the order of the first.
func (o *overwriting) via(f func(s driver.Stream)) {
	t := o.t
	t.Helper()
	t.ok(t.D.EventRecord(t.ctx, o.before, o.s), "record an event")
	t.ok(t.D.StreamWaitEvent(t.ctx, o.other, o.before), "wait for it")
	f(o.other)
	t.ok(t.D.EventRecord(t.ctx, o.end, o.other), "record an event")
	t.ok(t.D.StreamWaitEvent(t.ctx, o.s, o.end), "wait for it")
}

// round writes, discards and writes again, and reports whether the CPU reads what
// was written last: at once and a little later.
func (o *overwriting) round(discard func(o *overwriting)) bool {
	t := o.t
	t.Helper()
	o.v += 2
	t.ok(t.D.MemsetD8Async(t.ctx, o.p, o.v-1, o.n, o.s), "memset")
	discard(o)
	t.ok(t.D.MemsetD8Async(t.ctx, o.p, o.v, o.n, o.s), "memset")
	t.ok(t.D.StreamSynchronize(t.ctx, o.s), "synchronize")
	if o.wrong(o.v) >= 0 {
		return false
	}
	if t.software { // it works late what it may
		time.Sleep(t.glance() / 4)
	}
	return o.wrong(o.v) < 0
}

// always requires that several rounds keep what was written last.
func (o *overwriting) always(what string, discard func(o *overwriting)) {
	o.t.Helper()
	for i := range 4 {
		if !o.round(discard) {
			o.t.Fatalf("%s: the second memset was lost in round %d", what, i)
		}
	}
}

func (o *overwriting) reads(v byte, what string) {
	o.t.Helper()
	o.t.ok(o.t.D.StreamSynchronize(o.t.ctx, o.s), "synchronize")
	if at := o.wrong(v); at >= 0 {
		o.t.Fatalf("%s: the CPU reads %#x at %#x, want %#x", what, o.bytes()[at], at, v)
	}
}

// wrong is the offset of the first page that does not begin and end with v, or
// -1.
func (o *overwriting) wrong(v byte) int {
	data := o.bytes()
	for at := 0; at < len(data); at += osPage {
		if data[at] != v || data[at+osPage-1] != v {
			return at
		}
	}
	return -1
}

func (o *overwriting) bytes() []byte { return unsafe.Slice((*byte)(hostPointer(o.p)), o.n) }
