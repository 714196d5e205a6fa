package pooltrace

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/cuvmm/cuvmm/internal/tracegen"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
	"github.com/stretchr/testify/require"
)

// python runs the script that replays traces through other libraries, or
// another program, and returns its output and its complaints.
func python(t *testing.T, args ...string) (out, complaints string, err error) {
	t.Helper()
	path := needs.Program(t, "python3")
	var o, c bytes.Buffer
	run := exec.CommandContext(t.Context(), path, append([]string{"-B"}, args...)...)
	run.Stdout, run.Stderr = &o, &c
	err = run.Run()
	return o.String(), c.String(), err
}

func script(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("../../../../scripts/pool-peers.py")
	require.NoError(t, err)
	if _, err := os.Stat(path); err != nil {
		needs.Lacks(t, "the sources: %v", err)
	}
	return path
}

// peers runs the script, which must succeed without complaints.
func peers(t *testing.T, args ...string) string {
	t.Helper()
	out, complaints, err := python(t, append([]string{script(t)}, args...)...)
	require.NoError(t, err, "%s", complaints)
	require.Empty(t, complaints)
	return out
}

// measured are the measurements that a comparison kept.
func measured(t *testing.T, args ...string) (all []result) {
	t.Helper()
	kept := filepath.Join(t.TempDir(), "results")
	peers(t, append([]string{"compare", "-results", kept}, args...)...)
	text, err := os.ReadFile(kept)
	require.NoError(t, err)
	for _, line := range strings.Split(strings.TrimSpace(string(text)), "\n") {
		var r result
		require.NoError(t, json.Unmarshal([]byte(line), &r), line)
		all = append(all, r)
	}
	return all
}

func writeTrace(t *testing.T, tr *trace.Trace) string {
	t.Helper()
	b, err := tr.MarshalBinary()
	require.NoError(t, err)
	return file(t, tr.Name, string(b))
}

// The script reads traces by itself, and must see in them what Go sees, in each
// mode.
func TestPeersReadTraces(t *testing.T) {
	args := []string{"-peers", "dry", "-modes", "all", "-many", "3"}
	var want []result
	add := func(tr *trace.Trace, path string) {
		args = append(args, path)
		for _, m := range modes(3) {
			s, err := m.of(tr).Summary()
			require.NoError(t, err)
			want = append(want, result{Trace: tr.Name, Mode: m.name, Operations: m.goroutines * (s.Allocs + s.Frees), Requested: m.goroutines * s.PeakBytes})
		}
	}
	for _, g := range tracegen.Generators() {
		tr := g.Make(tracegen.Config{Seed: 4, Divisor: 1000})
		add(tr, writeTrace(t, tr))
	}
	for _, path := range []string{
		file(t, "mine.json", "[[0, 400], [1, 300],\n [0, 0], [0, 5000]]"),
		file(t, "lines.jsonl", `{"trace":"lines","streams":2,"tags":["a"]}
{"op":"alloc","id":0,"bytes":4096,"stream":1,"tag":"a"}
{"op":"sync"}
{"op":"free","id":0}
`),
	} {
		tr, err := load(path)
		require.NoError(t, err)
		add(tr, path)
	}
	got := measured(t, args...)
	require.Len(t, got, len(want))
	for i, r := range got {
		require.Empty(t, r.Error)
		require.Positive(t, r.FirstUs)
		require.Equal(t, r.Requested, r.Reserved)
		told := result{Trace: r.Trace, Mode: r.Mode, Operations: r.Operations, Requested: r.Requested}
		require.Equal(t, want[i], told)
	}
}

// A snapshot of PyTorch's memory becomes a trace of what was requested.
func TestPeersConvert(t *testing.T) {
	dir := t.TempDir()
	snapshot := filepath.Join(dir, "mine.pickle")
	_, complaints, err := python(t, "-c", `
import pickle, sys
event = lambda action, addr, size, stream: {"action": action, "addr": addr, "size": size, "stream": stream}
pickle.dump({"segments": [], "device_traces": [[], [
    event("free_requested", 5, 9, 0),
    event("segment_alloc", 512, 2 << 20, 0), event("alloc", 512, 700, 0), event("alloc", 2048, 5, 77),
    event("free_requested", 512, 700, 0), event("free_completed", 512, 700, 0), event("alloc", 512, 800, 0),
]]}, open(sys.argv[1], "wb"))`, snapshot)
	require.NoError(t, err, complaints)
	out := peers(t, "convert", "-out", dir, snapshot)
	require.Contains(t, out, "mine.trace: 4 operations on 2 streams, at most 0.00 GiB")
	got, err := load(filepath.Join(dir, "mine.trace"))
	require.NoError(t, err)
	require.Equal(t, &trace.Trace{Name: "mine", Streams: 2, Tags: []string{""}, Ops: []trace.Op{
		{Kind: trace.Alloc, Bytes: 700}, {Kind: trace.Alloc, ID: 1, Bytes: 5, Stream: 1}, {Kind: trace.Free}, {Kind: trace.Alloc, ID: 2, Bytes: 800},
	}}, got)
	_, err = load(snapshot)
	require.ErrorContains(t, err, "scripts/pool-peers.py convert")
	require.Equal(t, 805, measured(t, "-peers", "dry", "-modes", "idle", snapshot)[0].Requested)
}

func TestPeersRefuse(t *testing.T) {
	dir := t.TempDir()
	danger, empty := filepath.Join(dir, "danger.pickle"), filepath.Join(dir, "empty.pickle")
	_, complaints, err := python(t, "-c", `
import os, pickle, sys
class Danger:
    def __reduce__(self):
        return os.mkdir, (sys.argv[1] + ".made",)
pickle.dump(Danger(), open(sys.argv[1], "wb"))
pickle.dump({"segments": [], "device_traces": [[]]}, open(sys.argv[2], "wb"))`, danger, empty)
	require.NoError(t, err, complaints)
	good := file(t, "good.json", "[[0, 1]]")
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"compare", "-peers", "dry", danger}, "mkdir, which no snapshot of PyTorch's memory has: do not trust it"},
		{[]string{"convert", "-out", dir, empty}, "the snapshot has no history: call torch.cuda.memory._record_memory_history()"},
		{[]string{"compare", "-peers", "dry", file(t, "bad.json", "[[0, 1], [0, 2]]")}, "bad.json: operation 1: block 0 is allocated, but lives: free it first"},
		{[]string{"compare", "-peers", "dry", file(t, "odd.json", "[[0, 1.5]]")}, "operation 0: [0, 1.5] is not [block, bytes]"},
		{[]string{"compare", "-peers", "dry", file(t, "other", "hello")}, "it is neither a trace nor a snapshot"},
		{[]string{"compare", "-peers", "jemalloc", good}, "-peers jemalloc: there are torch, torch-expandable"},
		{[]string{"compare", "-peers", "dry", "-modes", "busy", good}, "-modes busy: use idle, behind, streams, goroutines or all"},
		{[]string{"table", good}, "no result in these files"},
	} {
		_, complaints, err := python(t, append([]string{script(t)}, c.args...)...)
		require.Error(t, err)
		require.Contains(t, complaints, c.want)
	}
	require.NoDirExists(t, danger+".made")
}

// A library that is not there is told in its lines, and ends nothing.
func TestPeersThatAreMissing(t *testing.T) {
	modules := t.TempDir()
	t.Setenv("PYTHONPATH", modules)
	require.NoError(t, os.WriteFile(filepath.Join(modules, "cupy.py"), []byte("raise ImportError('not today')"), 0o600))
	got := measured(t, "-peers", "cupy,dry", "-modes", "idle", file(t, "one.json", "[[0, 7]]"))
	require.Len(t, got, 2)
	require.Equal(t, "ImportError: not today", got[0].Error)
	require.Empty(t, got[1].Error)
}

// stubDriver stands for the driver's library: its pool says that it reserved
// twice what lived and a byte for each block that was set, and it refuses what no
// program may do.
const stubDriver = `
#include <stddef.h>
#include <stdint.h>
static uint64_t live[1 << 16], now, high, next;
static int sets, streams;
int cuInit(unsigned f) { return 0; }
int cuDeviceGet(int *d, int n) { *d = 0; return 0; }
int cuDeviceTotalMem_v2(size_t *n, int d) { *n = (size_t)64 << 30; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)1; return 0; }
int cuCtxSetCurrent(void *c) { return c ? 0 : 201; }
int cuCtxGetCurrent(void **c) { *c = (void *)1; return 0; }
int cuStreamCreate(void **s, unsigned flags) { *s = (void *)(uintptr_t)++streams; return flags == 1 ? 0 : 1; }
int cuStreamSynchronize(void *s) { return 0; }
int cuMemsetD8Async(uint64_t p, unsigned char v, size_t n, void *s) {
    sets++;
    return live[p] == n ? 0 : 700;
}
int cuMemPoolCreate(void **p, const void *props) { now = high = next = sets = 0; *p = (void *)7; return ((const uint64_t *)props)[3] == (uint64_t)32 << 30 ? 0 : 1; }
int cuMemPoolDestroy(void *p) { return now ? 1 : 0; }
int cuMemPoolSetAttribute(void *p, int a, void *v) { return a == 4 ? 0 : 1; }
int cuMemPoolGetAttribute(void *p, int a, uint64_t *v) { *v = 2 * high + sets; return a == 6 ? 0 : 1; }
int cuMemAllocFromPoolAsync(uint64_t *p, size_t n, void *pool, void *s) {
    if (n > (uint64_t)1 << 40) return 2;
    *p = ++next;
    live[next] = n;
    now += n;
    if (now > high) high = now;
    return 0;
}
int cuMemFreeAsync(uint64_t p, void *s) {
    if (!live[p]) return 1;
    now -= live[p];
    live[p] = 0;
    return 0;
}
`

// The compiled loop allocates, works on and frees what the trace says, and frees
// the rest.
func TestPeersLoop(t *testing.T) {
	cc, cxx := needs.Program(t, "cc"), needs.Program(t, "c++")
	script(t)
	stub := filepath.Join(t.TempDir(), "stub.so")
	built, err := exec.CommandContext(t.Context(), cc, "-shared", "-fPIC", "-w", "-o", stub, file(t, "stub.c", stubDriver)).CombinedOutput()
	require.NoError(t, err, "%s", built)
	t.Setenv("CXX", cxx)
	good := file(t, "good.json", "[[0, 4000], [1, 300], [0, 0], [2, 6000]]")
	large := file(t, "large.json", "[[0, 4000], [1, 2199023255552]]")
	got := measured(t, "-libcuda", stub, "-peers", "driver-pool,driver-pool-trim", "-modes", "idle,behind,streams", good, large)
	require.Len(t, got, 12)
	for _, r := range got {
		if r.Trace == "large" {
			require.Equal(t, "RuntimeError: operation 1: cuMemAllocFromPoolAsync returned 2", r.Error)
			continue
		}
		require.Empty(t, r.Error)
		require.Equal(t, 4, r.Operations)
		require.Equal(t, 6300, r.Requested)
		worked := map[string]int{"behind": 6, "streams": 6}[r.Mode] // in both passes
		require.Equal(t, 2*6300+worked, r.Reserved)
		require.Positive(t, r.LongestUs)
	}
}

func TestPeersTable(t *testing.T) {
	results := file(t, "results", `noise
{"trace": "gnn", "mode": "idle", "allocator": "pool", "requested": 100, "reserved": 103, "first_us": 1.0, "second_us": 0.5, "longest_us": 1900, "longest_bytes": 1}
{"trace": "gnn", "mode": "idle", "allocator": "torch-expandable", "requested": 100, "reserved": 110, "first_us": 0.4, "second_us": 0.1, "longest_us": 1, "longest_bytes": 1}
{"trace": "gnn", "mode": "idle", "allocator": "driver-pool", "requested": 100, "reserved": 102, "first_us": 2.0, "second_us": 1.0, "longest_us": 1, "longest_bytes": 1}
{"trace": "gnn", "mode": "behind", "allocator": "pool", "requested": 100, "reserved": 104, "first_us": 3.0, "second_us": 0.5, "longest_us": 2100, "worked_us": 2060, "longest_bytes": 1}
{"trace": "gnn", "mode": "behind", "allocator": "driver-pool", "requested": 100, "reserved": 102, "first_us": 2.0, "second_us": 1.0, "longest_us": 9999, "longest_bytes": 1}
{"trace": "gnn", "mode": "streams", "allocator": "pool", "requested": 100, "reserved": 100, "first_us": 1.0, "first_worked_us": 0.8, "second_us": 0.5, "longest_us": 9000, "worked_us": 1900, "longest_bytes": 1}
{"trace": "gnn", "mode": "streams", "allocator": "driver-pool", "requested": 100, "reserved": 102, "first_us": 2.0, "second_us": 1.0, "longest_us": 9999, "longest_bytes": 1}
{"trace": "lora-0", "mode": "idle", "allocator": "pool", "requested": 100, "reserved": 100, "first_us": 1.0, "second_us": 0.5, "longest_us": 5900, "longest_bytes": 4294967296}
{"trace": "lora-0", "mode": "idle", "allocator": "torch", "requested": 100, "reserved": 150, "first_us": 2.0, "second_us": 2.0, "longest_us": 1, "longest_bytes": 1}
{"trace": "lora-1", "mode": "idle", "allocator": "pool", "error": "out of memory"}
{"trace": "lora-1", "mode": "idle", "allocator": "torch", "requested": 100, "reserved": 120, "first_us": 4.0, "second_us": 2.0, "longest_us": 1, "longest_bytes": 1}
`)
	require.Equal(t, `Peak reserved over peak requested, µs of an operation in the first and the second pass, the longest in ms [without waiting for memory in use]; of several traces the worst (and the mean).

| traces | mode | pool | torch-expandable | driver-pool | torch | least memory of peers | pool misses |
| --- | --- | --- | --- | --- | --- | --- | --- |
| gnn | idle | 1.030, 1.00, 0.50, 1.9 | 1.100, 0.40, 0.10, 0.0 | 1.020, 2.00, 1.00, 0.0 | – | driver-pool | none |
| gnn | behind | 1.040, 3.00, 0.50, 2.1 | – | 1.020, 2.00, 1.00, 10.0 | – | driver-pool | **memory**, **first pass**, **longest** |
| gnn | streams | 1.000, 1.00 [0.80], 0.50, 9.0 [1.9] | – | 1.020, 2.00, 1.00, 10.0 | – | driver-pool | none |
| lora (2) | idle | 1.000, 1.00, 0.50, 5.9, 1 failed | – | – | 1.500 (1.350), 4.00 (3.00), 2.00 (2.00), 0.0 (0.0) | torch | **failed** 1 of 2 |
`, peers(t, "table", results))
}
