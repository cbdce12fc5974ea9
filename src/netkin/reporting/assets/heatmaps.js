/* Heatmaps: what a cell says, and the ways of pointer and keyboard. */

function gridOf(figure) {
  const [kind, first, second] = figure.dataset.grid.split(" ");
  if (kind === "series") return frame(Number(first));
  if (kind === "summary") {
    const summary = data.summaries[first];
    return { ...summary, rows: summary.models, columns: summary.models, a: summary.sides, b: summary.sides };
  }
  const comparison = data.comparisons[first];
  const [a, b] = comparison.shown;
  if (kind === "list") return { ...listOf(comparison, comparison.lists[second]), a, b };
  return { ...comparison.tables[second], rows: comparison.layers_a, columns: comparison.layers_b, a, b, comparison };
}

/* a list has a row for each pair of layers, and a column for each table of one name */
function listOf(comparison, list) {
  const tables = list.of.map((k) => comparison.tables[k]);
  const picked = (from) => comparison.pairs.map(([i, j]) => tables.map((table) => from(table, i, j)));
  const why = (table, i, j) => table.holes.find(([u, v]) => u === i && v === j)?.[2];
  const holes = picked(why).flatMap((row, i) => row.flatMap((reason, j) => (reason === undefined ? [] : [[i, j, reason]])));
  const values = picked((table, i, j) => table.values[i][j]);
  const errors = picked((table, i, j) => (table.errors ? table.errors[i][j] : null));
  const facts = picked((table, i, j) => [table, i, j]);
  return { ...tables[0], ...list, ids: tables.map((table) => table.id), values, errors, holes, facts, best: values.map(() => null) };
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
  const [rows, columns] = [g.labels ?? g.rows, g.labels ?? g.columns];
  const pair = `${g.ids ? `${rows[i]}, ${g.ids[j]}` : `${rows[i]} × ${columns[j]}`}${g.when ?? ""}: `;
  const value = g.values[i][j];
  if (value === null) return `${pair}no value, ${g.reasons.get(`${i} ${j}`) ?? g.unasked ?? g.comparison.unasked}`;
  const spread = toldError(...(g.facts ? g.facts[i][j] : [g, i, j]));
  return pair + number(value) + spread + (g.best[i] === j ? `, best match of ${g.rows[i]}${toldMargin(g, i)}` : "");
}

/* a value's standard error and interval, or why it has none */
function toldError(table, i, j) {
  const error = table.errors ? table.errors[i][j] : null;
  if (error === null) {
    const why = withoutError(table, i, j);
    return why ? `, no standard error: ${why}` : "";
  }
  const [low, high] = interval(table, table.values[i][j], error);
  return ` ± ${number(error)} standard error` + (low === null ? "" : `, 95 % interval ${number(low)} to ${number(high)}`);
}

function toldMargin(g, i) {
  const margin = g.margins?.[i];
  return margin ? `, ahead of ${margin[0]} by ${number(margin[1])} ± ${number(margin[2])}` : "";
}

function toldName(g, i, j) {
  const name = i >= 0 ? g.rows[i] : (g.ids ?? g.columns)[j];
  if (!g.comparison) return name;
  const side = i >= 0 ? "a" : "b";
  const [shape, width] = [g.comparison[`shapes_${side}`][name], g.comparison[`widths_${side}`][name]];
  const said = (shape === undefined ? "" : `, ${shape}`) + (width === undefined ? "" : `, ${width} wide`);
  return `${name}${said}` + (i >= 0 && g.best[i] !== null ? `; best match ${g.columns[g.best[i]]}` : "");
}

const place = (cell) => [cell.parentElement.rowIndex - 1, cell.cellIndex - 1];

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
