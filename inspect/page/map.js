// The page: follows the keys and the mouse.

function redraw() {
  if (!pending) { pending = true; requestAnimationFrame(draw); }
}

// arrange gives everything its place, and keeps an offset of a region at a height of the
// window.
function arrange(keep) {
  total = place(model, head) + 8;
  if (keep && keep.region && keep.region.group.state.open) top_ = rowOf(keep.region, keep.offset) - keep.y;
  scrollTo_(top_);
}

// rowOf returns the height in the picture of the row with an offset of a region.
const rowOf = (r, offset) => r.y + head + Math.floor(displayed(r, offset) / r.perRow) * rowHeight;

function scrollTo_(y) {
  top_ = Math.max(0, Math.min(y, Math.max(0, total - height)));
  redraw();
}

// showAll shows everything from the top, each group at the scale that fits.
function showAll() {
  fit(model, height, head, true);
  top_ = 0;
  arrange();
}

// point returns what is at a point of the window: a group's heading, or an offset of a
// region and the height of its row, or null.
function point(x, y) {
  const first = model.lines[lastBefore(model.lines, "y", top_)];
  if (!first) return null;
  if (y < groupHeight && first.group.y < top_) return { group: first.group };
  const { group, region: r } = model.lines[lastBefore(model.lines, "y", y + top_)];
  if (!r) return { group };
  const at = Math.floor((y + top_ - r.y - head) / rowHeight), row = Math.max(0, Math.min(at, r.rows - 1));
  const d = (row + Math.max(0, Math.min((x - left) / barWidth(), 1))) * r.perRow;
  return { group, region: r, offset: offsetAt(r, Math.min(d, r.display)), label: at < 0 || x < left, y: r.y + head + row * rowHeight - top_ };
}

// zoom zooms the group that is at a point, or that of the selection or else of the middle.
function zoom(factor, x, y) {
  const own = selected && x === undefined && selected.region_.group.state.open;
  const at = own ? { region: selected.region_, offset: selected.o, y: selectedY() } : point(x ?? width / 2, y ?? height / 2);
  const g = at && (at.region ? at.region.group : at.group);
  if (!g || !g.state.open) return;
  zoomGroup(g, g.state.zoom * factor);
  arrange(at);
}

function selectedY() {
  const y = rowOf(selected.region_, selected.o) - top_;
  return y >= 0 && y < height ? y : height / 2;
}

// toggle folds a group, or unfolds it.
function toggle(g) {
  const y = g.y - top_;
  g.state.open = !g.state.open;
  fit(model, height, head);
  arrange();
  if (y < 0) scrollTo_(g.y);
  groupList();
}

// toggleAll folds all groups, or unfolds all if none is open.
function toggleAll() {
  const open = !model.groups.some(g => g.state.open);
  for (const g of model.groups) g.state.open = open;
  fit(model, height, head);
  arrange();
  groupList();
}

function select(item, region, bring) {
  selected = item;
  if (item) {
    item.region_ = region;
    if (bring) {
      if (!region.group.state.open) toggle(region.group);
      const y = rowOf(region, item.o) - top_;
      if (y < groupHeight || y > height - 2 * rowHeight) scrollTo_(y + top_ - height / 3);
    }
  }
  detail(item, region);
  redraw();
}

const whole = r => ({ kind: "region", o: 0, n: r.bytes, stack: r.stack, side: r.sides });

// go selects what is at an address, and reports whether anything is.
function go(ptr) {
  const r = regionAt(model, ptr);
  if (!r) return false;
  const o = Number(ptr - r.ptr);
  select(itemAt(r, o, event_, shows) || { ...whole(r), o, n: r.bytes - o }, r, true);
  return true;
}

// shownRegions are the regions of open groups, in the order of the picture.
const shownRegions = () => model.groups.filter(g => g.state.open).flatMap(g => g.regions);

// neighbour selects the next (1) or previous (-1) block or mapping.
function neighbour(step) {
  const regions = shownRegions(), list = r => itemsAt(r, event_).length ? itemsAt(r, event_) : r.mappings;
  let at = selected ? regions.indexOf(selected.region_) : 0;
  if (at < 0 || !regions.length) return;
  let items = list(regions[at]);
  let i = selected ? items.indexOf(selected) : -1;
  if (selected && i < 0) i = lastBefore(items, "o", selected.o) + (step < 0 ? 1 : selected.kind === "region" ? -1 : 0);
  for (i += step; ; i += step) {
    if (i >= 0 && i < items.length) {
      if (shows(items[i])) return select(items[i], regions[at], true);
      continue;
    }
    at += step;
    if (at < 0 || at >= regions.length) return;
    items = list(regions[at]);
    i = step > 0 ? -1 : items.length;
  }
}

// neighbourRegion selects the next (1) or previous (-1) range.
function neighbourRegion(step) {
  const regions = shownRegions(), at = selected ? regions.indexOf(selected.region_) + step : 0;
  if (regions[at]) select(whole(regions[at]), regions[at], true);
}

function nextAlias() {
  if (!selected) return;
  const r = selected.region_, m = selected.kind === "mapping" ? selected : r.mappings[lastBefore(r.mappings, "o", selected.o)];
  if (!m) return;
  const all = [];
  for (const other of model.regions) for (const x of other.mappings) if (x.memory === m.memory) all.push([x, other]);
  const at = all.findIndex(([x]) => x === m);
  const [item, region] = all[(at + 1) % all.length] || [];
  if (item) select(item, region, true);
}

let hits = { text: "", all: [], at: 0 };
function find(text) {
  if (!text) return;
  if (text !== hits.text) {
    hits = { text, all: [], at: -1 };
    const needle = text.toLowerCase(), known = new Map();
    const inStack = stack => {
      if (!stack) return false;
      if (!known.has(stack)) known.set(stack, stack.some(f => f.toLowerCase().includes(needle)));
      return known.get(stack);
    };
    if (/^0x[0-9a-f]+$/.test(needle)) {
      hits.all.push(() => go(BigInt(needle)));
    } else {
      for (const r of model.regions) {
        if ((r.title + " " + r.holder).toLowerCase().includes(needle)) hits.all.push(() => go(r.ptr));
        for (const b of r.blocks)
          if ((b.tag || "").toLowerCase().includes(needle) || inStack(b.stack)) hits.all.push(() => select(b, r, true));
      }
    }
  }
  if (hits.all.length) hits.all[hits.at = (hits.at + 1) % hits.all.length]();
  byId("search").classList.toggle("missed", !hits.all.length);
  byId("search").ariaInvalid = String(!hits.all.length);
}

let playing = 0;
function showEvent(i) {
  const n = model.events.length;
  i = Math.max(0, Math.min(i, n));
  event_ = i >= n ? null : i;
  byId("time").value = i;
  const e = model.events[Math.min(i, n - 1)];
  byId("when").textContent = event_ === null ? "now" : i + 1 + " of " + n + ", " + new Date(e.at).toISOString().slice(11, 23) + ": " + e.op + " " + sizeText(e.bytes);
  redraw();
}

function play() {
  if (playing) { clearInterval(playing); playing = 0; byId("play").textContent = "▶"; return; }
  const n = model.events.length, step = Math.max(1, n / 600); // ten seconds in all
  let i = event_ === null ? 0 : event_;
  byId("play").textContent = "❚❚";
  playing = setInterval(() => {
    i += step;
    showEvent(Math.floor(i));
    if (i >= n) play();
  }, 1000 / 60);
}

function chart() {
  const c = byId("chart"), n = model.events.length, scale = window.devicePixelRatio || 1;
  c.width = c.clientWidth * scale;
  c.height = c.clientHeight * scale;
  const g = c.getContext("2d"), most = model.events.reduce((m, e) => Math.max(m, e.live), 1);
  g.fillStyle = colors.live;
  for (let x = 0; x < c.width; x++) {
    const e = model.events[Math.floor(x / c.width * n)];
    const h = e.live / most * c.height;
    g.fillRect(x, c.height - h, 1, h);
  }
}

function resize() {
  const scale = window.devicePixelRatio || 1;
  width = canvas.clientWidth;
  height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const wide = width >= 3 * labelWidth;
  left = wide ? margin + labelWidth : margin;
  head = wide ? 0 : headHeight;
}

function theme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  readColors();
  legend();
  lists();
  if (model.events.length) chart();
  redraw();
}

// show shows another model, at the same place if there was one before.
function show(snapshots) {
  const first = !model.snapshots.length, before = point(left, height / 2), old = selected && selected.region_.ptr + BigInt(Math.floor(selected.o));
  model = buildModel(snapshots);
  selected = event_ = null;
  const s = snapshots[snapshots.length - 1];
  byId("title").textContent = s.process.name + " (" + s.process.pid + ")";
  byId("about").textContent = [totals(s), s.driver, new Date(s.time).toLocaleString()].join(" · ");
  document.title = "cuvmm map: " + byId("title").textContent;
  byId("sides").hidden = !model.two;
  byId("player").hidden = !model.events.length;
  if (first && model.regions.some(r => r.blocks.some(b => b.tag))) byId("color").value = "tag";
  makeGroups(model, byId("by").value);
  resize();
  legend();
  groupList();
  lists();
  if (model.events.length) {
    byId("time").max = model.events.length;
    showEvent(model.events.length);
    chart();
  }
  fit(model, height, head);
  const r = before && before.region && regionAt(model, before.region.ptr);
  arrange(r && { region: r, offset: before.offset, y: before.y });
  if (old === null || !go(old)) detail(null);
  document.body.dataset.ready = "true";
}

canvas.addEventListener("wheel", e => {
  e.preventDefault();
  if (e.ctrlKey || e.metaKey) zoom(e.deltaY > 0 ? 1.25 : 0.8, e.offsetX, e.offsetY);
  else scrollTo_(top_ + e.deltaY * (e.deltaMode ? rowHeight : 1));
}, { passive: false });

// A drag moves the map, or the scroll bar.
let drag = null;
canvas.addEventListener("pointerdown", e => {
  const bar = total > height && e.offsetX > width - margin;
  drag = { y: e.clientY, top: top_, moved: false, factor: bar ? (height - total) / (height - scrollBar().height) : 1 };
  canvas.setPointerCapture(e.pointerId);
});
canvas.addEventListener("pointermove", e => {
  if (!drag) return;
  if (Math.abs(e.clientY - drag.y) > 4) drag.moved = true;
  if (drag.moved) scrollTo_(drag.top - (e.clientY - drag.y) * drag.factor);
});
canvas.addEventListener("pointerup", e => {
  const moved = drag && drag.moved;
  drag = null;
  const at = !moved && point(e.offsetX, e.offsetY);
  if (!at) return;
  if (!at.region) { toggle(at.group); return; }
  select(at.label ? whole(at.region) : itemAt(at.region, at.offset, event_, shows), at.region);
});
canvas.addEventListener("dblclick", () => focusSelected());

// focusSelected zooms so that the selection has a third of a row.
function focusSelected() {
  if (!selected || !selected.n || !selected.region_.group.state.open) return;
  const r = selected.region_, g = r.group, want = Math.max(selected.n * 3, 4096), most = Math.min(g.state.fit, r.most);
  zoomGroup(g, want < most ? want / most : want / g.state.fit);
  arrange({ region: r, offset: selected.o, y: height / 3 });
}

const next = (id, step) => { const e = byId(id); e.selectedIndex = (e.selectedIndex + step) % e.options.length; e.dispatchEvent(new Event("change")); };
document.addEventListener("keydown", e => {
  if (e.target.id === "search") {
    if (e.key === "Enter") find(e.target.value);
    if (e.key === "Escape") canvas.focus();
    return;
  }
  if (e.target.tagName === "SELECT" || e.target.type === "range" || e.ctrlKey || e.metaKey || e.altKey || byId("keys").open) return;
  const page = height - 3 * rowHeight, keys = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": showAll,
    ArrowDown: () => scrollTo_(top_ + 3 * rowHeight), ArrowUp: () => scrollTo_(top_ - 3 * rowHeight),
    PageDown: () => scrollTo_(top_ + page), PageUp: () => scrollTo_(top_ - page), Home: () => scrollTo_(0), End: () => scrollTo_(total),
    n: () => neighbour(1), p: () => neighbour(-1), N: () => neighbourRegion(1), P: () => neighbourRegion(-1), a: nextAlias,
    f: () => { const at = selected ? selected.region_ : point(left, groupHeight); if (at) toggle(at.group); }, F: toggleAll, g: () => next("by", 1), c: () => next("color", 1), Enter: focusSelected,
    "/": () => byId("search").focus(), d: () => byId("theme").click(), "?": () => byId("keys").showModal(), Escape: () => select(null),
  };
  if (model.events.length) Object.assign(keys, { " ": play, ArrowLeft: () => showEvent(Number(byId("time").value) - 1), ArrowRight: () => showEvent(Number(byId("time").value) + 1) });
  if (e.target.tagName === "BUTTON" && (e.key === "Enter" || e.key === " ")) return;
  if (keys[e.key]) { e.preventDefault(); keys[e.key](); }
});

byId("by").addEventListener("change", e => { makeGroups(model, e.target.value); legend(); groupList(); showAll(); });
byId("color").addEventListener("change", () => { legend(); redraw(); });
byId("side").addEventListener("change", e => { side = e.target.value === "diff" ? 0 : 1 << Number(e.target.value); legend(); lists(); redraw(); });
byId("in").addEventListener("click", () => zoom(0.5));
byId("out").addEventListener("click", () => zoom(2));
byId("all").addEventListener("click", showAll);
byId("theme").addEventListener("click", () => theme(!document.documentElement.classList.contains("dark")));
byId("help").addEventListener("click", () => byId("keys").showModal());
byId("close").addEventListener("click", () => byId("keys").close());
byId("play").addEventListener("click", play);
byId("time").addEventListener("input", e => showEvent(Number(e.target.value)));
window.addEventListener("resize", () => {
  const at = point(left, groupHeight + 1);
  resize();
  fit(model, height, head);
  arrange(at);
});

async function follow(source) {
  byId("live").hidden = false;
  for (;;) {
    const began = performance.now();
    if (!model.snapshots.length || (byId("refresh").checked && !playing && !document.hidden)) {
      try {
        const response = await fetch(source, { cache: "no-store" });
        if (!response.ok) throw new Error(response.status + " " + response.statusText);
        show([await response.json()]);
      } catch (e) {
        byId("about").textContent = "no snapshot: " + e.message;
      }
    }
    await new Promise(done => setTimeout(done, Math.max(1000, 10 * (performance.now() - began)))); // at most a tenth of the time
  }
}

resize();
theme(matchMedia("(prefers-color-scheme: dark)").matches);
const data = JSON.parse(byId("data").textContent);
if (data.source) follow(data.source); else show(data.snapshots);
