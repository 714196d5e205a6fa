package page_test

import (
	"fmt"
	"strconv"
	"testing"

	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/internal/test/browser"
	"github.com/stretchr/testify/require"
)

// count makes each bar that is drawn count: the regions with one that is large enough to
// see, and what is wrong with others. walk scrolls from the top to the end.
const count = `
	const seen = new Set(), bad = [], fill = context.fillRect.bind(context), row = drawRow;
	let bars = null, pictures = 0;
	let empty = false; // a range without memory, which is seen by its hole
	context.fillRect = (x, y, w, h) => { if (bars && h === barHeight && (empty || painted !== colors.hole && painted !== hatch)) bars.push(w > 3.5 ? w + 0.5 : w); fill(x, y, w, h); };
	drawRow = (r, i, y) => {
		bars = [];
		empty = !r.mapped;
		row(r, i, y);
		const wide = bars.reduce((sum, w) => sum + w, 0);
		if (i === 0) {
			seen.add(r);
			if (wide < barWidth() / 20) bad.push(hex(r.ptr) + ": " + wide + " pixels");
			if (seen.size % 256 < 2 && y > groupHeight && y < height - barHeight && !inked(left + 4, y + 4)) bad.push(hex(r.ptr) + ": nothing at its beginning");
		}
		bars = null;
	};
	const inked = (x, y) => {
		const scale = window.devicePixelRatio || 1, [r, g, b] = context.getImageData(x * scale, y * scale, 1, 1).data;
		return "#" + [r, g, b].map(c => c.toString(16).padStart(2, "0")).join("") !== colors.bg;
	};
	const walk = () => {
		scrollTo_(0);
		for (let before = -1; before !== top_; pictures++) {
			before = top_;
			draw();
			if (pictures === 0) first = seen.size === model.lines.filter(l => l.region && l.y + head < height).length && seen.size > 0;
			document.dispatchEvent(new KeyboardEvent("keydown", { key: "PageDown" }));
		}
	};
	let first = false;
`

// However many ranges there are, in a window of any size, each is drawn so that it is seen,
// once its group is unfolded and the picture scrolls to it.
func TestEveryRangeIsSeenInABrowser(t *testing.T) {
	for _, n := range []int{1, 15, 100, 10_000} {
		for _, width := range []int{1280, 420} {
			t.Run(fmt.Sprintf("%d/%d", n, width), func(t *testing.T) {
				t.Parallel()
				w := browser.Window{Width: width, Height: 900}
				all := "true, of " + strconv.Itoa(n) + " seen " + strconv.Itoa(n)
				require.Equal(t, all+" light;"+all+" dark", w.Run(t, written(t, regions(n)), count+`
					const out = [], folded = model.groups.filter(g => !g.state.open);
					for (const dark of [false, true]) {
						theme(dark);
						pictures = 0;
						seen.clear();
						walk();
						const least = first;
						for (const g of folded) toggle(g);
						seen.clear();
						walk();
						for (const g of folded) toggle(g);
						out.push(least + "," + bad.slice(0, 3).join() + " of " + model.regions.length + " seen " + seen.size + (document.documentElement.classList.contains("dark") ? " dark" : " light"));
					}`+finish+`out.join(";")`))
			})
		}
	}
}

// Long groups begin folded, each with a bar of what it is used for. Folding and unfolding
// changes what is drawn, and the list of groups says so.
func TestGroupsFoldInABrowser(t *testing.T) {
	require.Equal(t, "false,false,false,false,true;0 of 0;833 of 833;true;5 groups;live,unused;2 groups", browse(t, count+`
		const open = model.groups.map(g => g.state.open).join(), pools = model.groups[2], out = [open];
		const drawn = () => { seen.clear(); walk(); return [...seen].filter(r => r.group === pools).length + " of " + model.lines.filter(l => l.region && l.group === pools).length; };
		out.push(drawn());
		[...document.querySelectorAll("#groups button")].find(b => b.textContent.endsWith("pools")).click();
		out.push(drawn(), document.querySelectorAll("#groups button")[2].ariaExpanded, document.querySelectorAll("#groups button").length + " groups");
		out.push(summary(model.groups[0]).filter(([, n]) => n > 0).map(([color]) => Object.keys(colors).find(k => colors[k] === color)).join());
		byId("by").value = "device";
		byId("by").dispatchEvent(new Event("change"));
		out.push(model.groups.length + " groups");`+finish+`out.join(";") + bad.slice(0, 3).join()`, regions(10_000)))
}

// Every group has a scale of its own, which zooming changes alone.
func TestGroupsHaveScalesInABrowser(t *testing.T) {
	require.Equal(t, "true;buffers 0.5;buffers 1", browse(t, `
		const changed = () => model.groups.filter(g => g.state.zoom !== 1).map(g => g.key + " " + g.state.zoom).join();
		const scales = new Set(model.groups.map(groupScale)), b = model.groups.find(g => g.key === "buffers"), out = [scales.size > 2];
		select(whole(b.regions[0]), b.regions[0], true);
		const press = key => document.dispatchEvent(new KeyboardEvent("keydown", { key }));
		press("+"); out.push(changed());
		press("0"); out.push(changed() || "buffers " + b.state.zoom);`+finish+`out.join(";")`, regions(100)))
}

// Blocks of pools group their ranges by tag, and memory its ranges by device.
func TestGroupingInABrowser(t *testing.T) {
	s := many(100)
	s.Memory[0].Location = "device 1"
	require.Equal(t, "device 0: 2, device 1: 1;no tag: 2, weights: 1", browse(t, `
		model.regions[0].device = "device 1";
		const by = how => { makeGroups(model, how); return model.groups.map(g => g.key + ": " + g.regions.length).sort().join(", "); }`+finish+
		`by("device") + ";" + by("tag")`, s))
}

// What a program named and tagged is shown so, is found by it, and is grouped by its tag.
func TestNamesInABrowser(t *testing.T) {
	s := many(100)
	s.Buffers[0].Name, s.Buffers[0].Tag, s.Pools[0].Name, s.Pools[0].Tag = "shown", "llm", "scratch", "llm"
	require.Equal(t, "reservation,“embeddings”,scratch;llm: 2,no tag: 1;true;pool 0 \"scratch\" on device 0;llm", browse(t, `
		const out = [model.regions.map(r => r.title).join()];
		makeGroups(model, "tag");
		out.push(model.groups.map(g => g.key + ": " + g.regions.length).sort().join());
		legend();
		out.push(byId("legend").textContent.includes("llm"));
		find("scratch");
		out.push(selected.region_.holder);
		find("llm");
		out.push(selected.tag);`+finish+`out.join(";")`, s))
}

// What a publication or a follower shows sleeps, and the lists say so.
func TestWhoSleepsInABrowser(t *testing.T) {
	s := many(100)
	s.Publications = []inspect.Publication{{Name: "weights", Suspended: true}, {Name: "cache"}}
	s.Followers = []inspect.Follower{{Name: "index", PID: 7, Suspended: true}, {Name: "rows", PID: 8}}
	asleep := &s.Reservations[0].Mappings[0]
	asleep.Suspended = true
	require.Equal(t, "drawn true;described true;“weights”, 0 followers, sleeps;“cache”, 0 followers;“index” of process 7, sleeps;“rows” of process 8", browse(t, `
		const used = new Set(), fill = context.fillRect.bind(context);
		context.fillRect = (x, y, w, h) => { used.add(painted); fill(x, y, w, h); };
		draw();
		const r = model.regions.find(r => r.mappings.some(m => m.flags & ASLEEP));`+finish+
		`"drawn " + used.has(colors.asleep) + ";described " + describe(r).includes(" suspended") + ";" + [...document.querySelectorAll("#lists tr")].map(r => r.firstChild.textContent).filter(t => t.startsWith("“")).join(";")`, s))
}

// Sparse ranges are a group, with their names and tags; their pages are in use, and freed ones,
// which are mapped yet, are not.
func TestSparseRangesInABrowser(t *testing.T) {
	s := inspect.Snapshot{Reservations: []inspect.Reservation{{Ptr: 1 << 40, Bytes: 64 * mib}},
		Sparse:  []inspect.Sparse{{Ptr: 1 << 40, Name: "request 7", Tag: "kv cache", Page: 2 * mib, Pages: 32, Mapped: 3, Freed: 1, Spans: []inspect.Span{{First: 0, N: 2}, {First: 20, N: 1}}}},
		Sources: []inspect.Source{{Name: "kv", Page: 2 * mib, Pages: 4, Used: 3, Waiting: 1}}}
	for i, at := range []int{0, 2, 30, 40} {
		s.Memory = append(s.Memory, inspect.Memory{ID: uint64(i + 1), Bytes: 2 * mib, Location: "device 0", Mappings: 1})
		s.Reservations[0].Mappings = append(s.Reservations[0].Mappings, inspect.Mapping{Offset: at * mib, Bytes: 2 * mib, Memory: uint64(i + 1)})
	}
	require.Equal(t, `sparse ranges|request 7|kv cache|sparse range "request 7": 8 MiB mapped of 64 MiB;kv cache,kv cache,mapped,kv cache;pages in use|mapping;pages "kv": 3 of 4 pages in use`, browse(t, `
		const r = model.regions[0], shown = o => { select(itemAt(r, o, null), r, true); return document.querySelector("#detail h2").textContent; };
		const what = color => nameColor("kv cache") === color ? "kv cache" : Object.keys(colors).find(k => colors[k] === color);
		const pixel = o => { const d = displayed(r, o), s = window.devicePixelRatio || 1, x = left + d % r.perRow / r.perRow * barWidth(), y = r.y - top_ + head + Math.floor(d / r.perRow) * rowHeight + 5;
			const [red, green, blue] = context.getImageData((x + 2) * s, y * s, 1, 1).data; return what("#" + [red, green, blue].map(c => c.toString(16).padStart(2, "0")).join("")); };
		draw();`+finish+`[r.group.key, r.title, r.tag, describe(r)].join("|") + ";" + [0, 2 << 20, 30 << 20, 40 << 20].map(pixel) + ";" + shown(5) + "|" + shown(30 << 20) + ";" + [...document.querySelectorAll("#lists td")].map(d => d.textContent).find(text => text.startsWith("pages"))`, s))
}

// Managed memory is drawn by where its pages are, and like memory that nothing uses if the driver
// cannot tell; what is selected says it in words.
func TestManagedMemoryInABrowser(t *testing.T) {
	s := inspect.Snapshot{Managed: managedMemory()}
	require.Equal(t, "live,host,host,hole,live;host|device 0;mapped|unknown: the driver cannot tell|device 1;21 MiB mapped", browse(t, `
		const fill = context.fillRect.bind(context), row = drawRow, managed = model.groups.find(g => g.key === "managed memory");
		let bars = null;
		context.fillRect = (x, y, w, h) => { if (bars && h === barHeight) bars.push(Object.keys(colors).find(k => colors[k] === painted) || "hatch"); fill(x, y, w, h); };
		drawRow = (r, i, y) => { bars = []; row(r, i, y); if (r.managed) r.drawn = (r.drawn || []).concat(bars.filter((b, i) => b !== "hole" || bars[i + 1] === "hole")); bars = null; };
		const shown = (r, o) => { select(itemAt(r, o, null), r, true); return [...document.querySelectorAll("#detail dd")].map(d => d.textContent).slice(2, 4).filter(text => !text.startsWith("0x")).join("|"); };
		const [known, unknown] = managed.regions;`+finish+`(draw(), known.drawn) + ";" + shown(known, 10 << 20) + ";" + unknown.drawn + "|" + shown(unknown, 5) + ";" + sizeText(managed.mapped) + " mapped"`, s))
}

// The page with nothing to show says so, and keeps no room for what is not there.
func TestAPageOfNothingInABrowser(t *testing.T) {
	require.Equal(t, "no address space is reserved;0,0,0", browse(t, `
		let said = "";
		const text = context.fillText.bind(context);
		context.fillText = (t, x, y) => { said += t; text(t, x, y); };
		draw();`+finish+`said + ";" + ["detail", "groups", "lists"].map(id => byId(id).offsetHeight).join()`, inspect.Snapshot{Format: inspect.Format, Version: inspect.Version}))
}
