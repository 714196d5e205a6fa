// The panels beside the map: the legend, the groups, what is selected, and tables.

function element(tag, text, attributes) {
  const e = document.createElement(tag);
  if (text !== undefined) e.textContent = text;
  Object.assign(e, attributes || {});
  return e;
}

const itemNames = { block: "block", waiting: "block, freed and waiting", mapping: "mapping", used: "buffer, bytes in use", unused: "buffer, memory not in use", region: "range", resident: "managed memory", pages: "pages in use" };

// detail shows an item of a region, or nothing.
function detail(b, r) {
  const to = byId("detail");
  to.replaceChildren();
  if (!b) return;
  to.append(element("h2", itemNames[b.kind]));
  const list = element("dl");
  const line = (name, value) => { if (value !== undefined && value !== "" && value !== null) list.append(element("dt", name), element("dd", String(value))); };
  line("address", addressOf(r, b.o));
  line("size", sizeText(b.n) + " (" + b.n + ")");
  if (b.requested !== undefined) line("requested", b.requested + " bytes");
  line("tag", b.tag);
  line("stream", b.stream);
  if (model.two) line("in", b.side === FIRST ? "the first alone: gone" : b.side === SECOND ? "the second alone: new" : "both");
  const m = b.kind === "mapping" ? b : r.mappings[lastBefore(r.mappings, "o", b.o)];
  if (b.kind === "resident") {
    line("pages on", b.location || "unknown: the driver cannot tell");
    line("last prefetch to", r.managed.prefetched);
  } else if (m && m.o <= b.o && b.o < m.o + m.n) {
    const memory = model.memory.get(m.memory) || {};
    line("memory", "#" + m.memory + " on " + m.location + (memory.mappings > 1 ? ", mapped " + memory.mappings + " times" : ""));
    line("sharing", [memory.exported ? "exported: another process may hold it" : "", memory.imported ? "imported from another process" : ""].filter(t => t).join("; "));
    line("access", m.access || "none");
    if (m.flags & CLOSING) line("state", "closed; waits for the GPU");
    if (m.flags & ASLEEP) line("state", "suspended: no memory is there until it is resumed");
    if (b.kind === "mapping") b.stack = memory.stack || r.stack;
  }
  if (b.segment && b.segment.pinned) line("pinned", b.segment.pinned + " chunks of its segment never move");
  line("in", hex(r.ptr) + " " + describe(r));
  to.append(list);
  if (b.stack && b.stack.length) to.append(element("h2", "created by"), element("pre", b.stack.join("\n")));
}

function legend() {
  const to = byId("legend"), [names, others] = assignColors();
  to.replaceChildren(element("h2", "legend"));
  const key = (color, text, style) => {
    const k = element("span", undefined, { className: "key" }), i = element("i", undefined, { className: style || "", ariaHidden: "true" });
    i.style.setProperty("--key", color);
    k.append(i, text);
    to.append(k);
  };
  if (model.two && !side) { key(colors.gone, "gone"); key(colors.new, "new"); }
  for (const name of names) key(nameColor(name), name);
  key(colors.live, others ? "others in use (" + others + " more)" : names.length ? "others in use" : "in use");
  key(colors.waiting, "waits for the GPU");
  key(colors.unused, "not in use");
  key(colors.mapped, "mapped, free");
  const managed = model.regions.some(r => r.managed), none = managed ? "not mapped, or untouched" : "not mapped";
  if (managed) key(colors.host, "managed, on the host");
  key(colors.hole, none);
  key(colors.hole, none + ", not to scale", "hatch");
  key(colors.alias, "mapped several times", "strip");
  key(colors.shared, "exported", "strip");
  key(colors.imported, "imported", "strip");
  key(colors.waiting, "closed, waits", "strip");
  key(colors.asleep, "suspended", "strip");
  key(colors.select, "selected", "frame");
}

// groupList lists the groups, to fold them and to go to them.
function groupList() {
  const to = byId("groups"), focused = document.activeElement.dataset.group, rows = element("table");
  to.replaceChildren();
  if (!model.groups.length) return;
  for (const g of model.groups) {
    const tr = element("tr"), td = element("td");
    const fold = element("button", (g.state.open ? "▾ " : "▸ ") + g.key, { className: "link", onclick: () => toggle(g), ariaExpanded: String(g.state.open) });
    fold.dataset.group = g.key;
    td.append(fold);
    tr.append(td, element("td", g.regions.length, { className: "n" }), element("td", sizeText(g.mapped), { className: "n" }));
    rows.append(tr);
    if (g.key === focused) queueMicrotask(() => fold.focus());
  }
  to.append(element("h2", "groups"), rows);
}

// meter returns a bar of parts, each with its color.
function meter(whole, parts) {
  const bar = element("div", undefined, { className: "meter", ariaHidden: "true" });
  for (const [part, color] of parts) {
    const i = element("i");
    i.style.width = 100 * Math.max(0, part) / Math.max(whole, 1) + "%";
    i.style.background = color;
    bar.append(i);
  }
  return bar;
}

const longestTable = 25;

function lists() {
  const to = byId("lists"), s = model.snapshots[model.snapshots.length - 1];
  to.replaceChildren();
  if (!s) return;
  const table = (title, rows) => {
    if (!rows.length) return;
    const t = element("table");
    for (const [text, number, ptr, bar] of rows.slice(0, longestTable)) {
      const tr = element("tr"), td = element("td");
      td.append(ptr === undefined ? text : element("button", text, { className: "link", onclick: () => go(ptr()) }));
      tr.append(td, element("td", number, { className: "n" }));
      t.append(tr);
      if (!bar) continue;
      const wide = element("td", undefined, { colSpan: 2 }), below = element("tr");
      wide.append(bar);
      below.append(wide);
      t.append(below);
    }
    to.append(element("h2", title + (rows.length > longestTable ? " (" + longestTable + " of " + rows.length + ")" : "")), t);
  };
  const own = new Map(); // physical memory by location
  for (const m of s.memory || []) own.set(m.location, (own.get(m.location) || 0) + m.bytes);
  table("devices", (s.devices || []).map(d => {
    const mine = own.get("device " + d.ordinal) || 0, others = d.free === undefined ? 0 : d.memory - d.free - mine;
    return [d.ordinal + ": " + d.name, (d.free === undefined ? "?" : sizeText(d.free)) + " free of " + sizeText(d.memory), undefined,
      meter(d.memory, [[mine, colors.live], [others, colors.dim]])];
  }));
  if (model.two) table("changes", changes(...model.snapshots).map(u => [u.name, (u.bytes > 0 ? "+" : "") + sizeText(u.bytes), u.ptr]));
  table("pools", (s.pools || []).map(p => [poolTitle(p) + ": " + count(p.blocks, "block"), sizeText(p.requested) + " of " + sizeText(p.reserved), undefined,
    meter(p.reserved, [[p.requested, colors.live]])]));
  table("sources of pages", (s.sources || []).map(x => ["pages" + quoted(x.name) + ": " + x.used + " of " + count(x.pages, "page") + " in use", sizeText(x.used * x.page) + " of " + sizeText(x.pages * x.page), undefined,
    meter(x.pages, [[x.used, colors.live]])]));
  table("publications", (s.publications || []).flatMap(p => [["“" + p.name + "”, " + count((p.followers || []).length, "follower") + (p.suspended ? ", sleeps" : ""), sizeText(p.bytes) + (p.pinned ? " + " + sizeText(p.pinned) + " pinned" : ""), () => BigInt(p.ptr)],
    ...(p.followers || []).map(f => ["· process " + (f.pid || "?") + (f.refused ? ": " + f.refused : ""), f.pinned ? sizeText(f.pinned) + " pinned" : ""])]));
  table("follows", (s.followers || []).map(f => ["“" + f.name + "” of process " + (f.pid || "?") + (f.suspended ? ", sleeps" : "") + (f.stuck ? ": " + f.stuck : ""), sizeText(f.bytes), () => BigInt(f.ptr)]));
  table("leases", (s.leases || []).map(l => ["until " + new Date(l.until).toLocaleTimeString(), sizeText(l.bytes)]));
  table("could not be given back", (s.leftovers || []).map(l => [l.what + ": " + l.error, l.bytes ? sizeText(l.bytes) : ""]));
  table("most memory", uses(side === FIRST ? model.snapshots[0] : s).map(u => [u.name + (u.count > 1 ? " × " + u.count : ""), sizeText(u.bytes), u.ptr]));
}
