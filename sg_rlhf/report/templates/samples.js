// The sample browser.
const PAGE = 100;
const BINS = 10;
let runs, texts, pieces, samples, total, searchable;
let keys = []; // of each sample, the same in the next version of the page: run, rollout, place in it
let matching = [];
let place = 0; // in `matching`

function readSamples() {
  ({ runs, texts, pieces, samples } = JSON.parse($("data").textContent));
  total = samples.step.length;
  searchable = new Array(total);
  const seen = {};
  keys = samples.step.map((step, i) => {
    const rollout = `${samples.run[i]} ${step}`;
    seen[rollout] = (seen[rollout] || 0) + 1;
    return `${rollout} ${seen[rollout]}`;
  });
}

const response = (i) => samples.tokens[i].map((t) => pieces[t]).join("");
const shownText = (i) => (samples.text[i] === null ? response(i) : texts[samples.text[i]]);
const correctText = (x) => (x === null ? "not graded" : x === 1 ? "correct" : x === 0 ? "wrong" : `${x} correct`);

function textOf(i) {
  if (searchable[i] === undefined) {
    searchable[i] = `${texts[samples.prompt[i]]}\n${texts[samples.label[i]]}\n${shownText(i)}`.toLowerCase();
  }
  return searchable[i];
}

const bound = (id, fallback) => {
  const value = $(id).value;
  return value === "" || Number.isNaN(Number(value)) ? fallback : Number(value);
};

function filter(keep = keys[matching[place]]) {
  const [stepMin, stepMax] = [bound("f-step-min", -Infinity), bound("f-step-max", Infinity)];
  const [rewardMin, rewardMax] = [bound("f-reward-min", null), bound("f-reward-max", null)];
  const run = $("f-run").value;
  const correct = $("f-correct").value;
  const sign = $("f-advantage").value;
  const words = $("f-text").value.toLowerCase();
  matching = [];
  for (let i = 0; i < total; i++) {
    const reward = samples.reward[i];
    if (run !== "" && samples.run[i] !== Number(run)) continue;
    if (samples.step[i] < stepMin || samples.step[i] > stepMax) continue;
    if (rewardMin !== null && (reward === null || reward < rewardMin)) continue;
    if (rewardMax !== null && (reward === null || reward > rewardMax)) continue;
    if (correct === "1" && samples.correct[i] !== 1) continue;
    if (correct === "0" && (samples.correct[i] === null || samples.correct[i] === 1)) continue;
    if (sign !== "" && (samples.advantage[i] === null || Math.sign(samples.advantage[i]) !== Number(sign))) continue;
    if (words && !textOf(i).includes(words)) continue;
    matching.push(i);
  }
  place = Math.max(0, matching.findIndex((i) => keys[i] === keep));
  $("count").textContent = `${matching.length} of ${total} samples`;
  drawList();
  drawSample();
}

function drawList() {
  const list = $("list");
  const first = Math.floor(place / PAGE) * PAGE;
  const items = matching.slice(first, first + PAGE).map((i, offset) => {
    const item = make("li");
    item.id = `option-${first + offset}`;
    item.setAttribute("role", "option");
    item.dataset.place = first + offset;
    const mark = samples.correct[i] === 1 ? "✓" : samples.correct[i] === null ? "·" : "✗";
    item.append(
      make("span", "", `${mark} rollout ${samples.step[i]}, reward ${signed(samples.reward[i], 2)}`),
      make("span", "start", (runs.length > 1 ? `${runs[samples.run[i]].name}: ` : "") + shownText(i).slice(0, 80)),
    );
    item.setAttribute("aria-label",
      `rollout ${samples.step[i]}, reward ${signed(samples.reward[i], 2)}, ${correctText(samples.correct[i])}`);
    return item;
  });
  list.replaceChildren(...items);
  $("pages").hidden = matching.length <= PAGE;
  $("page-now").textContent = `${first + 1} to ${Math.min(first + PAGE, matching.length)}`;
  $("page-back").disabled = first === 0;
  $("page-on").disabled = first + PAGE >= matching.length;
  markSelected();
}

function markSelected() {
  const list = $("list");
  for (const item of list.children) {
    item.setAttribute("aria-selected", String(Number(item.dataset.place) === place));
  }
  const selected = $(`option-${place}`);
  if (selected) {
    list.setAttribute("aria-activedescendant", selected.id);
    const top = selected.offsetTop - list.offsetTop;
    if (top < list.scrollTop) list.scrollTop = top;
    const below = top + selected.offsetHeight - list.clientHeight;
    if (below > list.scrollTop) list.scrollTop = below;
  } else {
    list.removeAttribute("aria-activedescendant");
  }
}

function select(next) {
  if (!matching.length) return;
  const before = Math.floor(place / PAGE);
  place = Math.max(0, Math.min(matching.length - 1, next));
  if (Math.floor(place / PAGE) === before) markSelected(); else drawList();
  drawSample();
}

// -- one sample ----------------------------------------------------------------------------------
const probability = (i, k) => Math.exp(-samples.logp[i][k] / 1000);
const isZeroed = (i, k) => samples.zeroed[i] !== null && samples.zeroed[i][k] === "1";

function bin(i, k, by) {
  if (by === "p") return BINS - 1 - Math.min(BINS - 1, Math.floor(probability(i, k) * BINS));
  if (by !== "w" || samples.w[i] === null) return 0;
  const [low, high] = runs[samples.run[i]].bounds;
  if (high - low < 1e-6) return 0;
  const share = (samples.w[i][k] / 1000 - low) / (high - low);
  return Math.max(0, Math.min(BINS - 1, Math.floor(share * BINS)));
}

function pText(p) {
  if (p >= 0.9995) return p === 1 ? "1.000" : "> 0.999";
  return p < 0.001 ? p.toExponential(1) : p.toFixed(3);
}

function describe(i, k) {
  const weight = samples.w[i] === null ? "n/a" : (samples.w[i][k] / 1000).toFixed(3);
  const advantage = samples.advantage[i];
  let gradient = "has a policy gradient at ratio 1";
  if (samples.w[i] === null) gradient = "policy gradient at ratio 1: n/a";
  else if (advantage === 0) gradient = "no policy gradient: advantage 0";
  else if (isZeroed(i, k)) gradient = "zeroed: no policy gradient at ratio 1";
  return [`p ${pText(probability(i, k))}`, `weight ${weight}`, `advantage ${signed(advantage, 3)}`, gradient];
}

const spoken = (text) => text.replace(/\n/g, " newline ").replace(/^ +$/, "space");

function fact(list, name, value) {
  const row = make("div");
  row.append(make("dt", "", name), make("dd", "", value));
  list.append(row);
}

function legend(i, by) {
  const box = make("p", "legend");
  if (by) {
    const scale = make("span", `scale by-${by}`);
    const bounds = runs[samples.run[i]].bounds;
    const known = by === "p" || bounds !== null;
    const ends = by === "p" ? ["p = 1", "p = 0"] : known ? [`w = ${bounds[0]}`, `w = ${bounds[1]}`] : [];
    if (known && (by === "p" || bounds[1] - bounds[0] > 1e-6)) {
      scale.append(ends[0]);
      for (let b = 0; b < BINS; b++) scale.append(make("i", `t b${b}`));
      scale.append(ends[1]);
    } else {
      scale.append(known ? `every token has ${ends[0]}` : `weight ${runs[samples.run[i]].weighting}`);
    }
    box.append(scale);
  }
  const marked = make("span");
  marked.append(make("span", "t z", "underlined"), " no policy gradient at ratio 1");
  box.append(marked);
  return box;
}

function drawSample() {
  hideTip();
  const article = $("sample");
  if (!matching.length) {
    article.replaceChildren(make("p", "missing", "No sample matches these filters."));
    return;
  }
  const i = matching[place];
  const by = $("f-color").value;
  const facts = make("dl");
  if (runs.length > 1) fact(facts, "run", runs[samples.run[i]].name);
  fact(facts, "rollout", String(samples.step[i]));
  fact(facts, "reward", signed(samples.reward[i], 3));
  fact(facts, "answer", correctText(samples.correct[i]));
  fact(facts, "advantage", signed(samples.advantage[i], 3));
  fact(facts, "tokens", String(samples.tokens[i].length));
  if (samples.zeroed[i] !== null) {
    fact(facts, "zeroed at ratio 1", String([...samples.zeroed[i]].filter((c) => c === "1").length));
  }
  fact(facts, "label", texts[samples.label[i]]);

  const prompt = make("details");
  const promptText = texts[samples.prompt[i]];
  prompt.open = promptText.length < 400;
  prompt.append(make("summary", "", `Prompt (${promptText.length} characters)`), make("pre", "", promptText));

  const tokens = make("div", `tokens by-${by}`);
  tokens.id = "tokens";
  tokens.setAttribute("role", "group");
  tokens.setAttribute("aria-label", "Response by tokens; arrow keys go from token to token");
  const parts = document.createDocumentFragment();
  samples.tokens[i].forEach((t, k) => {
    const part = make("span", `t b${bin(i, k, by)}${isZeroed(i, k) ? " z" : ""}`, pieces[t].replace(/\n/g, "↵\n"));
    part.tabIndex = k ? -1 : 0;
    part.dataset.k = k;
    parts.append(part);
  });
  tokens.append(parts);
  const blocks = [make("h3", "", `Sample ${place + 1} of ${matching.length}`), facts, prompt];
  if (samples.tokens[i].length) blocks.push(legend(i, by), tokens);
  else blocks.push(make("p", "missing", "This sample has no tokens with probabilities."));
  if (samples.text[i] !== null) {
    const whole = make("details");
    whole.open = !samples.tokens[i].length;
    whole.append(
      make("summary", "", "As one text, with what an environment wrote between the model's parts, if one did"),
      make("pre", "", texts[samples.text[i]]),
    );
    blocks.push(whole);
  }
  article.replaceChildren(...blocks);
}

// -- tips of the tokens --------------------------------------------------------------------------
function describeToken(part) {
  const i = matching[place];
  const k = Number(part.dataset.k);
  part.setAttribute("role", "img");
  part.setAttribute("aria-label", `token ${k + 1}: ${spoken(pieces[samples.tokens[i][k]])}`);
  showTip(part, describe(i, k));
}

// -- start ---------------------------------------------------------------------------------------
document.addEventListener("keydown", (event) => {
  if (!$("list") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, textarea")) return;
  if (event.key === "j") select(place + 1);
  else if (event.key === "k") select(place - 1);
  else if (event.key === "/") { event.preventDefault(); $("f-text").focus(); }
});

function listenToTokens() {
  const article = $("sample");
  const tokenAt = (event) => event.target.closest("#tokens .t");
  article.addEventListener("mouseover", (event) => {
    if (restsAtFocus(event)) return;
    const part = tokenAt(event);
    if (part) describeToken(part); else hideTip();
  });
  article.addEventListener("mouseleave", (event) => {
    if (!restsAtFocus(event)) hideTip();
  });
  article.addEventListener("focusin", (event) => {
    const part = tokenAt(event);
    if (part) describeToken(part);
  });
  article.addEventListener("focusout", hideTip);
  article.addEventListener("keydown", (event) => {
    const part = tokenAt(event);
    if (!part) return;
    const k = Number(part.dataset.k);
    const next = { ArrowRight: k + 1, ArrowLeft: k - 1, ArrowDown: k + 10, ArrowUp: k - 10,
      Home: 0, End: Infinity }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    focusToken(next);
  });
}

function focusToken(k) {
  const parts = [...$("tokens").querySelectorAll(".t")];
  for (const part of parts) part.tabIndex = -1;
  const target = parts[Math.max(0, Math.min(parts.length - 1, k))];
  target.tabIndex = 0;
  target.focus();
}

function listenToList() {
  $("list").addEventListener("keydown", (event) => {
    const next = { ArrowDown: place + 1, ArrowUp: place - 1, PageDown: place + 10, PageUp: place - 10,
      Home: 0, End: matching.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    select(next);
  });
  $("list").addEventListener("click", (event) => {
    const item = event.target.closest("li");
    if (item) select(Number(item.dataset.place));
  });
  $("page-back").addEventListener("click", () => select((Math.floor(place / PAGE) - 1) * PAGE));
  $("page-on").addEventListener("click", () => select((Math.floor(place / PAGE) + 1) * PAGE));
}

function startSamples() {
  if (!$("list")) return;
  readSamples();
  runs.forEach((run, index) => {
    const option = make("option", "", run.name);
    option.value = index;
    $("f-run").append(option);
  });
  document.querySelector(".run-choice").hidden = runs.length < 2;
  const form = $("filters");
  form.addEventListener("input", (event) => (event.target.id === "f-color" ? drawSample() : filter()));
  form.addEventListener("reset", () => setTimeout(() => filter(), 0));
  form.addEventListener("submit", (event) => event.preventDefault());
  listenToTokens();
  listenToList();
  filter();
}
startSamples();
