/* Line charts: the nearest point tells its value, arrow keys go from point to point, a key brings lines to the front,
   and a frame drawn with the pointer is shown larger. */

const SIDE = 1000;
const within = (value, low, high) => Math.min(Math.max(value, low), high);

/* the round numbers between two others */
function roundNumbers(from, to, count = 5) {
  const [low, high] = from < to ? [from, to] : [to, from];
  const power = 10 ** Math.floor(Math.log10((high - low) / count));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size * count >= (high - low) * (1 - 1e-9));
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, k) => Number(((first + k) * step).toPrecision(12)));
}

for (const field of all(".field[data-chart]")) {
  const { x, names, up: ends, logarithmic, across, lines } = structuredClone(blocks.get(field.dataset.chart).chart);
  const level = (value) => (logarithmic ? Math.log10(Math.max(value, ends[0])) : value);
  const up = ends.map(level);
  const whole = field.closest("figure, [data-lines], .card") ?? field;
  const svg = find("svg", field);
  const groups = all("g.line", svg);
  const labels = all(".end", field);
  const buttons = all(".key button", whole);
  const readout = find(".readout", whole);
  const spot = field.appendChild(document.createElement("span"));
  const reset = document.createElement("button");
  const view = { left: 0, right: 1, top: 0, bottom: 1 };
  const at = { line: 0, place: 0 };
  spot.className = "spot";
  spot.setAttribute("role", "img");
  Object.assign(reset, { type: "button", textContent: "Whole chart", hidden: true, className: "controls" });
  field.append(reset);

  for (const line of lines) line.y = line.values.map((value) => (value === null ? null : up[0] === up[1] ? 0.5 : (level(value) - up[1]) / (up[0] - up[1])));
  const known = (line, place) => (lines[line]?.y[place] ?? null) !== null;
  const spread = (error) => (error ? ` ± ${number(error)}` : "");
  const told = (line, place) => `${lines[line].name}, ${across} ${names[place]}: ${number(lines[line].values[place])}${spread(lines[line].errors?.[place])}`;
  const share = (line, place) => [(x[place] + lines[line].aside - view.left) / (view.right - view.left), (lines[line].y[place] - view.top) / (view.bottom - view.top)];
  const shown = (line, place) => known(line, place) && share(line, place).every((part) => part > -0.01 && part < 1.01);
  const points = () => lines.flatMap((own, line) => own.y.flatMap((_, place) => (shown(line, place) ? [{ line, place }] : [])));

  /* lines are in front while pointed at, and stay there while their buttons are pressed */
  function light(line) {
    const pressed = buttons.flatMap((button) => (button.getAttribute("aria-pressed") === "true" ? [Number(button.dataset.line)] : []));
    const front = line === null ? pressed : [...pressed, line];
    field.classList.toggle("dimmed", front.length > 0 && lines.length > 1);
    groups.forEach((group, k) => group.classList.toggle("lit", front.includes(k)));
    for (const end of labels) end.classList.toggle("lit", front.includes(Number(end.dataset.line)));
    if (line !== null) svg.append(groups[line]);
  }

  function put(line, place, aloud) {
    Object.assign(at, { line, place });
    const [left, top] = share(line, place);
    spot.style.left = `${100 * left}%`;
    spot.style.top = `${100 * top}%`;
    spot.style.color = getComputedStyle(groups[line]).color;
    spot.setAttribute("aria-label", told(line, place));
    if (!aloud || !readout) return;
    readout.textContent = told(line, place);
    readout.classList.add("told");
  }

  /* points that lie on one another tell their values together */
  function crowd({ line, place }) {
    const box = field.getBoundingClientRect();
    const [, top] = share(line, place);
    const others = lines.flatMap((_, k) => (k !== line && shown(k, place) && Math.abs(share(k, place)[1] - top) * box.height < 7 ? [k] : []));
    return [line, ...others].slice(0, 8).map((k) => told(k, place)).join("\n");
  }

  function showSpot(point, aloud) {
    put(point.line, point.place, aloud);
    light(point.line);
    field.classList.add("spotted");
    showTip(aloud ? told(point.line, point.place) : crowd(point), spot);
  }

  function hideSpot() {
    hideTip();
    const focused = document.activeElement === spot;
    field.classList.toggle("spotted", focused);
    light(focused ? at.line : null);
  }

  function nearest(event) {
    const box = field.getBoundingClientRect();
    const far = ({ line, place }) => {
      const [left, top] = share(line, place);
      return Math.hypot(left * box.width + box.left - event.clientX, top * box.height + box.top - event.clientY);
    };
    return points().reduce((best, point) => (best === null || far(point) < far(best) ? point : best), null);
  }

  /* along a line over missing values, or to the next line that has a value here */
  function beside({ line, place }, key) {
    const [down, along] = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -1], End: [0, 1] }[key];
    let found = null;
    for (let [l, p] = [line + down, place + along]; l in lines && p in x; l += down, p += along) {
      if (!shown(l, p)) continue;
      found = { line: l, place: p };
      if (key.startsWith("Arrow")) break;
    }
    return found;
  }

  /* ---------- zoom: the drawing's view changes, and the words beside it are written anew ---------- */

  function tick(text, style) {
    const span = field.appendChild(document.createElement("span"));
    span.className = "tick fresh";
    span.textContent = text;
    span.style.cssText = `position:absolute;font-size:12px;line-height:1;white-space:nowrap;${style}`;
  }

  function nameAxes() {
    for (const old of all(".fresh", field)) old.remove();
    const height = (share) => up[1] + share * (up[0] - up[1]);
    for (const value of roundNumbers(height(view.top), height(view.bottom))) {
      const top = ((value - up[1]) / (up[0] - up[1]) - view.top) / (view.bottom - view.top);
      tick(logarithmic ? number(10 ** value) : String(value), `right:calc(100% + 8px);transform:translateY(-50%);top:${100 * top}%`);
    }
    let free = -Infinity;
    x.forEach((place, k) => {
      const left = (place - view.left) / (view.right - view.left);
      if (left < -1e-9 || left > 1 + 1e-9 || left * field.clientWidth < free) return;
      free = left * field.clientWidth + 24 + 7 * names[k].length;
      tick(names[k], `top:calc(100% + 8px);transform:translateX(-50%);left:${100 * left}%`);
    });
  }

  function look(next) {
    Object.assign(view, next);
    const zoomed = view.left > 0 || view.right < 1 || view.top > 0 || view.bottom < 1;
    field.classList.toggle("zoomed", zoomed);
    reset.hidden = !zoomed;
    svg.setAttribute("viewBox", [view.left, view.top, view.right - view.left, view.bottom - view.top].map((part) => part * SIDE).join(" "));
    for (const old of all(".fresh", field)) old.remove();
    if (zoomed) nameAxes();
    if (known(at.line, at.place)) put(at.line, at.place, false);
  }

  const lookWhole = () => look({ left: 0, right: 1, top: 0, bottom: 1 });

  function lookCloser(factor) {
    const half = Math.min((view.right - view.left) * factor, 1) / 2;
    const left = within(x[at.place] - half, 0, 1 - 2 * half);
    if (half > 1e-3) look({ left, right: left + 2 * half });
  }

  let frame = null;
  function partOf(event) {
    const box = field.getBoundingClientRect();
    return [within((event.clientX - box.left) / box.width, 0, 1), within((event.clientY - box.top) / box.height, 0, 1)];
  }

  function drawFrame(event) {
    const [left, top] = partOf(event);
    const [from, above] = frame.start;
    if (!frame.box && Math.abs(left - from) * field.clientWidth < 8) return;
    frame.box ??= Object.assign(field.appendChild(document.createElement("span")), { className: "frame" });
    const flat = Math.abs(top - above) * field.clientHeight < 24;  // across the whole height
    frame.part = { left: Math.min(from, left), right: Math.max(from, left), top: flat ? 0 : Math.min(above, top), bottom: flat ? 1 : Math.max(above, top) };
    const { part } = frame;
    Object.assign(frame.box.style, { left: `${100 * part.left}%`, width: `${100 * (part.right - part.left)}%`, top: `${100 * part.top}%`, height: `${100 * (part.bottom - part.top)}%` });
  }

  function endFrame() {
    const part = frame?.part;
    frame?.box?.remove();
    frame = null;
    if (!part) return false;
    const [width, height] = [view.right - view.left, view.bottom - view.top];
    look({ left: view.left + part.left * width, right: view.left + part.right * width, top: view.top + part.top * height, bottom: view.top + part.bottom * height });
    return true;
  }

  field.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button === 0 && !event.target.closest("button, .end")) frame = { start: partOf(event) };
  });
  addEventListener("pointerup", (event) => {
    if (!frame) return;
    if (endFrame()) field.addEventListener("click", (click) => click.stopImmediatePropagation(), { capture: true, once: true });
  });
  reset.addEventListener("click", (event) => { event.stopPropagation(); lookWhole(); });
  field.addEventListener("dblclick", lookWhole);

  /* ---------- pointer and keys ---------- */

  const chosen = () => field.dispatchEvent(new CustomEvent("chosen", { bubbles: true, detail: { ...at } }));
  const KEYS = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"];
  spot.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === "Escape") { hideTip(); lookWhole(); }
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); chosen(); }
    if (event.key === "+" || event.key === "-") { event.preventDefault(); lookCloser(event.key === "+" ? 0.5 : 2); }
    if (!KEYS.includes(event.key)) return;
    event.preventDefault();
    const next = beside(at, event.key);
    if (next) showSpot(next, true);
  });
  spot.addEventListener("focus", () => showSpot(at, true));
  spot.addEventListener("blur", hideSpot);
  field.addEventListener("pointermove", (event) => {
    if (frame) { drawFrame(event); hideTip(); return; }
    const near = nearest(event);
    if (near) showSpot(near, false);
  });
  field.addEventListener("pointerleave", hideSpot);
  field.addEventListener("click", (event) => {
    const near = event.target.closest("button") ? null : nearest(event);
    if (!near) return;
    showSpot(near, true);
    chosen();
  });

  for (const own of [...buttons, ...labels]) {
    const line = Number(own.dataset.line);
    own.addEventListener("pointerenter", () => light(line));
    own.addEventListener("pointerleave", () => light(null));
    own.addEventListener("focus", () => light(line));
    own.addEventListener("blur", () => light(null));
  }
  for (const button of buttons) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      light(null);
    });
  }

  const first = points()[0];
  if (first) { spot.tabIndex = 0; put(first.line, first.place, false); }
  addEventListener("beforeprint", lookWhole);
}
