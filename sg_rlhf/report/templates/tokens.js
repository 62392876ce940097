// What is known of a token: as a colour, in strips, and in words.
const BINS = 10;
const STRIP_CELLS = 120;
const probability = (i, k) => Math.exp(-samples.logp[i][k] / 1000);
// Not marked where the whole response has none: its advantage is 0.
const isZeroed = (i, k) => samples.why[i] !== null && !"0a".includes(samples.why[i][k]);
const inBins = (x) => Math.max(0, Math.min(BINS - 1, Math.floor(x)));
// Each: its name, its unit, its value of a token or null, its tone from 0 to 9, the ends of its scale.
const QUANTITIES = {
  p: {
    name: "1 - p", of: (i, k) => 1 - probability(i, k), tone: (x) => inBins(x * BINS), ends: ["p = 1", "p = 0"],
  },
  e: {
    name: "entropy", unit: " nats", of: (i, k) => (samples.entropy[i] === null ? null : samples.entropy[i][k] / 1000),
    tone: (x) => inBins(x * 5), ends: ["0 nats", "2 nats"],
  },
  m: {
    name: "difference of trainer and engine", of: (i, k) => (samples.engine[i] === null
      ? null : Math.abs(samples.engine[i][k]) / 1e5),
    tone: (x) => inBins(2 * Math.log10(Math.max(x, 1e-9) / 1e-5)), ends: ["0.00001", "0.3 in log p"],
  },
};

function bin(i, k, by) {
  if (QUANTITIES[by]) {
    const value = QUANTITIES[by].of(i, k);
    return value === null ? 0 : QUANTITIES[by].tone(value);
  }
  if (by !== "w" || samples.w[i] === null) return 0;
  const [low, high] = runs[samples.run[i]].bounds;
  return high - low < 1e-6 ? 0 : inBins(((samples.w[i][k] / 1000 - low) / (high - low)) * BINS);
}

function pText(p) {
  if (p >= 0.9995) return p === 1 ? "1.000" : "> 0.999";
  return p < 0.001 ? p.toExponential(1) : p.toFixed(3);
}

function describe(i, k) {
  const known = (name) => samples[name][i] !== null;
  const lines = [`p ${pText(probability(i, k))}`];
  if (known("engine")) {
    const difference = samples.engine[i][k] / 1e5;
    lines.push(`p of the engine ${pText(Math.min(1, probability(i, k) * Math.exp(difference)))}`);
    lines.push(`log p: engine - trainer ${number(difference)}`);
  }
  if (known("entropy")) lines.push(`entropy ${(samples.entropy[i][k] / 1000).toFixed(3)} nats`);
  lines.push(`weight ${known("w") ? (samples.w[i][k] / 1000).toFixed(3) : "n/a"}`);
  if (known("update")) lines.push(`ratio in the update ${Math.exp(samples.update[i][k] / 1000).toFixed(3)}`);
  lines.push(`advantage ${signed(samples.advantage[i], 3)}`);
  const letter = known("why") ? samples.why[i][k] : null;
  if (letter === null) lines.push("policy gradient: n/a");
  else if (letter === "0") lines.push(`has a policy gradient${known("update") ? "" : " at ratio 1"}`);
  else lines.push(`no policy gradient: ${reasons[letter]}`);
  return lines;
}

const spoken = (text) => text.replace(/\n/g, " newline ").replace(/^ +$/, "space");

function legend(i, by) {
  const box = make("p", "legend");
  if (by) {
    const scale = make("span", `scale by-${by}`);
    const bounds = runs[samples.run[i]].bounds;
    const quantity = QUANTITIES[by];
    let ends = quantity ? quantity.ends : null;
    let remark = `weight ${runs[samples.run[i]].weighting}`;
    if (quantity && quantity.of(i, 0) === null) {
      [ends, remark] = [null, `this sample has no ${quantity.name}`];
    } else if (by === "w" && bounds !== null) {
      if (bounds[1] - bounds[0] > 1e-6) ends = [`w = ${bounds[0]}`, `w = ${bounds[1]}`];
      else remark = `every token has w = ${bounds[0]}`;
    }
    if (ends) {
      scale.append(make("span", "end", ends[0]));
      for (let b = 0; b < BINS; b++) scale.append(make("i", `t b${b}`));
      scale.append(make("span", "end", ends[1]));
    } else {
      scale.append(remark);
    }
    box.append(scale);
  }
  const marked = make("span");
  marked.append(make("span", "t z", "underlined"), " no policy gradient");
  box.append(marked);
  if (samples.between[i].length) {
    const masked = make("span");
    masked.append(make("span", "env", "grey"), " environment, masked");
    box.append(masked);
  }
  return box;
}

// One line of cells per quantity; a cell has the largest value of its tokens.
function strips(i) {
  const box = make("div", "strips");
  const count = samples.tokens[i].length;
  const cells = Math.min(STRIP_CELLS, count);
  for (const [by, { name, unit, of, tone }] of Object.entries(QUANTITIES)) {
    if (of(i, 0) === null) continue;
    const row = make("div", `strip by-${by}`);
    let top = 0;
    for (let cell = 0; cell < cells; cell++) {
      const first = Math.floor((cell * count) / cells);
      let largest = first;
      for (let k = first; k < Math.floor(((cell + 1) * count) / cells); k++) {
        if (of(i, k) > of(i, largest)) largest = k;
      }
      if (of(i, largest) > of(i, top)) top = largest;
      const part = make("i", `t b${tone(of(i, largest))}`);
      part.dataset.k = largest;
      row.append(part);
    }
    const button = make("button", "", `${name}: largest ${number(Number(of(i, top).toPrecision(3)))}${unit || ""}, token ${top + 1}`);
    button.type = "button";
    button.dataset.k = top;
    box.append(button, row);
  }
  return box;
}
