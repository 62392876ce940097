// The values behind the lines and bars of a figure: under the pointer, and by arrow keys.
let figures = JSON.parse($("data").textContent).figures;
let reading = { panel: 0, point: 0 }; // by keyboard

const valuesOf = (plot) => figures[plot.closest("figure").id.replace("figure-", "")] || [];
const number = (x) => String(Math.abs(x) >= 1e5 || (x !== 0 && Math.abs(x) < 1e-3) ? x.toExponential(2) : x);

// The places along x at which some series of the panel has a point, from left to right.
function places(panel) {
  const found = panel.series.flatMap(([, points]) => points.map(([at]) => at));
  return [...new Set(found)].sort((a, b) => a - b);
}

function readAt(plot, panel, place) {
  const near = (points) => points.reduce(
    (best, point) => (best === null || Math.abs(point[0] - place) < Math.abs(best[0] - place) ? point : best), null);
  const lines = [];
  let x = null;
  for (const [name, points] of panel.series) {
    const point = near(points);
    if (point === null || Math.abs(point[0] - place) > 1) continue;
    x = point[1];
    lines.push(`${name}: ${number(point[2])}`);
  }
  const matrix = plot.querySelector("svg").getScreenCTM;
  const box = () => {
    const to = matrix.call(plot.querySelector("svg"));
    const [top, bottom] = [panel.box[1], panel.box[3]].map((y) => to.f + to.d * y);
    const left = to.e + to.a * place;
    return { left, right: left, top, bottom: Math.min(bottom, top + 40) };
  };
  showTip(plot, [`${panel.x.split(" (")[0] || "x"} ${number(x)}`, ...lines], box);
  markPlace(plot, panel, place);
}

function markPlace(plot, panel, place) {
  const svg = plot.querySelector("svg");
  let line = svg.querySelector(".cursor");
  if (!line) {
    line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    line.setAttribute("class", "cursor");
    svg.append(line);
  }
  for (const [name, value] of Object.entries({ x1: place, x2: place, y1: panel.box[1], y2: panel.box[3] })) {
    line.setAttribute(name, value);
  }
}

function stopReading(plot) {
  const line = plot.querySelector(".cursor");
  if (line) line.remove();
  hideTip();
}

function readByPointer(event) {
  const plot = event.target.closest && event.target.closest(".plot[tabindex]");
  if (!plot || restsAtFocus(event)) return;
  const to = plot.querySelector("svg").getScreenCTM().inverse();
  const [x, y] = [to.a * event.clientX + to.e, to.d * event.clientY + to.f];
  const panel = valuesOf(plot).find(({ box }) => x >= box[0] && x <= box[2] && y >= box[1] && y <= box[3]);
  if (!panel) { stopReading(plot); return; }
  const nearest = places(panel).reduce((best, at) => (Math.abs(at - x) < Math.abs(best - x) ? at : best));
  readAt(plot, panel, nearest);
}

function readByKey(event) {
  const plot = event.target;
  if (!plot.matches || !plot.matches(".plot[tabindex]")) return;
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const turn = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step === undefined && turn === undefined) return;
  event.preventDefault();
  const panels = valuesOf(plot);
  reading.panel = Math.max(0, Math.min(panels.length - 1, reading.panel + (turn || 0)));
  const along = places(panels[reading.panel]);
  reading.point = Math.max(0, Math.min(along.length - 1, reading.point + (step || 0)));
  readAt(plot, panels[reading.panel], along[reading.point]);
}

document.addEventListener("mousemove", readByPointer);
document.addEventListener("mouseout", (event) => {
  const plot = event.target.closest && event.target.closest(".plot[tabindex]");
  if (plot && !plot.contains(event.relatedTarget) && !restsAtFocus(event)) stopReading(plot);
});
document.addEventListener("keydown", readByKey);
document.addEventListener("focusin", (event) => {
  if (event.target.matches(".plot[tabindex]")) reading = { panel: 0, point: -1 };
});
document.addEventListener("focusout", (event) => {
  if (event.target.matches(".plot[tabindex]")) stopReading(event.target);
});
