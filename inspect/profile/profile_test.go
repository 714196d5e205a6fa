package profile_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/inspect/profile"
	_ "github.com/cuvmm/cuvmm/internal/test/gputest" // with it, another library captures beside each test
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

const mib = 1 << 20

func snapshot() inspect.Snapshot {
	return inspect.Snapshot{
		Time:   time.Unix(1_700_000_000, 0),
		Stacks: []inspect.Stack{{"main.load (/src/load.go:10)", "main.main (/src/main.go:5)"}, {"main.cache (/src/cache.go:7)", "main.main (/src/main.go:6)"}},
		Reservations: []inspect.Reservation{
			{Ptr: 0x1000000000, Bytes: 64 * mib, Mappings: []inspect.Mapping{{Bytes: 8 * mib, Memory: 1}}}, // a buffer's
			{Ptr: 0x2000000000, Bytes: 64 * mib, Mappings: []inspect.Mapping{{Bytes: 32 * mib, Memory: 2}}},
			{Ptr: 0x3000000000, Bytes: 64 * mib, Mappings: []inspect.Mapping{{Bytes: 4 * mib, Memory: 3}}},
		},
		Memory: []inspect.Memory{{ID: 1, Bytes: 8 * mib, Location: "device 0", Mappings: 1}, {ID: 2, Bytes: 32 * mib, Location: "device 0", Mappings: 1},
			{ID: 3, Bytes: 4 * mib, Location: "device 1", Mappings: 1, Stack: 2}},
		Buffers: []inspect.Buffer{{Ptr: 0x1000000000, Used: 5 * mib, Committed: 8 * mib, Stack: 1}},
		Pools: []inspect.Pool{{Reserved: 32 * mib, Segments: []inspect.Segment{{Ptr: 0x2000000000, Bytes: 32 * mib, Blocks: []inspect.Block{
			{Bytes: 2 * mib, Requested: 2 * mib, Tag: "kv", Stack: 2}, {Offset: 2 * mib, Bytes: 4 * mib, Requested: 3 * mib}, {Offset: 8 * mib, Bytes: mib, Waiting: true}}}},
			History: []inspect.Event{{Op: "alloc", Bytes: 2 * mib, Tag: "kv", Stack: 2}, {Op: "alloc", Bytes: 7 * mib, Stack: 2}, {Op: "free", Bytes: 7 * mib}}}},
		Others: []inspect.Other{{Kind: "managed memory", Bytes: mib}, {Kind: "stream"}},
	}
}

// pprof returns the output of the tool for the profile.
func pprof(t *testing.T, s inspect.Snapshot, args ...string) string {
	t.Helper()
	tool := needs.Program(t, "go")
	file := filepath.Join(t.TempDir(), "gpu.pb.gz")
	var w bytes.Buffer
	require.NoError(t, profile.Write(&w, s))
	require.NoError(t, os.WriteFile(file, w.Bytes(), 0o600))
	out, err := exec.CommandContext(t.Context(), tool, append(append([]string{"tool", "pprof"}, args...), file)...).CombinedOutput()
	if err != nil && strings.Contains(string(out), "no such tool") {
		needs.Lacks(t, "a Go toolchain with pprof")
	}
	require.NoError(t, err, "%s", out)
	return string(out)
}

func TestThePprofToolReadsIt(t *testing.T) {
	out := pprof(t, snapshot(), "-top", "-unit=MB")
	for _, want := range []string{
		"Type: inuse_space",
		"27MB 60.00%", "(free in pool)",
		"8MB 17.78%", "main.load",
		"6MB 13.33%", "main.cache",
		"3MB  6.67%", "(block)",
		"1MB  2.22%", "(managed memory)",
		"main.main",
	} {
		require.Contains(t, strings.ReplaceAll(out, "   ", "  "), want)
	}
	require.Contains(t, pprof(t, snapshot(), "-top", "-sample_index=alloc_space", "-unit=MB"), "9MB   100%   100%        9MB   100%  main.cache")
	require.Contains(t, pprof(t, snapshot(), "-top", "-sample_index=inuse_objects"), "main.cache")
	require.Contains(t, pprof(t, snapshot(), "-top", "-lines", "-unit=MB"), "main.load /src/load.go:10")
	tags := pprof(t, snapshot(), "-tags", "-unit=MB")
	for _, want := range []string{"device:", "kind:", "tag:", "kv", "managed memory"} {
		require.Contains(t, tags, want)
	}
	require.Contains(t, pprof(t, snapshot(), "-top", "-tagfocus=device=device 1", "-unit=MB"), "4MB")
}

func TestAnEmptyProfile(t *testing.T) {
	require.Contains(t, pprof(t, inspect.Snapshot{Time: time.Unix(1, 0)}, "-top"), "Total")
}

// All memory that the System counts is in the profile, and none of it twice.
func TestTheProfileAddsUp(t *testing.T) {
	_, sys := sim.Open(t, sim.WithMulticast(1))
	d := sys.Devices()[0]
	closing := func(c interface{ Close() error }) { t.Cleanup(func() { require.NoError(t, c.Close()) }) }
	stream, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	closing(stream)
	p, err := pool.New(d, pool.Options{Statistics: true})
	require.NoError(t, err)
	closing(p)
	b, err := p.Alloc(pool.Request{Bytes: 3 * mib, Stream: stream})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Free(b)) })
	buffer, err := vmm.NewBuffer(d, vmm.BufferOptions{})
	require.NoError(t, err)
	closing(buffer)
	_, err = buffer.Append(nil, make([]byte, mib))
	require.NoError(t, err)
	own, err := vmm.Create(d, 4*mib, vmm.Properties{})
	require.NoError(t, err)
	closing(own)
	m, err := managed.NewAllocator(d, managed.Options{})
	require.NoError(t, err)
	closing(m)
	unified, err := m.New(stream, mib)
	require.NoError(t, err)
	closing(unified)

	s, err := inspect.Take(sys)
	require.NoError(t, err)
	out := pprof(t, s, "-top", "-unit=B")
	for _, called := range []string{"vmm.NewBuffer", "vmm.Create", "managed.(*Allocator).New"} {
		require.Regexp(t, `\d%  github.com/cuvmm/cuvmm/`+regexp.QuoteMeta(called)+"\n", out)
	}
	for _, hidden := range []string{"internal/", "(*buffer)", "newBuffer"} {
		require.NotContains(t, out, hidden)
	}
	require.Contains(t, out, fmt.Sprintf(" %dB total", s.Totals.AllocatedBytes+s.Totals.ManagedBytes), out)
}
