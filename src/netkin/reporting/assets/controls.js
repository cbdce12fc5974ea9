/* How the page is shown: values, best matches, size, choice of comparison and of measures. */

const room = Math.min(12, (innerWidth - 140) / 30);
const layered = all("figure[data-grid]").filter((figure) => grid(figure).level === "layers");
const fewCells = layered.every((figure) => grid(figure).columns.length <= room);
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

const fit = find("#fit");
function refit() {
  fitted = fit.checked;
  for (const figure of all("figure[data-grid]")) recolour(figure);
  if (data.timeline) all("section.measure").forEach(repaintPanes);
}
fit.addEventListener("input", refit);
if (fit.checked) refit();  // a page that is opened again may keep the choice

/* on a phone the controls are folded, so that the first picture is on the first screen */
const unfold = find("#unfold");
unfold.addEventListener("click", () => unfold.setAttribute("aria-expanded", String(find(".toolbar").classList.toggle("open"))));

/* names of columns stay below the bar of controls while the page scrolls, unless a heatmap scrolls by itself */
const bar = all(".timeline, .toolbar").find((one) => getComputedStyle(one).position === "sticky");
function settle() {
  root.style.setProperty("--bar", `${bar && getComputedStyle(bar).position === "sticky" ? bar.offsetHeight : 0}px`);
  for (const box of all(".box")) {
    box.classList.remove("fits");
    box.classList.toggle("fits", box.scrollWidth <= box.clientWidth + 1);
  }
}
new ResizeObserver(settle).observe(document.body);
for (const control of [zoom, values]) control.addEventListener("input", settle);

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
  const article = choice.closest("article, main");
  const show = () => {
    const wanted = new Set(all("input:checked", choice).map((input) => input.value));
    for (const figure of all("figure[data-measure]", article)) figure.hidden = !wanted.has(figure.dataset.measure);
  };
  choice.addEventListener("input", show);
  show();
}
