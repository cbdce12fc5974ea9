/* Heatmaps: what a cell says, and the ways of pointer and keyboard. */

/* the numbers of a block or, of a run, of one of its steps; holes by their cells */
function gridOf(block, step = block.frames ? at : null) {
  const now = step === null ? block : { ...block, ...block.frames[step] };
  const reasons = new Map(Object.entries(now.missing ?? {}).flatMap(([reason, cells]) => cells.map(([i, j]) => [`${i} ${j}`, reason])));
  const best = now.best ?? [];
  const [a, b] = block.sides;
  return { ...now, a, b, reasons, best, values: numbers(now.values), errors: numbers(now.errors) };
}

/* columns without any value are not shown; `places` are those of the shown ones in the whole table */
function trimmed(g, shown) {
  const places = shown === undefined ? g.columns.map((_, j) => j) : shown.split(" ").map(Number);
  if (shown === undefined) return { ...g, places };
  const cut = (line) => line && places.map((j) => line[j]);
  const best = g.best.map((j) => (j === null ? null : places.indexOf(j)));
  return { ...g, places, best, columns: cut(g.columns), ids: cut(g.ids), values: g.values.map(cut), errors: g.errors?.map(cut) ?? null };
}

const grids = new Map();
function grid(figure) {
  if (!grids.has(figure)) {
    const block = blocks.get(figure.dataset.grid);
    grids.set(figure, trimmed(block.frames ? frame(block) : gridOf(block), figure.dataset.columns));
  }
  return grids.get(figure);
}

function told(g, i, j) {
  if (i < 0 || j < 0) return toldName(g, i, j);
  const [rows, columns] = [g.labels ?? g.rows, g.labels ?? g.columns];
  const pair = `${g.ids ? `${rows[i]}, ${g.ids[j]}` : `${rows[i]} × ${columns[j]}`}${g.when ?? ""}: `;
  const value = g.values[i][j];
  if (value === null) return `${pair}no value, ${g.reasons.get(`${i} ${g.places[j]}`) ?? g.unasked}`;
  const spread = toldError(g, i, j);
  const behind = g.counts ? `, the mean over ${g.counts[i][j]} ${g.counts[i][j] === 1 ? "pair" : "pairs"} of layers` : "";
  return pair + number(value) + behind + spread + (g.best[i] === j ? `, best match of ${g.rows[i]}${toldMargin(g, i)}` : "");
}

/* a value's standard error and interval, or why it has none */
function toldError(g, i, j) {
  const error = g.errors ? g.errors[i][j] : null;
  if (error === null) {
    const why = withoutError(g, i, g.places[j]);
    return why ? `, no standard error: ${why}` : "";
  }
  const [low, high] = interval(g, g.places[j], g.values[i][j], error);
  return ` ± ${number(error)} standard error` + (low === null ? "" : `, 95 % interval ${number(low)} to ${number(high)}`);
}

function toldMargin(g, i) {
  const margin = g.margins?.[i];
  return margin ? `, ahead of ${margin[0]} by ${number(margin[1])} ± ${number(margin[2])}` : "";
}

function toldName(g, i, j) {
  const name = i >= 0 ? g.rows[i] : (g.ids ?? g.columns)[j];
  const about = g.about?.[i >= 0 ? 0 : 1]?.[name];
  const best = i >= 0 ? (g.best[i] ?? null) : null;
  return `${name}${about ? `, ${about}` : ""}${best === null ? "" : `; best match ${g.columns[best]}`}`;
}

const place = (cell) => [cell.parentElement.rowIndex - 1, cell.cellIndex - 1];

/* the row and the column that are pointed at, as two frames over the table, and their names in bold */
function mark(figure, cell) {
  const sheet = find(".sheet", figure);
  for (const old of all(".band", sheet)) old.remove();
  for (const old of all("th.on", sheet)) old.classList.remove("on");
  const [i, j] = cell ? place(cell) : [-1, -1];
  if (i < 0 && j < 0) return;
  const table = find("table", sheet);
  const body = table.tBodies[0];
  const frame = (left, top, width, height) => Object.assign(sheet.appendChild(document.createElement("span")), { className: "band" }).style.cssText = `left:${left}px;top:${top}px;width:${width}px;height:${height}px`;
  const row = i < 0 ? null : body.rows[i];
  const column = j < 0 ? null : table.tHead.rows[0].cells[j + 1];
  if (row) { row.cells[0].classList.add("on"); frame(row.cells[0].offsetLeft, row.offsetTop, table.offsetWidth, row.offsetHeight); }
  if (column) { column.classList.add("on"); frame(body.rows[0].cells[j + 1].offsetLeft, 0, column.offsetWidth, table.offsetHeight); }
}

function tellCell(figure, cell, aloud) {
  mark(figure, cell);
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
  const target = i >= 0 && j >= 0 ? (g.opens?.[i][j] ?? null) : null;
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
  if (blocks.get(figure.dataset.grid).opens) table.classList.add("opens");
  const cellOf = (event) => event.target.closest("tbody td, th");
  table.addEventListener("pointerover", (event) => { const cell = cellOf(event); if (cell) tellCell(figure, cell, false); });
  table.addEventListener("pointerleave", () => { hideTip(); mark(figure, null); });
  table.addEventListener("click", (event) => { const cell = cellOf(event); if (cell) { focusCell(table, cell); open(table, cell, event); } });
  table.addEventListener("focusin", (event) => { const cell = cellOf(event); if (cell) tellCell(figure, cell, true); });
  table.addEventListener("focusout", () => { hideTip(); mark(figure, null); });
  table.addEventListener("keydown", (event) => onKey(table, event));
}

/* The shades, from far to close, with the colours of text on them, stand in the style sheet. */

const [palette, inks] = [[], []];
for (const rule of [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules])) {
  const kind = /^\.c(\d+)$/.exec(rule.selectorText ?? "");
  if (kind) [palette[kind[1]], inks[kind[1]]] = [rule.style.backgroundColor, rule.style.color];
}

/* The heatmap once more, as one drawing that stands by itself. */

const namespace = find("svg") ? find("svg").namespaceURI : null;
function draw(parent, kind, attributes, text) {
  const element = parent.appendChild(document.createElementNS(namespace, kind));
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/* colours span the whole scale of a measure or, if that is chosen, the values of its name on this page */
const reached = new Map();
let fitted = false;
function scaleOf(g) {
  if (!fitted) return g.scale;
  const key = g.fitted_with;
  if (!reached.has(key)) {
    const alike = [...blocks.values()].filter((block) => block.fitted_with === key);
    const known = alike.flatMap((block) => (block.frames ?? [block]).flatMap((own) => numbers(own.values).flat())).filter((value) => value !== null);
    const [low, high] = known.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
    reached.set(key, low < high ? { low, high } : {});
  }
  return { ...g.scale, ...reached.get(key) };
}

function farAndClose(g) {
  const { low, high, words } = scaleOf(g);
  const short = (value) => String(Number(value.toPrecision(3)));
  const [far, close] = g.higher_is_closer ? [low, high] : [high, low];
  return [`${short(far)} ${words[0]}`, `${words[1]} ${short(close)}`];
}

function recolour(figure) {
  const g = grid(figure);
  const rows = find("tbody", figure).rows;
  g.values.forEach((line, i) => line.forEach((value, j) => {
    const cell = rows[i].cells[j + 1];
    if (value !== null) cell.className = cell.className.replace(/^c\d+/, `c${shade(g, value)}`);
  }));
  const legend = find(".legend", figure);
  const ends = [legend.children[0], legend.children[2]];
  ends.forEach((end, k) => { end.dataset.whole ??= end.textContent; end.textContent = fitted ? farAndClose(g)[k] : end.dataset.whole; });
  const bar = find(".bar", legend);
  bar.setAttribute("aria-label", `colours from ${ends[0].textContent} to ${ends[1].textContent}`);
  legend.classList.toggle("fitted", fitted);
}

function shade(g, value) {
  const { low, high } = scaleOf(g);
  const share = high > low ? Math.min(Math.max((value - low) / (high - low), 0), 1) : 0.5;
  return Math.round((g.higher_is_closer || !(high > low) ? share : 1 - share) * (palette.length - 1));
}

/* names as they stand beside the heatmap: cut in their middle where they are long */
const shortNames = (figure) => [all("tbody th", figure), all("thead th", figure)].map((cells) => cells.map((cell) => cell.textContent));

function picture(whole, figure) {
  const numbered = values.checked || figure.classList.contains("numbered");
  const g = { ...whole, scale: scaleOf(whole), short: shortNames(figure), numbered };
  const unit = Math.min(56, Math.max(14, Math.floor(720 / Math.max(g.columns.length, g.rows.length))));
  const font = Math.min(13, unit * 0.8);
  const longest = (names) => Math.max(...names.map((name) => name.length)) * font * 0.62 + 12;
  const [rows, columns] = g.short;
  const [left, top] = [Math.max(longest(rows), 40), longest(columns) + 44];
  const [across, down] = [unit * g.columns.length, unit * g.rows.length];
  const sides = g.a === g.b ? `${g.a} by ${g.b}` : `${g.a} (rows), ${g.b} (columns)`;
  const title = `${g.id}: ${g.ids ? `${g.a} and ${g.b}` : sides}`;
  const [width, height] = [Math.max(left + Math.max(across, 260), title.length * 9.2) + 32, top + down + 64];
  const svg = document.createElementNS(namespace, "svg");
  for (const [key, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width, height, "font-family": "sans-serif", "font-size": font, fill: "#000" })) svg.setAttribute(key, value);
  hatched(svg);
  draw(svg, "rect", { width, height, fill: "#fff" });
  draw(svg, "text", { x: 16, y: 22, "font-size": 16, "font-weight": 600 }, title);
  names(svg, { rows, columns }, { unit, left, top });
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

function names(svg, { rows, columns }, { unit, left, top }) {
  rows.forEach((name, i) => draw(svg, "text", { x: left - 6, y: top + (i + 0.5) * unit, "text-anchor": "end", "dominant-baseline": "central" }, name));
  columns.forEach((name, j) => {
    const x = left + (j + 0.5) * unit;
    draw(svg, "text", { x, y: top - 6, transform: `rotate(-90 ${x} ${top - 6})`, "dominant-baseline": "central" }, name);
  });
}

function squares(svg, g, { unit, left, top }) {
  g.values.forEach((row, i) => row.forEach((value, j) => {
    const spot = { x: left + j * unit, y: top + i * unit };
    const fill = value === null ? "url(#hatch)" : palette[shade(g, value)];
    draw(svg, "rect", { ...spot, width: unit, height: unit, fill, stroke: "#fff", "stroke-width": 0.5 });
    if (value === null || !g.numbered || unit < 24) return;
    const text = { x: spot.x + unit / 2, y: spot.y + unit / 2, "text-anchor": "middle", "dominant-baseline": "central", "font-size": unit * 0.3, fill: inks[shade(g, value)] };
    const error = g.errors && unit >= 40 ? g.errors[i][j] : null;
    draw(svg, "text", error === null ? text : { ...text, y: text.y - unit * 0.14 }, written(value));
    if (error !== null) draw(svg, "text", { ...text, y: text.y + unit * 0.2, "font-size": unit * 0.24 }, `±${Number(error.toPrecision(1))}`);
  }));
}

function matches(svg, g, { unit, left, top }) {
  if (g.numbered && unit >= 24) { rings(svg, g, { unit, left, top }); return; }
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
  const last = palette.length - 1;
  for (let k = 0; k < steps; k += 1) draw(svg, "rect", { x: left + k * 4, y, width: 4.5, height: 12, fill: palette[Math.round((k / (steps - 1)) * last)] });
  const [far, close] = farAndClose(g);
  draw(svg, "text", { x: left, y: y + 28 }, far);
  draw(svg, "text", { x: left + steps * 4, y: y + 28, "text-anchor": "end" }, close);
}
