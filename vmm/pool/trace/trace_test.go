package trace_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/vmm/pool/trace"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) {
	if os.Getenv("CI") != "" {
		if err := flag.Set("rapid.seed", "20261121"); err != nil {
			panic(err)
		}
	}
	goleak.VerifyTestMain(m)
}

func small() *trace.Trace {
	return &trace.Trace{
		Name: "small", Streams: 2, Tags: []string{"a", "b"},
		Ops: []trace.Op{
			{Kind: trace.Alloc, ID: 0, Bytes: 1000, Tag: 1},
			{Kind: trace.Alloc, ID: 1, Bytes: 0, Stream: 1},
			{Kind: trace.Use, ID: 0, Stream: 1},
			{Kind: trace.Free, ID: 0},
			{Kind: trace.Sync},
			{Kind: trace.Alloc, ID: 2, Bytes: 300},
		},
	}
}

func TestSummary(t *testing.T) {
	s, err := small().Summary()
	require.NoError(t, err)
	require.Equal(t, trace.Summary{
		Allocs: 3, Frees: 1, Uses: 1, Syncs: 1, PeakBytes: 1000, PeakBlocks: 2, LiveBytes: 300, LiveBlocks: 2,
	}, s)
}

func TestCheck(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*trace.Trace)
		want   string
	}{
		{"no stream", func(t *trace.Trace) { t.Streams = 0 }, "a trace of 0 streams: it has 1 to 1024"},
		{"too many streams", func(t *trace.Trace) { t.Streams = 1025 }, "1025 streams"},
		{"too many tags", func(t *trace.Trace) { t.Tags = make([]string, 1025) }, "1025 tags"},
		{"a tag twice", func(t *trace.Trace) { t.Tags[1] = "a" }, `tag "a" twice`},
		{"a long name", func(t *trace.Trace) { t.Name = strings.Repeat("x", 256) }, "at most 255 bytes"},
		{"a tag that is no text", func(t *trace.Trace) { t.Tags[0] = "\xff" }, "UTF-8"},
		{"a block out of turn", func(t *trace.Trace) { t.Ops[1].ID = 2 }, "operation 1: alloc of block 2: the next one is 1"},
		{"too large", func(t *trace.Trace) { t.Ops[0].Bytes = trace.MaxBytes + 1 }, "operation 0: alloc of 140737488355329 bytes: at least 0, at most 140737488355328"},
		{"negative", func(t *trace.Trace) { t.Ops[0].Bytes = -1 }, "operation 0: alloc of -1 bytes: at least 0"},
		{"more than can be counted", func(t *trace.Trace) {
			t.Ops = nil
			for i := range uint32(1<<13 + 1) {
				t.Ops = append(t.Ops, trace.Op{Kind: trace.Alloc, ID: i, Bytes: trace.MaxBytes})
			}
		}, "operation 8192: blocks of more than 1152921504606846976 bytes at once"},
		{"unknown tag", func(t *trace.Trace) { t.Ops[0].Tag = 2 }, "tag 2 of 2"},
		{"unknown stream", func(t *trace.Trace) { t.Ops[2].Stream = 2 }, "operation 2: use on stream 2 of 2"},
		{"unknown block", func(t *trace.Trace) { t.Ops[3].ID = 2 }, "free of block 2, of which 2 were taken"},
		{"twice", func(t *trace.Trace) { t.Ops[4] = t.Ops[3] }, "operation 4: free of block 0, which was given back before"},
		{"used too late", func(t *trace.Trace) { t.Ops[4] = t.Ops[2] }, "use of block 0, which was given back before"},
		{"a field too many", func(t *trace.Trace) { t.Ops[3].Bytes = 1 }, "free with fields that it does not have"},
		{"sync of a block", func(t *trace.Trace) { t.Ops[4].ID = 1 }, "sync with fields that it does not have"},
		{"unknown kind", func(t *trace.Trace) { t.Ops[4].Kind = 4 }, "unknown kind 4"},
	} {
		t.Run(c.name, func(t *testing.T) {
			tr := small()
			c.change(tr)
			require.ErrorContains(t, tr.Check(), c.want)
			_, err := tr.MarshalBinary()
			require.ErrorContains(t, err, c.want)
			var text bytes.Buffer
			require.ErrorContains(t, tr.WriteText(&text), c.want)
			require.Zero(t, text.Len())
		})
	}
}

// The text form is what people write by hand, so it is held fixed.
func TestTextForm(t *testing.T) {
	var text bytes.Buffer
	require.NoError(t, small().WriteText(&text))
	const want = `{"trace":"small","streams":2,"tags":["a","b"]}
{"op":"alloc","id":0,"bytes":1000,"stream":0,"tag":"b"}
{"op":"alloc","id":1,"bytes":0,"stream":1,"tag":"a"}
{"op":"use","id":0,"stream":1}
{"op":"free","id":0}
{"op":"sync"}
{"op":"alloc","id":2,"bytes":300,"stream":0,"tag":"a"}
`
	require.Equal(t, strings.Split(want, "\n"), strings.Split(text.String(), "\n"))
	got, err := trace.ReadText(&text)
	require.NoError(t, err)
	require.Equal(t, small(), got)
}

func TestTextRefuses(t *testing.T) {
	const header = `{"trace":"x","streams":1,"tags":["a"]}` + "\n"
	for _, c := range []struct{ name, text, want string }{
		{"nothing", "", "no line"},
		{"no header", `{"streams":1}`, "line 1: the first line is not the header"},
		{"an unknown field", `{"trace":"x","streams":1,"more":1}`, "more"},
		{"no JSON", header + "alloc", "line 2"},
		{"two values", header + `{"op":"sync"} {"op":"sync"}`, "line 2: more than one value"},
		{"unknown operation", header + `{"op":"grow"}`, `unknown operation "grow"`},
		{"a field too few", header + `{"op":"alloc","id":0,"bytes":1,"stream":0}`, "lacks a field"},
		{"a field too many", header + `{"op":"sync","id":0}`, "has one of another"},
		{"unknown tag", header + `{"op":"alloc","id":0,"bytes":1,"stream":0,"tag":"b"}`, `tag "b"`},
		{"nonsense", header + `{"op":"free","id":0}`, "operation 0: free of block 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := trace.ReadText(strings.NewReader(c.text))
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestBinaryRefuses(t *testing.T) {
	good, err := small().MarshalBinary()
	require.NoError(t, err)
	for n := range good {
		require.Error(t, new(trace.Trace).UnmarshalBinary(good[:n]), "cut at %d", n)
	}
	kept := small()
	require.ErrorContains(t, kept.UnmarshalBinary(append(good, 0)), "more bytes than the trace has")
	require.Equal(t, small(), kept, "a failed decoding changes nothing")

	const magic = "cuvmmtr\x01"
	for _, c := range []struct{ name, rest, want string }{
		{"a longer number", "\x00\x81\x00", "more bytes than it needs"},
		{"an endless number", "\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "does not end"},
		{"more operations than bytes", "\x00\x01\x00\xff\x7f", "is the most"},
		{"sync with a number", "\x00\x01\x00\x01\x07", "sync with 1"},
		{"free of nothing", "\x00\x01\x00\x01\x05", "free of the block 1 before 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.ErrorContains(t, new(trace.Trace).UnmarshalBinary([]byte(magic+c.rest)), c.want)
		})
	}
}

func TestForms(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr := &trace.Trace{
			Name:    rapid.StringN(0, 20, 255).Draw(t, "name"),
			Streams: rapid.IntRange(1, 5).Draw(t, "streams"),
			Tags:    rapid.SliceOfNDistinct(rapid.StringN(0, 8, 255), 1, 4, rapid.ID).Draw(t, "tags"),
			Ops:     []trace.Op{},
		}
		var live []uint32
		next := uint32(0)
		for range rapid.IntRange(0, 60).Draw(t, "operations") {
			stream := uint32(rapid.IntRange(0, tr.Streams-1).Draw(t, "stream"))
			kind := trace.Kind(rapid.IntRange(0, 3).Draw(t, "kind"))
			op := trace.Op{Kind: kind}
			switch {
			case kind == trace.Sync:
			case kind == trace.Alloc || len(live) == 0:
				op = trace.Op{
					ID: next, Stream: stream,
					Bytes: rapid.IntRange(0, trace.MaxBytes).Draw(t, "bytes"),
					Tag:   uint32(rapid.IntRange(0, len(tr.Tags)-1).Draw(t, "tag")),
				}
				live = append(live, next)
				next++
			default:
				i := rapid.IntRange(0, len(live)-1).Draw(t, "block")
				op.ID = live[i]
				if kind == trace.Free {
					live = append(live[:i], live[i+1:]...)
				} else {
					op.Stream = stream
				}
			}
			tr.Ops = append(tr.Ops, op)
		}
		b, err := tr.MarshalBinary()
		require.NoError(t, err)
		var back trace.Trace
		require.NoError(t, back.UnmarshalBinary(b))
		require.Equal(t, *tr, back)
		var text bytes.Buffer
		require.NoError(t, tr.WriteText(&text))
		read, err := trace.ReadText(&text)
		require.NoError(t, err)
		again, err := read.MarshalBinary()
		require.NoError(t, err)
		require.Equal(t, b, again)
	})
}

func FuzzBinary(f *testing.F) {
	good, err := small().MarshalBinary()
	require.NoError(f, err)
	f.Add(good)
	f.Add(good[:20])
	f.Fuzz(func(t *testing.T, b []byte) {
		var tr trace.Trace
		if tr.UnmarshalBinary(b) != nil {
			return
		}
		again, err := tr.MarshalBinary()
		require.NoError(t, err)
		require.Equal(t, b, again, "what was decoded is canonical")
	})
}

func FuzzText(f *testing.F) {
	var good bytes.Buffer
	require.NoError(f, small().WriteText(&good))
	f.Add(good.String())
	f.Add(`{"trace":"","streams":1,"tags":[]}`)
	f.Fuzz(func(t *testing.T, text string) {
		tr, err := trace.ReadText(strings.NewReader(text))
		if err != nil {
			return
		}
		var again bytes.Buffer
		require.NoError(t, tr.WriteText(&again))
		back, err := trace.ReadText(&again)
		require.NoError(t, err)
		one, err := tr.MarshalBinary()
		require.NoError(t, err)
		two, err := back.MarshalBinary()
		require.NoError(t, err)
		require.Equal(t, one, two)
	})
}

func TestKindText(t *testing.T) {
	text, err := json.Marshal([]trace.Kind{trace.Alloc, trace.Free, trace.Use, trace.Sync, 9})
	require.NoError(t, err)
	require.JSONEq(t, `["alloc","free","use","sync","Kind(9)"]`, string(text))
}
