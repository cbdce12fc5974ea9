/* Dark or light, and on paper nothing stays folded. */

const theme = find("#theme");
const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const nameTheme = () => { theme.textContent = isDark() ? "Light page" : "Dark page"; };
theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
nameTheme();

const folded = [];
addEventListener("beforeprint", () => {
  for (const details of all("details:not([open])")) { folded.push(details); details.open = true; }
});
addEventListener("afterprint", () => { for (const details of folded.splice(0)) details.open = false; });
