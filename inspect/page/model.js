"use strict";
// The model: regions of the address space with their mappings and blocks, sorted by
// offset, of one snapshot or of two to compare. This part draws nothing.

const FIRST = 1, SECOND = 2; // sides: the snapshots that have an item
const ALIAS = 1, SHARED = 2, IMPORTED = 4, CLOSING = 8;

function sizeText(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0, sign = n < 0 ? "-" : "";
  for (n = Math.abs(n); n >= 1024 && at < units.length - 1; at++) n /= 1024;
  return sign + (n >= 100 || Number.isInteger(n) ? n.toFixed(0) : n.toFixed(n >= 10 ? 1 : 2)) + " " + units[at];
}

const hex = n => "0x" + n.toString(16);

// atOrBefore returns the index of the last item that begins at x or before it, or 0.
function atOrBefore(items, x) {
  let low = 0, high = items.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (items[mid].o <= x) low = mid + 1; else high = mid;
  }
  return Math.max(0, low - 1);
}

// firstReaching returns the index of the first item that may reach beyond x: all items
// before it end at x or earlier. Items of two snapshots, or of different times, overlap.
function firstReaching(items, x) {
  let low = 0, high = items.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (items[mid].reach > x) high = mid; else low = mid + 1;
  }
  return low;
}

// order sorts items by offset, and sets in each how far it or any before it reaches.
function order(items) {
  items.sort((a, b) => a.o - b.o);
  let reach = 0;
  for (const b of items) b.reach = reach = Math.max(reach, b.o + b.n);
  return items;
}

function buildModel(snapshots) {
  const model = { snapshots, regions: [], byPtr: new Map(), memory: new Map(), events: [], two: snapshots.length === 2 };
  snapshots.forEach((s, at) => addSnapshot(model, s, model.two ? 1 << at : FIRST));
  model.regions.sort((a, b) => a.ptr - b.ptr);
  const last = snapshots[snapshots.length - 1];
  if (!model.two) addHistory(model, last);
  for (const r of model.regions) finishRegion(r);
  return model;
}

function regionAt(model, ptr) {
  const items = model.sorted || model.regions;
  let low = 0, high = items.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (items[mid].ptr <= ptr) low = mid + 1; else high = mid;
  }
  const r = items[low - 1];
  return r && ptr < r.ptr + r.bytes ? r : null;
}

function addSnapshot(model, s, side) {
  const stacks = s.stacks || [];
  const stackText = n => n ? stacks[n - 1] : null;
  const seen = new Map(); // how often a memory is mapped here
  for (const r of s.reservations || []) for (const m of r.mappings || []) seen.set(m.memory, (seen.get(m.memory) || 0) + 1);
  for (const m of s.memory || []) model.memory.set(m.id, { ...m, stack: stackText(m.stack) });
  const mine = [];
  for (const r of s.reservations || []) {
    const ptr = Number(r.ptr), key = ptr + ":" + r.bytes;
    let to = model.byPtr.get(key);
    if (!to) {
      to = { ptr, bytes: r.bytes, what: [], sides: 0, mappings: [], blocks: [], past: [], index: new Map(), stack: stackText(r.stack) };
      model.byPtr.set(key, to);
      model.regions.push(to);
    }
    to.sides |= side;
    mine.push(to);
    for (const m of r.mappings || []) {
      const memory = model.memory.get(m.memory) || {};
      const flags = (seen.get(m.memory) > 1 ? ALIAS : 0) | (memory.exported ? SHARED : 0) | (memory.imported ? IMPORTED : 0) | (m.closing ? CLOSING : 0);
      merge(model, to, to.mappings, () => "m" + m.offset + ":" + m.bytes + ":" + m.memory,
        { o: m.offset, n: m.bytes, memory: m.memory, flags, access: m.access, kind: "mapping" }, side);
    }
  }
  model.sorted = mine.sort((a, b) => a.ptr - b.ptr);
  for (const b of s.buffers || []) {
    const r = regionAt(model, Number(b.ptr));
    if (!r) continue;
    r.buffer = b;
    r.what.push("buffer" + (b.imported ? ", imported" : "") + ": " + sizeText(b.used) + " used of " + sizeText(b.committed));
    if (b.used) merge(model, r, r.blocks, () => "used", { o: 0, n: b.used, kind: "used", stack: stackText(b.stack) }, side);
    if (b.committed > b.used) merge(model, r, r.blocks, () => "unused", { o: b.used, n: b.committed - b.used, kind: "unused", stack: stackText(b.stack) }, side);
  }
  (s.pools || []).forEach((p) => {
    const mark = new Set();
    for (const g of p.segments || []) {
      const r = regionAt(model, Number(g.ptr));
      if (!r) continue;
      if (!mark.has(r)) r.what.push("pool " + p.serial + " on device " + p.device);
      mark.add(r);
      r.pool = p;
      const base = Number(g.ptr) - r.ptr;
      for (const b of g.blocks || []) {
        merge(model, r, r.blocks, () => "b" + (base + b.offset) + ":" + b.bytes + ":" + (b.tag || ""),
          { o: base + b.offset, n: b.bytes, requested: b.requested, kind: b.waiting ? "waiting" : "block", tag: b.tag, stream: g.stream, segment: g,
            stack: stackText(b.stack) }, side);
      }
    }
  });
  for (const p of s.publications || []) {
    const r = regionAt(model, Number(p.ptr));
    if (r) r.what.push("published as “" + p.name + "” to " + (p.followers || []).length);
  }
  for (const f of s.followers || []) {
    const r = regionAt(model, Number(f.ptr));
    if (r) r.what.push("follows “" + f.name + "” of process " + f.pid);
  }
  model.sorted = null;
}

// merge adds an item, or marks it as one of both snapshots.
function merge(model, region, list, key, item, side) {
  item.side = side;
  if (model.two) {
    const name = key(), known = region.index.get(name);
    if (known) { known.side |= side; return; }
    region.index.set(name, item);
  }
  list.push(item);
}

// addHistory gives each block that the pools' histories know its first and last event.
function addHistory(model, s) {
  const stacks = s.stacks || [];
  for (const p of s.pools || []) for (const e of p.history || []) model.events.push({ ...e, at: Date.parse(e.time), pool: p });
  model.events.sort((a, b) => a.at - b.at);
  const open = new Map();
  const keep = (ptr, b) => {
    const r = regionAt(model, ptr);
    if (r) r.past.push({ ...b, o: ptr - r.ptr, kind: "block", side: FIRST });
  };
  let live = 0;
  model.events.forEach((e, i) => {
    const ptr = Number(e.ptr);
    if (e.op === "alloc") {
      open.set(ptr, { n: Math.max(e.bytes, 1), requested: e.bytes, tag: e.tag, stream: e.stream, stack: e.stack ? stacks[e.stack - 1] : null, from: i });
      live += e.bytes;
    } else {
      const b = open.get(ptr) || { n: Math.max(e.bytes, 1), requested: e.bytes, tag: e.tag, stream: e.stream, from: -1 };
      open.delete(ptr);
      keep(ptr, { ...b, to: i });
      live -= e.bytes;
    }
    e.live = live;
  });
  for (const [ptr, b] of open) keep(ptr, { ...b, to: Infinity });
  let before = 0; // what was allocated before the history and still lives
  if (model.events.length) {
    for (const r of model.regions) for (const b of r.blocks) {
      if (b.kind === "block" && !open.has(r.ptr + b.o)) {
        r.past.push({ ...b, from: -1, to: Infinity });
        before += b.requested || 0;
      }
    }
  }
  const least = model.events.reduce((m, e) => Math.min(m, e.live), 0);
  for (const e of model.events) e.live += before - least;
}

function finishRegion(r) {
  r.index = null;
  for (const list of [r.mappings, r.blocks, r.past]) order(list);
  r.plain = !r.buffer && !r.pool; // the program maps it itself, and uses what it maps
  r.mapped = r.mappings.reduce((sum, m) => sum + m.n, 0);
  // pieces are the runs with items, and the holes between them.
  r.pieces = [];
  let end = 0;
  const visit = (o, n) => {
    const last = r.pieces[r.pieces.length - 1];
    if (last && o <= end) {
      if (o + n > end) { last.n += o + n - end; end = o + n; }
      return;
    }
    if (o > end) r.pieces.push({ o: end, n: o - end, hole: true });
    r.pieces.push({ o, n, hole: false });
    end = o + n;
  };
  const all = r.past.length ? r.mappings.concat(r.past).sort((a, b) => a.o - b.o) : r.mappings;
  for (const m of all) visit(m.o, m.n);
  if (end < r.bytes) r.pieces.push({ o: end, n: r.bytes - end, hole: true });
}

// layout gives each region its place for a number of bytes a row: a hole that is longer
// than a quarter of a row is shortened to that, and to what is left of the row.
function layout(model, bytesPerRow, rowHeight, headHeight) {
  let y = 0;
  for (const r of model.regions) {
    let d = 0;
    for (const p of r.pieces) {
      p.d = d;
      p.dn = p.n;
      if (p.hole && p.n > bytesPerRow / 4) {
        const left = bytesPerRow - d % bytesPerRow;
        p.dn = Math.min(left, bytesPerRow / 4);
      }
      d += p.dn;
    }
    r.y = y;
    r.rows = Math.max(1, Math.ceil(d / bytesPerRow - 1e-9));
    r.display = d;
    y += headHeight + r.rows * rowHeight;
  }
  return y;
}

// displayed turns an offset in a region into a place in its display.
function displayed(r, offset) {
  let low = 0, high = r.pieces.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (r.pieces[mid].o <= offset) low = mid + 1; else high = mid;
  }
  const p = r.pieces[Math.max(0, low - 1)];
  return p ? p.d + (p.n ? (offset - p.o) / p.n * p.dn : 0) : 0;
}

// offsetAt is the reverse of displayed.
function offsetAt(r, d) {
  let low = 0, high = r.pieces.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (r.pieces[mid].d <= d) low = mid + 1; else high = mid;
  }
  const p = r.pieces[Math.max(0, low - 1)];
  return p ? p.o + (p.dn ? (d - p.d) / p.dn * p.n : 0) : 0;
}

// itemsAt returns the blocks of a region now, if at is null, or at an event of the
// history.
function itemsAt(r, at) {
  if (at === null) return r.blocks;
  if (r.shownAt !== at) {
    r.shownAt = at;
    r.shown = order(r.past.filter(b => b.from <= at && at < b.to).map(b => b.shown ||= { ...b }));
  }
  return r.shown;
}

// itemAt returns the block or else the mapping at an offset. at is the event up to
// which the history is shown, or null.
function itemAt(r, offset, at, shows = () => true) {
  for (const items of [itemsAt(r, at), r.mappings])
    for (let i = firstReaching(items, offset); i < items.length && items[i].o <= offset; i++)
      if (offset < items[i].o + items[i].n && shows(items[i])) return items[i];
  return null;
}

// groups adds up the live blocks by a key: the largest first.
function groups(model, key, side) {
  const sums = new Map();
  for (const r of model.regions) for (const b of r.blocks) {
    if (b.kind === "unused" || !(b.side & side)) continue;
    const k = key(b, r);
    const g = sums.get(k) || { key: k, bytes: 0, count: 0, first: b, region: r };
    g.bytes += b.requested || b.n;
    g.count++;
    sums.set(k, g);
  }
  return [...sums.values()].sort((a, b) => b.bytes - a.bytes);
}

// creators has for each stack its innermost function outside of the library, without
// folders.
const creators = new Map();
function creator(stack) {
  if (!stack) return "";
  let name = creators.get(stack);
  if (name === undefined) {
    const own = f => f.startsWith("github.com/cuvmm/cuvmm/") && !f.includes("_test.go:") && !f.includes("/samples/");
    name = (stack.find(f => !own(f)) || "").replace(/ \(.*\//, " (").replace(/^[^ ]*\//, "");
    creators.set(stack, name);
  }
  return name;
}

const groupKey = (b, r) => b.tag || creator(b.stack) || (b.kind === "used" ? "buffer " + hex(r.ptr) : "blocks without a tag");
