/* What every page has: its document, how numbers are said, the box beside what is pointed at, dark or light, print.
   The document is what docs/page.md describes. */

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;

/* blocks by their keys, those inside sections and choices too */
const blocks = new Map();
function collect(own) {
  if (own.key !== undefined) blocks.set(own.key, own);
  for (const inside of ["blocks", "origins", "choices"]) for (const block of own[inside] ?? []) collect(block);
}
collect(data);

/* numbers as nested lists: given so, or by their place among the numbers of the page, eight bytes each */
const unpacked = new Map();
function numbers(given) {
  const place = given?.numbers;
  if (place === undefined) return given ?? null;
  if (!unpacked.has(place)) {
    const { shape, float64 } = data.numbers[place];
    const bytes = Uint8Array.from(atob(float64), (letter) => letter.charCodeAt(0));
    let list = Array.from(new Float64Array(bytes.buffer), (value) => (Number.isNaN(value) ? null : value));
    for (const size of shape.slice(1).reverse()) list = Array.from({ length: list.length / size }, (_, k) => list.slice(k * size, (k + 1) * size));
    unpacked.set(place, list);
  }
  return unpacked.get(place);
}
const find = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const tip = document.body.appendChild(document.createElement("div"));
tip.id = "tip";
tip.hidden = true;
tip.setAttribute("aria-hidden", "true");

function number(value) {
  const size = Math.abs(value);
  return value !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(3) : (value === 0 ? 0 : value).toFixed(4);
}

/* a number as short as it stands in a cell */
function written(value, powers = Math.abs(value) >= 1e5) {
  const text = powers ? value.toExponential(1) : value.toFixed(2);
  return text === "-0.00" ? "0.00" : text;
}

/* the interval by Student's t within the measure's bounds, and why a value has no error */
function interval(g, j, value, error) {
  const quantile = g.quantiles?.[g.quantiles.length > 1 ? j : 0];
  if (value === null || error === null || !quantile) return [null, null];
  const reach = quantile * error;
  return [Math.max(value - reach, g.bounds[0] ?? -Infinity), Math.min(value + reach, g.bounds[1] ?? Infinity)];
}

function withoutError(g, i, j) {
  const found = Object.entries(g.without_error ?? {}).find(([, places]) => places === null || places.some(([u, v]) => u === i && v === j));
  return found?.[0];
}

function showTip(text, target) {
  tip.textContent = text;
  tip.hidden = false;
  const spot = target.getBoundingClientRect();
  const own = tip.getBoundingClientRect();
  const above = spot.top - own.height - 8;
  const left = Math.min(Math.max(8, spot.left + spot.width / 2 - own.width / 2), root.clientWidth - own.width - 8);
  tip.style.transform = `translate(${left}px, ${above > 8 ? above : spot.bottom + 8}px)`;
}

/* on a phone warnings are folded to their title, so that the first picture is on the first screen */
if (matchMedia("(max-width: 600px)").matches) for (const note of all(".warnings")) note.open = false;

const hideTip = () => { tip.hidden = true; };
addEventListener("scroll", hideTip, { passive: true, capture: true });

/* Dark or light, nothing left undrawn, and on paper nothing folded. */

const theme = find("#theme");
const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const nameTheme = () => { theme.textContent = isDark() ? "Light page" : "Dark page"; };
theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
nameTheme();

/* large heatmaps off the screen are drawn one by one once the first stands: a picture of the whole page has them all */
const idly = window.requestIdleCallback ?? setTimeout;
function drawNext() {
  const next = find(".card.wide:not(.drawn)");
  (next ?? root).classList.add("drawn");
  if (next) idly(drawNext);
}
addEventListener("load", () => setTimeout(drawNext, 100));

const folded = [];
addEventListener("beforeprint", () => {
  for (const details of all("details:not([open])")) { folded.push(details); details.open = true; }
});
addEventListener("afterprint", () => { for (const details of folded.splice(0)) details.open = false; });
/* What is larger than its place says that it can be scrolled, while that is so. */

for (const wide of all(".scroll, .box")) {
  const hint = document.createElement("p");
  hint.className = "hint";
  wide.before(hint);
  const tell = () => {
    const [across, down] = [wide.scrollWidth > wide.clientWidth + 1, wide.scrollHeight > wide.clientHeight + 1];
    hint.hidden = !across && !down;
    hint.textContent = across && down ? "Larger than this screen: scroll in all directions" : across ? "Wider than this screen: scroll sideways ⟷" : "Longer than this screen: scroll up and down ↕";
  };
  const observer = new ResizeObserver(tell);
  for (const one of [wide, ...wide.children]) observer.observe(one);
}
