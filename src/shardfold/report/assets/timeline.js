// The step in time: a lane a stream, and below it the memory against the limit.
const PAINT = { forward: "var(--compute)", backward: "color-mix(in srgb, var(--compute) 62%, var(--ink))", recompute: "var(--again)", update: "var(--update)" };

function timeline() {
  const { streams, pieces, note, figures } = data.step;
  const works = streams.map((name) => name === "compute" || name.startsWith("part "));
  const width = 1180, left = 120, lane = 34, top = 4, end = Math.max(...pieces.map((p) => p[3]), 1e-12);
  const height = top + lane * streams.length + 26, x = (t) => left + (width - left - 8) * t / end;
  const plot = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img" });
  streams.forEach((name, k) => {
    plot.append(svg("text", { x: 0, y: top + k * lane + 19 }, works[k] || name === "communication" ? name : `links: ${name}`));
    plot.append(svg("line", { x1: left, x2: width - 8, y1: top + k * lane + 28, y2: top + k * lane + 28, class: "axis" }));
  });
  for (const [stream, phase, start, stop, exposed, what, many] of pieces) {
    const isWork = works[stream];
    const bar = svg("rect", { x: x(start), y: top + stream * lane + 4, width: Math.max(0.6, x(stop) - x(start)), height: 22 });
    bar.style.fill = isWork ? PAINT[phase] || PAINT.forward : "var(--talk)";
    if (!isWork && !(exposed > 0)) bar.style.fillOpacity = ".38";
    hinted(bar, `${phase}, ${what}${many > 1 ? ` and ${many - 1} more` : ""}\n${seconds(stop - start)} from ${seconds(start)}${!isWork && exposed > 0 ? `\nexposed: ${seconds(exposed)}` : ""}`);
    plot.append(bar);
  }
  for (let k = 0; k <= 5; k++) plot.append(svg("text", { x: x(end * k / 5), y: height - 6, "text-anchor": k === 5 ? "end" : k ? "middle" : "start" }, seconds(end * k / 5)));
  const phases = [...new Set(pieces.filter((p) => works[p[0]]).map((p) => p[1]))];
  const exposed = pieces.reduce((sum, p) => sum + (works[p[0]] ? 0 : p[4]), 0);
  const keys = [...phases.map((name) => [name, PAINT[name] || PAINT.forward]), ...(works.every(Boolean) ? [] : [["communication, exposed", "var(--talk)"]])];
  const hidden = pieces.some((p) => !works[p[0]] && !(p[4] > 0));
  body("panel-timeline").append(plot,
    el("div", { class: "keys", style: "margin-top:6px" }, keys.map(([name, colour]) => el("span", {}, swatch(colour), name)), hidden ? el("span", {}, swatch("color-mix(in srgb, var(--talk) 38%, var(--card))"), "communication, hidden behind work") : null, works.every(Boolean) ? null : el("span", {}, "exposed in all ", el("b", {}, seconds(exposed)), ` ${share(exposed / end)}`),
      Object.entries(figures).map(([name, value]) => el("span", {}, `${name} `, el("b", {}, value)))),
    el("p", { class: "quiet", style: "font-size:12px;margin-top:6px" }, note));
}

const CLASSES = ["#4f7fb5", "#6fa3c8", "#8f83b5", "#d08a3e", "#6aa657", "#c4685f", "#8b929a"];
function memory() {
  const { memory: samples } = data.step, e = data.estimate;
  const host = body("panel-memory");
  if (!samples.length) {
    const meter = el("div", { class: e.fits ? "meter" : "meter over", style: "height:14px;border-radius:5px" }, el("i"));
    meter.firstChild.style.width = `${Math.min(100, 100 * e.peak / e.limit)}%`;
    host.append(meter, el("p", { class: "quiet" }, `Predicted peak ${bytes(e.peak)} of ${bytes(e.limit)} allowed (${bytes(e.device)} on the device): parameters, gradients, optimizer state and the activations kept for backward.`));
    return;
  }
  const names = [...new Set(samples.flatMap(([, held]) => Object.keys(held)))];
  const end = Math.max(...samples.map(([t]) => t), ...data.step.pieces.map((p) => p[3]));
  const peak = Math.max(...samples.map(([, held]) => Object.values(held).reduce((a, b) => a + b, 0)));
  const width = 1180, left = 120, height = 230, top = 18, base = height - 24;
  const isFar = e.limit > 2.5 * peak, most = isFar ? 1.2 * peak : Math.max(peak, e.limit) * 1.06;
  const x = (t) => left + (width - left - 8) * t / end, y = (b) => base - (base - top) * b / most;
  const plot = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img" });
  const floor = samples.map(() => 0);
  names.forEach((name, k) => {
    let path = "", back = "";
    samples.forEach(([t, held], i) => {
      const stop = i + 1 < samples.length ? samples[i + 1][0] : end, low = floor[i], high = low + (held[name] || 0);
      path += `${i ? "L" : "M"}${x(t).toFixed(1)} ${y(high).toFixed(1)}L${x(stop).toFixed(1)} ${y(high).toFixed(1)}`;
      back = `L${x(stop).toFixed(1)} ${y(low).toFixed(1)}L${x(t).toFixed(1)} ${y(low).toFixed(1)}` + back;
      floor[i] = high;
    });
    const area = svg("path", { d: `${path}${back}Z` }); area.style.fill = CLASSES[k % CLASSES.length]; area.style.fillOpacity = ".8";
    hinted(area, (event) => {
      const at = (event.offsetX * width / plot.clientWidth - left) / (width - left - 8) * end;
      const sample = samples.filter(([t]) => t <= at).pop() || samples[0];
      return [`at ${seconds(Math.max(0, at))}`, ...names.filter((n) => sample[1][n]).map((n) => `${n}: ${bytes(sample[1][n])}`)].join("\n");
    });
    plot.append(area);
  });
  const line = isFar ? top - 8 : y(e.limit);
  if (!isFar) plot.append(svg("line", { x1: left, x2: width - 8, y1: line, y2: line, class: "limit" }));
  plot.append(svg("text", { x: isFar ? left : left - 8, y: line + 4, "text-anchor": isFar ? "start" : "end", class: "limit-text" }, isFar ? `↑ the limit, ${bytes(e.limit)}, is ${(e.limit / peak).toFixed(1)} times the peak` : `limit ${bytes(e.limit)}`));
  plot.append(svg("text", { x: left - 8, y: y(peak) + (Math.abs(y(peak) - line) < 14 ? 18 : 4), "text-anchor": "end" }, `peak ${bytes(peak)}`));
  plot.append(svg("line", { x1: left, x2: width - 8, y1: base, y2: base, class: "axis" }));
  for (let k = 0; k <= 5; k++) plot.append(svg("text", { x: x(end * k / 5), y: height - 6, "text-anchor": k === 5 ? "end" : k ? "middle" : "start" }, seconds(end * k / 5)));
  host.append(plot, el("div", { class: "keys", style: "margin-top:6px" }, names.map((name, k) => el("span", {}, swatch(CLASSES[k % CLASSES.length]), name))));
}
