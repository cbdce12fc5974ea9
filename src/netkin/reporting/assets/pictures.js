/* The heatmap once more, as one drawing that stands by itself. */

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

function picture(g) {
  const unit = Math.min(56, Math.max(14, Math.floor(720 / Math.max(g.columns.length, g.rows.length))));
  const font = Math.min(13, unit * 0.8);
  const longest = (names) => Math.max(...names.map((name) => name.length)) * font * 0.62 + 12;
  const [rows, columns] = [g.labels ?? g.rows, g.labels ?? g.columns];
  const [left, top] = [Math.max(longest(rows), 40), longest(columns) + 44];
  const [across, down] = [unit * g.columns.length, unit * g.rows.length];
  const title = g.ids ? `${g.id}: ${g.a} and ${g.b}` : `${g.id}: ${g.a} (rows), ${g.b} (columns)`;
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
    const fill = value === null ? "url(#hatch)" : data.palette[shade(g, value)];
    draw(svg, "rect", { ...spot, width: unit, height: unit, fill, stroke: "#fff", "stroke-width": 0.5 });
    if (value === null || !values.checked || unit < 24) return;
    const text = { x: spot.x + unit / 2, y: spot.y + unit / 2, "text-anchor": "middle", "dominant-baseline": "central", "font-size": unit * 0.3, fill: data.ink[shade(g, value)] };
    const error = g.errors && unit >= 40 ? g.errors[i][j] : null;
    draw(svg, "text", error === null ? text : { ...text, y: text.y - unit * 0.14 }, written(value));
    if (error !== null) draw(svg, "text", { ...text, y: text.y + unit * 0.2, "font-size": unit * 0.24 }, `±${Number(error.toPrecision(1))}`);
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
  draw(svg, "text", { x: left, y: y + 28 }, `${short(far)} ${g.scale.words[0]}`);
  draw(svg, "text", { x: left + steps * 4, y: y + 28, "text-anchor": "end" }, `${g.scale.words[1]} ${short(close)}`);
}
