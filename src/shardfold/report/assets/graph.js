// The model as nested blocks: closed ones are cards, open ones frames with their own graph inside.
const LEAF = [206, 44], BLOCK = [222, 54], PAD = 18, TOP = 34, TINY = 5e-4;
const graph = { zoom: 1, open: new Set(), small: false, chosen: null, hits: new Set() };
let parentOf = new Map();

function prepare(node, parent) {
  parentOf.set(node, parent);
  if (node.op !== undefined) data.ops[node.op].node = node;
  else node.children.forEach((child) => prepare(child, node));
}
const isTiny = (node) => { const sum = tally(node); return sum.total < TINY * COST && !sum.moves && !graph.hits.has(node) && graph.chosen !== node && !holds(node, graph.chosen); };
function holds(node, inner) {
  for (let at = inner; at; at = parentOf.get(at)) if (at === node) return true;
  return false;
}

// The children that are shown, and the links between them; what is too small is passed through.
function visible(block) {
  const hidden = block.children.map((child) => !graph.small && isTiny(child));
  if (hidden.every(Boolean)) hidden.fill(false);
  const into = block.children.map(() => []);
  for (const [s, t, moved] of block.links) into[t].push([s, moved]);
  const number = [], shown = [], links = [];
  block.children.forEach((child, k) => { if (!hidden[k]) { number[k] = shown.length; shown.push(child); } });
  const known = new Map();
  const sources = block.children.map(() => null);
  block.children.forEach((child, k) => {
    const found = new Map();
    for (const [s, moved] of into[k]) {
      const from = s === k ? [[k, moved]] : hidden[s] ? [...sources[s]].map((x) => [x, moved]) : [[s, moved]];
      for (const [x, m] of from) { found.set(x, [...(found.get(x) || []), ...m]); }
    }
    sources[k] = new Set(found.keys());
    if (!hidden[k]) for (const [x, m] of found) {
      const key = `${number[x]} ${number[k]}`;
      if (known.has(key)) known.get(key)[2].push(...m);
      else { const link = [number[x], number[k], [...m]]; known.set(key, link); links.push(link); }
    }
  });
  return { shown, links };
}

function measured(node) {
  if (node.op !== undefined) return { node, width: LEAF[0], height: LEAF[1] };
  if (!graph.open.has(node)) return { node, width: BLOCK[0], height: BLOCK[1] };
  const { shown, links } = visible(node);
  const boxes = shown.map(measured);
  const inner = arranged(boxes.map((box) => [box.width, box.height]), links);
  const head = node === data.tree ? 0 : TOP, pad = node === data.tree ? 10 : PAD;
  return { node, boxes, inner, links, head, pad, width: Math.max(inner.width + 2 * pad, BLOCK[0]), height: inner.height + head + 2 * pad };
}

const pen = document.createElement("canvas").getContext("2d");
function clip(text, most, font) {
  pen.font = `${font} system-ui, -apple-system, "Segoe UI", "Helvetica Neue", "Noto Sans", "DejaVu Sans", sans-serif`;
  if (pen.measureText(text).width <= most) return text;
  let kept = text.length;
  while (kept > 1 && pen.measureText(text.slice(0, kept) + "…").width > most) kept--;
  return text.slice(0, kept) + "…";
}
const BOLD = "600 12.5px", PLAIN = "11px";
const title = (node) => (node.op !== undefined ? data.ops[node.op].label : node.name || "together");

function rail(node, x, y, height) {
  const by = Object.entries(tally(node).by).filter(([name]) => name);
  const whole = by.reduce((sum, [, value]) => sum + value, 0);
  const group = svg("g");
  if (!whole) { group.append(svg("rect", { x, y, width: 6, height, rx: 2, class: "rail" })); return group; }
  let at = y;
  for (const [name, value] of by.sort((a, b) => b[1] - a[1])) {
    const tall = height * value / whole;
    const part = svg("rect", { x, y: at, width: 6, height: tall });
    part.style.fill = hue(name);
    group.append(part); at += tall;
  }
  return group;
}

function card(box, x, y) {
  const { node } = box, sum = tally(node), isLeaf = node.op !== undefined;
  const [width, height] = isLeaf ? LEAF : BLOCK;
  const group = svg("g", { class: "node", transform: `translate(${x} ${y})`, tabindex: 0, role: "button" });
  const times = isLeaf ? 1 : node.times;
  if (times > 1) for (const shift of [6, 3]) group.append(svg("rect", { x: shift, y: shift, width, height, rx: 8, class: "under" }));
  group.append(svg("rect", { width, height, rx: 8, class: "card" }));
  group.append(rail(node, 9, 9, height - 18));
  const part = sum.total / COST;
  const words = isLeaf ? splitWords(data.ops[node.op].split) : `${times > 1 ? "× " + times + " · " : ""}${sum.ops} operators`;
  group.append(svg("text", { x: 24, y: isLeaf ? 19 : 22, class: "label" }, clip(title(node), width - 24 - (part >= 0.0005 ? 46 : 10), BOLD)));
  group.append(svg("text", { x: 24, y: isLeaf ? 34 : 38, class: "sub" }, clip(words, width - 34, PLAIN)));
  if (part >= 0.0005) {
    group.append(svg("text", { x: width - 10, y: isLeaf ? 19 : 22, class: "share" }, share(part)));
    group.append(svg("rect", { x: 24, y: height - 4.5, width: Math.max(1, (width - 34) * Math.min(1, part)), height: 2, rx: 1, class: "heat" }));
  }
  finish(group, node);
  return group;
}

function frame(box, x, y) {
  const { node } = box;
  const group = svg("g", { class: "node frame", transform: `translate(${x} ${y})` });
  if (node !== data.tree) {
    if (node.times > 1) for (const shift of [6, 3]) group.append(svg("rect", { x: shift, y: shift, width: box.width, height: box.height, rx: 10, class: "under" }));
    group.append(svg("rect", { width: box.width, height: box.height, rx: 10, class: "card" }));
    group.append(svg("text", { x: 14, y: 22, class: "label" }, "▾ " + clip(title(node), box.width - 120, BOLD) + (node.times > 1 ? `  × ${node.times}` : "")));
    group.append(svg("text", { x: box.width - 12, y: 22, class: "share" }, share(tally(node).total / COST)));
    finish(group, node);
  }
  const dx = box.pad + (box.width - 2 * box.pad - box.inner.width) / 2, dy = box.head + box.pad;
  const edges = svg("g"), marks = svg("g");
  box.links.forEach((link, k) => edge(edges, marks, link, box, k, dx, dy));
  group.append(edges);
  box.boxes.forEach((inner, k) => {
    const at = box.inner.nodes[k];
    group.append((inner.boxes ? frame : card)(inner, at.x + dx, at.y + dy));
  });
  group.append(marks);
  return group;
}

function finish(group, node) {
  group.dataset.name = title(node);
  if (graph.chosen === node) group.classList.add("on");
  if (graph.hits.has(node)) group.classList.add("hit");
  const act = (event) => { event.stopPropagation(); if (!graph.moved) pick(node, true); };
  group.addEventListener("click", act);
  group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(event); } });
  node.drawn = group;
}

function edge(into, marks, [s, t, moved], box, k, dx, dy) {
  const size = moved.filter((m) => m[0] !== "backward").reduce((sum, m) => sum + m[3], 0) || moved.reduce((sum, m) => sum + m[3], 0);
  const group = svg("g", { class: moved.length ? "edge moves" : "edge" });
  let middle;
  if (s === t) {
    if (!moved.length) return;
    const at = box.inner.nodes[s], x = at.x + dx + at.width, y = at.y + dy + at.height / 2;
    group.append(svg("path", { d: `M${x} ${y + 10}C${x + 34} ${y + 16} ${x + 34} ${y - 16} ${x} ${y - 10}` }));
    middle = [x + 30, y];
  } else {
    const stops = box.inner.chains[k];
    const points = [];
    stops.forEach((node, i) => {
      const x = node.x + node.width / 2 + dx;
      if (i > 0) points.push([i === stops.length - 1 ? x + box.inner.ports[k] : x, node.y + dy - (i === stops.length - 1 ? 5 : 0)]);
      if (i < stops.length - 1) points.push([x, node.y + dy + node.height]);
    });
    let path = `M${points[0]}`;
    for (let i = 1; i < points.length; i++) {
      const [ax, ay] = points[i - 1], [bx, by] = points[i], half = (ay + by) / 2;
      path += i % 2 ? `C${ax} ${half} ${bx} ${half} ${bx} ${by}` : `L${bx} ${by}`;
    }
    const [x, y] = points[points.length - 1];
    group.append(svg("path", { d: path }), svg("path", { class: "head", d: `M${x - 4} ${y - 2}L${x + 4} ${y - 2}L${x} ${y + 5}Z` }));
    const [ax, ay] = points[points.length - 2];
    middle = [(ax + x) / 2, (ay + y) / 2 + 1];
  }
  into.append(group);
  if (!moved.length) return;
  const text = bytes(size), width = text.length * 6.2 + 12;
  const mark = svg("g", { class: "edge moves", tabindex: 0, role: "button" },
    svg("rect", { x: middle[0] - width / 2, y: middle[1] - 8, width, height: 16, rx: 8, class: "pill" }),
    svg("text", { x: middle[0], y: middle[1] + 3.8 }, text));
  hinted(mark, moved.map(([phase, kind, axes, each]) => `${phase}: ${kindWords(kind)} over ${axesWords(axes)}, ${bytes(each)}`).join("\n"));
  marks.append(mark);
  const act = (event) => { event.stopPropagation(); inspectEdge(box.boxes[s].node, box.boxes[t].node, moved); };
  mark.addEventListener("click", act); group.addEventListener("click", act);
}

function draw() {
  const box = measured(data.tree);
  const width = box.width + 20, height = box.height + 20;
  const drawing = svg("svg", { width: width * graph.zoom, height: height * graph.zoom, viewBox: `-10 -10 ${width} ${height}`, role: "img" });
  drawing.append(frame(box, 0, 0));
  $("graph").replaceChildren(drawing);
}

function reveal(node) {
  for (let at = parentOf.get(node); at; at = parentOf.get(at)) graph.open.add(at);
}
function centre(node) {
  if (!node.drawn) return;
  const host = $("graph"), a = node.drawn.getBoundingClientRect(), b = host.getBoundingClientRect();
  host.scrollTo({ left: host.scrollLeft + a.left - b.left - b.width / 2 + a.width / 2, top: host.scrollTop + a.top - b.top - Math.min(b.height / 2 - a.height / 2, b.height / 3) });
}

// Choosing: an operator is inspected; a block opens or closes under the pointer.
function pick(node, byHand) {
  const before = byHand && node.drawn ? node.drawn.getBoundingClientRect() : null;
  if (byHand && node.op === undefined) { if (!graph.open.delete(node)) graph.open.add(node); }
  graph.chosen = node;
  reveal(node); draw(); inspect(node); markRow(node);
  if (before) {
    const host = $("graph"), after = node.drawn.getBoundingClientRect();
    host.scrollLeft += after.left + after.width / 2 - before.left - before.width / 2;
    host.scrollTop += after.top - before.top;
  } else centre(node);
}

function zoomTo(zoom) {
  const host = $("graph"), x = (host.scrollLeft + host.clientWidth / 2) / host.scrollWidth, y = (host.scrollTop + host.clientHeight / 2) / host.scrollHeight;
  graph.zoom = Math.min(2.5, Math.max(0.15, zoom));
  draw();
  host.scrollTo(x * host.scrollWidth - host.clientWidth / 2, y * host.scrollHeight - host.clientHeight / 2);
}

// At first, what holds most of the time is open, as long as the drawing stays small.
function firstView() {
  graph.open = new Set([data.tree]);
  let shown = visible(data.tree).shown;
  for (;;) {
    const next = shown.filter((n) => n.op === undefined && !graph.open.has(n)).sort((a, b) => tally(b).total - tally(a).total)[0];
    if (!next || tally(next).total < 0.3 * COST) break;
    const inner = visible(next).shown;
    if (shown.length + inner.length > 26) break;
    graph.open.add(next); shown = [...shown.filter((n) => n !== next), ...inner];
  }
}

function startGraph() {
  prepare(data.tree, null);
  firstView(); draw();
  const host = $("graph");
  host.scrollLeft = (host.scrollWidth - host.clientWidth) / 2;
  $("small").addEventListener("change", (event) => { graph.small = event.target.checked; draw(); });
  $("fold").addEventListener("click", () => { graph.open = new Set([data.tree]); draw(); });
  $("open").addEventListener("click", () => {
    const grow = [...graph.open].flatMap((block) => visible(block).shown.filter((n) => n.op === undefined && !graph.open.has(n)));
    grow.forEach((node) => graph.open.add(node)); draw();
  });
  $("in").addEventListener("click", () => zoomTo(graph.zoom * 1.25));
  $("out").addEventListener("click", () => zoomTo(graph.zoom / 1.25));
  host.addEventListener("wheel", (event) => { if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoomTo(graph.zoom * Math.exp(-event.deltaY / 300)); } }, { passive: false });
  let held = null;
  host.addEventListener("pointerdown", (event) => { graph.moved = false; if (event.button === 0) held = [event.clientX, event.clientY, host.scrollLeft, host.scrollTop]; });
  addEventListener("pointermove", (event) => {
    if (!held) return;
    const [x, y, left, top] = held;
    if (Math.abs(event.clientX - x) + Math.abs(event.clientY - y) > 5) { graph.moved = true; host.classList.add("held"); }
    if (graph.moved) host.scrollTo(left - (event.clientX - x), top - (event.clientY - y));
  });
  addEventListener("pointerup", () => { held = null; host.classList.remove("held"); setTimeout(() => { graph.moved = false; }); });
  const seen = {};
  for (const [name, value] of Object.entries(tally(data.tree).by)) seen[name] = value;
  for (const [name, value] of Object.entries(seen).sort((a, b) => b[1] - a[1])) {
    $("legend").append(el("span", {}, swatch(name ? hue(name) : UNSPLIT), name || "unsplit"));
    void value;
  }
}
