package page_test

import (
	"bytes"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/test/browser"

	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/inspect/page"
	"github.com/stretchr/testify/require"
)

// written returns the page of snapshots.
func written(t *testing.T, snapshots ...inspect.Snapshot) string {
	t.Helper()
	var w bytes.Buffer
	require.NoError(t, page.Write(&w, snapshots...))
	return w.String()
}

// browse runs a script on the page of snapshots, and returns the document's data-result.
func browse(t *testing.T, script string, snapshots ...inspect.Snapshot) string {
	t.Helper()
	return browser.Window{}.Run(t, written(t, snapshots...), script)
}

const finish = `; document.body.dataset.result = `

func TestTheModelInABrowser(t *testing.T) {
	require.Equal(t, "1 3 regions, alias, 4,50,0.25", browse(t, `
		const r = model.regions[1], last = r.pieces[r.pieces.length-1];
		layoutRegion(r, 1 << 27);
		const back = offsetAt(r, displayed(r, 50 << 20)) / (1 << 20);
		const m = itemAt(model.regions[0], 33 << 20, null);
		const names = uses(model.snapshots[0]).map(u => u.name)`+finish+`
		names.includes("load.go:10") + names.includes("main.load (load.go:10)") + " " + model.regions.length + " regions, " + (m.flags & ALIAS ? "alias" : "none") + ", " + (lastBefore(model.regions[2].mappings, "o", 4.5 * (32 << 20))) + "," + back + "," + last.dn / (1 << 27)`,
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
				zoomGroup(model.regions[2].group, 2 ** 40); // all blocks within a row
				arrange();
				press("c");
				if (model.regions[2].rows > 1) complaints += "more than a row; ";
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
