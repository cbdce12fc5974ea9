/* What is wider than its place says that it can be scrolled, while that is so. */

for (const wide of all(".chart, .scroll")) {
  const hint = document.createElement("p");
  hint.className = "hint";
  hint.textContent = "Wider than this screen: scroll sideways ⟷";
  hint.hidden = true;
  wide.before(hint);
  new ResizeObserver(() => { hint.hidden = wide.scrollWidth <= wide.clientWidth + 1; }).observe(wide);
}
