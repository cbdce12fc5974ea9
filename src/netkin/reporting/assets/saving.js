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

/* the page that is shown: one of the choices, if there are such */
const shownPage = () => data.choices?.[chosen] ?? data;

/* the cells of one column, or of all: names, value, error, the ends of its interval, and why one of them is missing */
function* cellsOf(g, columns = g.columns.keys(), names = (i, j) => [g.rows[i], g.columns[j]]) {
  for (const i of g.rows.keys()) {
    for (const j of columns) {
      const value = g.values[i][j];
      const error = g.errors ? g.errors[i][j] : null;
      const reason = g.reasons.get(`${i} ${j}`) ?? (value !== null && error === null ? withoutError(g, i, j) : undefined);
      yield [...names(i, j), value, error, ...interval(g, j, value, error), reason];
    }
  }
}

/* tables in the order of the result; a list has one for each column; a pair that was not asked for has no line */
function heatmapCsv() {
  const keys = [];
  (function gather(own) {
    if (own.kind === "heatmap") keys.push(own.key);
    for (const block of own.blocks ?? []) gather(block);
  })(shownPage());
  const tables = keys.map((key) => gridOf(blocks.get(key))).flatMap((g) => {
    if (!g.pairs) return [[g.order?.[0] ?? 0, g.id, () => [...cellsOf(g, [...g.columns.keys()])]]];
    return g.order.map((place, j) => [place, g.ids[j], () => [...cellsOf(g, [j], (i) => g.pairs[i])]]);
  });
  const rows = tables.sort(([one], [other]) => one - other).flatMap(([, id, cells]) => cells().map((cell) => [id, ...cell]));
  const asked = rows.filter((row) => row[3] !== null || row.at(-1) !== undefined);
  return csv(["measure", "layer_a", "layer_b", "value", "error", "low", "high", "reason"], asked);
}

/* the text of the document that `--json` prints too, with its numbers as lists */
function whole(own) {
  if (own === null || typeof own !== "object") return own;
  if (own.numbers !== undefined && Object.keys(own).length === 1) return numbers(own);
  return Array.isArray(own) ? own.map(whole) : Object.fromEntries(Object.entries(own).map(([key, value]) => [key, whole(value)]));
}
async function documentText() {
  const packed = Uint8Array.from(atob(data.results), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.stringify(whole(JSON.parse(await new Response(stream).text())[chosen]));
}

function savePicture(figure, kind) {
  const g = grid(figure);
  const svg = picture(g, figure);
  const blob = new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" });
  const name = `${fileName(g.id, ...(g.saved ?? [g.a, g.b]))}.${kind}`;
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

const csvText = () => (data.csv ? csv(...data.csv) : data.timeline ? seriesCsv() : heatmapCsv());

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-save]");
  if (!button) return;
  const kind = button.dataset.save;
  if (kind === "svg" || kind === "png") { savePicture(button.closest("figure"), kind); return; }
  const text = kind === "csv" ? csvText() : await documentText();
  save(`${fileName(...shownPage().name)}.${kind}`, new Blob([text], { type: kind === "csv" ? "text/csv;charset=utf-8" : "application/json" }));
});
