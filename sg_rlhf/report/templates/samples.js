// The sample browser.
const PAGE = 100;
let runs, texts, pieces, reasons, samples, total, searchable;
let keys = []; // of each sample, the same in the next version of the page: run, rollout, place in it
let matching = [];
let place = 0; // in `matching`

function readSamples() {
  ({ runs, texts, pieces, reasons, samples } = JSON.parse($("data").textContent));
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
    if (hasNoSpread(i)) item.append(make("span", "flat", "no spread in its group"));
    item.setAttribute("aria-label",
      `rollout ${samples.step[i]}, reward ${signed(samples.reward[i], 2)}, ${correctText(samples.correct[i])}`
      + (hasNoSpread(i) ? ", no spread in its group" : ""));
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
let drawn = ""; // what the article shows, so that a new version of the page leaves it alone

function fact(list, name, value) {
  const row = make("div");
  row.append(make("dt", "", name), make("dd", "", value));
  list.append(row);
}

function facts(i) {
  const list = make("dl");
  if (runs.length > 1) fact(list, "run", runs[samples.run[i]].name);
  fact(list, "rollout", String(samples.step[i]));
  fact(list, "reward", signed(samples.reward[i], 3));
  fact(list, "answer", correctText(samples.correct[i]));
  fact(list, "advantage", signed(samples.advantage[i], 3));
  fact(list, "tokens", String(samples.tokens[i].length));
  if (samples.why[i] !== null) fact(list, "without policy gradient", countReasons(samples.why[i]));
  fact(list, "label", texts[samples.label[i]]);
  return list;
}

function countReasons(why) {
  const counts = {};
  for (const letter of why) if (letter !== "0") counts[letter] = (counts[letter] || 0) + 1;
  const found = Object.entries(counts).map(([letter, n]) => `${n} ${reasons[letter].split(":")[0]}`);
  return found.length ? `${found.join(", ")}` : "none";
}

function tokenSpans(i, by) {
  const parts = document.createDocumentFragment();
  const between = new Map(samples.between[i]);
  const environment = (k) => {
    if (between.has(k)) parts.append(make("span", "env", texts[between.get(k)].replace(/\n/g, "↵\n")));
  };
  samples.tokens[i].forEach((t, k) => {
    environment(k);
    const name = `t b${bin(i, k, by)}${isZeroed(i, k) ? " z" : ""}`;
    const part = make("span", name, pieces[t].replace(/\n/g, "↵\n"));
    part.dataset.k = k;
    parts.append(part);
  });
  environment(samples.tokens[i].length);
  return parts;
}

function drawSample() {
  const article = $("sample");
  if (!matching.length) {
    hideTip();
    drawn = "";
    article.replaceChildren(make("p", "missing", "No sample matches these filters."));
    return;
  }
  const i = matching[place];
  const by = $("f-color").value;
  const title = `Sample ${place + 1} of ${matching.length}`;
  const now = JSON.stringify([keys[i], by, mates(i).map(
    (m) => [shownText(m), ...["reward", "advantage", "logp", "why", "rewards"].map((name) => samples[name][m])])]);
  if (now === drawn && article.firstElementChild) {
    article.firstElementChild.textContent = title;
    return;
  }
  drawn = now;
  hideTip();
  const promptText = texts[samples.prompt[i]];
  const prompt = make("details");
  prompt.open = promptText.length < 400;
  prompt.append(make("summary", "", `Prompt (${promptText.length} characters)`), make("pre", "", promptText));
  const blocks = [make("h3", "", title), facts(i), prompt];
  if (samples.tokens[i].length) {
    const tokens = make("div", `tokens by-${by}`);
    tokens.id = "tokens";
    tokens.setAttribute("role", "group");
    tokens.setAttribute("aria-label", "Response by tokens; arrow keys go from token to token");
    tokens.append(tokenSpans(i, by));
    tokens.querySelectorAll(".t").forEach((part, k) => { part.tabIndex = k ? -1 : 0; });
    blocks.push(strips(i), legend(i, by), tokens);
  } else {
    blocks.push(make("p", "missing", "This sample has no tokens with probabilities."));
  }
  if (samples.text[i] !== null) {
    const whole = make("details");
    whole.open = !samples.tokens[i].length;
    whole.append(
      make("summary", "", "As one text, with what an environment wrote between the model's parts, if one did"),
      make("pre", "", texts[samples.text[i]]),
    );
    blocks.push(whole);
  }
  const group = groupOf(i, by);
  if (group) blocks.push(group);
  article.replaceChildren(...blocks);
}

// -- tips of the tokens --------------------------------------------------------------------------
function describeToken(part) {
  if (part.matches(".env")) {
    showTip(part, ["written by the environment", "no policy gradient: mask"]);
    return;
  }
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
  const tokenAt = (event) => event.target.closest("#tokens .t, #tokens .env");
  article.addEventListener("mouseover", (event) => {
    if (restsAtFocus(event)) return;
    const part = tokenAt(event);
    if (part) describeToken(part); else hideTip();
  });
  article.addEventListener("click", (event) => {
    const part = event.target.closest(".strips [data-k]");
    if (part) focusToken(Number(part.dataset.k));
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
