// How a tensor lies: a cell a device, one tint a part; equal tints hold equal parts.
const MOST = 8;

function deviceGrid(side) {
  const axes = data.mesh.map((axis, k) => ({ ...axis, state: side.layout[k] || "replicated", shown: axis.size > MOST ? 4 : axis.size }));
  if (!axes.length) return el("div", { class: "grid quiet" }, "one device has all of it");
  const cutters = axes.filter((axis) => axis.state.startsWith("dim"));
  const pending = axes.some((axis) => axis.state === "partial");
  const parts = cutters.reduce((n, axis) => n * axis.size, 1);
  const [rows, ...columns] = axes.length > 1 ? axes : [{ name: "", size: 1, shown: 1, state: "replicated" }, ...axes];
  const wide = columns.reduce((n, axis) => n * axis.shown, 1);
  const size = wide > 24 ? 9 : wide > 12 ? 12 : 16, gap = 2, group = 6;
  const left = rows.name ? 46 : 4, top = 15;
  const drawing = svg("svg", {});
  let width = 0;
  for (let r = 0; r < rows.shown; r++) {
    let x = left;
    for (let c = 0; c < wide; c++) {
      const at = coordinates(r, c, rows, columns);
      if (c && columns.length > 1 && c % columns[columns.length - 1].shown === 0) x += group;
      let part = 0;
      for (const axis of cutters) part = part * axis.size + at[axis.name];
      const cell = svg("rect", { x, y: top + r * (size + gap), width: size, height: size, rx: 2.5, class: "cell" });
      cell.style.fill = tint(part, parts, cutters.length > 0);
      if (pending) { cell.style.fillOpacity = ".45"; cell.style.stroke = "var(--warm)"; cell.setAttribute("stroke-dasharray", "2 2"); }
      hinted(cell, `${axes.map((axis) => `${axis.name} ${at[axis.name]}`).join(", ")}: ${held(side, axes, at, parts)}`);
      drawing.append(cell);
      x += size + gap;
    }
    width = x;
  }
  const height = top + rows.shown * (size + gap) + 2;
  if (rows.name) drawing.append(svg("text", { x: 0, y: top + size - 3 }, `${rows.name} ↓`));
  drawing.append(svg("text", { x: left, y: 10 }, columns.map((axis) => axis.name).join(" × ") + " →"));
  const cut = axes.filter((axis) => axis.shown < axis.size).map((axis) => `${axis.shown} of ${axis.size} along ${axis.name}`);
  add(drawing, { width: width + 4, height, viewBox: `0 0 ${width + 4} ${height}` });
  return el("div", { class: "grid" }, drawing, cut.length ? el("div", { class: "quiet", style: "font-size:11px" }, `shown: ${cut.join(", ")}`) : null);
}

function coordinates(r, c, rows, columns) {
  const at = { [rows.name]: r };
  for (let k = columns.length - 1; k >= 0; k--) { at[columns[k].name] = c % columns[k].shown; c = Math.floor(c / columns[k].shown); }
  return at;
}

// A hue a part while parts are few; a ramp where they are many.
function tint(part, parts, isCut) {
  if (!isCut) return "color-mix(in srgb, var(--faint) 45%, var(--card))";
  const turn = parts <= 12 ? part / parts : (part * 0.6180339887) % 1;
  return `hsl(${Math.round(160 + 250 * turn) % 360} 42% ${parts <= 12 ? 58 : 50 + 18 * ((part * 0.37) % 1)}%)`;
}

function held(side, axes, at, parts) {
  const cuts = {};
  for (const axis of axes) if (axis.state.startsWith("dim")) (cuts[axis.state] ||= []).push(axis);
  const words = Object.entries(cuts).map(([state, found]) => {
    const ways = found.reduce((n, axis) => n * axis.size, 1);
    const index = found.reduce((n, axis) => n * axis.size + at[axis.name], 0);
    return `part ${index + 1} of ${ways} along ${state}`;
  });
  const sums = axes.filter((axis) => axis.state === "partial").map((axis) => axis.name);
  if (sums.length) words.push(`a part of the sum over ${sums.join(", ")}`);
  return words.join(", ") || "the whole tensor";
}

function layoutWords(side) {
  const found = data.mesh.map((axis, k) => [axis.name, side.layout[k]]).filter(([, state]) => state && state !== "replicated");
  return found.map(([name, state]) => `${name}: ${state}`).join(", ") || "whole on every device";
}
