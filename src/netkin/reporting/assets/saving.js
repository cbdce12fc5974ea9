/* Saving: tables as CSV and JSON, pictures as SVG and PNG. */

function save(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/* "cka of seed0 and seed1" or "cka models by models": the last part of a path, without characters that files can't have */
function fileName(what, ...parts) {
  const plain = (part) => String(part).replace(/\.(netkin|pt|pth|safetensors|json)$/i, "").split(/[\\/]/).filter(Boolean).slice(-2).join(" ");
  const [a, b] = parts.map(plain);
  const words = !parts.length ? plain(what) : a === b ? `${what} ${a} by ${b}` : `${what} of ${parts.map(plain).join(" and ")}`;
  return words.replace(/[^\p{L}\p{N}._=() -]+/gu, " ").replace(/ +/g, " ").trim().slice(0, 100);
}
const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

/* a text that begins like a formula would be computed by a spreadsheet; an apostrophe keeps it a text */
const harmless = (part) => (typeof part === "string" && /^[=@+\-\t\r]/.test(part) ? `'${part}` : String(part ?? ""));

const csv = (head, rows) => [head, ...rows].map((row) => row.map((part) => quoted(harmless(part))).join(",")).join("\r\n") + "\r\n";

function* cellsOf(table, rows, columns) {
  const why = new Map(table.holes.map(([i, j, reason]) => [`${i} ${j}`, reason]));
  for (const [i, a] of rows.entries()) {
    for (const [j, b] of columns.entries()) {
      const value = table.values[i][j];
      const error = table.errors ? table.errors[i][j] : null;
      const reason = why.get(`${i} ${j}`) ?? (value !== null && error === null ? withoutError(table, i, j) : undefined);
      yield [a, b, value, error, ...interval(table, value, error), reason];
    }
  }
}

/* a pair that was not asked for has no line */
function comparisonCsv(comparison) {
  const asked = (table) => [...cellsOf(table, comparison.layers_a, comparison.layers_b)].filter((cell) => cell[2] !== null || cell.at(-1) !== undefined);
  const rows = comparison.tables.flatMap((table) => asked(table).map((cell) => [table.id, ...cell]));
  return csv(["measure", "layer_a", "layer_b", "value", "error", "low", "high", "reason"], rows);
}

/* the document that `--json` prints too, and that `nk.load` opens; replicates are not in the page */
function documentOf({ shown, unasked, pairs, lists, tables, ...facts }) {
  const told = tables.map((table) => [table.id, tableDocument(table, facts.layers_a, facts.layers_b, unasked)]);
  return { kind: "comparison", format: 2, ...facts, tables: Object.fromEntries(told) };
}

function tableDocument(table, layers_a, layers_b, unasked) {
  const { values, errors, holes, without_error, margins, best, scale, quantile, ...facts } = table;
  const cells = [...cellsOf(table, layers_a, layers_b)];
  const ends = (at) => (quantile ? layers_a.map((_, i) => layers_b.map((_, j) => cells[i * layers_b.length + j][at])) : null);
  const reasons = (some) => some.map(([layer_a, layer_b, , , , , reason]) => ({ layer_a, layer_b, reason: reason ?? unasked }));
  const matches = best.flatMap((j, i) => {
    const [second, margin, margin_error] = margins[i] ?? [null, null, null];
    return j === null ? [] : [{ layer_a: layers_a[i], layer_b: layers_b[j], value: values[i][j], error: errors ? errors[i][j] : null, second, margin, margin_error }];
  });
  return {
    ...facts, ...data.meanings[facts.id], layers_a, layers_b, values, standard_errors: errors, replicates: null, low: ends(4), high: ends(5),
    holes: reasons(cells.filter((cell) => cell[2] === null)),
    error_reasons: reasons(cells.filter((cell) => cell[2] !== null && cell[6] !== undefined)), best_matches: matches,
  };
}

function savePicture(figure, kind) {
  const g = grid(figure);
  const svg = picture(g, figure);
  const blob = new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" });
  const name = `${fileName(g.id, ...(g.title ?? [g.a, g.b]))}.${kind}`;
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

/* a result that compares no models brings its document and its table along */
function saveResult(kind) {
  const text = kind === "csv" ? csv(...data.table) : JSON.stringify(data.document, null, 1);
  save(`${fileName(data.name)}.${kind}`, new Blob([text], { type: kind === "csv" ? "text/csv;charset=utf-8" : "application/json" }));
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-save]");
  if (!button) return;
  const kind = button.dataset.save;
  if (kind === "svg" || kind === "png") { savePicture(button.closest("figure"), kind); return; }
  if (data.document) { saveResult(kind); return; }
  const result = data.series ?? data.comparisons[chosen];
  const text = kind === "json" ? JSON.stringify(data.series ? result : documentOf(result), null, 1) : data.series ? seriesCsv() : comparisonCsv(result);
  const type = kind === "csv" ? "text/csv;charset=utf-8" : "application/json";
  save(`${data.series ? fileName(result.run) : fileName(result.tables.length === 1 ? result.tables[0].id : "similarity", ...result.shown)}.${kind}`, new Blob([text], { type }));
});
