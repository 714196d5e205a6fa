// Drawing: the visible rows of the model. The work of a frame is bounded by the pixels of
// the window and not by the number of blocks.

const byId = id => document.getElementById(id);
const canvas = byId("map"), context = canvas.getContext("2d");
const headHeight = 26, rowHeight = 22, margin = 12;
let model = null, bytesPerRow = 1, top_ = 0, total = 0, width = 0, height = 0;
let selected = null, event_ = null, side = 0, pending = false;
let colors = {}, hatch = null, groupOf = null; // the key of groups with colors of their own

// paint sets the color of what is drawn next, if it changes: setting it is expensive.
let painted = null;
function paint(color) {
  if (color !== painted) context.fillStyle = painted = color;
}

function readColors() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["bg", "text", "dim", "line", "hole", "mapped", "live", "unused", "waiting", "alias", "shared", "imported", "gone", "new", "select", "label"])
    colors[name] = style.getPropertyValue("--" + name).trim();
  colors.groups = style.getPropertyValue("--groups").trim().split(/\s+/);
  const tile = element("canvas", undefined, { width: 6, height: 6 }), g = tile.getContext("2d");
  g.strokeStyle = colors.line;
  g.lineCap = "square";
  g.beginPath();
  for (const x of [-3, 3, 9]) { g.moveTo(x - 3, 6); g.lineTo(x + 3, 0); }
  g.stroke();
  hatch = context.createPattern(tile, "repeat");
}

// places has the index of each group among the colors. A group keeps its color while the
// page is open, so that a live page does not flicker.
const places = new Map();
const colorKeys = {
  tag: b => b.tag || "",
  stream: b => b.stream ? hex(b.stream) : "",
  stack: b => creator(b.stack),
};

// assignColors gives groups their colors, the largest first, and returns the groups.
function assignColors() {
  groupOf = colorKeys[byId("color").value] || null;
  if (!groupOf) return [];
  const all = groups(model, groupOf, side || FIRST | SECOND).filter(g => g.key && g.first.kind !== "used");
  for (const g of all) if (!places.has(g.key)) places.set(g.key, places.size);
  return all;
}

const groupColor = name => colors.groups[places.get(name) % colors.groups.length];

function colorOf(b) {
  if (b.kind === "unused") return colors.unused;
  if (b.kind === "waiting") return colors.waiting;
  const name = b.kind !== "used" && groupOf && groupOf(b);
  return name ? groupColor(name) : colors.live;
}

// shows reports whether the selected snapshot has an item.
function shows(b) { return !side || (b.side & side) !== 0; }
const sideColor = b => model.two && !side ? (b.side === FIRST ? colors.gone : b.side === SECOND ? colors.new : null) : null;

function draw() {
  pending = false;
  if (!model) return;
  const scale = window.devicePixelRatio || 1;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  painted = null; // a canvas of another size has lost it
  paint(colors.bg);
  context.fillRect(0, 0, width, height);
  context.textBaseline = "middle";
  for (let i = firstRegion(top_); i < model.regions.length && model.regions[i].y - top_ < height; i++) drawRegion(model.regions[i]);
  if (total > height) { // the scroll bar
    const bar = Math.max(24, height * height / total);
    paint(colors.line);
    context.fillRect(width - 6, top_ / (total - height) * (height - bar), 4, bar);
  }
}

function firstRegion(y) {
  let low = 0, high = model.regions.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (model.regions[mid].y <= y) low = mid + 1; else high = mid;
  }
  return Math.max(0, low - 1);
}

const textFont = "12px system-ui, sans-serif", boldFont = "600 12px system-ui, sans-serif", smallFont = "10px system-ui, sans-serif";

function drawRegion(r) {
  const y = r.y - top_;
  if (y > -headHeight) {
    let x = margin;
    const write = (text, font, color) => {
      context.font = font;
      paint(color);
      context.fillText(text, x, y + headHeight / 2 + 4);
      x += context.measureText(text).width + 12;
    };
    write([...new Set(r.what)].join("; ") || "reservation", boldFont, sideColor({ side: r.sides }) || colors.text);
    write(sizeText(r.mapped) + " mapped of " + sizeText(r.bytes) + " reserved", textFont, colors.dim);
    write(hex(r.ptr), textFont, colors.dim);
  }
  const from = Math.max(0, Math.floor((-y - headHeight) / rowHeight));
  const to = Math.min(r.rows, Math.ceil((height - y - headHeight) / rowHeight));
  for (let row = from; row < to; row++) drawRow(r, row, y + headHeight + row * rowHeight);
}

function drawRow(r, row, y) {
  const d0 = row * bytesPerRow, d1 = Math.min(d0 + bytesPerRow, r.display), h = rowHeight - 3;
  const scale = (width - 2 * margin) / bytesPerRow, x = d => margin + (d - d0) * scale;
  let low = 0, high = r.pieces.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (r.pieces[mid].d <= d0) low = mid + 1; else high = mid;
  }
  let last = -1; // the last pixel with a piece
  for (let at = Math.max(0, low - 1); at < r.pieces.length && r.pieces[at].d < d1; at++) {
    const p = r.pieces[at], from = Math.max(p.d, d0), to = Math.min(p.d + p.dn, d1);
    const x0 = x(from), x1 = x(to);
    if (to <= from || Math.floor(x1) === last && x1 - x0 < 1) continue;
    last = Math.floor(x1);
    paint(colors.hole);
    context.fillRect(x0, y, x1 - x0, h);
    if (p.hole) drawHole(p, from, x0, x1, y, h);
    else drawPiece(r, p.o + (from - p.d), p.o + (to - p.d), x0, scale, y, h);
  }
}

function drawHole(p, from, x0, x1, y, h) {
  if (p.dn === p.n) return;
  paint(hatch); // not to scale
  context.fillRect(x0, y, x1 - x0, h);
  const text = sizeText(p.n) + " not mapped";
  context.font = smallFont;
  const w = context.measureText(text).width;
  if (from !== p.d || x1 - x0 < w + 20) return;
  paint(colors.hole);
  context.fillRect(x0 + 6, y + h / 2 - 7, w + 8, 14);
  paint(colors.dim);
  context.fillText(text, x0 + 10, y + h / 2 + 0.5);
}

// visible calls f for the items that overlap [o0, o1), which begins at pixel x. It skips
// items within a pixel that has one already.
function visible(items, o0, o1, x, scale, f) {
  let last = -1;
  for (let i = firstReaching(items, o0); i < items.length && items[i].o < o1;) {
    const b = items[i++];
    if (b.o + b.n <= o0 || !shows(b)) continue;
    const x0 = x + (Math.max(b.o, o0) - o0) * scale, x1 = x + (Math.min(b.o + b.n, o1) - o0) * scale;
    const pixel = Math.floor(x1);
    if (x1 - x0 < 1) {
      if (pixel > last) f(b, x0, x1);
      i = Math.max(i, firstReaching(items, o0 + (pixel + 1 - x) / scale));
    } else f(b, x0, x1);
    last = pixel;
  }
}

// drawPiece draws the mappings of a run of addresses, the blocks in them, and a strip at
// their bottom that shows how they are shared.
function drawPiece(r, o0, o1, x, scale, y, h) {
  const strip = Math.max(2, Math.round(h / 7));
  visible(r.mappings, o0, o1, x, scale, (m, x0, x1) => {
    const w = Math.max(x1 - x0, 0.7), gap = w > 4 ? 0.5 : 0;
    paint(sideColor(m) || (r.plain ? colors.live : colors.mapped));
    context.fillRect(x0, y, w - gap, h);
    if (selected && selected.kind === "mapping" && m.memory === selected.memory && m !== selected) {
      paint(colors.select);
      context.fillRect(x0, y, Math.max(w, 2), 2);
    }
  });
  visible(itemsAt(r, event_), o0, o1, x, scale, (b, x0, x1) => drawBlock(b, x0, x1, y, h - strip - 1));
  visible(r.mappings, o0, o1, x, scale, (m, x0, x1) => {
    const flags = [[IMPORTED, colors.imported], [SHARED, colors.shared], [ALIAS, colors.alias], [CLOSING, colors.waiting]].filter(([flag]) => m.flags & flag);
    flags.forEach(([, color], i) => {
      paint(color);
      context.fillRect(x0, y + h - strip + i * strip / flags.length, Math.max(x1 - x0, 0.7), strip / flags.length);
    });
  });
  if (selected && selected.region_ === r && selected.o < o1 && selected.o + selected.n > o0) {
    const x0 = x + (Math.max(selected.o, o0) - o0) * scale, x1 = x + (Math.min(selected.o + selected.n, o1) - o0) * scale;
    context.strokeStyle = colors.select;
    context.lineWidth = 1.5;
    context.strokeRect(x0 - 1, y - 0.5, Math.max(x1 - x0, 3) + 1, h + 1);
  }
}

function drawBlock(b, x0, x1, y, h) {
  const w = Math.max(x1 - x0, 0.7), gap = w > 3 ? 0.6 : 0;
  paint(sideColor(b) || colorOf(b));
  context.fillRect(x0, y, w - gap, h);
  if (!b.tag || w < 40 || h < 10) return;
  context.font = smallFont;
  if (context.measureText(b.tag).width > w - 8) return;
  paint(colors.label);
  context.fillText(b.tag, x0 + 4, y + h / 2 + 0.5);
}
