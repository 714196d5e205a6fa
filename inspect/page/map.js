// The page: follows the keys and the mouse, and fills the panels.

function redraw() {
  if (!pending) { pending = true; requestAnimationFrame(draw); }
}

// place makes the layout for a number of bytes a row, and keeps an offset of a region at
// a height of the window.
function place(bytes, keep) {
  bytesPerRow = Math.min(Math.max(bytes, 1024), 2 ** 52);
  total = layout(model, bytesPerRow, rowHeight, headHeight) + 8;
  if (keep && keep.region) {
    const row = Math.floor(displayed(keep.region, keep.offset) / bytesPerRow);
    top_ = keep.region.y + headHeight + row * rowHeight - keep.y;
  }
  scrollTo_(top_);
}

function scrollTo_(y) {
  top_ = Math.max(0, Math.min(y, Math.max(0, total - height)));
  redraw();
}

// fit shows everything, if the headings alone leave room.
function fit() {
  const room = Math.max(height - model.regions.length * headHeight - 8, 12 * rowHeight);
  let low = 10, high = 52;
  while (low + 0.05 < high) {
    const mid = (low + high) / 2;
    if (layout(model, 2 ** mid, rowHeight, 0) <= room) high = mid; else low = mid;
  }
  top_ = 0;
  place(2 ** high);
}

function point(x, y) {
  const at = y + top_, r = model.regions[firstRegion(at)];
  if (!r) return null;
  const row = Math.floor((at - r.y - headHeight) / rowHeight);
  const d = Math.max(0, row) * bytesPerRow + (x - margin) / (width - 2 * margin) * bytesPerRow;
  return { region: r, offset: row < 0 ? 0 : offsetAt(r, Math.min(d, r.display)), head: row < 0, y };
}

function zoom(factor, x, y) {
  const at = selected && x === undefined ? { region: selected.region_, offset: selected.o, y: selectedY() } : point(x ?? width / 2, y ?? height / 2);
  place(bytesPerRow * factor, at);
}

function selectedY() {
  const r = selected.region_;
  const y = r.y + headHeight + Math.floor(displayed(r, selected.o) / bytesPerRow) * rowHeight - top_;
  return y >= 0 && y < height ? y : height / 2;
}

function select(item, region, bring) {
  selected = item;
  if (item) {
    item.region_ = region;
    if (bring) {
      const y = region.y + headHeight + Math.floor(displayed(region, item.o) / bytesPerRow) * rowHeight;
      if (y < top_ + headHeight || y > top_ + height - 2 * rowHeight) scrollTo_(y - height / 3);
    }
  }
  detail(item, region);
  redraw();
}

function element(tag, text, attributes) {
  const e = document.createElement(tag);
  if (text !== undefined) e.textContent = text;
  Object.assign(e, attributes || {});
  return e;
}

function detail(b, r) {
  const to = byId("detail");
  to.replaceChildren(element("h2", b ? { block: "block", waiting: "block, freed and waiting", mapping: "mapping", used: "buffer, bytes in use", unused: "buffer, memory not in use", region: "reservation" }[b.kind] : "nothing selected"));
  if (!b) return;
  const list = element("dl");
  const line = (name, value) => { if (value !== undefined && value !== "" && value !== null) list.append(element("dt", name), element("dd", String(value))); };
  line("address", hex(r.ptr + b.o));
  line("size", sizeText(b.n) + " (" + b.n + ")");
  if (b.requested !== undefined) line("requested", b.requested + " bytes");
  line("tag", b.tag);
  if (b.stream !== undefined) line("stream", hex(b.stream));
  if (model.two) line("in", b.side === FIRST ? "the first alone: gone" : b.side === SECOND ? "the second alone: new" : "both");
  const m = b.kind === "mapping" ? b : r.mappings[atOrBefore(r.mappings, b.o)];
  if (m && m.kind === "mapping" && m.o <= b.o && b.o < m.o + m.n) {
    const memory = model.memory.get(m.memory) || {};
    line("memory", "#" + m.memory + " on " + (memory.location || "?") + (memory.mappings > 1 ? ", mapped " + memory.mappings + " times" : ""));
    line("sharing", [memory.exported ? "exported: another process may hold it" : "", memory.imported ? "imported from another process" : ""].filter(t => t).join("; "));
    line("access", m.access || "none");
    if (m.flags & CLOSING) line("state", "closed; waits for the GPU");
    if (b.kind === "mapping") b.stack = memory.stack || r.stack;
  }
  if (b.segment && b.segment.pinned) line("pinned", b.segment.pinned + " chunks of its segment never move");
  line("in", hex(r.ptr) + " " + [...new Set(r.what)].join("; "));
  to.append(list);
  if (b.stack && b.stack.length) to.append(element("h2", "created by"), element("pre", b.stack.join("\n")));
}

function legend() {
  const to = byId("legend");
  to.replaceChildren(element("h2", "legend"));
  const key = (color, text) => {
    const k = element("span", undefined, { className: "key" }), i = element("i");
    i.style.background = color;
    k.append(i, text);
    to.append(k);
  };
  if (model.two && !side) { key(colors.gone, "gone"); key(colors.new, "new"); }
  const most = 12, named = assignColors();
  for (const g of named.slice(0, most)) key(groupColor(g.key), g.key);
  if (named.length > most) key("transparent", "and " + (named.length - most) + " more");
  key(colors.live, named.length ? "others in use" : "in use");
  key(colors.unused, "not in use");
  key(colors.waiting, "waits for the GPU");
  key(colors.mapped, "mapped, free");
  key(colors.hole, "not mapped");
  key(colors.alias, "alias");
  key(colors.shared, "exported");
  key(colors.imported, "imported");
}

// meter returns a bar of parts, each with its color.
function meter(whole, parts) {
  const bar = element("div", undefined, { className: "meter" });
  for (const [part, color] of parts) {
    const i = element("i");
    i.style.width = 100 * Math.max(0, part) / Math.max(whole, 1) + "%";
    i.style.background = color;
    bar.append(i);
  }
  return bar;
}

function go(ptr) {
  const r = regionAt(model, ptr);
  if (!r) return false;
  const item = itemAt(r, ptr - r.ptr, event_, shows) || { kind: "region", o: ptr - r.ptr, n: r.bytes - (ptr - r.ptr), stack: r.stack, side: r.sides };
  select(item, r, true);
  return true;
}

function lists() {
  const to = byId("lists");
  to.replaceChildren();
  const s = model.snapshots[model.snapshots.length - 1];
  const table = (title, rows) => {
    if (!rows.length) return;
    const t = element("table");
    for (const [text, number, ptr, bar] of rows.slice(0, 25)) {
      const tr = element("tr"), td = element("td");
      td.append(ptr === undefined ? text : element("a", text, { onclick: () => go(ptr) }));
      tr.append(td, element("td", number, { className: "n" }));
      t.append(tr);
      if (!bar) continue;
      const wide = element("td", undefined, { colSpan: 2 }), below = element("tr");
      wide.append(bar);
      below.append(wide);
      t.append(below);
    }
    to.append(element("h2", title + (rows.length > 25 ? " (25 of " + rows.length + ")" : "")), t);
  };
  const own = new Map(); // physical memory by location
  for (const m of s.memory || []) own.set(m.location, (own.get(m.location) || 0) + m.bytes);
  table("devices", (s.devices || []).map(d => {
    const mine = own.get("device " + d.ordinal) || 0, others = d.free === undefined ? 0 : d.memory - d.free - mine;
    return [d.ordinal + ": " + d.name, (d.free === undefined ? "?" : sizeText(d.free)) + " free of " + sizeText(d.memory), undefined,
      meter(d.memory, [[mine, colors.live], [others, colors.dim]])];
  }));
  if (model.two) {
    const changes = new Map();
    for (const [sign, which] of [[-1, FIRST], [1, SECOND]])
      for (const g of groups(model, groupKey, which)) {
        const c = changes.get(g.key) || { bytes: 0, first: g.first, region: g.region };
        c.bytes += sign * g.bytes;
        changes.set(g.key, c);
      }
    table("changes", [...changes].filter(([, c]) => c.bytes).sort((a, b) => Math.abs(b[1].bytes) - Math.abs(a[1].bytes))
      .map(([k, c]) => [k, (c.bytes > 0 ? "+" : "") + sizeText(c.bytes), c.region.ptr + c.first.o]));
  }
  table("pools", (s.pools || []).map((p, i) => [i + " on device " + p.device + ": " + p.blocks + " blocks", sizeText(p.requested) + " of " + sizeText(p.reserved), undefined,
    meter(p.reserved, [[p.requested, colors.live]])]));
  table("publications", (s.publications || []).flatMap(p => [["“" + p.name + "”, " + (p.followers || []).length + " followers", sizeText(p.bytes) + (p.pinned ? " + " + sizeText(p.pinned) + " pinned" : ""), Number(p.ptr)],
    ...(p.followers || []).map(f => ["· process " + f.pid + (f.refused ? ": " + f.refused : ""), f.pinned ? sizeText(f.pinned) + " pinned" : ""])]));
  table("follows", (s.followers || []).map(f => ["“" + f.name + "” of process " + f.pid + (f.stuck ? ": " + f.stuck : ""), sizeText(f.bytes), Number(f.ptr)]));
  table("leases", (s.leases || []).map(l => ["until " + new Date(l.until).toLocaleTimeString(), sizeText(l.bytes)]));
  table("most memory", groups(model, groupKey, side || (model.two ? SECOND : FIRST)).map(g => [g.key + (g.count > 1 ? " × " + g.count : ""), sizeText(g.bytes), g.region.ptr + g.first.o]));
}

// neighbour selects the next (1) or previous (-1) thing.
function neighbour(step) {
  const list = r => itemsAt(r, event_).length ? itemsAt(r, event_) : r.mappings;
  let at = model.regions.indexOf(selected ? selected.region_ : model.regions[firstRegion(top_)]);
  if (at < 0) return;
  let items = list(model.regions[at]);
  let i = selected ? items.indexOf(selected) : -1;
  if (selected && i < 0) i = atOrBefore(items, selected.o) - (step > 0 ? 0 : -1);
  for (i += step; ; i += step) {
    if (i >= 0 && i < items.length) {
      if (shows(items[i])) return select(items[i], model.regions[at], true);
      continue;
    }
    at += step;
    if (at < 0 || at >= model.regions.length) return;
    items = list(model.regions[at]);
    i = step > 0 ? -1 : items.length;
  }
}

function nextAlias() {
  if (!selected) return;
  const r = selected.region_, m = selected.kind === "mapping" ? selected : r.mappings[atOrBefore(r.mappings, selected.o)];
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
      hits.all.push(() => go(Number(needle)));
    } else {
      for (const r of model.regions) {
        if (r.what.some(w => w.toLowerCase().includes(needle))) hits.all.push(() => go(r.ptr));
        for (const b of r.blocks)
          if ((b.tag || "").toLowerCase().includes(needle) || inStack(b.stack)) hits.all.push(() => select(b, r, true));
      }
    }
  }
  if (hits.all.length) hits.all[hits.at = (hits.at + 1) % hits.all.length]();
  byId("search").style.color = hits.all.length ? "" : colors.gone;
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
}

function theme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  readColors();
  if (model) { legend(); lists(); if (model.events.length) chart(); redraw(); }
}

// show shows another model, at the same place if there was one before.
function show(snapshots) {
  const before = model && point(margin, height / 2), old = selected && { ptr: selected.region_.ptr + selected.o };
  model = buildModel(snapshots);
  event_ = null;
  const s = snapshots[snapshots.length - 1];
  byId("title").textContent = s.process.name + " (" + s.process.pid + ")";
  byId("about").textContent = s.driver + " · " + new Date(s.time).toLocaleString() + " · " + s.totals.reservations + " reservations, " + sizeText(s.totals.allocated_bytes) + " of memory, " + s.totals.mappings + " mappings";
  document.title = "cuvmm map: " + byId("title").textContent;
  byId("sides").hidden = !model.two;
  byId("player").hidden = !model.events.length;
  resize();
  if (before) legend();
  lists();
  if (model.events.length) {
    byId("time").max = model.events.length;
    showEvent(model.events.length);
    chart();
  }
  if (!before) {
    if (model.regions.some(r => r.blocks.some(b => b.tag))) byId("color").value = "tag";
    legend();
    fit();
    detail(null);
  }
  else {
    const r = regionAt(model, before.region.ptr + before.offset);
    place(bytesPerRow, r ? { region: r, offset: before.region.ptr + before.offset - r.ptr, y: before.y } : null);
    selected = null;
    if (old) go(old.ptr); else detail(null);
  }
  document.body.dataset.ready = "true";
}

canvas.addEventListener("wheel", e => {
  e.preventDefault();
  if (e.ctrlKey || e.metaKey) zoom(e.deltaY > 0 ? 1.25 : 0.8, e.offsetX, e.offsetY);
  else scrollTo_(top_ + e.deltaY * (e.deltaMode ? rowHeight : 1));
}, { passive: false });

let drag = null;
canvas.addEventListener("pointerdown", e => { drag = { y: e.clientY, top: top_, moved: false }; canvas.setPointerCapture(e.pointerId); });
canvas.addEventListener("pointermove", e => {
  if (!drag) return;
  if (Math.abs(e.clientY - drag.y) > 4) drag.moved = true;
  if (drag.moved) scrollTo_(drag.top - (e.clientY - drag.y));
});
canvas.addEventListener("pointerup", e => {
  const moved = drag && drag.moved;
  drag = null;
  const at = !moved && point(e.offsetX, e.offsetY);
  if (!at) return;
  const r = at.region;
  select(at.head ? { kind: "region", o: 0, n: r.bytes, stack: r.stack, side: r.sides } : itemAt(r, at.offset, event_, shows), r);
});
canvas.addEventListener("dblclick", () => focusSelected());

function focusSelected() {
  if (selected && selected.n) place(Math.max(selected.n * 3, 4096), { region: selected.region_, offset: selected.o, y: height / 3 });
}

const next = (id, step) => { const e = byId(id); e.selectedIndex = (e.selectedIndex + step) % e.options.length; e.dispatchEvent(new Event("change")); };
document.addEventListener("keydown", e => {
  if (e.target.id === "search") {
    if (e.key === "Enter") find(e.target.value);
    if (e.key === "Escape") canvas.focus();
    return;
  }
  if (e.target.tagName === "SELECT" || e.ctrlKey || e.metaKey || e.altKey || byId("keys").open) return;
  const page = height - 3 * rowHeight, keys = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": fit,
    ArrowDown: () => scrollTo_(top_ + 3 * rowHeight), ArrowUp: () => scrollTo_(top_ - 3 * rowHeight),
    PageDown: () => scrollTo_(top_ + page), PageUp: () => scrollTo_(top_ - page), Home: () => scrollTo_(0), End: () => scrollTo_(total),
    n: () => neighbour(1), p: () => neighbour(-1), a: nextAlias, c: () => next("color", 1), Enter: focusSelected,
    "/": () => byId("search").focus(), d: () => byId("theme").click(), "?": () => byId("keys").showModal(), Escape: () => select(null),
  };
  if (model.events.length) Object.assign(keys, { " ": play, ArrowLeft: () => showEvent(Number(byId("time").value) - 1), ArrowRight: () => showEvent(Number(byId("time").value) + 1) });
  if (e.target.tagName === "BUTTON" && (e.key === "Enter" || e.key === " ")) return;
  if (keys[e.key]) { e.preventDefault(); keys[e.key](); }
});

byId("color").addEventListener("change", () => { legend(); redraw(); });
byId("side").addEventListener("change", e => { side = e.target.value === "diff" ? 0 : 1 << Number(e.target.value); legend(); lists(); redraw(); });
byId("in").addEventListener("click", () => zoom(0.5));
byId("out").addEventListener("click", () => zoom(2));
byId("all").addEventListener("click", fit);
byId("theme").addEventListener("click", () => theme(!document.documentElement.classList.contains("dark")));
byId("help").addEventListener("click", () => byId("keys").showModal());
byId("play").addEventListener("click", play);
byId("time").addEventListener("input", e => showEvent(Number(e.target.value)));
window.addEventListener("resize", () => { if (model) { resize(); place(bytesPerRow, point(margin, 1)); } });

async function follow(source) {
  byId("live").hidden = false;
  for (;;) {
    const began = performance.now();
    if (!model || (byId("refresh").checked && !playing && !document.hidden)) {
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

theme(matchMedia("(prefers-color-scheme: dark)").matches);
const data = JSON.parse(byId("data").textContent);
if (data.source) follow(data.source); else show(data.snapshots);
