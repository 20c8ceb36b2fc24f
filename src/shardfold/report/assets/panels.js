// Figures, alternatives, where the time goes, the mesh, the table of operators, the provenance.
const body = (id) => $(id).querySelector(".body");

function figures() {
  const e = data.estimate, devices = data.mesh.reduce((n, axis) => n * axis.size, 1);
  const fitting = data.rivals.slice(1).filter((r) => r.bytes <= e.limit).sort((a, b) => a.seconds - b.seconds);
  const rival = fitting.find((r) => r.name === "data-parallel") || fitting[0], best = fitting[0];
  const times = (r) => `${(r.seconds / e.step).toFixed(2)}×`;
  const meter = el("div", { class: e.fits ? "meter" : "meter over" }, el("i"));
  meter.firstChild.style.width = `${Math.min(100, 100 * e.peak / e.limit)}%`;
  const tile = (name, value, note, extra, bad) => $("figures").append(el("div", { class: bad ? "figure bad" : "figure" }, el("div", { class: "name" }, name), el("div", { class: "value" }, value), extra, el("div", { class: "note" }, note)));
  tile("Step", seconds(e.step), [e.is_simulated ? "simulated with overlap" : "the additive cost: no overlap is known", e.rate].filter(Boolean).join(", "));
  tile("Memory a device", bytes(e.peak), e.fits ? `of ${bytes(e.limit)} allowed` : `more than the ${bytes(e.limit)} allowed`, meter, !e.fits);
  if (rival) tile(`Against ${rival.name}`, times(rival), rival === best ? "the fastest baseline that fits" : `the fastest baseline that fits, ${best.name}: ${times(best)}`);
  else tile("Against baselines", "—", "none of them fits in memory");
  tile("Devices", devices.toLocaleString("en"), `mesh ${data.mesh.map((axis) => `${axis.name} ${axis.size}`).join(" × ") || "of one"}`);
  tile("Parameters", count(e.parameters), `${e.operators.toLocaleString("en")} operators`);
}

// The words of the terminal: what is said of the plan, and its table.
function says() {
  $("says").append(...data.view.sentences.map(([text, tone]) => el("li", { class: tone }, text)));
}
function planTable() {
  const { heads, rows, legend, contenders, limit } = data.view;
  const cell = (text) => text.split("\n").flatMap((line, k) => (k ? [el("br"), line] : [line]));
  body("panel-plan").append(
    table(heads, rows.map(([depth, isHead, ...cells]) => cells.map((text, k) => (k ? cell(text) : el(isHead ? "b" : "span", { style: `padding-left:${depth}em` }, text)))), [3]),
    el("p", { class: "quiet", style: "font-size:12px;margin:6px 0 14px" }, legend),
    table(["", "step", "", "memory", limit], contenders, [1, 2, 3]));
}

function rivals() {
  const e = data.estimate, slowest = Math.max(...data.rivals.map((r) => r.seconds));
  const rows = [...data.rivals].sort((a, b) => a.seconds - b.seconds).map((r) => {
    const bar = el("i"), fits = r.bytes <= e.limit, mine = r.name === "this plan";
    bar.style.width = `${Math.max(0.6, 100 * r.seconds / slowest)}%`;
    bar.style.background = mine ? "var(--accent)" : fits ? "var(--faint)" : "repeating-linear-gradient(45deg, var(--line) 0 4px, transparent 4px 8px)";
    return [el("span", { class: mine ? "it" : null }, r.name), el("div", { class: "track" }, bar),
      el("span", { class: mine ? "it num" : "num" }, `${seconds(r.seconds)}${mine ? "" : `  ${(r.seconds / e.step).toFixed(2)}×`}`),
      el("span", { class: fits ? "quiet num" : "bad num" }, `${bytes(r.bytes)}${fits ? "" : r.recomputes ? " ✗ recomputing" : " ✗"}`)];
  });
  body("panel-rivals").append(el("div", { class: "bars" }, rows),
    el("p", { class: "quiet", style: "font-size:12px;margin-top:10px" }, `Step, and memory a device against ${bytes(e.limit)} (✗ does not fit, even with recomputation where it says so), ${e.is_simulated ? "simulated with overlap" : "priced"} by the same cost model.`));
}

// What is sent in a step, by pass, kind and axes: the slowest first.
function traffic() {
  const found = {};
  for (const op of data.ops) for (const [phase, kind, axes, each, times, time] of op.collectives) {
    const sum = (found[`${phase} ${kind} ${axes}`] ||= { phase, kind, axes, size: 0, time: 0, times: 0 });
    sum.size += each * times * op.count; sum.time += time * op.count; sum.times += times * op.count;
  }
  const rows = Object.values(found).sort((a, b) => b.time - a.time).slice(0, 5).map((t) => [PHASE[t.phase] || t.phase, `${kindWords(t.kind)} × ${t.times.toLocaleString("en")}`, axesWords(t.axes), bytes(t.size), seconds(t.time)]);
  body("panel-time").append(el("h3", {}, "Slowest collectives"), rows.length ? table(["pass", "kind", "over", "bytes", "time"], rows, [3, 4]) : el("p", { class: "quiet" }, "Nothing is sent."));
}

function whereTimeGoes() {
  const e = data.estimate;
  body("panel-time").append(el("p", { class: "quiet", style: "font-size:12px;margin-bottom:6px" }, `Of the additive cost, ${seconds(e.additive)}, in which nothing overlaps: ${e.proof}.`));
  const parts = [["compute", e.compute, "var(--compute)"], ["communication", e.communication, "var(--talk)"], ["update", e.update, "var(--update)"]];
  const kinds = {};
  for (const op of data.ops) { const k = (kinds[shortKind(op.kind)] ||= [0, 0]); k[0] += op.total; k[1] += op.sent; }
  const top = Object.entries(kinds).sort((a, b) => b[1][0] - a[1][0]);
  const shown = top.slice(0, 6), rest = top.slice(6).reduce((sum, [, [t, s]]) => [sum[0] + t, sum[1] + s], [0, 0]);
  if (rest[0] > 0) shown.push([`${top.length - 6} others`, rest]);
  const most = Math.max(...shown.map(([, [t]]) => t)) || 1;
  const rows = shown.map(([name, [total, sent]]) => {
    const work = el("i"), talk = el("i");
    work.style.width = `${100 * (total - sent) / most}%`; work.style.background = "var(--compute)";
    talk.style.width = `${100 * sent / most}%`; talk.style.background = "var(--talk)";
    return [el("span", {}, name), hinted(el("div", { class: "track" }, work, talk), `work ${seconds(total - sent)}, communication ${seconds(sent)}`), el("span", { class: "num" }, seconds(total)), el("span", { class: "quiet num" }, share(total / COST))];
  });
  body("panel-time").append(stacked(parts, e.compute + e.communication + e.update || 1),
    el("div", { class: "keys", style: "margin-bottom:12px" }, parts.map(([name, value, colour]) => el("span", {}, swatch(colour), `${name} `, el("b", {}, seconds(value)), ` ${share(value / COST)}`))),
    el("div", { class: "bars" }, rows));
}

function meshPanel() {
  const host = el("div", { class: "mesh" }), left = el("div"), right = el("div");
  const levels = data.levels.filter((level) => level.size > 1);
  let into = left;
  levels.forEach((level, depth) => {
    const axes = data.mesh.filter((axis) => axis.level === level.name);
    const cells = el("div", { class: "cells" });
    const last = depth === levels.length - 1;
    const box = el("div", { class: "level" },
      el("div", { class: "head-line" }, el("b", {}, `${level.size} ${level.name}${level.size > 1 ? "s" : ""}`), el("span", { class: "quiet" }, `${(level.bandwidth / 1e9).toPrecision(3)} GB/s a device · ${(level.latency_seconds * 1e6).toPrecision(2)} us`)),
      el("div", { style: "margin-top:4px" }, axes.length ? axes.map((axis) => el("span", { class: "chip" }, `axis ${axis.name} = ${axis.size}`)) : el("span", { class: "quiet" }, "no axis")), cells);
    into.append(box);
    const open = el("div", { class: "cell open" });
    if (!last) cells.append(open);
    const shown = Math.min(level.size, last ? 8 : 6);
    for (let k = last ? 0 : 1; k < shown; k++) cells.append(el("div", { class: "cell" }, `${level.name} ${k}`));
    if (level.size > shown) cells.append(el("span", { class: "quiet" }, `… ${level.size - 1}`));
    if (!last) { open.append(el("span", { class: "quiet", style: "font-size:11px" }, `${level.name} 0`)); into = open; }
  });
  if (!levels.length) left.append(el("p", { class: "quiet" }, "One device: nothing to join."));
  const device = data.device;
  if (device && device.name) left.append(el("p", { class: "quiet", style: "margin-top:10px;font-size:12.5px" }, `Device: ${device.name}, ${bytes(device.memory_bytes || 0)}, ${((device.memory_bandwidth || 0) / 1e9).toFixed(0)} GB/s memory.`));
  right.append(el("h3", { style: "margin-top:8px" }, "What each axis does"), axisUse());
  if (data.meshes.length > 1) {
    const mine = data.mesh.map((axis) => axis.size).join("x");
    const behind = (m) => (m[1] === null ? Infinity : m[1]), best = data.estimate.step;
    const tried = [...data.meshes].sort((a, b) => behind(a) - behind(b)).slice(0, 10);
    right.append(el("h3", {}, "Meshes tried"), table(["mesh", "best step", "against this"], tried.map(([name, step]) => [name === mine ? el("b", {}, name) : name, step === null ? "" : seconds(step), name === mine ? "chosen" : step === null || step < best * (1 - 5e-4) ? "does not fit" : `+${((step / best - 1) * 100).toFixed(1)}%`]), [1, 2]));
  }
  host.append(left, right); body("panel-mesh").append(host);
}

function axisUse() {
  const rows = data.mesh.map((axis, k) => {
    const by = {}; let sent = 0, size = 0;
    for (const op of data.ops) {
      const face = op.face === undefined ? null : data.faces[op.face];
      const found = face && face.factors.find((f) => f[0] === op.config[k]);
      const word = found ? found[1] : ({ "-": "", "+": "" })[op.config[k]] ?? op.config[k];
      by[word] = (by[word] || 0) + op.total;
      for (const [, , axes, each, times, time] of op.collectives) if (axes.includes(axis.name)) { sent += time * op.count; size += each * times * op.count; }
    }
    const parts = Object.entries(by).sort((a, b) => b[1] - a[1]).map(([name, value]) => [name || "nothing", value, name ? hue(name) : UNSPLIT]);
    const whole = parts.reduce((sum, p) => sum + p[1], 0) || 1;
    const bar = stacked(parts, whole); bar.style.height = "14px"; bar.style.margin = "3px 0";
    return [el("b", {}, axis.name), String(axis.size), el("div", { style: "min-width:120px" }, bar, el("div", { class: "quiet", style: "font-size:11.5px" }, parts.slice(0, 3).map(([name, value]) => `${name} ${share(value / whole)}`).join(", "))), bytes(size), seconds(sent)];
  });
  if (!rows.length) return el("p", { class: "quiet" }, "There is no axis.");
  return [table(["axis", "size", "splits, by time", "bytes a step", "time"], rows, [1, 3, 4]), el("p", { class: "quiet", style: "font-size:11.5px;margin-top:4px" }, "A collective over several axes counts for each of them.")].map((x) => x).reduce((div, x) => (div.append(x), div), el("div"));
}

const rowsOf = new Map();
function operatorTable() {
  const heads = [["operator", (op) => op.path], ["kind", (op) => shortKind(op.kind)], ["count", (op) => op.count, 1], ["split", (op) => splitWords(op.split)], ["each", (op) => op.seconds, 1], ["sent", (op) => op.sent / (op.total || 1), 1], ["share", (op) => op.total, 1]];
  const most = Math.max(...data.ops.map((op) => op.total)) || 1;
  const rows = el("tbody");
  const row = (op) => {
    const bar = el("span", { class: "mini" }, el("i")); bar.firstChild.style.width = `${100 * op.total / most}%`; bar.firstChild.style.background = "var(--talk)";
    const line = el("tr", { onclick: () => { pick(op.node); $("model").scrollIntoView(); } },
      el("td", { class: "path" }, op.path), el("td", {}, shortKind(op.kind)), el("td", { class: "num" }, op.count > 1 ? `× ${op.count}` : ""), el("td", {}, splitWords(op.split)), el("td", { class: "num" }, seconds(op.seconds)), el("td", { class: "num" }, op.sent ? share(op.sent / op.total) : "—"), el("td", { class: "num" }, bar, share(op.total / COST)));
    rowsOf.set(op, line); return line;
  };
  const head = el("tr");
  let by = 6, up = false, all = false;
  const fill = () => {
    const value = heads[by][1];
    const sorted = [...data.ops].sort((a, b) => { const x = value(a), y = value(b); return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1); });
    rows.replaceChildren(...sorted.slice(0, all ? undefined : 40).map((op) => rowsOf.get(op) || row(op)));
    [...head.children].forEach((th, k) => { if (k === by) th.setAttribute("aria-sort", up ? "ascending" : "descending"); else th.removeAttribute("aria-sort"); });
    more.hidden = all || data.ops.length <= 40;
  };
  heads.forEach(([name, , number], k) => head.append(el("th", { class: number ? "num" : null, onclick: () => { up = by === k ? !up : k < 2 || k === 3; by = k; fill(); } }, name)));
  const more = el("button", { type: "button", style: "margin-top:10px", onclick: () => { all = true; fill(); } }, `Show all ${data.ops.length}`);
  body("panel-operators").append(el("table", { class: "sortable" }, el("thead", {}, head), rows), more);
  addEventListener("beforeprint", () => { all = all || data.ops.length <= 200; fill(); });
  fill();
}
function markRow(node) {
  for (const line of rowsOf.values()) line.classList.remove("on");
  if (node.op !== undefined && rowsOf.has(data.ops[node.op])) rowsOf.get(data.ops[node.op]).classList.add("on");
}

function made() {
  body("panel-made").append(table(["", ""], data.made.map(([name, value]) => [name, el("code", { style: "overflow-wrap:anywhere" }, value)])));
}
