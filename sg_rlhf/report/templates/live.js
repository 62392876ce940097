// The page as `report --follow` serves it: told by server-sent events, it fetches its next version
// and takes over what differs. Filters, the selected sample, open details and the focus stay.
function exchange(id, next) {
  const [old, fresh] = [$(id), next.getElementById(id)];
  const before = old.querySelectorAll("details");
  fresh.querySelectorAll("details").forEach((details, index) => {
    if (before[index]) details.open = before[index].open;
  });
  if (old.isEqualNode(fresh)) return;
  const focused = old.contains(document.activeElement) ? document.activeElement.id : "";
  if (described && old.contains(described)) hideTip();
  old.replaceWith(document.adoptNode(fresh));
  if (focused && $(focused)) $(focused).focus({ preventScroll: true });
}

async function update() {
  const answer = await fetch("./", { cache: "no-store" });
  const next = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const id of ["runs", "settings", "about"]) exchange(id, next);
  const selected = keys[matching[place]];
  $("data").textContent = next.getElementById("data").textContent;
  exchangeFigures(next);
  if ($("list") && next.getElementById("list")) {
    exchange("samples-note", next);
    readSamples();
    filter(selected);
  } else {
    exchange("samples", next);
    startSamples();
  }
  root.dataset.live = next.documentElement.dataset.live;
}

function listen() {
  const source = new EventSource("events");
  let busy = false;
  source.addEventListener("message", async (event) => {
    const { version, state } = JSON.parse(event.data);
    $("live").textContent = state;
    if (busy || version === root.dataset.live) return;
    busy = true;
    try { await update(); } catch { /* the server ended meanwhile, which the next line says */ }
    busy = false;
  });
  source.addEventListener("error", () => {
    $("live").textContent = "Not connected: sg-rlhf report --follow has ended, or cannot be reached.";
  });
}
if (root.dataset.live) listen();
