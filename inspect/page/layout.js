// The layout: groups of regions that fold, each with a scale, and the rows of each region.
// This part draws nothing.

const groupHeight = 30, headHeight = 22, rowHeight = 22, gap = 6;
const leastRow = 1024; // bytes of a row

// groupings are what regions are grouped by.
const groupings = { kind: r => r.kind, tag: r => r.tag || "no tag", device: r => r.device };
const kinds = ["published buffers", "imported buffers", "pools", "buffers", "sparse ranges", "reservations", "managed memory"];

// states has how each group is shown: open or folded, the bytes of a row that fit, and the
// factor that the user zooms by. It outlives the models of a live page.
const states = new Map();

// makeGroups groups the regions. The long groups begin folded, except the last one if it
// would leave the window empty.
function makeGroups(model, by) {
  const all = new Map();
  for (const r of model.regions) {
    const key = groupings[by](r);
    if (!all.has(key)) all.set(key, { key, regions: [], mapped: 0, bytes: 0, items: 0 });
    const g = r.group = all.get(key);
    g.regions.push(r);
    g.mapped += r.mapped;
    g.bytes += r.bytes;
    g.items += r.mappings.length + r.blocks.length;
  }
  model.groups = [...all.values()].sort((a, b) => kinds.indexOf(a.key) - kinds.indexOf(b.key) || b.mapped - a.mapped || (a.key < b.key ? -1 : 1));
  const short = g => g.regions.length <= 100, last = model.groups[model.groups.length - 1];
  for (const g of model.groups) {
    const name = by + " " + g.key;
    if (!states.has(name)) states.set(name, { open: short(g) || g === last && !model.groups.some(short), fit: 0, zoom: 1 });
    g.state = states.get(name);
  }
}

// fit chooses the scale of each open group that is not zoomed, or of all: as large as the
// room permits that remains if every region has a row. A group with little to see gets less.
function fit(model, room, head, all) {
  const open = model.groups.filter(g => g.state.open);
  const needed = model.groups.length * groupHeight + open.reduce((sum, g) => sum + g.regions.length * (head + rowHeight + gap), 0);
  const more = Math.max(6, Math.floor((room - needed) / rowHeight / Math.max(1, open.length)));
  for (const g of open) {
    if (g.state.zoom !== 1 && !all) continue;
    g.state.zoom = 1;
    const rows = g.regions.length + Math.min(more, 1 + g.regions.length + (g.items >> 4));
    let low = 9, high = 52; // exponents: too small, large enough
    while (low + 1 < high) {
      g.state.fit = 2 ** (low + high >> 1);
      const needs = g.regions.reduce((sum, r) => sum + layoutRegion(r, scaleOf(r)).rows, 0);
      if (needs <= rows) high = low + high >> 1; else low = low + high >> 1;
    }
    g.state.fit = 2 ** high;
  }
}

// scaleOf returns the bytes of a region's row: those of its group, or less if the region
// would be too small to see.
function scaleOf(r) {
  const { fit, zoom } = r.group.state;
  return Math.max(leastRow, Math.min(fit * Math.max(zoom, 1), r.most) * Math.min(zoom, 1));
}

const groupScale = g => g.state.fit * g.state.zoom;

// zoomGroup sets a group's zoom, as far as it changes anything.
function zoomGroup(g, zoom) {
  const most = g.regions.reduce((m, r) => Math.max(m, r.most), 0);
  g.state.zoom = Math.min(Math.max(zoom, leastRow / g.state.fit), Math.max(1, most / g.state.fit));
}

// layoutRegion gives the pieces of a region their places in its display, for a number of
// bytes a row. It shortens long holes, the more the more pieces there are, and to what is
// left of the row.
function layoutRegion(r, perRow) {
  const longest = perRow / Math.min(Math.max(r.runs, 4), 32);
  let d = 0;
  for (const p of r.pieces) {
    p.d = d;
    p.dn = p.hole && p.n > longest ? Math.min(perRow - d % perRow, longest) : p.n;
    d += p.dn;
  }
  r.perRow = perRow;
  r.display = d;
  r.rows = Math.max(1, Math.ceil(d / perRow - 1e-9));
  return r;
}

// place gives each group and each region of an open group its height in the picture, lists
// them from the top as the model's lines, and returns the whole height.
function place(model, head) {
  let y = 0;
  model.lines = [];
  for (const g of model.groups) {
    g.y = y;
    model.lines.push({ y, group: g });
    y += groupHeight;
    if (!g.state.open) { y += rowHeight + gap; continue; }
    for (const r of g.regions) {
      layoutRegion(r, scaleOf(r));
      r.y = y;
      model.lines.push({ y, group: g, region: r });
      y += head + r.rows * rowHeight + gap;
    }
  }
  return y;
}

// displayed turns an offset in a region into a place in its display.
function displayed(r, offset) {
  const p = r.pieces[lastBefore(r.pieces, "o", offset)];
  return p ? p.d + (p.n ? (offset - p.o) / p.n * p.dn : 0) : 0;
}

// offsetAt is the reverse of displayed.
function offsetAt(r, d) {
  const p = r.pieces[lastBefore(r.pieces, "d", d)];
  return p ? p.o + (p.dn ? (d - p.d) / p.dn * p.n : 0) : 0;
}
