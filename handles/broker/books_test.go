package broker

import (
	"cmp"
	"encoding/json"
	"slices"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// truth is what holds of an object, whatever brokers come and go.
type truth struct {
	key               keeper.Key
	name              string
	version           uint64
	writer            int
	sealed, ephemeral bool
	removed           bool
	// uncounted: it had ended when a broker began, which knows nothing of it.
	uncounted bool
	// has are the clients that have it mapped.
	has map[int]bool
}

// world is clients, the books of one broker after the other, and what the keeper has.
type world struct {
	t     *rapid.T
	b     *books
	kept  map[keeper.Key]record
	last  uint64
	all   []*truth
	away  map[int]bool // clients that have not come back to this broker
	keys  byte
	names []string
}

func id(client int) holder { return holder{byte(client + 1)} }

func (w *world) drop(gone []*object) {
	for _, o := range gone {
		require.Equal(w.t, ended, o.State)
		delete(w.kept, o.key)
	}
}

// pick returns one of the objects that fit, or nil.
func (w *world) pick(fits func(*truth) bool) *truth {
	some := slices.DeleteFunc(slices.Clone(w.all), func(x *truth) bool { return !fits(x) })
	if len(some) == 0 {
		return nil
	}
	return rapid.SampledFrom(some).Draw(w.t, "object")
}

// newest is the newest version of a name that was not removed.
func (w *world) newest(name string) (top *truth) {
	for _, x := range w.all {
		if x.name == name && x.sealed && !x.removed && (top == nil || x.version > top.version) {
			top = x
		}
	}
	return top
}

// client returns one that is connected.
func (w *world) client() int {
	var some []int
	for i := range 3 {
		if !w.away[i] {
			some = append(some, i)
		}
	}
	if len(some) == 0 {
		w.return_(0)
		return 0
	}
	return rapid.SampledFrom(some).Draw(w.t, "client")
}

// return_ is a client that comes back and says what it holds.
func (w *world) return_(client int) {
	delete(w.away, client)
	for _, x := range w.all {
		if !x.has[client] {
			continue
		}
		err := w.b.hold("test", id(client), x.key)
		if w.lives(x) {
			require.NoError(w.t, err, "%+v", x)
		} else {
			require.ErrorIs(w.t, err, ErrLost, "%+v", x)
		}
	}
}

// lives reports whether an object must be there.
func (w *world) lives(x *truth) bool {
	switch {
	case x.removed:
		return false
	case !x.sealed:
		return x.has[x.writer]
	case w.newest(x.name) == x && !x.ephemeral:
		return true
	}
	return len(x.has) > 0
}

// forget notes that what lives no more was removed, once and for all: the newest first, after which an
// older one may be the newest.
func (w *world) forget() {
	for _, x := range slices.SortedFunc(slices.Values(w.all), func(x, y *truth) int { return cmp.Compare(y.version, x.version) }) {
		if !w.lives(x) {
			x.removed = true
		}
	}
}

func (w *world) step() {
	client := w.client()
	switch op := rapid.IntRange(0, 7).Draw(w.t, "op"); op {
	case 0: // create
		w.keys++
		x := &truth{key: keeper.Key{w.keys}, name: rapid.SampledFrom(w.names).Draw(w.t, "name"), writer: client, ephemeral: rapid.Bool().Draw(w.t, "ephemeral"), has: map[int]bool{client: true}}
		m := handles.Descriptor{Kind: handles.BufferKind, Chunks: []int{10}, Length: 10, Location: cuda.OnDevice(0), Device: cuda.UUID{1}, Handle: vmm.PosixFD}
		text, err := m.MarshalBinary()
		require.NoError(w.t, err)
		o, err := w.b.create("test", x.key, record{Name: x.name, Ephemeral: x.ephemeral, Writer: id(client), Memory: text}, []int{10}, false, Quota{})
		require.NoError(w.t, err)
		o.memory, o.files = m, &files{}
		w.kept[x.key] = o.record
		w.all = append(w.all, x)
	case 1, 2: // commit
		x := w.pick(func(x *truth) bool { return !x.sealed && x.has[client] && x.writer == client })
		if x == nil {
			return
		}
		o, err := w.b.seal("test", id(client), x.key)
		require.NoError(w.t, err)
		require.NotNil(w.t, o)
		r := w.b.sealedRecord(o, time.Now())
		require.Greater(w.t, r.Version, w.last)
		w.last = r.Version
		ok := rapid.IntRange(0, 5).Draw(w.t, "kept") > 0
		if ok {
			w.kept[x.key] = r
			x.sealed, x.version = true, r.Version
		}
		w.drop(w.b.sealEnded(o, r, ok))
	case 3: // attach
		name := rapid.SampledFrom(w.names).Draw(w.t, "name")
		o, err := w.b.find("test", name, 0)
		top := w.newest(name)
		if top == nil {
			require.Error(w.t, err)
			return
		}
		require.NoError(w.t, err)
		require.Equal(w.t, top.key, o.key)
		o.holders[id(client)] = false
		top.has[client] = true
	case 4: // close
		x := w.pick(func(x *truth) bool { return x.has[client] })
		if x == nil {
			return
		}
		delete(x.has, client)
		w.drop(w.b.release(id(client), x.key))
	case 5: // the process ends
		for _, x := range w.all {
			delete(x.has, client)
		}
		w.drop(w.b.leave(id(client)))
	case 6: // remove
		name := rapid.SampledFrom(w.names).Draw(w.t, "name")
		gone, err := w.b.remove("test", name, 0)
		require.Equal(w.t, w.newest(name) == nil, err != nil)
		for _, x := range w.all {
			x.removed = x.removed || x.sealed && x.name == name
		}
		w.drop(gone)
	case 7: // another broker, to which the clients come back in their own time
		w.restart()
	}
	if len(w.away) == 0 && w.b.returning {
		w.drop(w.b.settle())
	}
}

func (w *world) restart() {
	for _, x := range w.all {
		if _, kept := w.kept[x.key]; !kept {
			x.uncounted = true
		}
	}
	w.b = newBooks(0)
	text, err := json.Marshal(w.last)
	require.NoError(w.t, err)
	require.NoError(w.t, w.b.restore(&keeper.Entry{Key: counter, Record: text}))
	for key, r := range w.kept {
		text, err := json.Marshal(r)
		require.NoError(w.t, err)
		e := keeper.Entry{Key: key, Record: text, Files: make([]*peer.FD, 1)}
		if r.State == sealed {
			e.Files = make([]*peer.FD, 2)
		}
		require.NoError(w.t, w.b.restore(&e))
	}
	w.b.returning = true
	w.away = map[int]bool{0: true, 1: true, 2: true}
	for _, client := range rapid.Permutation([]int{0, 1, 2}).Draw(w.t, "order")[:rapid.IntRange(0, 3).Draw(w.t, "back")] {
		w.return_(client)
	}
}

// check compares the books with the truth.
func (w *world) check() {
	if w.b.returning {
		return // what has lost its last holder ends when all are back
	}
	w.forget()
	for _, x := range w.all {
		o := w.b.objects[x.key]
		_, kept := w.kept[x.key]
		require.Equal(w.t, w.lives(x), kept, "%+v", x)
		if w.lives(x) {
			require.NotNil(w.t, o)
			require.NotEqual(w.t, ended, o.State)
		} else {
			require.Equal(w.t, len(x.has) > 0 && !x.uncounted, o != nil, "its memory counts while a client has it: %+v", x)
		}
		if o != nil {
			require.Len(w.t, o.holders, len(x.has), "%+v", x)
		}
	}
}

// Random operations of clients that come, go and come back, and brokers that replace each other.
func TestBooks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &world{t: t, b: newBooks(0), kept: map[keeper.Key]record{}, away: map[int]bool{}, names: []string{"a", "b"}}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			w.step()
			for client := range 3 {
				if w.away[client] && rapid.IntRange(0, 3).Draw(t, "returns") == 0 {
					w.return_(client)
				}
			}
			if len(w.away) == 0 && w.b.returning {
				w.drop(w.b.settle())
			}
			w.check()
		}
	})
}

// A broker that ended between the commit of a copy and the end of what was copied leaves both: the next one serves
// the copy, and tells the writer its version as long as it is there.
func TestWhatWasCopiedIsNotCommittedAgain(t *testing.T) {
	m := handles.Descriptor{Kind: handles.BufferKind, Chunks: []int{10}, Length: 10, Location: cuda.OnDevice(0), Device: cuda.UUID{1}, Handle: vmm.PosixFD}
	memory, err := m.MarshalBinary()
	require.NoError(t, err)
	b, original, copied := newBooks(0), keeper.Key{1}, keeper.Key{2}
	for key, r := range map[keeper.Key]record{
		original: {Name: "w", State: writing, Memory: memory, Writer: id(1)},
		copied:   {Name: "w", State: sealed, Version: 7, Memory: memory, Writer: id(1), CopyOf: original},
	} {
		text, err := json.Marshal(r)
		require.NoError(t, err)
		require.NoError(t, b.restore(&keeper.Entry{Key: key, Record: text, Files: make([]*peer.FD, map[state]int{writing: 1, sealed: 2}[r.State])}))
	}
	gone := b.endCopied()
	require.Len(t, gone, 1)
	require.Equal(t, original, gone[0].key)
	require.ErrorIs(t, b.hold("test", id(1), original), ErrLost)
	o, err := b.seal("test", id(1), original)
	require.NoError(t, err)
	require.EqualValues(t, 7, o.Version)
	_, err = b.remove("test", "w", 0)
	require.NoError(t, err)
	_, err = b.seal("test", id(1), original)
	require.ErrorIs(t, err, ErrLost)
}
