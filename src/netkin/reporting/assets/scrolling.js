/* What is larger than its place says that it can be scrolled, while that is so. */

for (const wide of all(".chart, .scroll, .box")) {
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
