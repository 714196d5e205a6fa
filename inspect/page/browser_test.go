package page_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/inspect/page"
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
)

// browse opens a page in a headless browser, runs a script on it, and returns the
// document's data-result.
func browse(t *testing.T, script string, snapshots ...inspect.Snapshot) string {
	t.Helper()
	browser := needs.Program(t, "chromium")
	var w bytes.Buffer
	require.NoError(t, page.Write(&w, snapshots...))
	text := strings.Replace(w.String(), "</body>", "<script>"+script+"</script></body>", 1)
	file := filepath.Join(t.TempDir(), "map.html")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
		"--user-data-dir="+t.TempDir(), "--window-size=1400,900", "--virtual-time-budget=20000", "--dump-dom", "file://"+file).Output()
	require.NoError(t, err)
	found := regexp.MustCompile(`data-result="([^"]*)"`).FindSubmatch(out)
	require.NotNil(t, found, "the page did not come to its end")
	return string(found[1])
}

// many returns a snapshot with so many blocks in a pool, a buffer and an alias.
func many(blocks int) inspect.Snapshot {
	const mib = 1 << 20
	s := snapshot()
	s.Driver, s.Time, s.Totals.Reservations = "CUDA 13.0", time.Unix(1_700_000_000, 0), 3
	s.Stacks = []inspect.Stack{{"github.com/cuvmm/cuvmm/vmm.NewBuffer (/src/vmm/buffer.go:9)", "main.load (load.go:10)", "main.main (main.go:5)"}, {"main.cache (cache.go:7)"}}
	r := rand.New(rand.NewSource(1))
	region := inspect.Reservation{Ptr: 0x7f0000000000, Bytes: 1 << 40, Granularity: 2 * mib}
	at := 0
	var segment inspect.Segment
	for i := range blocks {
		size := 512 << r.Intn(12)
		if i%7 != 0 {
			segment.Blocks = append(segment.Blocks, inspect.Block{Offset: at, Bytes: size, Requested: size - 3, Waiting: i%50 == 1,
				Tag: []string{"weights", "kv cache", ""}[i%3], Stack: 1 + i%2})
		}
		at += size
	}
	segment.Ptr, segment.Bytes, segment.Kind = region.Ptr, (at+32*mib-1)/(32*mib)*(32*mib), "region"
	for o := 0; o < segment.Bytes; o += 32 * mib {
		id := uint64(len(s.Memory) + 1)
		s.Memory = append(s.Memory, inspect.Memory{ID: id, Bytes: 32 * mib, Location: "device 0", Mappings: 1})
		region.Mappings = append(region.Mappings, inspect.Mapping{Offset: o, Bytes: 32 * mib, Memory: id, Access: "device 0: read-write"})
	}
	requested := 0
	for _, b := range segment.Blocks {
		requested += b.Requested
	}
	s.Pools = []inspect.Pool{{Reserved: segment.Bytes, Requested: requested, Blocks: len(segment.Blocks), Segments: []inspect.Segment{segment}}}
	buffer := inspect.Reservation{Ptr: 0x7e0000000000, Bytes: 1 << 37}
	for i := range 9 {
		id := uint64(1_000_000 + i)
		s.Memory = append(s.Memory, inspect.Memory{ID: id, Bytes: 16 * mib, Location: "device 0", Mappings: 1 + i%2, Exported: i < 3})
		buffer.Mappings = append(buffer.Mappings, inspect.Mapping{Offset: i * 16 * mib, Bytes: 16 * mib, Memory: id})
	}
	alias := inspect.Reservation{Ptr: 0x7d0000000000, Bytes: 64 * mib, Mappings: []inspect.Mapping{{Offset: 32 * mib, Bytes: 16 * mib, Memory: 1_000_001}}}
	s.Buffers = []inspect.Buffer{{Ptr: buffer.Ptr, Used: 100 * mib, Committed: 128 * mib, Reserved: buffer.Bytes}}
	s.Publications = []inspect.Publication{{Name: "embeddings", Ptr: buffer.Ptr, Bytes: 48 * mib, Followers: []inspect.Reader{{PID: 4711, Pinned: 16 * mib}}}}
	s.Reservations = []inspect.Reservation{alias, buffer, region}
	return s
}

const finish = `; document.body.dataset.result = `

func TestTheModelInABrowser(t *testing.T) {
	require.Equal(t, "1 3 regions, alias, 4,50,0.25", browse(t, `
		const r = model.regions[1], last = r.pieces[r.pieces.length-1];
		layout(model, 1 << 27, rowHeight, headHeight);
		const back = offsetAt(r, displayed(r, 50 << 20)) / (1 << 20);
		const m = itemAt(model.regions[0], 33 << 20, null);
		const names = groups(model, groupKey, FIRST).map(g => g.key)`+finish+`
		names.includes("load.go:10") + names.includes("main.load (load.go:10)") + " " + model.regions.length + " regions, " + (m.flags & ALIAS ? "alias" : "none") + ", " + (atOrBefore(model.regions[2].mappings, 4.5 * (32 << 20))) + "," + back + "," + last.dn / (1 << 27)`,
		many(1000)))
}

// The shapes of a frame, and the blocks that it looks at, are bounded by the pixels of the
// window and not by the number of blocks, at every zoom.
func TestTheWorkOfAFrameInABrowser(t *testing.T) {
	for _, blocks := range []int{1_000, 10_000, 100_000} {
		t.Run(strconv.Itoa(blocks), func(t *testing.T) {
			require.Equal(t, "true mapping  ", browse(t, `
				let shapes = 0, looks = 0, complaints = "";
				const fill = context.fillRect.bind(context), look = shows;
				context.fillRect = (...a) => { shapes++; fill(...a); };
				shows = b => { looks++; return look(b); };
				const press = key => {
					document.dispatchEvent(new KeyboardEvent("keydown", { key }));
					shapes = looks = 0;
					draw();
					const rows = Math.min(Math.ceil(total / rowHeight), Math.ceil(height / rowHeight) + 1);
					if (shapes > 4 * rows * width || looks > 6 * rows * width) complaints += key + ": " + shapes + " shapes, " + looks + " looks; ";
				};
				for (const key of ["+", "+", "+", "ArrowDown", "PageDown", "n", "n", "Enter", "-", "p", "a", "c", "c", "0", "End", "Home"]) press(key);
				const kind = selected.kind;
				press("Escape");
				while (model.regions[2].rows > 1) press("-"); // all blocks within a row
				if (shapes > 5 * width || looks > 7 * width) complaints += "one row: " + shapes + " shapes, " + looks + " looks";`+finish+
				`document.body.dataset.ready + " " + kind + " " + " " + complaints`, many(blocks)))
		})
	}
}

// TestTheTimeOfAFrameInABrowser prints times and checks none.
func TestTheTimeOfAFrameInABrowser(t *testing.T) {
	if os.Getenv("CUVMM_PAGES") == "" {
		t.Skip("CUVMM_PAGES is not set: nothing to measure for")
	}
	for _, blocks := range []int{1_000, 10_000, 100_000} {
		t.Log(blocks, "blocks:", browse(t, `
			const opened = performance.now();
			const t0 = performance.now(); show([JSON.parse(JSON.stringify(data.snapshots[0]))]); draw(); const again = performance.now() - t0;
			const frames = [];
			for (let i = 0; i < 20; i++) for (const key of ["+", "ArrowDown", "PageDown", "n", "c", "-", "p", "0", "End", "Home"]) {
				const t1 = performance.now();
				document.dispatchEvent(new KeyboardEvent("keydown", { key })); draw();
				frames.push(performance.now() - t1);
			}
			frames.sort((a, b) => a - b)`+finish+`"open after " + opened.toFixed(0) + " ms, shown in " + again.toFixed(0) + " ms, frames " +
			frames[100].toFixed(1) + " ms, slowest " + frames[199].toFixed(1) + " ms"`, many(blocks)))
	}
}

// Blocks of two snapshots, and of different times, overlap: a long one is drawn in each
// row that it covers, and found at each of its addresses.
func TestBlocksThatOverlapInABrowser(t *testing.T) {
	const mib = 1 << 20
	one := func(blocks ...inspect.Block) inspect.Snapshot {
		s := many(10)
		s.Pools[0].Segments[0].Blocks = blocks
		return s
	}
	long, short := inspect.Block{Bytes: 30 * mib, Tag: "long"}, inspect.Block{Bytes: mib, Tag: "short"}
	require.Equal(t, "long,1;short,2;long,1", browse(t, `
		const r = model.regions[2], at = () => { const b = itemAt(r, 20 << 20, event_, shows) || {}; return b.tag + "," + b.side; };
		const drawn = () => { const seen = []; visible(itemsAt(r, event_), 16 << 20, 24 << 20, 0, 1e-5, b => seen.push(b.tag + "," + b.side)); return seen.join(); };
		side = 1; const out = [at()]; side = 2; out.push((itemAt(r, 1 << 19, event_, shows) || {}).tag + ",2"); side = 0; out.push(drawn())`+finish+`out.join(";")`,
		one(long), one(short)))

	s := one()
	at, ptr := s.Time, s.Pools[0].Segments[0].Ptr
	for i, e := range []inspect.Event{{Op: "alloc", Bytes: mib, Tag: "short"}, {Op: "free", Bytes: mib, Tag: "short"}, {Op: "alloc", Bytes: 30 * mib, Tag: "long"}, {Op: "free", Bytes: 30 * mib, Tag: "long"}} {
		e.Time, e.Ptr = at.Add(time.Duration(i)*time.Second), ptr
		s.Pools[0].History = append(s.Pools[0].History, e)
	}
	require.Equal(t, "short, none; none, none; long, long", browse(t, `
		const r = model.regions[2], out = [], tag = o => (itemAt(r, o, event_, shows) || {}).tag || "none";
		for (const i of [0, 1, 2]) { showEvent(i); draw(); out.push(tag(0) + ", " + tag(20 << 20)); }`+finish+`out.join("; ")`, s))
}

func TestFindingInABrowser(t *testing.T) {
	require.Equal(t, "block weights main.cache (cache.go:7);0x7f0000000000;mapping", browse(t, `
		find("weights"); const a = selected.kind + " " + selected.tag + " " + selected.stack[0];
		find("0x7f0000000000"); const b = hex(selected.region_.ptr);
		find("embeddings"); nextAlias(); neighbour(1); selected.kind; find("0x7e0006a00000"); neighbour(-1); nextAlias()`+finish+`a + ";" + b + ";" + selected.kind`, many(1000)))
}

func TestComparingInABrowser(t *testing.T) {
	first, second := many(1000), many(1000)
	blocks := &second.Pools[0].Segments[0].Blocks
	*blocks = (*blocks)[:len(*blocks)-10]
	second.Reservations = second.Reservations[1:]
	second.Reservations[0].Mappings = append(second.Reservations[0].Mappings, inspect.Mapping{Offset: 1 << 30, Bytes: 2 << 20, Memory: 77})
	require.Equal(t, "gone 10, new 1, regions gone 1, changes true", browse(t, `
		const count = (list, side) => model.regions.reduce((n, r) => n + r[list].filter(b => b.side === side).length, 0)`+finish+`
		"gone " + count("blocks", FIRST) + ", new " + count("mappings", SECOND) + ", regions gone " + model.regions.filter(r => r.sides === FIRST).length
		+ ", changes " + byId("lists").textContent.includes("changes")`, first, second))
}

func TestPlayingAHistoryInABrowser(t *testing.T) {
	s := many(10)
	at, ptr := s.Time, s.Pools[0].Segments[0].Ptr
	event := func(op string, offset, bytes int) {
		at = at.Add(time.Second)
		s.Pools[0].History = append(s.Pools[0].History, inspect.Event{Op: op, Time: at, Ptr: ptr + inspect.Address(offset), Bytes: bytes, Tag: "past"})
	}
	event("alloc", 8<<20, 1<<20)
	event("alloc", 9<<20, 1<<20)
	event("free", 8<<20, 1<<20)
	event("free", 4<<20, 1<<20) // allocated before the history began
	event("free", 9<<20, 1<<20)
	require.Equal(t, "1,2;2,3;3,2;4,1;now", browse(t, `
		const r = model.regions[2], out = [];
		const past = i => r.past.filter(b => b.tag === "past" && b.from <= i && i < b.to).length;
		for (const i of [0, 1, 2, 3]) { showEvent(i); draw(); out.push((i + 1) + "," + past(i)); }
		showEvent(5); draw();`+finish+`out.join(";") + ";" + byId("when").textContent`, s))
}

func TestLookAtThePage(t *testing.T) {
	to := os.Getenv("CUVMM_PAGES") // a folder to write the tests' pages into, to look at
	if to == "" {
		t.Skip("CUVMM_PAGES names no folder")
	}
	first, second := many(3000), many(3000)
	second.Pools[0].Segments[0].Blocks = second.Pools[0].Segments[0].Blocks[:2000]
	for i, pages := range [][]inspect.Snapshot{{many(100_000)}, {first, second}} {
		f, err := os.Create(filepath.Join(to, fmt.Sprintf("map%d.html", i)))
		require.NoError(t, err)
		require.NoError(t, page.Write(f, pages...))
		require.NoError(t, f.Close())
	}
}
