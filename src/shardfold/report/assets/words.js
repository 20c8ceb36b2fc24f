// The data, elements made without markup (so that no text can become any), and numbers in words.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function add(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of [children].flat(3)) {
    if (child === undefined || child === null || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}
const el = (name, attributes, ...children) => add(document.createElement(name), attributes, children);
const svg = (name, attributes, ...children) => add(document.createElementNS(SVG, name), attributes, children);

function scaled(value, units, digits) {
  for (const [unit, scale] of units) {
    const found = value / scale;
    if (found >= 0.9995) return found.toFixed(digits(found)).replace(/\B(?=(\d{3})+(?!\d))/g, (m, g, at, all) => (all.indexOf(".") >= 0 && at > all.indexOf(".") ? "" : ",")) + " " + unit;
  }
  return null;
}
const seconds = (value) => value < 0 ? "−" + seconds(-value)
  : scaled(value, [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]], (v) => (v < 9.995 ? 2 : v < 99.95 ? 1 : 0)) || "0 s";
const bytes = (value) => scaled(value, [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]], (v) => (v < 99.95 ? 1 : 0)) || `${Math.round(value)} B`;
const share = (value) => (value >= 0.0995 ? `${(value * 100).toFixed(0)}%` : value >= 0.0005 ? `${(value * 100).toFixed(1)}%` : value > 0 ? "<0.1%" : "0%");
const count = (value) => (value >= 1e12 ? `${(value / 1e12).toPrecision(3)}T` : value >= 1e9 ? `${(value / 1e9).toPrecision(3)}B` : value >= 1e6 ? `${(value / 1e6).toPrecision(3)}M` : value >= 1e4 ? `${(value / 1e3).toPrecision(3)}k` : String(value));
const splitWords = (split) => Object.entries(split).map(([name, parts]) => `${name}/${parts}`).join(" ") || "unsplit";
const KINDS = { all_reduce: "all-reduce", all_gather: "all-gather", reduce_scatter: "reduce-scatter", all_to_all: "all-to-all", halo: "halo exchange" };
const kindWords = (kind) => KINDS[kind] || kind.replace(/_/g, "-");
const SHORT = { scaled_dot_product_attention: "attention", cross_entropy_loss: "cross_entropy" };
const shortKind = (kind) => SHORT[kind.split(".").pop()] || kind.split(".").pop();

const COST = data.estimate.additive || 1; // what shares are of
const AXES = Object.fromEntries(data.mesh.map((axis) => [axis.name, axis]));
const axesWords = (axes) => (axes.length === data.mesh.length && axes.length > 1 ? "all axes" : axes.join("+"));

// One colour a factor, the same in every report.
const HUES = { batch: "#4f7fb5", seq: "#4aa3a2", heads: "#9a6fb0", out: "#e08a3c", in: "#cf5b57", vocab: "#d2b13a", classes: "#b99425", features: "#6aa657", hidden: "#a5775d", experts: "#dd7fa3", height: "#5b8f3e", width: "#8dbb62", keys: "#7b66b8", queries: "#b48cc9", groups: "#7d8791", time: "#3f8f8e" };
const MORE = ["#5f8dd3", "#c77d4f", "#7a9e3b", "#b36b8f", "#5aa9bd", "#a38a3a"];
const given = {};
function hue(factor) {
  if (HUES[factor]) return HUES[factor];
  given[factor] ??= MORE[Object.keys(given).length % MORE.length];
  return given[factor];
}
const UNSPLIT = "var(--line)";
const swatch = (colour) => { const s = el("span", { class: "swatch" }); s.style.background = colour; return s; };

function splitChips(split) {
  const entries = Object.entries(split);
  if (!entries.length) return [el("span", { class: "chip" }, "unsplit")];
  return entries.map(([name, parts]) => el("span", { class: "chip" }, swatch(hue(name)), `${name}/${parts}`));
}

const tip = $("tip");
function hinted(node, text) {
  node.addEventListener("pointermove", (event) => {
    tip.textContent = typeof text === "function" ? text(event) : text;
    tip.hidden = !tip.textContent;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const under = event.clientY + 16 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${under ? event.clientY + 16 : event.clientY - tip.offsetHeight - 10}px`;
  });
  node.addEventListener("pointerleave", () => { tip.hidden = true; });
  return node;
}

// What a subtree comes to: time, time of communication, time by factor.
function tally(node) {
  if (node.sum) return node.sum;
  const sum = { total: 0, sent: 0, update: 0, by: {}, moves: 0, ops: 0 };
  if (node.op !== undefined) {
    const op = data.ops[node.op];
    sum.total = op.total; sum.sent = op.sent; sum.update = ((op.work || {}).update || 0) * op.count; sum.ops = op.count;
    sum.moves = (op.moves || []).length;
    const parts = Object.entries(op.split);
    const whole = parts.reduce((s, [, n]) => s + Math.log2(n), 0);
    for (const [name, n] of parts) sum.by[name] = op.total * Math.log2(n) / whole;
    if (!parts.length) sum.by[""] = op.total;
  } else {
    for (const child of node.children) {
      const below = tally(child);
      sum.total += below.total; sum.sent += below.sent; sum.update += below.update; sum.moves += below.moves; sum.ops += below.ops;
      for (const [name, value] of Object.entries(below.by)) sum.by[name] = (sum.by[name] || 0) + value;
    }
  }
  node.sum = sum;
  return sum;
}
