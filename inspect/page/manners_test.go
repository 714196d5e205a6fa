package page_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/inspect/page"
	"github.com/cuvmm/cuvmm/internal/test/browser"
	"github.com/stretchr/testify/require"
)

// Every key works before the first snapshot, and in a page of nothing.
func TestKeysBeforeTheFirstSnapshotInABrowser(t *testing.T) {
	var live bytes.Buffer
	require.NoError(t, page.WriteLive(&live, "snapshot"))
	const press = `
		for (const key of ["+", "=", "-", "0", "ArrowDown", "ArrowUp", "PageDown", "PageUp", "Home", "End", "n", "p", "N", "P", "a", "f", "F", "g", "c", "Enter", "d", "d", "Escape", " ", "ArrowLeft"])
			document.dispatchEvent(new KeyboardEvent("keydown", { key }));
		for (const type of ["wheel", "pointerdown", "pointermove", "pointerup", "dblclick"])
			canvas.dispatchEvent(type === "wheel" ? new WheelEvent(type, { ctrlKey: true, deltaY: 9 }) : type === "dblclick" ? new MouseEvent(type) : new PointerEvent(type, { clientX: 20, clientY: 80 }));
		find("x"); find("0x1"); draw(); window.dispatchEvent(new Event("resize"));`
	require.Equal(t, "0 ranges, then 1", browser.Window{}.Run(t, live.String(), `
		canvas.setPointerCapture = () => {};`+press+`
		const before = model.regions.length;
		show([{ process: {}, totals: {}, reservations: [{ ptr: "0x1000", bytes: 4096 }] }]);`+press+finish+`before + " ranges, then " + model.regions.length`))
}

// Addresses and handles above 2^53, which numbers of JavaScript round, are shown as they are.
func TestHighAddressesInABrowser(t *testing.T) {
	const high = 1<<56 + 1<<21 + 1
	s := snapshot()
	s.Reservations = []inspect.Reservation{{Ptr: high - 1, Bytes: 1}, {Ptr: high, Bytes: 4096, Mappings: []inspect.Mapping{{Bytes: 4096, Memory: 1}}}}
	s.Pools = []inspect.Pool{{Segments: []inspect.Segment{{Ptr: high, Bytes: 4096, Stream: 1<<63 + 1, Blocks: []inspect.Block{{Offset: 512, Bytes: 512, Tag: "odd"}}}}}}
	require.Equal(t, "2 ranges;0x100000000200201,0x8000000000000001;true,false", browse(t, `
		find("odd");
		const field = name => [...document.querySelectorAll("#detail dt")].find(dt => dt.textContent === name).nextSibling.textContent;
		const shown = field("address") + "," + field("stream"), found = [go(0x100000000200201n), go(0x100000000201001n)];`+
		finish+`model.regions.length + " ranges;" + shown + ";" + found`, s))
}

// What people use without a mouse or without seeing it has a name and takes the focus.
func TestControlsHaveNamesInABrowser(t *testing.T) {
	s := regions(100)
	s.Leftovers = []inspect.Leftover{{What: "memory", Bytes: 5, Error: "refused"}}
	require.Equal(t, "0 nameless, 0 out of reach;false,true", browse(t, `
		go(model.regions[4].ptr);
		const all = [...document.querySelectorAll("button, select, input, canvas[tabindex], aside")];
		const nameless = all.filter(e => !(e.ariaLabel || e.closest("label")?.textContent.trim() || /[a-z]/.test(e.textContent)));
		const unreachable = [...document.querySelectorAll("*")].filter(e => e.onclick && e.tabIndex < 0);
		const fold = document.querySelector("#groups button");
		fold.focus();
		fold.click();
		const closed = document.querySelector("#groups button");`+finish+`nameless.length + " nameless, " + unreachable.length + " out of reach;" + closed.ariaExpanded + "," + (byId("lists").textContent.includes("refused"))`, s))
}

// A page runs its own script alone, whatever is written into it.
func TestThePolicyInABrowser(t *testing.T) {
	text := strings.Replace(written(t, many(10)), "<main>", `<main><script>document.body.dataset.strange = "ran"</script><img src="x" onerror="document.body.dataset.strange = 'ran'">`, 1)
	require.Equal(t, "nothing strange", browser.Window{Policy: true}.Run(t, text, finish+`document.body.dataset.strange || "nothing strange"`))
}

// The colors of the legend are apart from each other, from the background and from the
// hatching, in the light and in the dark, and text on them can be read.
func TestColorsInABrowser(t *testing.T) {
	s := many(100)
	for _, dark := range []bool{false, true} {
		require.Equal(t, "22 colors, too close: ", browser.Window{Dark: dark}.Run(t, written(t, s, s), `
			const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
			const oklab = color => {
				const [r, g, b] = [1, 3, 5].map(i => linear(parseInt(color.slice(i, i + 2), 16) / 255));
				const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b), m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b), s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
				return [0.2104542553 * l + 0.7936177850 * m - 0.0040720468 * s, 1.9779984951 * l - 2.4285922050 * m + 0.4505937099 * s, 0.0259040371 * l + 0.7827717662 * m - 0.8086757660 * s];
			};
			const distance = (a, b) => Math.hypot(...oklab(a).map((x, i) => x - oklab(b)[i]));
			const all = Object.entries(colors).filter(([name]) => !["groups", "text", "dim", "line", "select"].includes(name)).concat(colors.groups.map((c, i) => ["group " + i, c]));
			const close = [], limits = { "bg hole": 0.07, "hole mapped": 0.1, "hole hatch": 0.15 };
			const unseen = ["hatch"]; // is drawn on holes alone
			for (const [i, [a, x]] of all.entries()) for (const [b, y] of all.slice(i + 1)) {
				const limit = limits[a + " " + b] || limits[b + " " + a] || (unseen.includes(a) || unseen.includes(b) ? 0 : 0.12);
				if (distance(x, y) < limit) close.push(a + "-" + b + " " + distance(x, y).toFixed(3));
			}
			const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
			for (const [color, ink] of inks) if (contrast(color, ink) < 3.5) close.push(ink + " on " + color);
			for (const name of ["text", "dim"]) if (contrast(colors[name], colors.bg) < 4.5) close.push(name);`+finish+`all.length + " colors, too close: " + close.join(", ")`))
	}
}

// The legend names every color that is drawn, and the line of the status is whole, in a wide
// window and in a narrow one.
func TestTheLegendAndTheStatusInABrowser(t *testing.T) {
	s := regions(100)
	s.Driver = "CUDA 13.0 (/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.580.159.04)"
	s.Reservations[3].Mappings[0].Closing = true
	s.Reservations[4].Mappings[0].Suspended = true
	s.Pools[0].Segments[0].Blocks[0].Waiting = true
	s.Managed = managedMemory()
	for _, width := range []int{1280, 420} {
		require.Equal(t, "unexplained: ;whole true,true", browser.Window{Width: width, Height: 900}.Run(t, written(t, s, s), `
			const used = new Set(), fill = context.fillRect.bind(context);
			context.fillRect = (x, y, w, h) => { if (h < 30 && h > 1 && w !== 7) used.add(typeof painted === "string" ? painted : "hatch"); fill(x, y, w, h); };
			for (const r of model.regions) { select(whole(r), r, true); draw(); }
			const keys = [...document.querySelectorAll("#legend i")].map(i => i.className === "hatch" ? "hatch" : i.style.getPropertyValue("--key"));
			const about = byId("about");`+finish+
			`"unexplained: " + [...used].filter(c => !keys.includes(c) && c !== colors.bg) + ";whole " + [about.scrollWidth <= about.clientWidth && about.textContent.includes(model.snapshots[1].driver), canvas.clientWidth <= document.body.clientWidth && document.body.scrollWidth <= document.body.clientWidth && document.documentElement.scrollHeight <= innerHeight]`))
	}
}
