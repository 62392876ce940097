// The theme, elements and the tip. Content goes in as text nodes only, never as markup.
// page.py joins the scripts of this folder in one function.
const root = document.documentElement;
const $ = (id) => document.getElementById(id);

// -- theme: the system's until the button is used ------------------------------------------------
const system = matchMedia("(prefers-color-scheme: dark)");
let chosen = null;
try { chosen = localStorage.getItem("sg-report-theme"); } catch { /* storage may be off */ }
function applyTheme() {
  const dark = chosen ? chosen === "dark" : system.matches;
  root.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = dark ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", dark ? "Use light colours" : "Use dark colours");
}
$("theme").addEventListener("click", () => {
  chosen = root.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("sg-report-theme", chosen); } catch { /* storage may be off */ }
  applyTheme();
});
system.addEventListener("change", applyTheme);
applyTheme();

// -- elements, numbers ---------------------------------------------------------------------------
function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}
const signed = (x, digits) => (x === null ? "n/a" : (x > 0 ? "+" : "") + x.toFixed(digits));

// -- the tip: on hover and on focus --------------------------------------------------------------
const tip = $("tip");
let described = null; // the element that the tip is about
function showTip(element, lines) {
  hideTip();
  tip.textContent = lines.join("\n");
  tip.hidden = false;
  described = element;
  element.setAttribute("aria-describedby", "tip");
  placeTip();
}
function placeTip() {
  const box = described.getClientRects()[0] || described.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = Math.max(8, Math.min(box.left, innerWidth - width - 8));
  const below = box.bottom + 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${below + height > innerHeight ? Math.max(8, box.top - height - 8) : below}px`;
}
function hideTip() {
  tip.hidden = true;
  if (described) described.removeAttribute("aria-describedby");
  described = null;
}
const ofFocus = () => described !== null && described === document.activeElement;
let pointer = "";
const at = (event) => `${event.screenX},${event.screenY}`;
for (const name of ["mouseover", "mousemove"]) {
  document.addEventListener(name, (event) => { pointer = at(event); }, { passive: true });
}
// The keyboard scrolled the page under a pointer that rests: the tip stays with the focus.
const restsAtFocus = (event) => ofFocus() && at(event) === pointer;
// Going to an element that is out of sight scrolls the page, too.
const follow = () => (ofFocus() ? placeTip() : hideTip());
addEventListener("scroll", follow, { passive: true });
addEventListener("resize", follow, { passive: true });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
});
