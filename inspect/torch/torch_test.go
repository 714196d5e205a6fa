package torch_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/inspect/torch"
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
)

func snapshot() inspect.Snapshot {
	at := time.UnixMicro(1_700_000_000_000_000)
	s := inspect.Snapshot{
		Devices: make([]inspect.Device, 2),
		Stacks:  []inspect.Stack{{"main.load (/src/löad.go:10)", "main.main (main.go:5)"}, {"nowhere"}},
		Buffers: []inspect.Buffer{{Ptr: 0x7e0000000000, Used: 100, Committed: 4096, Device: 1, Stack: 2}},
		Pools: []inspect.Pool{{Segments: []inspect.Segment{{Ptr: 0x7f0000000000, Bytes: 1 << 20, Kind: "slab", Stream: 1<<63 + 5,
			Blocks: []inspect.Block{{Offset: 512, Bytes: 512, Requested: 500, Stack: 1}, {Offset: 1024, Bytes: 512, Requested: 300, Waiting: true, Stack: 1}}}},
			History: []inspect.Event{
				{Op: "alloc", Time: at, Ptr: 0x7f0000000200, Bytes: 500, Stream: 7, Stack: 1},
				{Op: "alloc", Time: at, Ptr: 0x7d0000000000, Bytes: 5, Stream: 7}, // which is mapped no more
				{Op: "free", Time: at, Ptr: 0x7f0000000400, Bytes: 300, Stream: 7},
			}}},
	}
	for i := range 3000 {
		s.Pools[0].History = append(s.Pools[0].History, inspect.Event{Op: "alloc", Time: at, Ptr: 0x7f0000001000, Bytes: i})
	}
	return s
}

// python reads a pickle with Python's own reader, without any classes.
func python(t *testing.T, pickle []byte) (read map[string]any) {
	t.Helper()
	path := needs.Program(t, "python3")
	c := exec.CommandContext(t.Context(), path, "-c", `
import json, pickle, sys
class Plain(pickle.Unpickler):
    def find_class(self, module, name): raise ValueError(name)
json.dump(Plain(sys.stdin.buffer).load(), sys.stdout)`)
	c.Stdin = bytes.NewReader(pickle)
	out, err := c.Output()
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(out, &read))
	return read
}

func TestPythonReadsWhatIsWritten(t *testing.T) {
	var w bytes.Buffer
	require.NoError(t, torch.Write(&w, snapshot()))
	if dir := os.Getenv("CUVMM_PAGES"); dir != "" {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "snapshot.pickle"), w.Bytes(), 0o600))
	}
	got := python(t, w.Bytes())
	segments := got["segments"].([]any)
	require.Len(t, segments, 2)
	slab := segments[0].(map[string]any)
	frames := []any{map[string]any{"filename": "/src/löad.go", "line": 10.0, "name": "main.load"}, map[string]any{"filename": "main.go", "line": 5.0, "name": "main.main"}}
	blocks := slab["blocks"].([]any)
	require.Len(t, blocks, 4)
	end := slab["address"].(float64)
	for _, b := range blocks { // the viewer adds up their sizes
		require.InDelta(t, end, b.(map[string]any)["address"], 0)
		end += b.(map[string]any)["size"].(float64)
	}
	require.InDelta(t, float64(0x7f0000000000+1<<20), end, 0)
	require.Equal(t, map[string]any{"address": float64(0x7f0000000200), "size": 512.0, "requested_size": 500.0, "state": "active_allocated", "frames": frames}, blocks[1])
	require.Equal(t, "active_pending_free", blocks[2].(map[string]any)["state"])
	require.Equal(t, frames, blocks[2].(map[string]any)["frames"])
	delete(slab, "blocks")
	require.Equal(t, map[string]any{"device": 0.0, "address": float64(0x7f0000000000), "total_size": float64(1 << 20), "allocated_size": 512.0, "active_size": 1024.0,
		"requested_size": 500.0, "stream": float64(1<<63 + 5), "segment_type": "small", "segment_pool_id": []any{0.0, 0.0}, "is_expandable": true, "frames": []any{}}, slab)
	buffer := segments[1].(map[string]any)
	require.InDelta(t, 1, buffer["device"], 0)
	require.Equal(t, []any{map[string]any{"filename": "", "line": 0.0, "name": "nowhere"}}, buffer["frames"])

	traces := got["device_traces"].([]any)
	require.Len(t, traces, 2)
	require.Empty(t, traces[1])
	events := traces[0].([]any)
	require.Len(t, events, 3003)
	var actions []any
	for _, e := range events[:4] {
		actions = append(actions, e.(map[string]any)["action"])
	}
	require.Equal(t, []any{"alloc", "free_requested", "free_completed", "alloc"}, actions)
	require.InDelta(t, 1_700_000_000_000_000, events[0].(map[string]any)["time_us"], 0)
	require.Equal(t, frames, events[0].(map[string]any)["frames"])
}

// The viewer's reader knows these opcodes of the format, and no others.
func TestTheViewerKnowsEveryOpcode(t *testing.T) {
	path := needs.Program(t, "python3")
	var w bytes.Buffer
	require.NoError(t, torch.Write(&w, snapshot()))
	c := exec.CommandContext(t.Context(), path, "-c", `
import pickletools, sys
print(*sorted({op.name for op, _, _ in pickletools.genops(sys.stdin.buffer.read())}))`)
	c.Stdin = &w
	out, err := c.Output()
	require.NoError(t, err)
	require.Subset(t, strings.Fields("APPENDS BINGET BININT BININT1 BININT2 BINUNICODE EMPTY_DICT EMPTY_LIST LONG1 LONG_BINGET MARK MEMOIZE NEWFALSE NEWTRUE PROTO SETITEMS STOP TUPLE2"),
		strings.Fields(string(out)))
}

func TestTextThatIsNotUTF8(t *testing.T) {
	var w bytes.Buffer
	s := snapshot()
	s.Stacks[0] = inspect.Stack{"main.load (/src/l\xffad.go:10)"}
	require.NoError(t, torch.Write(&w, s))
	blocks := python(t, w.Bytes())["segments"].([]any)[0].(map[string]any)["blocks"].([]any)
	require.Equal(t, []any{map[string]any{"filename": "/src/l�ad.go", "line": 10.0, "name": "main.load"}}, blocks[1].(map[string]any)["frames"])
}

func TestAnEmptySnapshot(t *testing.T) {
	var w bytes.Buffer
	require.NoError(t, torch.Write(&w, inspect.Snapshot{}))
	require.Empty(t, python(t, w.Bytes())["segments"])
}

// Each device up to the largest has a list in the pickle.
func TestDevicesThatCannotBe(t *testing.T) {
	for _, device := range []int{-7, 1e9} {
		for _, s := range []inspect.Snapshot{{Pools: []inspect.Pool{{Device: device}}}, {Buffers: []inspect.Buffer{{Device: device}}}} {
			require.ErrorContains(t, torch.Write(io.Discard, s), fmt.Sprintf("on device %d", device))
		}
	}
}
