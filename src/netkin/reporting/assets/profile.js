/* The profile: points tell their values, arrow keys go from point to point. */

function moveInChart(lines, mark, key) {
  const series = lines.map((line) => all(".mark", line));
  const row = series.findIndex((marks) => marks.includes(mark));
  const at = series[row].indexOf(mark);
  if (key === "ArrowLeft") return series[row][at - 1];
  if (key === "ArrowRight") return series[row][at + 1];
  const other = series[row + (key === "ArrowUp" ? -1 : 1)];
  return other && other[Math.min(at, other.length - 1)];
}

/* points that lie on one another tell their values together */
function crowd(chart, mark) {
  const spot = mark.getBoundingClientRect();
  const near = all(".mark", chart).filter((other) => {
    const own = other.getBoundingClientRect();
    return Math.hypot(own.x - spot.x, own.y - spot.y) < 7;
  });
  return near.map((other) => other.getAttribute("aria-label")).join("\n");
}

for (const chart of all(".lines")) {
  const lines = all(".line", chart).filter((line) => find(".mark", line));
  const first = find(".mark", chart);
  if (first) first.setAttribute("tabindex", "0");
  chart.addEventListener("pointerover", (event) => { const mark = event.target.closest(".mark"); if (mark) showTip(crowd(chart, mark), mark); });
  chart.addEventListener("focusin", (event) => showTip(event.target.getAttribute("aria-label"), event.target));
  chart.addEventListener("pointerout", hideTip);
  chart.addEventListener("focusout", hideTip);
  chart.addEventListener("keydown", (event) => {
    const mark = event.target.closest(".mark");
    if (!mark || !event.key.startsWith("Arrow")) return;
    event.preventDefault();
    const next = moveInChart(lines, mark, event.key);
    if (!next) return;
    mark.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });
}
