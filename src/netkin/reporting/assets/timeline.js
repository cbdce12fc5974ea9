/* The timeline: which step and which measure are shown, by slider, buttons, keys, playing, and the page's address. */

const { unit, steps, places, measures } = data.timeline;
const slider = find("#when");
const measureChoice = find("#measure");
const stepName = (k) => `${unit} ${steps[k].toLocaleString("en")}`;
let at = 0;
let measureAt = 0;
let playing = null;

/* one measure at the step that is shown, as a heatmap reads it */
function frame(block) {
  const [run, final] = block.sides;
  const when = ` at ${stepName(at)}`;
  return { ...gridOf(block), a: `${run}${when}`, b: final, when, saved: [`${run} at ${unit} ${steps[at]}`, "the end"] };
}

/* ---------- drawing a step ---------- */

function cellText(g, value) {
  if (value === null) return "–";
  const text = written(value, g.powers);
  return g.powers ? text.replace(/e([+-])(\d)$/, "e$10$2") : text;
}

function repaintCells(body, g) {
  g.values.forEach((row, i) => {
    const cells = body.rows[i].cells;
    row.forEach((value, j) => {
      const kind = value === null ? "hole" : `c${shade(g, value)}`;
      cells[j + 1].className = g.best[i] === j ? `${kind} best` : kind;
      cells[j + 1].textContent = cellText(g, value);
    });
  });
}

/* the line through the best matches, and the same with the cells of the matches left free */
function repaintLine(svg, g) {
  const points = g.best.flatMap((j, i) => (j === null ? [] : [[j + 0.5, i + 0.5]]));
  const gaps = points.slice(1).map(([u, v], k) => {
    const [x, y] = points[k];
    if (Math.abs(u - x) !== 1 || v - y !== 1) return "";  // a longer line would run through numbers
    const free = 0.42;
    return `M${x + free * (u - x)} ${y + free * (v - y)}L${u - free * (u - x)} ${v - free * (v - y)}`;
  }).join("");
  svg.replaceChildren();
  for (const side of ["under", "over"]) draw(svg, "polyline", { points: points.join(" "), class: side });
  for (const side of ["under", "over"]) draw(svg, "path", { d: gaps, class: `gaps ${side}` });
  for (const [cx, cy] of points) draw(svg, "circle", { cx, cy, r: 0.13 });
}

/* what is pointed at tells its new value; aloud only while nothing plays */
function retell(figure) {
  const hovered = find("tbody td:hover, th:hover", figure);
  const focused = find("td:focus, th:focus", figure);
  if (hovered) tellCell(figure, hovered, false);
  if (focused && !playing) tellCell(figure, focused, true);
  if (!hovered && !focused) untell(figure);
}

function untell(figure) {
  const readout = find(".readout.told", figure);
  if (readout && !playing) { readout.textContent = ""; readout.classList.remove("told"); }
}

/* the run at a glance in the colours that are chosen: one pixel a cell, holes transparent */
function repaintPanes(section) {
  const block = blocks.get(find("figure[data-grid]", section).dataset.grid);
  for (const pane of all(".panes button[data-place]", section)) {
    const values = numbers(block.frames[pane.dataset.place].values);
    const canvas = Object.assign(document.createElement("canvas"), { width: values[0].length, height: values.length });
    const paint = canvas.getContext("2d");
    values.forEach((row, i) => row.forEach((value, j) => {
      if (value !== null) { paint.fillStyle = palette[shade(block, value)]; paint.fillRect(j, i, 1, 1); }
    }));
    find("img", pane).src = canvas.toDataURL();
  }
}

function repaint(section, k) {
  const figure = find("figure[data-grid]", section);
  grids.delete(figure);
  const g = grid(figure);
  repaintCells(find("tbody", figure), g);
  repaintLine(find(".path", figure), g);
  find(".when", section).textContent = stepName(at);
  for (const pane of all(".panes button", section)) pane.setAttribute("aria-current", String(Number(pane.dataset.place) === at));
  const now = find(".now", section);
  for (const end of now ? ["x1", "x2"] : []) now.setAttribute(end, 1000 * places[at]);
  if (k === measureAt) retell(figure);
}

/* ---------- going to a step or a measure ---------- */

const sections = all("section.measure");
for (const field of all("[data-lines] .field")) {
  draw(find("svg", field), "line", { class: "now", y1: 0, y2: 1000, "vector-effect": "non-scaling-stroke" });
  field.addEventListener("chosen", (event) => stepBy(event.detail.place));
}

function goTo(k) {
  at = Math.min(Math.max(0, k), steps.length - 1);
  slider.value = at;
  slider.setAttribute("aria-valuetext", stepName(at));
  find("#shown").textContent = `${stepName(at)} · ${at + 1} of ${steps.length}`;
  find("#back").disabled = at === 0;
  find("#on").disabled = at === steps.length - 1;
  repaint(sections[measureAt], measureAt);
  remember();
}

function chooseMeasure(k) {
  measureAt = k;
  sections.forEach((section, place) => { section.hidden = place !== k; });
  if (measureChoice) measureChoice.value = measures[k];
  goTo(at);
}

/* the address keeps what is shown, so that a link or a bookmark comes back to it */
function remember() {
  const state = new URLSearchParams({ step: steps[at] });
  if (measures.length > 1) state.set("measure", measures[measureAt]);
  if (location.protocol !== "about:") history.replaceState(null, "", `#${state}`);
}

function recall() {
  const state = new URLSearchParams(location.hash.slice(1));
  const step = Number(state.get("step") ?? NaN);
  const last = steps.findLastIndex((own) => own <= step);
  if (last >= 0) at = last;
  const named = measures.indexOf(state.get("measure"));
  chooseMeasure(named >= 0 ? named : measureAt);
}

/* ---------- playing: never by itself, slowly for those who asked for little motion ---------- */

const play = find("#play");
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const pace = () => (calm.matches ? 1500 : Math.min(700, Math.max(120, 8000 / steps.length)));

function pause() {
  clearTimeout(playing);
  playing = null;
  play.textContent = "Play";
}

function tick() {
  if (at + 1 >= steps.length) { pause(); goTo(at); return; }
  goTo(at + 1);
  playing = setTimeout(tick, pace());
}

play.addEventListener("click", () => {
  if (playing) { pause(); return; }
  if (at + 1 >= steps.length) goTo(0);
  play.textContent = "Pause";
  playing = setTimeout(tick, pace());
});

function stepBy(k) { pause(); goTo(k); }
slider.addEventListener("input", () => stepBy(Number(slider.value)));
find("#back").addEventListener("click", () => stepBy(at - 1));
find("#on").addEventListener("click", () => stepBy(at + 1));
for (const pane of all(".panes button")) pane.addEventListener("click", () => stepBy(Number(pane.dataset.place)));
if (measureChoice) measureChoice.addEventListener("input", () => chooseMeasure(measures.indexOf(measureChoice.value)));
addEventListener("hashchange", recall);
addEventListener("beforeprint", () => sections.forEach((section, k) => repaint(section, k)));

/* numbers are rounded as they are told */
function seriesCsv() {
  const told = (cells) => cells?.map((row) => row.map((value) => (value === null ? null : Number(number(value)))));
  const rows = measures.flatMap((measure, k) => steps.flatMap((step, place) => {
    const g = gridOf(blocks.get(`series ${k}`), place);
    return [...cellsOf({ ...g, values: told(g.values), errors: told(g.errors) ?? null }, [...g.columns.keys()])].map((cell) => [measure, step, ...cell]);
  }));
  return csv(["measure", unit, "layer", "final_layer", "value", "error", "low", "high", "reason"], rows);
}

recall();
