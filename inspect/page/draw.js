// Drawing: the visible rows of the model. The work of a frame is bounded by the pixels of
// the window and not by the number of blocks.

const byId = id => document.getElementById(id);
const canvas = byId("map"), context = canvas.getContext("2d");
const margin = 12, labelWidth = 244, barHeight = rowHeight - 3;
let model = buildModel([]), top_ = 0, total = 0, width = 0, height = 0;
let left = margin, head = headHeight; // of the rows: labels are beside them if there is room, or above
let selected = null, event_ = null, side = 0, pending = false;
let colors = {}, hatch = null, groupOf = null; // the key of what has colors of its own

const barWidth = () => width - left - margin;

// paint sets the color of what is drawn next, if it changes: setting it is expensive.
let painted = null;
function paint(color) {
  if (color !== painted) context.fillStyle = painted = color;
}

const colorNames = ["bg", "text", "dim", "line", "hole", "mapped", "live", "unused", "waiting", "alias", "shared", "imported", "asleep", "host", "gone", "new", "select"];
let inks = new Map(); // the color of text on a color

function readColors() {
  const style = getComputedStyle(document.documentElement);
  for (const name of colorNames) colors[name] = style.getPropertyValue("--" + name).trim();
  colors.groups = style.getPropertyValue("--groups").trim().split(/\s+/);
  inks = new Map([colors.live, colors.waiting, colors.gone, colors.new, ...colors.groups].map(c => [c, luminance(c) > 0.18 ? "#000000" : "#ffffff"]));
  const tile = element("canvas", undefined, { width: 6, height: 6 }), g = tile.getContext("2d");
  g.strokeStyle = colors.hatch = style.getPropertyValue("--hatch").trim();
  g.lineCap = "square";
  g.beginPath();
  for (const x of [-3, 3, 9]) { g.moveTo(x - 3, 6); g.lineTo(x + 3, 0); }
  g.stroke();
  hatch = context.createPattern(tile, "repeat");
}

// luminance returns the relative luminance of a color #rrggbb.
function luminance(color) {
  const [r, g, b] = [1, 3, 5].map(i => (parseInt(color.slice(i, i + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// named has the tags, streams or creators with colors of their own, each with its color. A
// name keeps its color while the page is open, so that a live page does not flicker.
const named = { tag: new Map(), stream: new Map(), stack: new Map() };
const colorKeys = {
  tag: b => b.tag || "",
  stream: b => b.stream && b.stream !== "0x0" ? b.stream : "",
  stack: b => creator(b.stack),
};

// assignColors gives names their colors, the largest first, as long as there are colors, and
// returns the names that are shown, and how many have none.
function assignColors() {
  const by = byId("color").value, key = colorKeys[by], known = named[by];
  groupOf = key ? b => known.get(key(b)) : null;
  for (const g of model.groups) g.summary = null;
  if (!key) return [[], 0];
  const all = sums(model, key, side || FIRST | SECOND);
  for (const name of all) if (!known.has(name) && known.size < colors.groups.length) known.set(name, known.size);
  return [all.filter(name => known.has(name)), all.filter(name => !known.has(name)).length];
}

const nameColor = name => colors.groups[named[byId("color").value].get(name)];

function colorOf(b) {
  if (b.kind === "unused") return colors.unused;
  if (b.kind === "waiting") return colors.waiting;
  if (b.kind === "resident" && !b.location.startsWith("device")) return b.location ? colors.host : colors.mapped;
  const at = groupOf ? groupOf(b) : undefined;
  return at === undefined ? colors.live : colors.groups[at];
}

// shows reports whether the selected snapshot has an item.
function shows(b) { return !side || (b.side & side) !== 0; }
const sideColor = b => model.two && !side ? (b.side === FIRST ? colors.gone : b.side === SECOND ? colors.new : null) : null;

function draw() {
  pending = false;
  const scale = window.devicePixelRatio || 1;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  painted = null; // a canvas of another size has lost it
  paint(colors.bg);
  context.fillRect(0, 0, width, height);
  context.textBaseline = "middle";
  const lines = model.lines;
  for (let i = lastBefore(lines, "y", top_); i < lines.length && lines[i].y - top_ < height; i++) {
    const { group, region } = lines[i];
    if (region) drawRegion(region); else drawGroup(group, group.y - top_);
  }
  const first = lines[lastBefore(lines, "y", top_)];
  if (first && first.group.y < top_) drawGroup(first.group, 0); // stays at the top
  if (!lines.length && model.snapshots.length) write("no address space is reserved", textFont, colors.dim, margin, 24, width - 2 * margin);
  if (total > height) { // the scroll bar
    const bar = scrollBar();
    paint(colors.line);
    context.fillRect(width - 9, bar.y, 7, bar.height);
  }
}

function scrollBar() {
  const bar = Math.max(28, height * height / total);
  return { y: top_ / Math.max(1, total - height) * (height - bar), height: bar };
}

const textFont = "12px system-ui, sans-serif", boldFont = "600 12px system-ui, sans-serif", smallFont = "10px system-ui, sans-serif";

// write writes a text, shortened to the room that it has, and returns its width.
function write(text, font, color, x, y, room) {
  context.font = font;
  let w = context.measureText(text).width;
  if (w > room) {
    let low = 0, high = text.length;
    while (low < high) {
      const mid = (low + high + 1) >> 1;
      if (context.measureText(text.slice(0, mid) + "…").width <= room) low = mid; else high = mid - 1;
    }
    if (!low) return 0;
    text = text.slice(0, low) + "…";
    w = context.measureText(text).width;
  }
  paint(color);
  context.fillText(text, x, y);
  return w;
}

// writeAll writes texts in a line, as many as have room. The first one is shortened.
function writeAll(texts, x, y, end) {
  texts.forEach(([text, font, color], i) => {
    context.font = font;
    if (i && x + context.measureText(text).width > end) { x = end; return; }
    x += write(text, font, color, x, y, end - x) + 12;
  });
}

function drawGroup(g, y) {
  paint(colors.bg);
  context.fillRect(0, y, width, groupHeight);
  paint(colors.line);
  context.fillRect(margin, y + groupHeight - 5, width - 2 * margin, 1);
  paint(colors.text);
  context.beginPath();
  const [x, mid] = [margin + 1, y + groupHeight / 2 - 3];
  if (g.state.open) { context.moveTo(x, mid - 3); context.lineTo(x + 9, mid - 3); context.lineTo(x + 4.5, mid + 4); }
  else { context.moveTo(x + 1, mid - 5); context.lineTo(x + 8, mid); context.lineTo(x + 1, mid + 5); }
  context.fill();
  writeAll([[g.key, boldFont, colors.text], [count(g.regions.length, "range"), textFont, colors.dim],
    ...(g.state.open ? [["a row is " + sizeText(groupScale(g)), textFont, colors.dim]] : []),
    [sizeText(g.mapped) + " mapped of " + sizeText(g.bytes), textFont, colors.dim]], margin + 16, mid, width - margin);
  if (!g.state.open && y + groupHeight < height) drawSummary(g, y + groupHeight);
}

// drawSummary draws what a folded group's mapped memory is used for.
function drawSummary(g, y) {
  g.summary ||= summary(g);
  const scale = (width - 2 * margin) / Math.max(1, g.mapped);
  paint(colors.hole);
  context.fillRect(margin, y, width - 2 * margin, barHeight);
  let x = margin;
  for (const [color, bytes] of g.summary) {
    paint(color);
    context.fillRect(x, y, bytes * scale, barHeight);
    x += bytes * scale;
  }
}

function summary(g) {
  const all = new Map();
  let rest = g.mapped;
  for (const r of g.regions) for (const b of r.plain ? r.mappings : r.blocks) {
    const n = Math.min(b.n, rest), color = sideColor(b) || colorOf(b);
    all.set(color, (all.get(color) || 0) + n);
    rest -= n;
  }
  all.set(colors.mapped, rest);
  return [...all];
}

function drawRegion(r) {
  const y = r.y - top_, color = sideColor({ side: r.sides }) || colors.text, size = sizeText(r.mapped);
  const title = [r.title, boldFont, color], address = [hex(r.ptr), textFont, colors.dim];
  const at = Math.min(Math.max(y, groupHeight), y + (r.rows - 1) * rowHeight); // a label stays while its rows are seen
  if (head) {
    writeAll([title, [size + " of " + sizeText(r.bytes), textFont, colors.dim], address], left, y + head / 2, width - margin);
  } else {
    const end = left - 12, mid = at + barHeight / 2;
    context.font = textFont;
    const w = context.measureText(size).width;
    write(size, textFont, colors.dim, end - w, mid, w);
    const more = at + rowHeight < y + r.rows * rowHeight; // a second line, which has the address
    writeAll(more ? [title] : [title, address], margin, mid, end - w - 10);
    if (more) writeAll([["of " + sizeText(r.bytes), textFont, colors.dim], address], margin, mid + rowHeight, end);
  }
  const from = Math.max(0, Math.floor((-y - head) / rowHeight));
  const to = Math.min(r.rows, Math.ceil((height - y - head) / rowHeight));
  for (let row = from; row < to; row++) drawRow(r, row, y + head + row * rowHeight);
}

function drawRow(r, row, y) {
  const d0 = row * r.perRow, d1 = Math.min(d0 + r.perRow, r.display), h = barHeight;
  const scale = barWidth() / r.perRow, x = d => left + (d - d0) * scale;
  let last = -1; // the last pixel with a piece
  for (let at = lastBefore(r.pieces, "d", d0); at < r.pieces.length && r.pieces[at].d < d1; at++) {
    const p = r.pieces[at], from = Math.max(p.d, d0), to = Math.min(p.d + p.dn, d1);
    const x0 = x(from), x1 = x(to);
    if (to <= from || Math.floor(x1) === last && x1 - x0 < 1) continue;
    last = Math.floor(x1);
    paint(colors.hole);
    context.fillRect(x0, y, x1 - x0, h);
    if (p.hole) drawHole(r, p, from, x0, x1, y, h);
    else drawPiece(r, p.o + (from - p.d), p.o + (to - p.d), x0, scale, y, h);
  }
  if (row === r.rows - 1 && r.perRow < groupScale(r.group))
    write("a row is " + sizeText(r.perRow), smallFont, colors.dim, x(d1) + 8, y + h / 2, width - margin - x(d1) - 8);
}

function drawHole(r, p, from, x0, x1, y, h) {
  if (p.dn === p.n) return;
  paint(hatch); // not to scale
  context.fillRect(x0, y, x1 - x0, h);
  const text = sizeText(p.n) + (r.managed ? " untouched" : " not mapped");
  context.font = smallFont;
  const w = context.measureText(text).width;
  if (from !== p.d || x1 - x0 < w + 20) return;
  paint(colors.hole);
  context.fillRect(x0 + 6, y + h / 2 - 7, w + 8, 14);
  paint(colors.text);
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

// drawPiece draws the mappings of a run of addresses, the blocks in them, and in a region
// with shared memory a strip at their bottom that shows how it is shared.
function drawPiece(r, o0, o1, x, scale, y, h) {
  const strip = r.shared ? Math.round(h / 5) : 0;
  visible(r.mappings, o0, o1, x, scale, (m, x0, x1) => {
    const w = Math.max(x1 - x0, 0.7), gap = w > 4 ? 0.5 : 0;
    paint(sideColor(m) || (r.plain ? colorOf(m) : colors.mapped));
    context.fillRect(x0, y, w - gap, h);
    if (selected && selected.kind === "mapping" && m.memory === selected.memory && m !== selected) {
      paint(colors.select);
      context.fillRect(x0, y, Math.max(w, 2), 2);
    }
  });
  visible(itemsAt(r, event_), o0, o1, x, scale, (b, x0, x1) => drawBlock(b, x0, x1, y, strip ? h - strip - 1 : h));
  if (strip) visible(r.mappings, o0, o1, x, scale, (m, x0, x1) => {
    const flags = [[IMPORTED, colors.imported], [SHARED, colors.shared], [ALIAS, colors.alias], [CLOSING, colors.waiting], [ASLEEP, colors.asleep]].filter(([flag]) => m.flags & flag);
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
  const w = Math.max(x1 - x0, 0.7), gap = w > 3 ? 0.6 : 0, color = sideColor(b) || colorOf(b);
  paint(color);
  context.fillRect(x0, y, w - gap, h);
  if (!b.tag || w < 40 || h < 10) return;
  context.font = smallFont;
  if (context.measureText(b.tag).width > w - 8) return;
  paint(inks.get(color));
  context.fillText(b.tag, x0 + 4, y + h / 2 + 0.5);
}
