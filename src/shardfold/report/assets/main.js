// Everything is drawn once; then the search box, the theme and the keys.
function search() {
  const box = $("search"), list = $("hits");
  let at = -1, found = [];
  const texts = data.ops.map((op) => `${op.name} ${op.module} ${op.kind} ${splitWords(op.split)} ${op.first || ""} ${op.last || ""}`.toLowerCase());
  const run = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    found = words.length ? data.ops.filter((op, k) => words.every((word) => texts[k].includes(word))).sort((a, b) => b.total - a.total) : [];
    graph.hits = new Set(found.slice(0, 400).map((op) => op.node));
    at = found.length ? 0 : -1;
    list.hidden = !words.length;
    list.replaceChildren(...(found.length ? found.slice(0, 30).map((op, k) => el("li", { role: "option", "aria-selected": String(k === at), onclick: () => go(k) },
      el("span", { class: "path" }, op.path), el("span", { class: "quiet num" }, share(op.total / COST)),
      el("span", { class: "quiet" }, `${shortKind(op.kind)} · ${splitWords(op.split)}${op.count > 1 ? ` · × ${op.count}` : ""}`))) : [el("li", { class: "none" }, "Nothing matches.")]));
    draw();
  };
  const go = (k) => { list.hidden = true; pick(found[k].node); $("model").scrollIntoView(); };
  box.addEventListener("input", run);
  box.addEventListener("focus", () => { if (box.value) list.hidden = false; });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { box.value = ""; run(); box.blur(); }
    if (event.key === "Enter" && at >= 0) go(at);
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      at = Math.max(0, Math.min(Math.min(found.length, 30) - 1, at + (event.key === "ArrowDown" ? 1 : -1)));
      [...list.children].forEach((item, k) => item.setAttribute("aria-selected", String(k === at)));
      list.children[at]?.scrollIntoView({ block: "nearest" });
    }
  });
  addEventListener("click", (event) => { if (!event.target.closest(".search")) list.hidden = true; });
  addEventListener("keydown", (event) => { if (event.key === "/" && document.activeElement !== box) { event.preventDefault(); box.focus(); box.select(); } });
}

function theme() {
  const root = document.documentElement;
  let kept = null;
  try { kept = localStorage.getItem("shardfold-theme"); } catch { /* files may have no storage */ }
  root.dataset.theme = kept || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  $("theme").addEventListener("click", () => {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("shardfold-theme", root.dataset.theme); } catch { /* as above */ }
  });
}

theme();
$("title").textContent = data.title;
$("heading").textContent = data.view.facts;
figures(); says(); rivals(); planTable(); whereTimeGoes(); traffic(); startGraph(); timeline(); memory(); meshPanel(); operatorTable(); made(); search();
inspect(data.tree);
document.documentElement.dataset.ready = "yes";
