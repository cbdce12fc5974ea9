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
