// The responses to one prompt in one rollout: their rewards, and those that the run kept, side by side.
let groupOpen = true;

// The kept responses to the sample's prompt, itself among them.
function mates(i) {
  const found = [];
  for (let m = i; m >= 0 && samples.step[m] === samples.step[i]; m--) if (sameGroup(m, i)) found.unshift(m);
  for (let m = i + 1; m < total && samples.step[m] === samples.step[i]; m++) if (sameGroup(m, i)) found.push(m);
  return found;
}
const sameGroup = (m, i) => samples.run[m] === samples.run[i] && samples.prompt[m] === samples.prompt[i];

// Of all responses to the prompt where the run logged them; else of the kept ones, if there are several.
function groupRewards(i) {
  if (samples.rewards[i] !== null) return samples.rewards[i].length > 1 ? samples.rewards[i] : null;
  const kept = mates(i).map((m) => samples.reward[m]).filter((reward) => reward !== null);
  return kept.length > 1 ? kept : null;
}

function hasNoSpread(i) {
  const rewards = samples.rewards[i];
  return rewards !== null && rewards.length > 1 && rewards.every((reward) => reward === rewards[0]);
}

function spread(i, rewards) {
  const counts = new Map();
  for (const reward of [...rewards].sort((a, b) => a - b)) counts.set(reward, (counts.get(reward) || 0) + 1);
  const bar = make("div", "spread");
  bar.setAttribute("role", "list");
  for (const [reward, count] of counts) {
    const own = Math.abs(reward - samples.reward[i]) < 1e-4;
    const part = make("span", own ? "own" : "", `${signed(reward, 2)}${count > 1 ? ` ×${count}` : ""}`);
    part.setAttribute("role", "listitem");
    part.style.flexGrow = count;
    bar.append(part);
  }
  return bar;
}

function groupOf(i, by) {
  const [rewards, kept] = [groupRewards(i), mates(i)];
  if (rewards === null && kept.length < 2) return null;
  const box = make("details", "group");
  const shown = document.querySelector("#sample .group");
  if (shown) groupOpen = shown.open;
  box.open = groupOpen;
  const known = samples.rewards[i] === null ? "kept responses" : "responses";
  box.append(make("summary", "", `Group: ${(rewards || kept).length} ${known} to this prompt`));
  if (rewards !== null) {
    const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
    const std = Math.sqrt(rewards.reduce((a, b) => a + (b - mean) ** 2, 0) / (rewards.length - 1));
    box.append(make("p", "note", `Reward mean ${signed(mean, 3)}, standard deviation ${std.toFixed(3)}.`), spread(i, rewards));
    if (std === 0) {
      box.append(make("p", "warning", "No spread: all rewards are equal, so this group has no advantage."));
    }
  }
  if (kept.length > 1) {
    const grid = make("div", "mates");
    for (const m of kept) grid.append(mate(m, m === i, by));
    box.append(grid);
  }
  return box;
}

function mate(m, isSelected, by) {
  const box = make("div", "mate");
  const name = `reward ${signed(samples.reward[m], 3)}, ${correctText(samples.correct[m])}, ${samples.tokens[m].length} tokens`;
  const index = matching.indexOf(m);
  const button = make("button", "", isSelected ? `${name} (this one)` : name);
  button.type = "button";
  button.disabled = isSelected || index < 0;
  button.addEventListener("click", () => { select(index); $("list").focus({ preventScroll: true }); });
  const text = make("div", `tokens by-${by}`);
  text.tabIndex = 0;
  text.setAttribute("role", "region");
  text.setAttribute("aria-label", `Response with ${name}`);
  if (samples.tokens[m].length) text.append(tokenSpans(m, by));
  else text.textContent = shownText(m);
  box.append(button, text);
  return box;
}
