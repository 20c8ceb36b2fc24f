// What is known of the operator, block or edge that was chosen.
const PHASE = { forward: "forward", recompute: "recompute", backward: "backward", update: "update" };
const show = (...children) => { const body = $("panel-inspector").querySelector(".body"); body.replaceChildren(...children.flat(3).filter((c) => c instanceof Node)); body.scrollTop = 0; };
const table = (heads, rows, numbers = []) => el("table", {},
  el("thead", {}, el("tr", {}, heads.map((head, k) => el("th", { class: numbers.includes(k) ? "num" : null }, head)))),
  el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, k) => el("td", { class: numbers.includes(k) ? "num" : null }, cell))))));

function inspect(node) {
  if (node.op !== undefined) inspectOperator(data.ops[node.op], node.op);
  else inspectBlock(node);
}

function heading(name, aside, path) {
  return [el("div", { class: "head-line" }, el("div", { class: "big" }, name), el("div", { class: "quiet" }, aside)), path ? el("div", { class: "crumbs" }, path) : null];
}

function costBar(work, sent, total) {
  const parts = [["compute", Math.max(0, total - sent - (work.update || 0)), "var(--compute)"], ["communication", sent, "var(--talk)"], ["update", work.update || 0, "var(--update)"]].filter((p) => p[1] > 0);
  return [stacked(parts, total), el("div", { class: "keys" }, parts.map(([name, value, colour]) => el("span", {}, swatch(colour), `${name} `, el("b", {}, seconds(value)))))];
}
function stacked(parts, total) {
  return el("div", { class: "stack" }, parts.map(([name, value, colour]) => { const i = el("i"); i.style.width = `${100 * value / total}%`; i.style.background = colour; return hinted(i, `${name}: ${seconds(value)}, ${share(value / total)}`); }));
}

function inspectOperator(op, number) {
  const face = op.face === undefined ? null : data.faces[op.face];
  const many = op.count > 1 ? ` · one of ${op.count} alike` : "";
  const sent = op.collectives.reduce((sum, c) => sum + c[5], 0);
  show(
    heading(op.label, `${share(op.total / COST)} of the cost`, op.path),
    el("div", { class: "quiet", style: "margin:2px 0 8px" }, `${op.kind}${many}`, op.source ? el("span", {}, " · ", el("code", {}, op.source)) : null),
    el("div", {}, splitChips(op.split)),
    el("h3", {}, `Additive cost, ${op.count > 1 ? "each " : ""}${seconds(op.seconds)}${op.count > 1 ? `, all ${seconds(op.total)}` : ""}`),
    costBar(op.work || {}, sent, op.seconds),
    runnerUp(op, number),
    face ? [el("h3", {}, "Factors"), el("div", { class: "mono quiet", style: "margin-bottom:4px" }, face.rule), factors(op, face)] : el("p", { class: "quiet" }, "This plan was saved without a sketch: plan again to see factors and layouts."),
    el("h3", {}, "Collectives, for one device"), collectives(op),
    face ? [el("h3", {}, "Tensors on the devices"), [...face.operands.map((s, k) => tensor(s, s.name, movesOf(op, k))), ...face.results.map((s, k) => tensor(s, face.results.length > 1 ? `result ${k}` : "result", movesOf(op, -1 - k)))]] : null,
    op.first ? [el("h3", {}, "Stands for"), el("div", { class: "crumbs" }, `${op.first} … ${op.last}, of which ${op.name} is shown`)] : null,
  );
}
const movesOf = (op, operand) => (op.moves || []).filter((m) => m[0] === operand);

function factors(op, face) {
  const used = {};
  op.config.forEach((factor, k) => { (used[factor] ||= []).push(data.mesh[k]); });
  const rows = face.factors.map(([name, word, size]) => {
    const axes = used[name] || [];
    const ways = axes.reduce((n, axis) => n * axis.size, 1);
    return [el("span", {}, axes.length ? swatch(hue(word)) : null, el("code", {}, name), word !== name ? ` ${word}` : ""), size.toLocaleString("en"),
      axes.length ? axes.map((axis) => el("span", { class: "chip" }, `${axis.name} ${axis.size}`)) : el("span", { class: "quiet" }, "—"), ways > 1 ? `${ways} × ${Math.ceil(size / ways).toLocaleString("en")}` : ""];
  });
  const passing = op.config.map((factor, k) => (factor === "+" ? data.mesh[k].name : null)).filter(Boolean);
  const idle = op.config.map((factor, k) => (factor === "-" ? data.mesh[k].name : null)).filter(Boolean);
  return [table(["factor", "size", "split by axes", "parts"], rows, [1, 3]),
    passing.length ? el("p", { class: "quiet" }, `A partial sum passes on ${passing.join(", ")}.`) : null,
    idle.length ? el("p", { class: "quiet" }, `Repeated along ${idle.join(", ")}: every device there does the same.`) : null];
}

function collectives(op) {
  if (!op.collectives.length) return el("p", { class: "quiet" }, "None: each device works on what it has.");
  const order = Object.keys(PHASE);
  const rows = [...op.collectives].sort((a, b) => order.indexOf(a[0]) - order.indexOf(b[0])).map(([phase, kind, axes, each, times, time]) =>
    [PHASE[phase] || phase, `${kindWords(kind)}${times > 1 ? ` × ${times}` : ""}`, axesWords(axes), bytes(each), seconds(time)]);
  return table(["pass", "kind", "over", "bytes", "time"], rows, [3, 4]);
}

function tensor(side, name, moves) {
  const shape = `${side.dtype} [${side.shape.join(", ")}]`;
  return el("div", { class: "tensor" },
    el("div", { class: "top" }, el("span", {}, el("b", {}, name || side.role), " ", el("span", { class: "quiet" }, side.role === "parameter" ? "parameter" : "")), el("span", { class: "mono quiet" }, shape)),
    el("div", { class: "quiet", style: "font-size:12px" }, layoutWords(side)),
    moves.length ? el("div", { style: "font-size:12px;color:var(--warm)" }, moves.map((m) => `${m[1]}: ${kindWords(m[2])} over ${axesWords(m[3])}, ${bytes(m[4])}`).join("; ")) : null,
    deviceGrid(side));
}

function runnerUp(op, number) {
  const found = data.reasons[number];
  const head = el("h3", {}, "The runner-up");
  if (!found) {
    const model = data.model || "MODEL";
    const quoted = `'${op.name.replace(/'/g, "'\\''")}'`;
    return [head, el("p", { class: "quiet", style: "font-size:12.5px" }, "Other splits are priced exactly with everything else chosen anew, which needs the model:"), el("code", { class: "command" }, `shardfold explain plan.json ${quoted} --model ${model}`)];
  }
  const best = found.others.find((o) => o[1] !== null);
  if (!best) return [head, el("p", { class: "quiet" }, "No other split is possible, or none fits.")];
  const rows = found.others.slice(0, 6).map(([split, cost, bound]) => {
    const shown = cost === null ? bound : cost;
    return [splitWords(split), shown === null ? "does not fit" : `${cost === null ? "≥ " : ""}${seconds(shown)}`, shown === null ? "" : `${shown < found.additive ? "" : "+"}${((shown / found.additive - 1) * 100).toFixed(2)}%`];
  });
  const terms = found.terms.slice(0, 4).map(([what, value]) => `${value < 0 ? "−" : "+"}${seconds(Math.abs(value))} ${what}`).join("; ");
  return [head, table(["instead", "least cost", "more"], rows, [1, 2]), terms ? el("p", { class: "quiet", style: "font-size:12.5px;margin-top:4px" }, `With ${splitWords(best[0])}: ${terms}.`) : null,
    found.changes.length ? el("p", { class: "quiet", style: "font-size:12.5px" }, `${found.changes.length} other operators would be split otherwise.`) : null];
}

function inspectBlock(node) {
  const sum = tally(node), inner = [];
  (function walk(at) { if (at.op !== undefined) inner.push(data.ops[at.op]); else at.children.forEach(walk); })(node);
  inner.sort((a, b) => b.total - a.total);
  const by = Object.entries(sum.by).sort((a, b) => b[1] - a[1]).map(([name, value]) => [name || "unsplit", value, name ? hue(name) : UNSPLIT]);
  const isRoot = node === data.tree;
  show(
    heading(isRoot ? "The whole model" : node.name || "together", `${share(sum.total / COST)} of the cost`, node.times > 1 ? `${node.times} alike, ${seconds(sum.total / node.times)} each` : null),
    isRoot ? el("p", { class: "quiet", style: "margin:2px 0 0" }, "Choose an operator in the graph, in the table below, or by searching.") : null,
    el("h3", {}, `Additive cost, ${seconds(sum.total)}`), costBar({ update: sum.update }, sum.sent, sum.total || 1),
    el("h3", {}, "Split by"), stacked(by, sum.total || 1), el("div", { class: "keys" }, by.map(([name, value, colour]) => el("span", {}, swatch(colour), `${name} `, el("b", {}, share(value / (sum.total || 1)))))),
    el("h3", {}, "Slowest operators"),
    table(["operator", "split", "share"], inner.slice(0, 12).map((op) => [el("button", { class: "link", type: "button", onclick: () => pick(op.node) }, op.label + (op.count > 1 ? ` × ${op.count}` : "")), splitWords(op.split), share(op.total / COST)]), [2]),
  );
}

function inspectEdge(from, to, moved) {
  const total = moved.reduce((sum, m) => sum + m[3], 0);
  show(
    heading("Change of layout", bytes(total)),
    el("p", { class: "quiet", style: "margin:4px 0 8px" }, from === to ? `From one ${title(from)} to the next.` : `From ${title(from)} to ${title(to)}.`),
    table(["pass", "kind", "over", "bytes"], moved.map(([phase, kind, axes, each]) => [PHASE[phase] || phase, kindWords(kind), axesWords(axes), bytes(each)]), [3]),
    el("p", { class: "quiet", style: "margin-top:10px;font-size:12.5px" }, "The tensor is left in one layout and needed in another; bytes are those of the larger side on one device. ",
      el("button", { class: "link", type: "button", onclick: () => pick(from) }, title(from)), " · ", el("button", { class: "link", type: "button", onclick: () => pick(to) }, title(to))),
  );
}
