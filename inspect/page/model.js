"use strict";
// The model: regions of the address space with their mappings and blocks, sorted by
// offset, of one snapshot or of two to compare. Addresses are BigInts, since numbers round
// those above 2^53; offsets and sizes are numbers. This part draws nothing.

const FIRST = 1, SECOND = 2; // sides: the snapshots that have an item
const ALIAS = 1, SHARED = 2, IMPORTED = 4, CLOSING = 8, ASLEEP = 16;

// sizeText writes bytes as cuvmm map does in a terminal.
function sizeText(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], sign = n < 0 ? "-" : "";
  let at = 0;
  for (n = Math.abs(n); n >= 1024 && at < units.length - 1; at++) n /= 1024;
  const text = Number.isInteger(n) || n >= 100 ? Math.round(n).toFixed(0) : (Math.round(n * 10) / 10).toFixed(1);
  return sign + text + " " + units[at];
}

const count = (n, what) => n + " " + what + (n === 1 ? "" : "s");
const hex = n => "0x" + n.toString(16);
const addressOf = (r, offset) => hex(r.ptr + BigInt(Math.floor(offset)));

// lastBefore returns the index of the last item whose key is x or less, or 0.
function lastBefore(items, key, x) {
  let low = 0, high = items.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (items[mid][key] <= x) low = mid + 1; else high = mid;
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
  const model = { snapshots, regions: [], groups: [], lines: [], byPtr: new Map(), memory: new Map(), events: [], two: snapshots.length === 2 };
  snapshots.forEach((s, at) => addSnapshot(model, s, model.two ? 1 << at : FIRST));
  model.regions.sort(byAddress);
  if (snapshots.length === 1) addHistory(model, snapshots[0]);
  for (const r of model.regions) finishRegion(r);
  return model;
}

const byAddress = (a, b) => a.ptr < b.ptr ? -1 : a.ptr > b.ptr ? 1 : 0;

function regionAt(model, ptr) {
  const items = model.sorted || model.regions, r = items[lastBefore(items, "ptr", ptr)];
  return r && r.ptr <= ptr && ptr < r.ptr + BigInt(r.bytes) ? r : null;
}

function addSnapshot(model, s, side) {
  const stacks = s.stacks || [];
  const stackText = n => n ? stacks[n - 1] : null;
  for (const m of s.memory || []) model.memory.set(m.id, { ...m, stack: stackText(m.stack) });
  const mine = [];
  for (const r of s.reservations || []) {
    const ptr = BigInt(r.ptr), key = ptr + ":" + r.bytes;
    let to = model.byPtr.get(key);
    if (!to) {
      to = { ptr, bytes: r.bytes, sides: 0, mappings: [], blocks: [], past: [], index: new Map(), stack: stackText(r.stack) };
      model.byPtr.set(key, to);
      model.regions.push(to);
    }
    to.sides |= side;
    mine.push(to);
    for (const m of r.mappings || []) {
      const memory = model.memory.get(m.memory) || {};
      const flags = (memory.mappings > 1 ? ALIAS : 0) | (memory.exported ? SHARED : 0) | (memory.imported ? IMPORTED : 0) | (m.closing ? CLOSING : 0) | (m.suspended ? ASLEEP : 0);
      merge(model, to, to.mappings, () => "m" + m.offset + ":" + m.bytes + ":" + m.memory,
        { o: m.offset, n: m.bytes, memory: m.memory, location: memory.location || "?", flags, access: m.access, kind: "mapping" }, side);
    }
  }
  model.sorted = mine.sort(byAddress);
  for (const b of s.buffers || []) {
    const r = regionAt(model, BigInt(b.ptr));
    if (!r) continue;
    Object.assign(r, { buffer: b, device: "device " + b.device, holder: "buffer" + quoted(b.name) + (b.imported ? ", imported" : ""), kind: b.imported ? "imported buffers" : "buffers", title: b.name, tag: b.tag });
    if (b.used) merge(model, r, r.blocks, () => "used", { o: 0, n: b.used, kind: "used", tag: b.tag, stack: stackText(b.stack) }, side);
    if (b.committed > b.used) merge(model, r, r.blocks, () => "unused", { o: b.used, n: b.committed - b.used, kind: "unused", stack: stackText(b.stack) }, side);
  }
  for (const x of s.sparse || []) {
    const r = regionAt(model, BigInt(x.ptr));
    if (!r) continue;
    Object.assign(r, { sparse: x, device: "device " + x.device, holder: "sparse range" + quoted(x.name), kind: "sparse ranges", title: x.name, tag: x.tag });
    for (const { first, n } of x.spans || [])
      merge(model, r, r.blocks, () => "p" + first + ":" + n, { o: first * x.page, n: n * x.page, kind: "pages", tag: x.tag, stack: stackText(x.stack) }, side);
  }
  for (const p of s.pools || []) for (const g of p.segments || []) {
    const ptr = BigInt(g.ptr), r = regionAt(model, ptr);
    if (!r) continue;
    Object.assign(r, { pool: p, device: "device " + p.device, holder: poolTitle(p), kind: "pools", title: p.name, tag: p.tag });
    const base = Number(ptr - r.ptr);
    for (const b of g.blocks || []) {
      merge(model, r, r.blocks, () => "b" + (base + b.offset) + ":" + b.bytes + ":" + (b.tag || ""),
        { o: base + b.offset, n: b.bytes, requested: b.requested, kind: b.waiting ? "waiting" : "block", tag: b.tag, stream: g.stream, segment: g,
          stack: stackText(b.stack) }, side);
    }
  }
  for (const m of s.managed || []) addManaged(model, m, stackText(m.stack), side);
  for (const [list, kind, text] of [[s.followers, "imported buffers", f => "follows " + JSON.stringify(f.name) + " of process " + (f.pid || 0)],
    [s.publications, "published buffers", p => "published as " + JSON.stringify(p.name)]]) {
    for (const x of list || []) {
      const r = regionAt(model, BigInt(x.ptr));
      if (r && r.buffer) Object.assign(r, { holder: "buffer" + quoted(r.buffer.name) + ", " + text(x), kind, title: "“" + x.name + "”" });
    }
  }
  model.sorted = null;
}

// addManaged adds managed memory as a region of the pages that were touched, or if it is not
// known where they are of all of it.
function addManaged(model, m, stack, side) {
  const ptr = BigInt(m.ptr), key = ptr + ":" + m.bytes + ":managed";
  let to = model.byPtr.get(key);
  if (!to) {
    to = { ptr, bytes: m.bytes, sides: 0, mappings: [], blocks: [], past: [], index: new Map(), stack, kind: "managed memory", holder: "managed memory", device: "device " + m.device };
    model.byPtr.set(key, to);
    model.regions.push(to);
  }
  to.sides |= side;
  to.managed = m;
  for (const r of m.located ? m.resident || [] : [{ offset: 0, bytes: m.bytes, location: "" }])
    merge(model, to, to.mappings, () => "r" + r.offset + ":" + r.bytes + ":" + r.location, { o: r.offset, n: r.bytes, location: r.location, flags: 0, kind: "resident", stack }, side);
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
    if (r) r.past.push({ ...b, o: Number(ptr - r.ptr), kind: "block", side: FIRST });
  };
  let live = 0;
  model.events.forEach((e, i) => {
    const ptr = BigInt(e.ptr);
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
      if (b.kind === "block" && !open.has(r.ptr + BigInt(b.o))) {
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
  r.plain = !r.buffer && !r.pool && !r.sparse; // the program maps it itself, and uses what it maps
  r.holder ||= "reservation";
  r.kind ||= "reservations";
  r.shared = r.mappings.some(m => m.flags);
  r.mapped = r.mappings.reduce((sum, m) => sum + m.n, 0);
  r.device ||= r.mappings.length ? r.mappings[0].location : "nothing mapped";
  r.tag ||= tagOf(r);
  r.title ||= !r.pool && functionOf(creator(r.stack)) || r.holder;
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
  // most is the most bytes of a row with which what is mapped is seen: it has a sixteenth of
  // a row at least, and a piece of it some pixels. A hole alone has a quarter of a row.
  const mapped = r.pieces.filter(p => !p.hole);
  r.runs = mapped.length;
  r.most = r.runs ? mapped.reduce((sum, p) => sum + p.n, 0) * Math.min(16, 160 / r.runs) : Math.max(r.bytes, 1) * 4;
}

const quoted = name => name ? " " + JSON.stringify(name) : "";
const poolTitle = p => "pool " + p.serial + quoted(p.name) + " on device " + p.device;

// tagOf returns the tag that most of a region's bytes have, or "".
function tagOf(r) {
  const sums = new Map();
  let tag = "";
  for (const b of r.blocks) {
    if (!b.tag) continue;
    sums.set(b.tag, (sums.get(b.tag) || 0) + b.n);
    if (sums.get(b.tag) > (sums.get(tag) || 0)) tag = b.tag;
  }
  return tag;
}

// residency says where managed memory is, as cuvmm map does in a terminal.
function residency(m) {
  const text = "managed memory: " + sizeText(m.bytes);
  if (!m.located) return text + (m.prefetched ? ", last prefetched to " + m.prefetched : "");
  const sums = new Map();
  let untouched = m.bytes;
  for (const r of m.resident || []) {
    sums.set(r.location, (sums.get(r.location) || 0) + r.bytes);
    untouched -= r.bytes;
  }
  return text + [...sums].sort().map(([at, n]) => ", " + sizeText(n) + " on " + at).join("") + (untouched ? ", " + sizeText(untouched) + " untouched" : "");
}

// describe says what a region is, as cuvmm map does in a terminal.
function describe(r) {
  if (r.managed) return residency(r.managed);
  const shared = [[ALIAS, "aliased"], [SHARED, "exported"], [IMPORTED, "imported"], [ASLEEP, "suspended"]]
    .map(([flag, what]) => [r.mappings.reduce((sum, m) => sum + (m.flags & flag ? m.n : 0), 0), what]);
  return r.holder + ": " + sizeText(r.mapped) + " mapped of " + sizeText(r.bytes) + shared.map(([n, what]) => n ? ", " + sizeText(n) + " " + what : "").join("");
}

// totals says what all of a snapshot is, as cuvmm map does in a terminal.
const totals = s => count(s.totals.reservations, "reservation") + ", " + sizeText(s.totals.allocated_bytes) + " of memory, " + count(s.totals.mappings, "mapping");

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

// sums adds up the live blocks by a key, except "": the largest first.
function sums(model, key, side) {
  const all = new Map();
  for (const r of model.regions) for (const b of r.blocks) {
    const k = b.side & side && key(b);
    if (!k) continue;
    all.set(k, (all.get(k) || 0) + b.n);
  }
  return [...all].sort((a, b) => b[1] - a[1]).map(([k]) => k);
}

// uses returns the uses of the memory of buffers, sparse ranges and pools, as inspect.Snapshot.Uses does:
// the largest first, each with the address of one of them.
function uses(s) {
  const all = new Map(), stacks = s.stacks || [];
  const add = (name, bytes, ptr) => {
    const u = all.get(name) || { name, bytes: 0, count: 0, ptr };
    u.bytes += bytes;
    u.count++;
    all.set(name, u);
  };
  for (const b of s.buffers || []) add(b.tag || b.name || creator(stacks[b.stack - 1]) || "buffers", b.committed, () => BigInt(b.ptr));
  for (const x of s.sparse || []) add(x.tag || x.name || creator(stacks[x.stack - 1]) || "sparse ranges", x.mapped * x.page, () => BigInt(x.ptr));
  for (const p of s.pools || []) for (const g of p.segments || []) for (const b of g.blocks || [])
    if (!b.waiting) add(b.tag || creator(stacks[b.stack - 1]) || "blocks without a tag", b.requested || 0, () => BigInt(g.ptr) + BigInt(b.offset));
  return sortUses([...all.values()]);
}

const sortUses = all => all.sort((a, b) => Math.abs(b.bytes) - Math.abs(a.bytes) || (a.name < b.name ? -1 : 1));

// changes returns how the uses differ between two snapshots, as inspect.Compare does.
function changes(before, after) {
  const all = new Map(uses(after).map(u => [u.name, u]));
  for (const u of uses(before)) {
    const d = all.get(u.name) || { ...u, bytes: 0, count: 0 };
    d.bytes -= u.bytes;
    d.count -= u.count;
    if (d.bytes || d.count) all.set(u.name, d); else all.delete(u.name);
  }
  return sortUses([...all.values()]);
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

// functionOf returns "load" for "main.(*model[...]).load.func1 (load.go:10)".
const functionOf = creator => creator.replace(/ \(.*$|\[.*?\]/g, "").split(".").filter(part => !/^(func)?\d*$/.test(part)).pop() || "";
