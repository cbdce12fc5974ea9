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
  const why = new Map(table.missing.map(([i, j, reason]) => [`${i} ${j}`, reason]));
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

/* the text of the document that `--json` prints too, and that `nk.load` opens */
async function documentText() {
  const packed = Uint8Array.from(atob(find("#documents").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text())[chosen];
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

/* a result that compares no models brings its table along */
const csvText = () => (data.table ? csv(...data.table) : data.series ? seriesCsv() : comparisonCsv(data.comparisons[chosen]));

function nameOfResult() {
  if (data.table) return fileName(data.name);
  if (data.series) return fileName(data.series.run);
  const { tables, shown } = data.comparisons[chosen];
  return fileName(tables.length === 1 ? tables[0].id : "similarity", ...shown);
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-save]");
  if (!button) return;
  const kind = button.dataset.save;
  if (kind === "svg" || kind === "png") { savePicture(button.closest("figure"), kind); return; }
  const text = kind === "csv" ? csvText() : await documentText();
  save(`${nameOfResult()}.${kind}`, new Blob([text], { type: kind === "csv" ? "text/csv;charset=utf-8" : "application/json" }));
});
