// The figures, drawn by uPlot from the data of the page. Pointing at one, or its arrow keys, shows its
// values; dragging zooms and a double click resets, in every figure with the same x axis.
let figures = JSON.parse($("data").textContent).figures;
const states = {}; // of each panel, over new versions of the page: log, zoom
const probe = make("i"); // turns what CSS calls a colour into one that a canvas takes
probe.hidden = true;
document.body.append(probe);
function colour(value) {
  probe.style.color = value;
  return getComputedStyle(probe).color;
}
const tone = ({ colour: name, light }) => (light ? `color-mix(in srgb, var(--${name}) 55%, var(--card))` : `var(--${name})`);
const faint = (css, share) => colour(`color-mix(in srgb, ${css} ${share}%, transparent)`);

function number(x) {
  if (x === null || x === undefined) return "–";
  const short = Number(x.toPrecision(4));
  return String(Math.abs(x) >= 1e5 || (x !== 0 && Math.abs(x) < 1e-3) ? short.toExponential() : short);
}

// -- what is drawn of a panel --------------------------------------------------------------------
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

function smooth(values, window) {
  const last = [];
  return values.map((value) => {
    if (value === null) return null;
    last.push(value);
    if (last.length > window) last.shift();
    return mean(last);
  });
}

// One value of each curve at every x; null where a curve has none.
const across = (curves, of) => curves[0].map((_, i) => {
  const values = curves.map((curve) => curve[i]);
  return values.includes(null) ? null : of(values);
});

// The lines of uPlot: of each series one with a name, behind it its seeds or its unsmooth values, the
// ends of its range, and on it the points that stand out.
function linesOf(panel) {
  if (isStack(panel)) return stackOf(panel);
  const window = Number($("smoothing").value);
  return panel.series.flatMap((series) => {
    const curves = series.curves.map((values) => smooth(values, series.window > 1 ? window : 1));
    const several = curves.length > 1;
    const ends = several ? [Math.min, Math.max].map((of) => across(curves, (values) => of(...values))) : series.interval;
    let behind = several ? curves : [];
    if (!several && series.window > 1 && series.kind === "line") behind = series.curves;
    const marks = new Map(series.marks);
    const values = several ? across(curves, mean) : curves[0] || panel.xs.map(() => null);
    return [
      ...(series.kind === "line" ? ends.map((end, i) => ({ series, role: i ? "high" : "low", values: end })) : []),
      ...behind.map((curve) => ({ series, role: "behind", values: curve })),
      { series, role: "named", values, ends, shown: values },
      ...(marks.size ? [{ series, role: "mark", values: panel.xs.map((x) => marks.get(x) ?? null) }] : []),
    ];
  });
}

const isStack = (panel) => panel.series.every(({ kind }) => kind === "stack");

// Each part with those below it; the lowest is drawn last, over the others.
function stackOf(panel) {
  const below = panel.xs.map(() => 0);
  const parts = panel.series.map((series) => {
    const shown = series.curves[0];
    shown.forEach((value, i) => { below[i] += value || 0; });
    return { series, role: "named", values: [...below], ends: [], shown };
  });
  return parts.reverse();
}

const dataOf = (panel, lines, log) => [
  panel.xs, ...lines.map(({ values }) => (log ? values.map((value) => (value > 0 ? value : null)) : values)),
];

// -- options of uPlot ----------------------------------------------------------------------------
function key(series) {
  const box = make("span");
  const flat = ["stack", "bars"].includes(series.kind);
  box.innerHTML = '<svg class="key" viewBox="0 0 60 10" aria-hidden="true"><line x2="60" y1="5" y2="5"/></svg>';
  const line = box.querySelector("line");
  line.style.stroke = tone(series);
  line.style.strokeWidth = flat ? 10 : series.kind === "thin" ? 1.5 : 4;
  line.style.strokeDasharray = flat ? "" : series.dash.map((part) => 2 * part).join(" ");
  box.append(series.label);
  return box;
}

function seriesOf(panel, line) {
  const { series, role } = line;
  const css = tone(series);
  const thin = role === "behind" || series.kind === "thin";
  if (["low", "high"].includes(role)) return { class: "aside", width: 0, points: { show: false }, spanGaps: true };
  if (role === "mark") {
    const points = { show: true, size: 8, width: 1.5, stroke: () => colour("var(--ink)"), fill: () => colour(css) };
    return { class: "aside", stroke: () => colour(css), paths: () => null, points };
  }
  const found = {
    label: role === "named" ? key(series) : "", class: role === "named" ? "named" : "aside", spanGaps: true,
    stroke: () => (thin ? faint(css, 50) : colour(css)), width: thin ? 1 : 2, dash: thin ? [] : series.dash.map((part) => 2 * part),
    points: { show: series.kind === "points" || line.values.filter((value) => value !== null).length === 1, size: 6, fill: () => colour(css) },
    value: (plot, _, index, at) => (role !== "named" || at === null ? "–" : valueText(plot.lines[index - 1], at)),
  };
  if (series.kind === "stack") Object.assign(found, { width: 0, fill: () => colour(css) });
  if (series.kind === "bars" && panel.series.length === 1) found.fill = () => faint(css, 75);
  if (["stack", "bars"].includes(series.kind)) {
    Object.assign(found, { paths: uPlot.paths.bars({ size: [1], gap: 0 }), points: { show: false } });
  }
  return found;
}

function valueText({ series, shown, ends }, at) {
  const range = ends.length && ends[0][at] !== null ? ` [${ends.map((end) => number(end[at])).join(", ")}]` : "";
  const raw = series.window > 1 && series.curves.length === 1 ? series.curves[0][at] : null;
  const own = raw !== null && raw !== shown[at] ? `, here ${number(raw)}` : "";
  return `${number(shown[at])}${range}${own}`;
}

function yScale(panel, log) {
  if (log) return { distr: 3 };
  if (panel.scale === "auto") return {};
  const least = panel.scale === "share" ? 0.05 : 0;
  const floor = panel.series.some(({ kind }) => ["stack", "bars"].includes(kind)) ? 0 : -0.02; // a line at 0 is seen whole
  return {
    range: (plot, low, high) => {
      const top = panel.top ?? (Math.max(least, 1.05 * high) || 1);
      return [floor * top, top];
    },
  };
}

function axis(label) {
  const whole = ["rollout", "optimizer step"].includes(label);
  const font = "12px system-ui, sans-serif";
  return {
    label, font, labelFont: font, labelSize: 18, size: 28, gap: 3, stroke: () => colour("var(--ink)"),
    grid: { stroke: () => colour("var(--grid)"), width: 1 }, ticks: { stroke: () => colour("var(--muted)"), width: 1, size: 4 },
    values: (plot, ticks) => ticks.map((tick) => (tick === null || (whole && !Number.isInteger(tick)) ? "" : number(tick))),
  };
}

function shadeZones(plot, panel) {
  const { left, top, width, height } = plot.bbox;
  for (const { first, last, colour: name } of panel.zones) {
    const [a, b] = [first, last].map((x) => Math.max(left, Math.min(left + width, plot.valToPos(x, "x", true))));
    plot.ctx.fillStyle = faint(`var(--${name})`, 14);
    plot.ctx.fillRect(a, top, b - a, height);
  }
}

// The intervals of points.
function drawIntervals(plot, panel) {
  plot.lines.forEach(({ series, role, ends }, index) => {
    if (series.kind !== "points" || role !== "named" || !ends.length || !plot.series[index + 1].show) return;
    plot.ctx.strokeStyle = colour(tone(series));
    plot.ctx.lineWidth = 1.5 * devicePixelRatio;
    plot.ctx.beginPath();
    panel.xs.forEach((x, i) => {
      if (ends[0][i] === null || x < plot.scales.x.min || x > plot.scales.x.max) return;
      const at = plot.valToPos(x, "x", true);
      ends.forEach((end, k) => plot.ctx[k ? "lineTo" : "moveTo"](at, plot.valToPos(end[i], "y", true)));
    });
    plot.ctx.stroke();
  });
}

// -- one panel -----------------------------------------------------------------------------------
function drawPanel(host, panel, state) {
  if (host.plot) host.plot.destroy();
  const { zoom, log } = state;
  const lines = linesOf(panel);
  const bands = lines.flatMap(({ series, role }, i) => (role === "high"
    ? [{ series: [i + 1, i], fill: () => faint(tone(series), 18) }] : []));
  const half = isStack(panel) ? 0.5 : 0;
  const plot = new uPlot({
    width: host.clientWidth, height: host.dataset.lower ? 160 : 220, bands, class: isStack(panel) ? "stack" : "lines",
    scales: { x: { time: false, range: (_, low, high) => [low - half, high === low && !half ? high + 1 : high + half] }, y: yScale(panel, log) },
    axes: [axis(panel.x), { ...axis(), size: (_, texts) => 12 + 7 * Math.max(...(texts || [""]).map((text) => text.length)) }],
    series: [{ label: panel.x, value: (_, x) => number(x) }, ...lines.map((line) => seriesOf(panel, line))],
    legend: { markers: { show: false } },
    cursor: { y: false, sync: { key: panel.x, scales: ["x", null] }, hover: { skip: [null], prox: 12 }, points: { size: 7 } },
    hooks: {
      drawClear: [(now) => shadeZones(now, panel)],
      draw: [(now) => drawIntervals(now, panel)],
      setScale: [(now, name) => {
        const { min, max } = now.scales.x;
        if (name === "x") state.zoom = min > panel.xs[0] || max < panel.xs.at(-1) ? { min, max } : null;
      }],
      setSeries: [hideWith],
    },
  }, dataOf(panel, lines, log), (now, start) => {
    Object.assign(now, { lines });
    host.replaceChildren(now.root);
    start();
  });
  host.plot = plot;
  if (zoom) plot.setScale("x", zoom);
}

// What belongs to a named line is hidden with it.
function hideWith(plot, index, { show }) {
  const line = plot.lines[index - 1];
  if (show === undefined || line.role !== "named") return;
  plot.lines.forEach(({ series, role }, i) => {
    if (series === line.series && role !== "named") plot.setSeries(i + 1, { show });
  });
}

function resmooth(plot, panel, { log }) {
  const { min, max } = plot.scales.x;
  plot.lines = linesOf(panel);
  plot.setData(dataOf(panel, plot.lines, log), false);
  plot.setScale("x", { min, max });
}

function logSwitch(host, panel, state) {
  const [label, box] = [make("label", "log", "log"), make("input")];
  box.type = "checkbox";
  box.checked = state.log;
  box.setAttribute("aria-label", `logarithmic y axis: ${host.getAttribute("aria-label")}`);
  box.addEventListener("change", () => {
    state.log = box.checked;
    drawPanel(host, panel, state);
  });
  label.prepend(box);
  host.parentElement.querySelector(".y").append(label);
}

// -- all of them ---------------------------------------------------------------------------------
let panels = []; // of every figure: where it is drawn, its data, its state
let chosenWindow = null; // by the reader

function showWindow() {
  const window = $("smoothing").value;
  $("smoothing-now").textContent = window === "1" ? "none" : `mean of ${window} rollouts`;
}

function drawFigures() {
  $("reading").hidden = false;
  if (chosenWindow !== null) $("smoothing").value = chosenWindow;
  showWindow();
  panels = Object.entries(figures).flatMap(([name, found]) => {
    const hosts = document.querySelectorAll(`#figure-${name} .plot`);
    return found.map((panel, i) => {
      const state = states[`${name} ${i}`] ??= { log: panel.scale === "log", zoom: null };
      return { host: hosts[i], panel, state };
    });
  });
  for (const { host, panel, state } of panels) {
    if (panel.top === null) logSwitch(host, panel, state);
    drawPanel(host, panel, state);
    new ResizeObserver(() => host.plot.setSize({ width: host.clientWidth, height: host.plot.height })).observe(host);
  }
}

// Those of the next version of the page.
function exchangeFigures(next) {
  panels.forEach(({ host }) => host.plot.destroy());
  exchange("figures", next);
  ({ figures } = JSON.parse($("data").textContent));
  drawFigures();
}

document.addEventListener("input", ({ target }) => {
  if (target.id !== "smoothing") return;
  chosenWindow = target.value;
  showWindow();
  for (const { host, panel, state } of panels) resmooth(host.plot, panel, state);
});
document.addEventListener("keydown", (event) => {
  const { plot } = event.target;
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!plot || !step) return;
  event.preventDefault();
  plot.root.querySelector(".u-legend").setAttribute("aria-live", "polite");
  const last = plot.data[0].length - 1;
  const at = plot.cursor.idx ?? (step > 0 ? -1 : last + 1);
  const next = Math.max(0, Math.min(last, at + step));
  plot.setCursor({ left: plot.valToPos(plot.data[0][next], "x"), top: 0 });
});
document.addEventListener("focusout", ({ target }) => {
  if (target.plot) target.plot.setCursor({ left: -10, top: -10 });
});
new MutationObserver(() => panels.forEach(({ host }) => host.plot.redraw()))
  .observe(root, { attributeFilter: ["data-theme"] });
drawFigures();
