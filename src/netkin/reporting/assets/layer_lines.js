/* The lines of the layers: a spot that goes along the lines by pointer and by arrow keys, and a key that brings a line to the front. */

for (const card of all("[data-lines]")) {
  const table = series.tables[card.dataset.lines];
  const field = find(".field", card);
  const lines = all(".way", card);
  const buttons = all("button[data-layer]", card);
  const readout = find(".readout", card);
  const spot = field.appendChild(document.createElement("span"));
  spot.className = "spot";
  spot.setAttribute("role", "img");
  const spotAt = { layer: 0, step: 0 };

  const value = (layer, step) => { const [i, j] = series.own[layer]; return table.frames[step].values[i][j]; };
  const height = (known) => (table.axis.close - known) / (table.axis.close - table.axis.far || 1);
  const told = (layer, step) => `${series.layers[layer]} at ${stepName(step)}: ${number(value(layer, step))}`;

  /* a line is brought to the front while it is pointed at, and stays there while its button is pressed */
  function light(layer) {
    const pressed = buttons.findIndex((button) => button.getAttribute("aria-pressed") === "true");
    const front = layer ?? (pressed >= 0 ? pressed : null);
    field.classList.toggle("dimmed", front !== null);
    lines.forEach((line, k) => line.classList.toggle("lit", k === front));
    if (front !== null) lines[front].parentElement.append(lines[front]);
  }

  function put(layer, step, aloud) {
    Object.assign(spotAt, { layer, step });
    const known = value(layer, step);
    spot.style.left = `${100 * series.places[step]}%`;
    spot.style.top = `${100 * Math.min(Math.max(height(known), 0), 1)}%`;
    spot.style.color = lines[layer].style.color;
    spot.setAttribute("aria-label", told(layer, step));
    if (!aloud) return;
    readout.textContent = told(layer, step);
    readout.classList.add("told");
  }

  function showSpot(layer, step, aloud) {
    put(layer, step, aloud);
    light(layer);
    field.classList.add("spotted");
    showTip(told(layer, step), spot);
  }

  function hideSpot() {
    hideTip();
    field.classList.toggle("spotted", document.activeElement === spot);
    light(document.activeElement === spot ? spotAt.layer : null);
  }

  const nearest = (count, far) => {
    const known = [...Array(count).keys()].filter((k) => Number.isFinite(far(k)));
    return known.reduce((best, k) => (best === null || far(k) < far(best) ? k : best), null);
  };

  function under(event) {
    const box = field.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    const step = nearest(series.steps.length, (k) => Math.abs(series.places[k] - x));
    const layer = nearest(series.layers.length, (k) => (value(k, step) === null ? NaN : Math.abs(height(value(k, step)) - y)));
    return layer === null ? null : { layer, step };
  }

  /* along a line over missing values, or to the next layer that has a value at this step */
  function beside({ layer, step }, key) {
    const [down, along] = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -1], End: [0, 1] }[key];
    let found = null;
    for (let [l, s] = [layer + down, step + along]; l in series.layers && s in series.steps; l += down, s += along) {
      if (value(l, s) === null) continue;
      found = { layer: l, step: s };
      if (key.startsWith("Arrow")) break;
    }
    return found;
  }

  const KEYS = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"];
  spot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); stepBy(spotAt.step); }
    if (!KEYS.includes(event.key) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const next = beside(spotAt, event.key);
    if (next) showSpot(next.layer, next.step, true);
  });
  spot.addEventListener("focus", () => showSpot(spotAt.layer, spotAt.step, true));
  spot.addEventListener("blur", hideSpot);
  field.addEventListener("pointermove", (event) => { const near = under(event); if (near) showSpot(near.layer, near.step, false); });
  field.addEventListener("pointerleave", hideSpot);
  field.addEventListener("click", (event) => {
    const near = under(event);
    if (!near) return;
    stepBy(near.step);
    showSpot(near.layer, near.step, true);
  });

  buttons.forEach((button, k) => {
    button.addEventListener("pointerenter", () => light(k));
    button.addEventListener("pointerleave", () => light(null));
    button.addEventListener("focus", () => light(k));
    button.addEventListener("blur", () => light(null));
    button.addEventListener("click", () => {
      const pressed = button.getAttribute("aria-pressed") === "true";
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button && !pressed));
      light(pressed ? null : k);
    });
  });

  const known = series.layers.flatMap((_, layer) => series.steps.map((_, step) => ({ layer, step }))).find(({ layer, step }) => value(layer, step) !== null);
  if (known) { spot.tabIndex = 0; put(known.layer, known.step, false); }
}
