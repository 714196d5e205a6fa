package publish

import (
	"bytes"
	"encoding/json"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// An event is one step of the model: what is done, with its arguments and its results.
// Other implementations replay the events on machines of their own, and compare the
// results.
type event map[string]any

func pairs(all []chunk) [][2]uint64 {
	p := make([][2]uint64, len(all))
	for i, c := range all {
		p[i] = [2]uint64{c.id, c.size}
	}
	return p
}

func showing(v view) event {
	state := Live
	if v.away {
		state = Suspended
	}
	return event{"do": "show", "generation": v.generation, "ordered": v.ordered, "length": v.length, "chunks": pairs(v.chunks), "state": state}
}

// sent is the update that a publisher has next: serial 0 if it has none.
func sent(u *update) event {
	if u == nil {
		return event{"do": "next", "serial": 0}
	}
	e := fields(u)
	e["do"] = "next"
	return e
}

func fields(u *update) event {
	return event{"serial": u.serial, "generation": u.generation, "ordered": u.ordered, "length": u.length, "keep": u.keep,
		"last": u.last, "over": u.over, "state": u.state, "chunks": pairs(u.chunks)}
}

// heard is what a follower did with the last update.
func heard(d *done, r *replica) event {
	return event{"do": "carry out", "serial": d.serial, "status": d.status, "chunks": d.chunks, "length": r.length, "generation": r.generation}
}

// tryUpdate asks the follower to take a changed update, on a copy of it.
func (b *both) tryUpdate(t *rapid.T, u *update) {
	changed, change := *u, []func(u *update){
		func(u *update) { u.serial++ },
		func(u *update) { u.serial-- },
		func(u *update) { u.generation = b.replica.generation },
		func(u *update) { u.generation = lastGeneration + 1 },
		func(u *update) { u.ordered = u.generation + 1 },
		func(u *update) { u.length++ },
		func(u *update) { u.length = b.replica.bytes/b.replica.unit + 1 },
		func(u *update) { u.length = 0 },
		func(u *update) { u.keep++ },
		func(u *update) { u.keep = 0 },
		func(u *update) { u.last = !u.last },
		func(u *update) { u.over = !u.over },
		func(u *update) { u.over, u.last = true, false },
		func(u *update) { u.chunks = append(slices.Clone(u.chunks), chunk{1 << 50, modelChunk}) },
		func(u *update) { u.chunks = append(slices.Clone(u.chunks), chunk{1 << 50, modelChunk + 1}) },
		func(u *update) { u.chunks = nil },
	}
	change[rapid.IntRange(0, len(change)-1).Draw(t, "change")](&changed)
	r := b.replica
	e := fields(&changed)
	e["do"], e["taken"] = "try update", r.apply(&changed) == nil
	b.record(e)
}

// tryReply asks the publisher to take a changed acknowledgement, on a copy of its
// progress.
func (b *both) tryReply(t *rapid.T, d done) {
	change := []func(){
		func() { d.serial++ },
		func() { d.serial-- },
		func() { d.chunks++ },
		func() { d.chunks-- },
		func() { d.status = statusOK },
		func() { d.status = statusFailed },
	}
	change[rapid.IntRange(0, len(change)-1).Draw(t, "change")]()
	p := *b.progress
	b.record(event{"do": "try acknowledge", "serial": d.serial, "status": d.status, "chunks": d.chunks, "taken": p.acknowledged(&d) == nil})
}

// Every implementation does what the machines here do, in whatever order things
// happen: the file has runs of the model.
func TestTracesAreThoseOfTheModel(t *testing.T) {
	const runs, steps = 40, 60
	run := rapid.Custom(func(t *rapid.T) (events []event) {
		b := newBoth(t, 2, func(e event) { events = append(events, e) })
		actions := b.actions()
		often := slices.Concat(slices.Repeat([]string{"say", "hear", "settle"}, 6), slices.Repeat([]string{"grow", "shrink"}, 2), []string{"come back", "suspend"})
		for range steps {
			actions[rapid.SampledFrom(often).Draw(t, "what")](t)
		}
		b.finish(t)
		return events
	})
	var file bytes.Buffer
	kinds := map[string]int{}
	for seed := range runs {
		for _, e := range run.Example(seed) {
			line, err := json.Marshal(e)
			require.NoError(t, err)
			file.Write(append(line, '\n'))
			kinds[e["do"].(string)]++
		}
	}
	for kind, n := range kinds {
		require.GreaterOrEqual(t, n, runs, kind)
	}
	compareFile(t, "traces.jsonl", file.Bytes())
}
