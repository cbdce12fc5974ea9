/* The page's data, how its numbers are said, and the small box beside what is pointed at. */

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
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
function interval(table, value, error) {
  if (value === null || error === null || !table.quantile) return [null, null];
  const reach = table.quantile * error;
  return [Math.max(value - reach, table.bounds[0] ?? -Infinity), Math.min(value + reach, table.bounds[1] ?? Infinity)];
}

function withoutError(table, i, j) {
  const found = (table.without_error ?? []).find(([, places]) => places === null || places.some(([u, v]) => u === i && v === j));
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

const hideTip = () => { tip.hidden = true; };
addEventListener("scroll", hideTip, { passive: true, capture: true });
