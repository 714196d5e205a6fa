package sim

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

const racePTX = `
.version 7.0
.target sm_70
.address_size 64

.visible .entry sim_test_publish(.param .u64 data, .param .u64 words) { ret; }
.visible .entry sim_test_take(.param .u64 data, .param .u64 words) { ret; }
`

func init() {
	// It writes 8 bytes, says so, writes the next 8, and goes on until the second word is set.
	RegisterKernel("sim_test_publish", func(k *Kernel) {
		data, words := Param[uint64](k, 0), Param[uint64](k, 1)
		Store(k, data, []uint64{1})
		k.StoreWord(words, 1)
		Store(k, data+8, []uint64{2})
		for k.LoadWord(words+8) == 0 {
			k.Sleep(100 * time.Microsecond)
		}
	})
	// It reads 8 bytes, and the next 8, once the first word is set.
	RegisterKernel("sim_test_take", func(k *Kernel) {
		data, words := Param[uint64](k, 0), Param[uint64](k, 1)
		for k.LoadWord(words) == 0 {
			k.Sleep(100 * time.Microsecond)
		}
		Load[uint64](k, data, 1)
		Load[uint64](k, data+8, 1)
	})
}

// racer is a machine that looks for races, with two streams that nothing orders and that
// stand still until the work of a row is submitted, so that no work is done by luck before
// other work is submitted.
type racer struct {
	*rig
	a, b, c driver.Stream // c is free to work
	p       driver.Ptr    // memory
	words   driver.Ptr
	ready   chan struct{} // for rows that need one
}

func (x *racer) write(s driver.Stream, off, n uint64) {
	x.t.Helper()
	x.ok(x.MemsetD8Async(x.ctx, x.p+driver.Ptr(off), 1, n, s))
}

func (x *racer) read(s driver.Stream, off, n uint64) {
	x.t.Helper()
	to := map[driver.Stream]driver.Ptr{x.a: 4096, x.b: 8192}[s] // each has a place of its own
	x.ok(x.MemcpyDtoDAsync(x.ctx, x.p+to, x.p+driver.Ptr(off), n, s))
}

// record returns an event behind the work of a stream.
func (x *racer) record(s driver.Stream) driver.Event {
	x.t.Helper()
	e := x.event()
	x.ok(x.EventRecord(x.ctx, e, s))
	return e
}

// order puts what comes on one stream behind what is on another.
func (x *racer) order(first, second driver.Stream) {
	x.t.Helper()
	x.ok(x.StreamWaitEvent(x.ctx, second, x.record(first)))
}

func (x *racer) release(s driver.Stream) { x.m.Release(uintptr(s)) }

func (x *racer) launch(name string, s driver.Stream) {
	x.t.Helper()
	m, res := x.ModuleLoadData(x.ctx, []byte(racePTX+"\x00"))
	x.ok(res)
	x.t.Cleanup(func() { x.ModuleUnload(x.ctx, m) })
	f, res := x.ModuleGetFunction(x.ctx, m, name)
	x.ok(res)
	params := binary.NativeEndian.AppendUint64(nil, uint64(x.p))
	x.ok(x.LaunchKernel(x.ctx, f, one, binary.NativeEndian.AppendUint64(params, uint64(x.words)), s))
}

// call puts a call of a function on a stream.
func (x *racer) call(s driver.Stream, f func()) {
	x.t.Helper()
	h := x.NewHostFunc(f)
	x.t.Cleanup(func() { x.ReleaseHostFunc(h, func() {}) })
	x.ok(x.LaunchHostFunc(x.ctx, s, h))
}

func (x *racer) set(s driver.Stream, word driver.Ptr) {
	x.t.Helper()
	x.ok(x.StreamWriteValue64(x.ctx, s, x.words+8*word, 1))
}

func (x *racer) await(s driver.Stream, word driver.Ptr) {
	x.t.Helper()
	x.ok(x.StreamWaitValue64(x.ctx, s, x.words+8*word, 1))
}

// until asks again until it is done.
func (x *racer) until(done func() driver.Result) {
	x.t.Helper()
	for end := time.Now().Add(time.Minute); done() == driver.NotReady; time.Sleep(100 * time.Microsecond) {
		require.True(x.t, time.Now().Before(end))
	}
}

// graph captures work, which begins on stream s, and returns what launches it.
func (x *racer) graph(s driver.Stream, work func()) driver.GraphExec {
	x.t.Helper()
	x.begin(s)
	work()
	return x.end(s)
}

// branches are two parallel parts of a capture that begins on stream a.
func (x *racer) branches(first, second func()) func() {
	return func() {
		x.order(x.a, x.b)
		first()
		second()
		x.order(x.b, x.a)
	}
}

// alias maps the memory at a second address.
func (x *racer) alias() driver.Ptr {
	x.t.Helper()
	h, res := x.MemRetainAllocationHandle(x.p)
	x.ok(res)
	p := x.reserve(chunk)
	x.ok(x.MemMap(p, chunk, 0, h))
	x.ok(x.MemRelease(h))
	x.allow(p, chunk, 0)
	x.t.Cleanup(func() {
		x.ok(x.MemUnmap(p, chunk))
		x.ok(x.MemAddressFree(p, chunk))
	})
	return p
}

// orderings are programs and whether they race. What a row submits lies still until its end,
// unless it releases a stream itself.
var orderings = []struct {
	name  string
	races int
	do    func(x *racer)
}{
	{"two streams write", 1, func(x *racer) { x.write(x.a, 0, 8); x.write(x.b, 0, 8) }},
	{"one writes, another reads", 1, func(x *racer) { x.write(x.a, 0, 8); x.read(x.b, 4, 8) }},
	{"one writes and reads, another reads", 1, func(x *racer) { x.write(x.a, 0, 8); x.read(x.a, 0, 8); x.read(x.b, 0, 8) }},
	{"two streams read", 0, func(x *racer) { x.read(x.a, 0, 8); x.read(x.b, 0, 8) }},
	{"two streams write, and one behind one of them", 2, func(x *racer) {
		x.write(x.a, 0, 8)
		x.write(x.b, 0, 8)
		x.order(x.b, x.c)
		x.write(x.c, 0, 8)
	}},
	{"neighboring bytes", 0, func(x *racer) { x.write(x.a, 0, 8); x.write(x.b, 8, 8) }},
	{"one stream", 0, func(x *racer) { x.write(x.a, 0, 8); x.write(x.a, 0, 8); x.read(x.a, 0, 8) }},
	{"two addresses of one memory", 1, func(x *racer) {
		second := x.alias()
		x.write(x.a, 0, 8)
		x.ok(x.MemsetD8Async(x.ctx, second, 2, 8, x.b))
	}},
	{"an event", 0, func(x *racer) { x.write(x.a, 0, 8); x.order(x.a, x.b); x.write(x.b, 0, 8) }},
	{"an event by way of a third stream", 0, func(x *racer) {
		x.write(x.a, 0, 8)
		x.order(x.a, x.c)
		x.order(x.c, x.b)
		x.write(x.b, 0, 8)
	}},
	{"an event that the stream waited for before other work", 0, func(x *racer) {
		x.write(x.a, 0, 8)
		x.order(x.a, x.b)
		x.write(x.b, 16, 8)
		x.write(x.b, 0, 8)
	}},
	{"an event, and then another stream's", 0, func(x *racer) {
		d := x.stream(driver.StreamNonBlocking)
		x.m.Hold(uintptr(d))
		x.write(x.a, 0, 8)
		x.order(x.a, x.b)
		x.order(d, x.b)
		x.write(x.b, 0, 8)
		x.release(d)
	}},
	{"an event that was recorded too early", 1, func(x *racer) {
		e := x.record(x.a)
		x.write(x.a, 0, 8)
		x.ok(x.StreamWaitEvent(x.ctx, x.b, e))
		x.write(x.b, 0, 8)
	}},
	{"an event that the other stream waits for", 1, func(x *racer) {
		x.write(x.a, 0, 8)
		x.write(x.b, 0, 8)
		x.order(x.a, x.b)
	}},

	{"the legacy stream and one that does not block", 1, func(x *racer) {
		x.write(x.a, 0, 8)
		x.write(driver.StreamLegacy, 0, 8)
	}},
	{"a blocking stream, then the legacy one", 0, func(x *racer) {
		s := x.stream(driver.StreamDefault)
		x.m.Hold(uintptr(s))
		x.write(s, 0, 8)
		x.write(driver.StreamLegacy, 0, 8)
		x.release(s)
	}},
	{"the legacy stream, then a blocking one", 0, func(x *racer) {
		x.m.Hold(0)
		x.write(driver.StreamLegacy, 0, 8)
		x.write(x.stream(driver.StreamDefault), 0, 8)
		x.release(0)
	}},
	{"blocking streams by way of the legacy one", 0, func(x *racer) {
		s := x.stream(driver.StreamDefault)
		x.m.Hold(uintptr(s))
		x.write(s, 0, 8)
		x.write(driver.StreamLegacy, 16, 8)
		x.write(x.stream(driver.StreamDefault), 0, 8)
		x.release(s)
	}},
	{"blocking streams alone", 1, func(x *racer) {
		s, other := x.stream(driver.StreamDefault), x.stream(driver.StreamDefault)
		x.m.Hold(uintptr(s))
		x.m.Hold(uintptr(other))
		x.write(s, 0, 8)
		x.write(other, 0, 8)
		x.release(s)
		x.release(other)
	}},

	{"a wait of the host for the stream", 0, func(x *racer) {
		x.write(x.c, 0, 8)
		x.ok(x.lib.StreamSynchronize(x.ctx, x.c))
		x.write(x.b, 0, 8)
	}},
	{"a wait of the host for an event", 0, func(x *racer) {
		x.write(x.c, 0, 8)
		x.ok(x.lib.EventSynchronize(x.ctx, x.record(x.c)))
		x.write(x.b, 0, 8)
	}},
	{"a wait of the host for another event", 1, func(x *racer) {
		x.write(x.a, 0, 8)
		x.ok(x.lib.EventSynchronize(x.ctx, x.record(x.c)))
		x.write(x.b, 0, 8)
	}},
	{"a query of the stream", 0, func(x *racer) {
		x.write(x.c, 0, 8)
		x.until(func() driver.Result { return x.lib.StreamQuery(x.ctx, x.c) })
		x.write(x.b, 0, 8)
	}},
	{"a query of an event", 0, func(x *racer) {
		x.write(x.c, 0, 8)
		e := x.record(x.c)
		x.until(func() driver.Result { return x.lib.EventQuery(x.ctx, e) })
		x.write(x.b, 0, 8)
	}},
	{"a wait for the context", 0, func(x *racer) {
		x.write(x.c, 0, 8)
		x.ok(x.CtxSynchronize(x.ctx))
		x.write(x.b, 0, 8)
	}},

	{"a function of the host that tells of it", 0, func(x *racer) {
		x.write(x.c, 0, 8)
		x.call(x.c, func() { close(x.ready) })
		<-x.ready
		x.write(x.b, 0, 8)
	}},
	{"a function of the host that waits for it", 0, func(x *racer) {
		x.call(x.c, func() { <-x.ready })
		x.write(x.c, 0, 8)
		x.write(x.a, 0, 8)
		x.release(x.a)
		x.ok(x.lib.StreamSynchronize(x.ctx, x.a))
		close(x.ready)
	}},
	{"a function of the host of a graph that goes on", 0, func(x *racer) {
		e := x.graph(x.c, func() {
			x.write(x.c, 0, 8)
			x.call(x.c, func() { close(x.ready) })
			x.await(x.c, 1)
		})
		x.ok(x.GraphLaunch(x.ctx, e, x.c))
		<-x.ready
		x.write(x.b, 0, 8)
		x.set(x.b, 1)
	}},

	{"a word that a stream writes", 0, func(x *racer) {
		x.write(x.a, 0, 8)
		x.set(x.a, 0)
		x.await(x.b, 0)
		x.write(x.b, 0, 8)
	}},
	{"a word that was written before it", 1, func(x *racer) {
		x.set(x.c, 0)
		x.await(x.b, 0)
		x.release(x.b)
		x.ok(x.lib.StreamSynchronize(x.ctx, x.b))
		x.m.Hold(uintptr(x.b))
		x.write(x.a, 0, 8)
		x.write(x.b, 0, 8)
	}},
	{"a word, by way of an event", 0, func(x *racer) {
		x.write(x.a, 0, 8)
		x.set(x.a, 0)
		x.await(x.c, 0)
		x.order(x.c, x.b)
		x.write(x.b, 0, 8)
	}},
	{"a word that a graph writes and goes on", 0, func(x *racer) {
		e := x.graph(x.a, func() {
			x.write(x.a, 0, 8)
			x.set(x.a, 0)
			x.await(x.a, 1)
		})
		x.ok(x.GraphLaunch(x.ctx, e, x.a))
		x.await(x.b, 0)
		x.write(x.b, 0, 8)
		x.set(x.b, 1)
	}},
	{"a word that a kernel writes and goes on", 0, func(x *racer) {
		x.launch("sim_test_publish", x.a)
		x.await(x.b, 0)
		x.read(x.b, 0, 8)
		x.set(x.b, 1)
	}},
	{"a word that a kernel writes before the rest", 1, func(x *racer) {
		x.launch("sim_test_publish", x.a)
		x.await(x.b, 0)
		x.call(x.b, func() { time.Sleep(20 * time.Millisecond) })
		x.write(x.b, 8, 8)
		x.set(x.b, 1)
	}},
	{"a word that a kernel waits for", 0, func(x *racer) {
		x.launch("sim_test_take", x.b)
		x.write(x.a, 0, 8)
		x.set(x.a, 0)
	}},
	{"two writers of a word", 0, func(x *racer) { x.set(x.a, 0); x.set(x.b, 0) }},

	{"launches of one graph", 0, func(x *racer) {
		e := x.graph(x.c, func() { x.write(x.c, 0, 8) })
		x.ok(x.GraphLaunch(x.ctx, e, x.a))
		x.ok(x.GraphLaunch(x.ctx, e, x.b))
	}},
	{"launches of two graphs", 1, func(x *racer) {
		e := x.graph(x.c, func() { x.write(x.c, 0, 8) })
		f := x.graph(x.c, func() { x.write(x.c, 0, 8) })
		x.ok(x.GraphLaunch(x.ctx, e, x.a))
		x.ok(x.GraphLaunch(x.ctx, f, x.b))
	}},
	{"parallel branches of a graph", 1, func(x *racer) {
		e := x.graph(x.a, x.branches(func() { x.write(x.a, 0, 8) }, func() { x.write(x.b, 0, 8) }))
		x.ok(x.GraphLaunch(x.ctx, e, x.a))
	}},
	{"branches of a graph that an event orders", 0, func(x *racer) {
		e := x.graph(x.a, func() { x.write(x.a, 0, 8); x.order(x.a, x.b); x.write(x.b, 0, 8); x.order(x.b, x.a) })
		x.ok(x.GraphLaunch(x.ctx, e, x.a))
	}},
	{"parallel graphs in a graph", 1, func(x *racer) {
		inner := x.graph(x.c, func() { x.write(x.c, 0, 8) })
		other := x.graph(x.c, func() { x.write(x.c, 0, 8) })
		e := x.graph(x.a, x.branches(
			func() { x.ok(x.GraphLaunch(x.ctx, inner, x.a)) },
			func() { x.ok(x.GraphLaunch(x.ctx, other, x.b)) }))
		x.ok(x.GraphLaunch(x.ctx, e, x.a))
	}},
	{"a graph in a graph, and what comes behind it there", 0, func(x *racer) {
		inner := x.graph(x.c, func() { x.write(x.c, 0, 8) })
		e := x.graph(x.a, func() { x.ok(x.GraphLaunch(x.ctx, inner, x.a)); x.write(x.a, 0, 8) })
		x.ok(x.GraphLaunch(x.ctx, e, x.a))
	}},

	{"memory of a stream, on another one", 1, func(x *racer) {
		p, res := x.MemAllocAsync(x.ctx, chunk, x.c)
		x.ok(res)
		x.ok(x.MemsetD8Async(x.ctx, p, 1, 8, x.b))
		x.ok(x.lib.StreamSynchronize(x.ctx, x.c)) // by luck it is there
		x.release(x.b)
		x.ok(x.lib.StreamSynchronize(x.ctx, x.b))
		x.ok(x.MemFreeAsync(x.ctx, p, x.a))
	}},
	{"memory of a stream, freed on another one", 1, func(x *racer) {
		p, res := x.MemAllocAsync(x.ctx, chunk, x.c)
		x.ok(res)
		x.ok(x.lib.StreamSynchronize(x.ctx, x.c))
		x.ok(x.MemsetD8Async(x.ctx, p, 1, 8, x.a))
		x.ok(x.MemFreeAsync(x.ctx, p, x.b))
		x.release(x.a)
		x.ok(x.lib.StreamSynchronize(x.ctx, x.a)) // by luck it is still there
	}},
	{"memory of a stream that is freed behind its last use", 0, func(x *racer) {
		p, res := x.MemAllocAsync(x.ctx, chunk, x.a)
		x.ok(res)
		x.order(x.a, x.b)
		x.ok(x.MemsetD8Async(x.ctx, p, 1, 8, x.b))
		x.order(x.b, x.a)
		x.ok(x.MemFreeAsync(x.ctx, p, x.a))
	}},
	{"pinned memory", 1, func(x *racer) {
		h := pointer(x.pinned(8))
		x.ok(x.MemcpyDtoHAsync(x.ctx, h, x.p, 8, x.a))
		x.ok(x.MemcpyDtoHAsync(x.ctx, h, x.p, 8, x.b))
	}},
	{"pinned memory that the host writes", 0, func(x *racer) {
		h := x.pinned(8)
		x.ok(x.MemcpyHtoDAsync(x.ctx, x.p, pointer(h), 8, x.a))
		h[0] = 1
	}},
	{"managed memory", 1, func(x *racer) {
		p, res := x.MemAllocManaged(x.ctx, 4096, driver.AttachGlobal)
		x.ok(res)
		x.t.Cleanup(func() { x.ok(x.MemFree(x.ctx, p)) })
		x.ok(x.MemsetD8Async(x.ctx, p, 1, 8, x.a))
		x.ok(x.MemsetD8Async(x.ctx, p, 1, 8, x.b))
	}},
	{"a kernel that touches the memory twice", 1, func(x *racer) {
		x.set(x.c, 0)
		x.launch("sim_test_take", x.b)
		x.write(x.a, 0, 16)
		x.release(x.b)
		x.ok(x.lib.StreamSynchronize(x.ctx, x.b))
	}},
}

func TestOrderings(t *testing.T) {
	for _, row := range orderings {
		t.Run(row.name, func(t *testing.T) {
			for seed := range uint64(4) {
				x := newRacer(t, seed)
				row.do(x)
				x.release(x.a)
				x.release(x.b)
				x.ok(x.CtxSynchronize(x.ctx))
				races := x.m.Races()
				x.m.races = nil // so that the machine closes without an error
				require.Len(t, races, row.races, "%v", races)
			}
		})
	}
}

func newRacer(t *testing.T, seed uint64) *racer {
	x := &racer{rig: start(t, Options{Races: true, Seed: seed}), ready: make(chan struct{})}
	x.p, x.words = x.mapped(1), x.mapped(1)
	x.a, x.b, x.c = x.stream(driver.StreamNonBlocking), x.stream(driver.StreamNonBlocking), x.stream(driver.StreamNonBlocking)
	x.m.Hold(uintptr(x.a))
	x.m.Hold(uintptr(x.b))
	return x
}

// raced is a machine on which a kernel and a memset raced.
func raced(t *testing.T, o Options) *Machine {
	x := &racer{rig: start(t, o)}
	x.p, x.words = x.mapped(1), x.mapped(1)
	x.a, x.b = x.stream(driver.StreamNonBlocking), x.stream(driver.StreamNonBlocking)
	x.m.Hold(uintptr(x.b))
	x.set(x.a, 0)
	x.launch("sim_test_take", x.a)
	x.ok(x.MemsetD8Async(x.ctx, x.p+4, 1, 20, x.b))
	x.ok(x.lib.StreamSynchronize(x.ctx, x.a))
	x.release(x.b)
	x.ok(x.CtxSynchronize(x.ctx))
	require.Empty(t, x.m.Fault(), "a race loses no context")
	return x.m
}

func TestARaceNamesBothSides(t *testing.T) {
	m := raced(t, Options{Races: true})
	require.Len(t, m.Races(), 1)
	r := m.Races()[0]
	require.Equal(t, 4, r.Size)
	require.Equal(t, []any{"kernel sim_test_take", false, "cuMemsetD8Async", true}, []any{r.First.Work, r.First.Write, r.Second.Work, r.Second.Write})
	require.NotEqual(t, r.First.Stream, r.Second.Stream)
	require.Equal(t, r.First.Ptr, r.Second.Ptr)
	for _, a := range []Access{r.First, r.Second} {
		require.Contains(t, a.Stack, "sim.raced", "where it was submitted")
	}
	err := m.racesEnded()
	require.ErrorContains(t, err, "raced 1 time; order it by events:\na race for 4 bytes of memory: kernel sim_test_take on stream 0x")
	require.ErrorContains(t, err, "and cuMemsetD8Async on stream 0x")
	m.races = nil // so that the machine closes without an error
}

func TestWithoutTheOptionNothingLooksForRaces(t *testing.T) {
	require.Empty(t, raced(t, Options{}).Races())
}
