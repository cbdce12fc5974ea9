"use strict";
/* What the page does by itself: tell values, follow the keyboard, zoom, choose, save. It asks nothing of the network. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const find = (selector, within = document) => within.querySelector(selector);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const tip = document.body.appendChild(document.createElement("div"));
  tip.id = "tip";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");

  /* ---------- what a cell says ---------- */

  function number(value) {
    const size = Math.abs(value);
    return value !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(3) : (value === 0 ? 0 : value).toFixed(4);
  }

  function gridOf(figure) {
    const [first, second] = figure.dataset.grid.split(" ");
    if (first === "summary") {
      const summary = data.summaries[second];
      return { ...summary, rows: summary.models, columns: summary.models, a: "models", b: "models" };
    }
    const comparison = data.comparisons[first];
    return { ...comparison.tables[second], rows: comparison.layers_a, columns: comparison.layers_b, a: comparison.a, b: comparison.b, comparison };
  }

  const grids = new Map();
  function grid(figure) {
    if (!grids.has(figure)) {
      const made = gridOf(figure);
      made.reasons = new Map(made.holes.map(([i, j, reason]) => [`${i} ${j}`, reason]));
      grids.set(figure, made);
    }
    return grids.get(figure);
  }

  function told(g, i, j) {
    if (i < 0 || j < 0) return toldName(g, i, j);
    const pair = `${g.rows[i]} × ${g.columns[j]}: `;
    const value = g.values[i][j];
    if (value === null) return `${pair}no value, ${g.reasons.get(`${i} ${j}`)}`;
    const error = g.errors ? g.errors[i][j] : null;
    const spread = error === null ? "" : ` ± ${number(error)} standard error`;
    return pair + number(value) + spread + (g.best[i] === j ? `, best match of ${g.rows[i]}` : "");
  }

  function toldName(g, i, j) {
    const name = i >= 0 ? g.rows[i] : g.columns[j];
    if (!g.comparison) return name;
    const side = i >= 0 ? "a" : "b";
    const facts = [g.comparison[`shapes_${side}`][name], g.comparison[`widths_${side}`][name]];
    const said = facts[0] === undefined ? "" : `, ${facts[0]}, ${facts[1]} wide`;
    return `${name}${said}` + (i >= 0 && g.best[i] !== null ? `; best match ${g.columns[g.best[i]]}` : "");
  }

  const place = (cell) => [cell.parentElement.rowIndex - 1, cell.cellIndex - 1];

  /* ---------- the small box beside what is pointed at ---------- */

  function showTip(text, target) {
    tip.textContent = text;
    tip.hidden = false;
    const spot = target.getBoundingClientRect();
    const own = tip.getBoundingClientRect();
    const above = spot.top - own.height - 8;
    const left = Math.min(Math.max(8, spot.left + spot.width / 2 - own.width / 2), root.clientWidth - own.width - 8);
    tip.style.transform = `translate(${left}px, ${above > 8 ? above : spot.bottom + 8}px)`;
  }

  const hideTip = () => { tip.hidden = true; };
  addEventListener("scroll", hideTip, { passive: true, capture: true });

  /* ---------- heatmaps: pointer and keyboard ---------- */

  function tellCell(figure, cell, aloud) {
    const text = told(grid(figure), ...place(cell));
    showTip(text, cell);
    if (!aloud) return;
    const readout = find(".readout", figure);
    readout.textContent = text;
    readout.classList.add("told");
  }

  function focusCell(table, cell) {
    const old = find("[tabindex='0']", table);
    if (old) old.tabIndex = -1;
    cell.tabIndex = 0;
    cell.focus();
    cell.scrollIntoView({ block: "nearest", inline: "nearest" });
    tellCell(table.closest("figure"), cell, true);
  }

  const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0] };

  function goal(table, cell, event) {
    const [i, j] = [cell.parentElement.rowIndex, cell.cellIndex];
    const [rows, columns] = [table.rows.length - 1, table.rows[0].cells.length - 1];
    if (event.key === "Home") return [event.ctrlKey ? 1 : i, 1];
    if (event.key === "End") return [event.ctrlKey ? rows : i, columns];
    const step = STEPS[event.key];
    if (!step || event.ctrlKey || event.altKey || event.metaKey) return null;
    return [Math.min(Math.max(0, i + step[0]), rows), Math.min(Math.max(0, j + step[1]), columns)];
  }

  function onKey(table, event) {
    const cell = event.target.closest("td, th");
    if (!cell) return;
    if (event.key === "Escape") hideTip();
    if (event.key === "Enter" || event.key === " ") open(table, cell, event);
    const next = goal(table, cell, event);
    if (!next) return;
    event.preventDefault();
    const wanted = table.rows[next[0]].cells[next[1]];
    if (!wanted.classList.contains("corner")) focusCell(table, wanted);
  }

  function open(table, cell, event) {
    const g = grid(table.closest("figure"));
    const [i, j] = place(cell);
    const target = g.opens && i >= 0 && j >= 0 ? g.opens[i][j] : null;
    if (target === null) return;
    event.preventDefault();
    choose(target);
    find("#chooser").value = target;
    all("article.comparison")[target].scrollIntoView();
  }

  for (const figure of all("figure[data-grid]")) {
    const table = find("table", figure);
    const first = find("tbody td", table);
    if (first) first.tabIndex = 0;
    if (figure.dataset.grid.startsWith("summary")) table.classList.add("opens");
    const cellOf = (event) => event.target.closest("tbody td, th");
    table.addEventListener("pointerover", (event) => { const cell = cellOf(event); if (cell) tellCell(figure, cell, false); });
    table.addEventListener("pointerleave", hideTip);
    table.addEventListener("click", (event) => { const cell = cellOf(event); if (cell) { focusCell(table, cell); open(table, cell, event); } });
    table.addEventListener("focusin", (event) => { const cell = cellOf(event); if (cell) tellCell(figure, cell, true); });
    table.addEventListener("focusout", hideTip);
    table.addEventListener("keydown", (event) => onKey(table, event));
  }

  /* ---------- the profile: points tell their values, arrow keys go from point to point ---------- */

  function moveInChart(lines, mark, key) {
    const series = lines.map((line) => all(".mark", line));
    const row = series.findIndex((marks) => marks.includes(mark));
    const at = series[row].indexOf(mark);
    if (key === "ArrowLeft") return series[row][at - 1];
    if (key === "ArrowRight") return series[row][at + 1];
    const other = series[row + (key === "ArrowUp" ? -1 : 1)];
    return other && other[Math.min(at, other.length - 1)];
  }

  /* points that lie on one another tell their values together */
  function crowd(chart, mark) {
    const spot = mark.getBoundingClientRect();
    const near = all(".mark", chart).filter((other) => {
      const own = other.getBoundingClientRect();
      return Math.hypot(own.x - spot.x, own.y - spot.y) < 7;
    });
    return near.map((other) => other.getAttribute("aria-label")).join("\n");
  }

  for (const chart of all(".lines")) {
    const lines = all(".line", chart).filter((line) => find(".mark", line));
    const first = find(".mark", chart);
    if (first) first.setAttribute("tabindex", "0");
    chart.addEventListener("pointerover", (event) => { const mark = event.target.closest(".mark"); if (mark) showTip(crowd(chart, mark), mark); });
    chart.addEventListener("focusin", (event) => showTip(event.target.getAttribute("aria-label"), event.target));
    chart.addEventListener("pointerout", hideTip);
    chart.addEventListener("focusout", hideTip);
    chart.addEventListener("keydown", (event) => {
      const mark = event.target.closest(".mark");
      if (!mark || !event.key.startsWith("Arrow")) return;
      event.preventDefault();
      const next = moveInChart(lines, mark, event.key);
      if (!next) return;
      mark.setAttribute("tabindex", "-1");
      next.setAttribute("tabindex", "0");
      next.focus();
    });
  }

  /* ---------- controls ---------- */

  const room = Math.min(12, (innerWidth - 140) / 30);
  const fewCells = all("article figure[data-grid]").every((figure) => grid(figure).columns.length <= room);
  const values = find("#values");
  const path = find("#path");
  const zoom = find("#zoom");
  values.checked = fewCells;
  function redraw() {
    document.body.classList.toggle("values-hidden", !values.checked);
    document.body.classList.toggle("values-shown", values.checked);
    document.body.classList.toggle("path-hidden", !path.checked);
    root.style.setProperty("--zoom", zoom.value);
    zoom.setAttribute("aria-valuetext", `${Math.round(zoom.value * 100)} percent`);
  }
  for (const control of [values, path, zoom]) control.addEventListener("input", redraw);
  redraw();

  const theme = find("#theme");
  const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const nameTheme = () => { theme.textContent = isDark() ? "Light page" : "Dark page"; };
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
  nameTheme();

  let chosen = 0;
  function choose(which) {
    chosen = Number(which);
    all("article.comparison").forEach((article, k) => { article.hidden = k !== chosen; });
  }
  const chooser = find("#chooser");
  if (chooser) {
    chooser.addEventListener("input", () => choose(chooser.value));
    choose(chooser.value);
  }

  for (const choice of all(".choice")) {
    const article = choice.closest("article");
    const show = () => {
      const wanted = new Set(all("input:checked", choice).map((input) => input.value));
      for (const figure of all("figure[data-measure]", article)) figure.hidden = !wanted.has(figure.dataset.measure);
    };
    choice.addEventListener("input", show);
    show();
  }

  const folded = [];
  addEventListener("beforeprint", () => {
    for (const details of all("details:not([open])")) { folded.push(details); details.open = true; }
  });
  addEventListener("afterprint", () => { for (const details of folded.splice(0)) details.open = false; });

  /* ---------- saving ---------- */

  function save(name, blob) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  const fileName = (...parts) => parts.join("-").replace(/[^\p{L}\p{N}._=-]+/gu, "_").slice(0, 120);
  const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

  function csv(comparison) {
    const lines = ["measure,layer_a,layer_b,value,error,reason"];
    for (const table of comparison.tables) {
      const why = new Map(table.holes.map(([i, j, reason]) => [`${i} ${j}`, reason]));
      comparison.layers_a.forEach((a, i) => comparison.layers_b.forEach((b, j) => {
        const error = table.errors ? table.errors[i][j] : null;
        lines.push([table.id, a, b, table.values[i][j] ?? "", error ?? "", why.get(`${i} ${j}`) ?? ""].map((part) => quoted(String(part))).join(","));
      }));
    }
    return lines.join("\r\n") + "\r\n";
  }

  const namespace = find("svg") ? find("svg").namespaceURI : null;
  function draw(parent, kind, attributes, text) {
    const element = parent.appendChild(document.createElementNS(namespace, kind));
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function shade(g, value) {
    const { low, high } = g.scale;
    const share = high > low ? Math.min(Math.max((value - low) / (high - low), 0), 1) : 0.5;
    return Math.round((g.higher_is_closer || !(high > low) ? share : 1 - share) * (data.palette.length - 1));
  }

  /* the heatmap once more, as one drawing that stands by itself */
  function picture(g) {
    const unit = Math.min(56, Math.max(14, Math.floor(720 / g.columns.length)));
    const font = Math.min(13, unit * 0.8);
    const longest = (names) => Math.max(...names.map((name) => name.length)) * font * 0.62 + 12;
    const [left, top] = [Math.max(longest(g.rows), 40), longest(g.columns) + 44];
    const [across, down] = [unit * g.columns.length, unit * g.rows.length];
    const title = `${g.id}: ${g.a} (rows), ${g.b} (columns)`;
    const [width, height] = [Math.max(left + Math.max(across, 260), title.length * 9.2) + 32, top + down + 64];
    const svg = document.createElementNS(namespace, "svg");
    for (const [key, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width, height, "font-family": "sans-serif", "font-size": font, fill: "#000" })) svg.setAttribute(key, value);
    hatched(svg);
    draw(svg, "rect", { width, height, fill: "#fff" });
    draw(svg, "text", { x: 16, y: 22, "font-size": 16, "font-weight": 600 }, title);
    names(svg, g, { unit, left, top });
    squares(svg, g, { unit, left, top });
    if (path.checked) matches(svg, g, { unit, left, top });
    scaleBar(svg, g, left, top + down + 20);
    return svg;
  }

  function hatched(svg) {
    const pattern = draw(draw(svg, "defs", {}), "pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    draw(pattern, "rect", { width: 5, height: 5, fill: "#fff" });
    draw(pattern, "rect", { width: 1.6, height: 5, fill: "#888" });
  }

  function names(svg, g, { unit, left, top }) {
    g.rows.forEach((name, i) => draw(svg, "text", { x: left - 6, y: top + (i + 0.5) * unit, "text-anchor": "end", "dominant-baseline": "central" }, name));
    g.columns.forEach((name, j) => {
      const x = left + (j + 0.5) * unit;
      draw(svg, "text", { x, y: top - 6, transform: `rotate(-90 ${x} ${top - 6})`, "dominant-baseline": "central" }, name);
    });
  }

  function squares(svg, g, { unit, left, top }) {
    g.values.forEach((row, i) => row.forEach((value, j) => {
      const spot = { x: left + j * unit, y: top + i * unit };
      const fill = value === null ? "url(#hatch)" : data.palette[shade(g, value)];
      draw(svg, "rect", { ...spot, width: unit, height: unit, fill, stroke: "#fff", "stroke-width": 0.5 });
      if (value === null || !values.checked || unit < 24) return;
      const text = { x: spot.x + unit / 2, y: spot.y + unit / 2, "text-anchor": "middle", "dominant-baseline": "central", "font-size": unit * 0.3, fill: data.ink[shade(g, value)] };
      draw(svg, "text", text, Math.abs(value) >= 1e5 ? value.toExponential(1) : value.toFixed(2));
    }));
  }

  function matches(svg, g, { unit, left, top }) {
    if (values.checked && unit >= 24) { rings(svg, g, { unit, left, top }); return; }
    const points = g.best.flatMap((j, i) => (j === null ? [] : [[left + (j + 0.5) * unit, top + (i + 0.5) * unit]]));
    const line = { points: points.map((point) => point.join(",")).join(" "), fill: "none", "stroke-linejoin": "round" };
    draw(svg, "polyline", { ...line, stroke: "#000", "stroke-width": 4, opacity: 0.45 });
    draw(svg, "polyline", { ...line, stroke: "#fff", "stroke-width": 1.8, opacity: 0.8 });
    for (const [cx, cy] of points) draw(svg, "circle", { cx, cy, r: Math.max(2, unit * 0.08), fill: "#fff", stroke: "#000", "stroke-width": 0.8 });
  }

  function rings(svg, g, { unit, left, top }) {
    g.best.forEach((j, i) => {
      if (j === null) return;
      const square = { x: left + j * unit + 2, y: top + i * unit + 2, width: unit - 4, height: unit - 4, fill: "none" };
      draw(svg, "rect", { ...square, stroke: "#fff", "stroke-width": 3.5 });
      draw(svg, "rect", { ...square, stroke: "#000", "stroke-width": 1.2 });
    });
  }

  function scaleBar(svg, g, left, y) {
    const steps = 64;
    const last = data.palette.length - 1;
    for (let k = 0; k < steps; k += 1) draw(svg, "rect", { x: left + k * 4, y, width: 4.5, height: 12, fill: data.palette[Math.round((k / (steps - 1)) * last)] });
    const [far, close] = g.higher_is_closer ? [g.scale.low, g.scale.high] : [g.scale.high, g.scale.low];
    const short = (value) => String(Number(value.toPrecision(4)));
    draw(svg, "text", { x: left, y: y + 28 }, `${short(far)} far`);
    draw(svg, "text", { x: left + steps * 4, y: y + 28, "text-anchor": "end" }, `close ${short(close)}`);
  }

  function savePicture(figure, kind) {
    const g = grid(figure);
    const svg = picture(g);
    const blob = new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" });
    const name = `${fileName(g.a, g.b, g.id)}.${kind}`;
    if (kind === "svg") { save(name, blob); return; }
    const image = new Image();
    const [width, height] = [Number(svg.getAttribute("width")), Number(svg.getAttribute("height"))];
    image.onload = () => {
      const finer = Math.min(3, 8000 / Math.max(width, height));
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [width * finer, height * finer];
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((made) => save(name, made), "image/png");
      URL.revokeObjectURL(image.src);
    };
    image.src = URL.createObjectURL(blob);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-save]");
    if (!button) return;
    const kind = button.dataset.save;
    if (kind === "svg" || kind === "png") { savePicture(button.closest("figure"), kind); return; }
    const comparison = data.comparisons[chosen];
    const text = kind === "csv" ? csv(comparison) : JSON.stringify(comparison, null, 1);
    const type = kind === "csv" ? "text/csv;charset=utf-8" : "application/json";
    save(`${fileName(comparison.a, comparison.b)}.${kind}`, new Blob([text], { type }));
  });
})();
