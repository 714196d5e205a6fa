package publish

import (
	"errors"
	"testing"

	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

const modelChunk = 1 << 10

// both are the two sides of one follower, with the chunks that it has mapped and
// the length that it may show.
type both struct {
	record   func(event)
	batch    int
	view     view
	progress *progress
	replica  replica
	ids      []chunk
	nextID   uint64
	// withheld is an update on its way, with its chunks; reply is an acknowledgement on
	// its way back.
	withheld *update
	adds     []chunk
	reply    *done
	refused  uint64 // generation
	// least is the last generation that a follower which came back has seen.
	least uint64
}

func (b *both) grow(t *rapid.T) {
	for range rapid.IntRange(0, 3*b.batch).Draw(t, "chunks") {
		b.nextID++
		b.view.chunks = append(b.view.chunks[:len(b.view.chunks):len(b.view.chunks)], chunk{b.nextID, modelChunk * uint64(rapid.IntRange(1, 3).Draw(t, "size"))})
	}
	most := sizeOf(b.view.chunks) / b.progress.unit
	least := b.view.length
	b.view.length = rapid.Uint64Range(least, most).Draw(t, "length")
	b.trim() // what is announced is what the length needs
	b.view.generation = max(b.view.generation, b.least) + 1
	b.view.ordered = b.view.generation
	b.view.away = false
	b.record(showing(b.view))
}

// suspend takes all memory away. What comes back, with the next growth, is other memory.
func (b *both) suspend(*rapid.T) {
	if b.view.generation == 0 {
		return
	}
	b.view = view{generation: max(b.view.generation, b.least) + 1, ordered: b.view.ordered, away: true}
	b.progress.lower(0)
	b.record(showing(b.view))
	b.record(event{"do": "lower", "length": 0})
}

func (b *both) shrink(t *rapid.T) {
	b.view.length = rapid.Uint64Range(0, b.view.length).Draw(t, "length")
	b.trim()
	b.view.away = false
	b.view.generation = max(b.view.generation, b.least) + 1
	b.progress.lower(b.view.length)
	b.record(showing(b.view))
	b.record(event{"do": "lower", "length": b.view.length})
}

func (b *both) trim() {
	keep := len(b.view.chunks)
	for keep > 0 && sizeOf(b.view.chunks[:keep-1]) >= b.view.length*b.progress.unit {
		keep--
	}
	b.view.chunks = b.view.chunks[:keep:keep]
}

func (b *both) say(t *rapid.T) {
	u, add := b.progress.next(b.view, b.batch)
	b.record(sent(u))
	if u == nil {
		return
	}
	require.Nil(t, b.withheld)
	require.Nil(t, b.reply)
	require.LessOrEqual(t, len(add), b.batch)
	b.withheld, b.adds = u, add
}

func (b *both) hear(t *rapid.T) {
	u := b.withheld
	if u == nil {
		return
	}
	b.withheld = nil
	b.tryUpdate(t, u)
	require.NoError(t, b.replica.apply(u))
	require.Error(t, b.replica.apply(u), "one at a time")
	less := b.replica.less(u)
	var failed error
	if !u.over && rapid.IntRange(0, 9).Draw(t, "refuse") == 0 {
		failed = errors.New("refused")
	}
	switch {
	case failed != nil:
		b.refused = u.generation
	case less:
		b.ids = b.ids[:u.keep:u.keep]
	default:
		b.ids = append(b.ids, b.adds...)
	}
	b.reply = b.replica.finish(token{}, failed)
	if failed == nil && u.state == Suspended {
		require.Empty(t, b.replica.chunks)
		require.Zero(t, b.replica.length)
	}
	require.True(t, failed != nil || !u.last || b.replica.state == u.state)
	b.record(heard(b.reply, &b.replica))
}

func (b *both) settle(t *rapid.T) {
	if b.reply == nil {
		return
	}
	b.tryReply(t, *b.reply)
	require.NoError(t, b.progress.acknowledged(b.reply))
	require.Error(t, b.progress.acknowledged(b.reply), "one acknowledgement of one update")
	b.record(event{"do": "acknowledge", "reached": b.progress.told, "pinned": b.progress.pinned(b.view)})
	b.reply = nil
}

// comeBack is the end of the connection: what was under way is lost, and the follower
// comes back to the same publication, or to another one of the name.
func (b *both) comeBack(t *rapid.T) {
	b.withheld, b.adds, b.reply = nil, nil, nil
	b.replica.serial, b.replica.busy = 0, nil
	if rapid.Bool().Draw(t, "another") {
		b.view = view{}
		if rapid.Bool().Draw(t, "announced") {
			b.grow(t)
		}
	}
	has := possession{generation: b.replica.generation, length: b.replica.length}
	for _, c := range b.replica.chunks {
		has.chunks = append(has.chunks, c.id)
	}
	p := &Publication{view: b.view, used: b.view.generation, changed: make(chan struct{})}
	require.NoError(t, p.overtake("test", has.generation))
	b.view = p.view
	require.True(t, b.view.generation == 0 || b.view.generation > has.generation || has.generation == 0, "generations never go back")
	b.least = p.used
	b.progress = newProgress(b.progress.unit, b.progress.room)
	b.progress.resume(has, b.view)
	b.record(showing(b.view))
	b.record(event{"do": "come back"})
}

// actions are what can happen next, and under "" what always holds.
func (b *both) actions() map[string]func(*rapid.T) {
	return map[string]func(*rapid.T){
		"grow": b.grow, "shrink": b.shrink, "suspend": b.suspend, "say": b.say, "hear": b.hear, "settle": b.settle, "come back": b.comeBack,
		"": func(t *rapid.T) {
			require.Equal(t, append([]chunk{}, b.ids...), append([]chunk{}, b.replica.chunks...))
			require.Equal(t, sizeOf(b.ids), b.replica.bytes)
			require.LessOrEqual(t, b.replica.bytes, b.replica.room)
			require.LessOrEqual(t, b.replica.length*b.replica.unit, b.replica.bytes)
			if b.withheld == nil && b.reply == nil {
				require.Equal(t, identities(b.ids), identities(b.progress.has))
				require.Equal(t, b.replica.length, b.progress.length)
				require.Equal(t, b.replica.generation, b.progress.told)
				require.LessOrEqual(t, b.progress.pinned(b.view), sizeOf(b.ids[common(b.ids, b.view.chunks):]))
			}
		},
	}
}

func newBoth(t *rapid.T, batch int, record func(event)) *both {
	unit := rapid.SampledFrom([]uint64{1, 3, 4, 24}).Draw(t, "unit")
	room := rapid.SampledFrom([]uint64{1 << 40, 100 * modelChunk, modelChunk}).Draw(t, "room")
	record(event{"do": "begin", "unit": unit, "room": room, "granularity": modelChunk, "most": handles.MaxChunks, "batch": batch})
	return &both{record: record, batch: batch, progress: newProgress(unit, room),
		replica: replica{unit: unit, granularity: modelChunk, room: room, most: handles.MaxChunks}}
}

func identities(all []chunk) (ids []uint64) {
	for _, c := range all {
		ids = append(ids, c.id)
	}
	return ids
}

// Whatever is announced and taken back, refused and missed, both sides agree on
// the chunks that the follower has, which are always those that were shown at
// their places, and never more than fit.
func TestFollowersAgreeWithTheirPublisher(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := newBoth(t, wire.MaxBatch, func(event) {})
		t.Repeat(b.actions())
		b.finish(t)
	})
}

// finish lets everything arrive, and checks where that leads.
func (b *both) finish(t *rapid.T) {
	for b.progress.told < b.view.generation || b.progress.out != nil {
		b.say(t)
		b.hear(t)
		b.settle(t)
	}
	switch {
	case b.view.generation == 0: // a publisher that has announced nothing takes nothing away
	case b.refused == b.view.generation:
	case sizeOf(b.view.chunks) > b.replica.room:
		require.Equal(t, len(b.ids), common(b.ids, b.view.chunks), "nothing is kept that is not shown")
	default:
		require.Equal(t, b.view.away, b.replica.state == Suspended)
		require.Equal(t, append([]chunk{}, b.view.chunks...), append([]chunk{}, b.ids...))
		require.Equal(t, b.view.length, b.replica.length)
		require.Zero(t, b.progress.pinned(b.view))
	}
}

// No acknowledgement makes a publisher believe what it has not sent.
func FuzzAnswers(f *testing.F) {
	f.Add(uint64(1), uint8(0), uint32(2))
	f.Add(uint64(2), uint8(0), uint32(2))
	f.Add(uint64(1), uint8(5), uint32(0))
	f.Fuzz(func(t *testing.T, serial uint64, s uint8, chunks uint32) {
		v := view{generation: 1, ordered: 1, length: 2, chunks: []chunk{{1, modelChunk}, {2, modelChunk}}}
		fd := newProgress(1, 1<<30)
		u, _ := fd.next(v, wire.MaxBatch)
		err := fd.acknowledged(&done{serial: serial, status: status(s), chunks: chunks})
		switch {
		case serial == u.serial && s == uint8(statusOK) && chunks == 2:
			require.NoError(t, err)
			require.Len(t, fd.has, 2)
		case serial == u.serial && s != uint8(statusOK) && chunks == 0:
			require.NoError(t, err)
			require.Empty(t, fd.has)
		default:
			require.ErrorIs(t, err, peer.ErrProtocol)
			require.Empty(t, fd.has)
			require.NotNil(t, fd.out)
		}
	})
}

// No update makes a follower map what does not fit, or show what is not mapped.
func FuzzUpdates(f *testing.F) {
	for _, m := range said {
		if u, ok := m.(*update); ok {
			f.Add(pack(u).Body, pack(u).Body)
		}
	}
	f.Add(pack(&update{state: Live, serial: 1, generation: 1, ordered: 1, length: 5, last: true, chunks: []chunk{{1, modelChunk}}}).Body,
		pack(&update{state: Live, serial: 2, generation: 2, ordered: 1, length: 0, last: true}).Body)
	f.Fuzz(func(t *testing.T, first, second []byte) {
		tr := replica{unit: 3, granularity: modelChunk, room: 10 * modelChunk, most: 5}
		for _, body := range [][]byte{first, second} {
			for n := range wire.MaxBatch + 1 {
				m, err := toClient(wire.View, body, n)
				if err != nil {
					continue
				}
				if tr.apply(m.(*update)) == nil {
					tr.finish(token{}, nil)
				}
				require.LessOrEqual(t, tr.bytes, tr.room)
				require.LessOrEqual(t, len(tr.chunks), tr.most)
				require.LessOrEqual(t, tr.length, tr.bytes/tr.unit)
				require.LessOrEqual(t, tr.generation, uint64(lastGeneration))
			}
		}
	})
}
