package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/inspect/page"
	"github.com/cuvmm/cuvmm/internal/test/browser"
	"github.com/stretchr/testify/require"
)

// The map in a terminal and the page show the same numbers of the same snapshots: of all
// memory, of each range, of the uses and of what has changed.
func TestTerminalAndPageAgree(t *testing.T) {
	sys, buffer := program(t)
	before, err := inspect.Take(sys)
	require.NoError(t, err)
	_, err = buffer.Append(nil, make([]byte, 41<<20+5))
	require.NoError(t, err)
	s, err := inspect.Take(sys)
	require.NoError(t, err)
	of := inspect.Address(buffer.Ptr())
	s.Buffers[0].Name, s.Buffers[0].Tag, s.Pools[0].Name = "cache", "llm", "scratch"
	s.Publications = []inspect.Publication{{Name: `the "best" weights`, Ptr: of, Bytes: 3 << 20, Followers: []inspect.Reader{{PID: 5, Since: time.Now()}}}}
	for i := range s.Memory {
		s.Memory[i].Exported, s.Memory[i].Imported = i%3 == 0, i%3 == 1
	}
	s.Reservations[0].Mappings[0].Suspended = true
	s.Pools = append(s.Pools, inspect.Pool{Serial: 99, Segments: []inspect.Segment{{Ptr: 1 << 40, Bytes: 4096, Blocks: []inspect.Block{
		{Bytes: 512, Requested: 500, Waiting: true, Tag: "past"}, {Offset: 512, Bytes: 512, Requested: 511}}}}})
	s.Managed = []inspect.Managed{{Ptr: 1 << 41, Bytes: 64 << 20, Device: 1, Located: true, Resident: []inspect.Resident{{Bytes: 3 << 20, Location: "host"},
		{Offset: 16 << 20, Bytes: 8 << 20, Location: "device 0"}, {Offset: 24 << 20, Bytes: 1 << 20, Location: "host"}}},
		{Ptr: 1 << 42, Bytes: 4 << 20, Prefetched: "device 0"}, {Ptr: 1 << 43, Bytes: 4096}}
	own := slices.IndexFunc(s.Reservations, func(r inspect.Reservation) bool { return s.Holder(r) == "" })
	s.Sparse = []inspect.Sparse{{Ptr: s.Reservations[own].Ptr, Name: "request 7", Tag: "kv cache", Page: 1 << 20, Pages: 4, Mapped: 2, Spans: []inspect.Span{{First: 0, N: 1}, {First: 3, N: 1}}}}
	s.Sources = []inspect.Source{{Name: "kv", Page: 2 << 20, Pages: 9, Used: 5}}
	sizes := []int{0, 1, 1023, 1024, 1280, 1 << 20, 1<<20 + 51<<10, 99<<20 + 999<<10, 100<<20 + 512<<10, 1<<30 - 1, -5 << 18, 3<<40 + 7<<36, 1 << 52}

	var file bytes.Buffer
	require.NoError(t, page.Write(&file, before, s))
	list, err := json.Marshal(sizes)
	require.NoError(t, err)
	var shown struct {
		Totals              string
		Sizes, Ranges, Pool []string
		Uses, Changes       []inspect.Use
	}
	require.NoError(t, json.Unmarshal([]byte(browser.Window{}.Run(t, file.String(), `
		const [before, s] = model.snapshots, one = buildModel([s]);
		document.body.dataset.result = JSON.stringify({
			Totals: totals(s), Sizes: `+string(list)+`.map(sizeText), Ranges: one.regions.map(r => hex(r.ptr) + "  " + describe(r)), Uses: uses(s), Changes: changes(before, s),
			Pool: [...document.querySelectorAll("#lists td")].map(td => td.textContent).filter(text => text.includes(" of ")) })`)), &shown))

	var text bytes.Buffer
	picture{out: &text, cells: &text, width: 80, rows: 30}.write(s)
	lines := strings.Split(text.String(), "\n")
	for i, n := range sizes {
		require.Equal(t, size(n), shown.Sizes[i])
	}
	require.Contains(t, lines, shown.Totals)
	require.Contains(t, text.String(), " suspended\n")
	require.Len(t, shown.Ranges, len(s.Reservations)+len(s.Managed))
	require.Contains(t, shown.Ranges, "0x20000000000  managed memory: 64 MiB, 8 MiB on device 0, 4 MiB on host, 52 MiB untouched")
	for _, r := range shown.Ranges {
		require.Contains(t, lines, r)
	}
	require.Equal(t, s.Uses(), shown.Uses)
	require.Equal(t, inspect.Compare(before, s), shown.Changes)
	require.NotEmpty(t, shown.Changes)
	require.Contains(t, text.String(), `  sparse range "request 7": `)
	require.Contains(t, lines, `pages "kv": 5 of 9 pages of 2 MiB in use`)
	require.Contains(t, shown.Pool, "10 MiB of 18 MiB")
	p := s.Pools[0]
	require.Contains(t, shown.Pool, size(p.Requested)+" of "+size(p.Reserved))
	require.True(t, slices.ContainsFunc(lines, func(l string) bool {
		return strings.HasPrefix(l, fmt.Sprintf("pool %d \"scratch\" on device %d: %s in %d blocks, %s reserved", p.Serial, p.Device, size(p.Requested), p.Blocks, size(p.Reserved)))
	}))
}
