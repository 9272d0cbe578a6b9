// The page's state: which prompt, which trace leads, which round of each.

const known = JSON.parse(document.getElementById("data").textContent);
const viewer = document.getElementById("viewer");
const many = known.traces.length > 1;
const at = { pair: 0, side: 0, rounds: [0, 0] };

const names = {
  short: (id) => (id < 0 ? "?" : known.labels[id] ?? `#${id}`),
  full: (id) => (id < 0 ? "not recorded" : id in known.labels ? `“${known.labels[id]}” (id ${id})` : `id ${id}`),
};

function roundAt(side, index) {
  const values = sequence(side).rounds[index];
  return Object.fromEntries(known.fields.map((name, i) => [name, values[i]]));
}

function sequence(side, pair = at.pair) {
  const index = known.pairs[pair].sequences[side];
  return index === null || index === undefined ? null : known.traces[side].sequences[index];
}

/** The round that wrote a token; the prefill's is shown with the first round. */
function roundOfToken(side, token) {
  const starts = sequence(side).starts;
  let low = 0;
  for (let high = starts.length; low < high; ) {
    const middle = (low + high) >> 1;
    if (starts[middle] <= token) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

const sides = () => known.traces.map((_, i) => i).filter((i) => sequence(i)?.rounds.length);
const sectionOf = (pair) => document.getElementById(`p${pair}`);
const textOf = (side) => sectionOf(at.pair).querySelector(`.tokens[data-side="${side}"]`);

function showPair(pair, focus = false) {
  at.pair = pair;
  at.rounds = [0, 0];
  known.pairs.forEach((_, i) => {
    sectionOf(i).hidden = i !== pair;
  });
  for (const link of document.querySelectorAll(".picker a")) {
    if (link.getAttribute("href") === `#p${pair}`) {
      link.setAttribute("aria-current", "true");
      link.scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
    } else link.removeAttribute("aria-current");
  }
  const list = sides();
  viewer.hidden = !list.length;
  if (!list.includes(at.side)) at.side = list[0] ?? 0;
  sectionOf(pair).querySelector(".slot").append(viewer);
  for (const box of sectionOf(pair).querySelectorAll(".tokens")) box.classList.add("ready");
  jumps();
  const first = known.pairs[pair].rounds ?? known.pairs[pair].text;
  markSplit();
  if (list.length) {
    strips();
    showRound(first ? (first[at.side ? "b" : "a"].round ?? 0) : 0, { quiet: true });
  }
  if (!focus) return;
  address();
  document.getElementById(`p${pair}-title`).focus({ preventScroll: true });
}

function showRound(index, { quiet = false, node = null } = {}) {
  const list = sides();
  if (!list.length) return;
  const last = sequence(at.side).rounds.length - 1;
  at.rounds[at.side] = Math.min(Math.max(index, 0), last);
  const token = sequence(at.side).starts[at.rounds[at.side]];
  for (const side of list) if (side !== at.side) at.rounds[side] = roundOfToken(side, token);
  const number = document.getElementById("round");
  number.value = at.rounds[at.side];
  number.max = last;
  document.getElementById("of").textContent = `of 0–${last}${many ? `, ${known.names[at.side]} leads` : ""}`;
  for (const button of viewer.querySelectorAll("[data-go]")) {
    const back = ["first", "previous"].includes(button.dataset.go);
    button.setAttribute("aria-disabled", at.rounds[at.side] === (back ? 0 : last));
  }
  const inside = document.activeElement?.closest(".tree-box") !== null;
  viewer.querySelector(".panes").replaceChildren(...list.map((side) => pane(side, side === at.side ? node : null)));
  for (const side of list) {
    markTokens(side);
    moveStrip(side);
    reveal(viewer.querySelector(`.pane[data-side="${side}"] .tree-box`));
  }
  if (inside) viewer.querySelector(`.pane[data-side="${at.side}"] .node[tabindex="0"]`).focus();
  const said = `Round ${at.rounds[at.side]}. ${sentence(at.side)}`;
  document.getElementById("said").textContent = quiet ? "" : said;
  if (!quiet) address();
}

function address() {
  history.replaceState(null, "", `#p${at.pair}r${at.rounds[at.side]}${at.side ? "b" : ""}`);
}

function markTokens(side) {
  const box = textOf(side);
  for (const old of box.querySelectorAll(".now")) old.classList.remove("now");
  const begin = sequence(side).starts[at.rounds[side]];
  const count = roundAt(side, at.rounds[side]).written;
  for (let i = begin; i < begin + count; i++) box.children[i].classList.add("now");
  const first = box.children[begin];
  if (!first) return;
  const top = first.offsetTop - box.offsetTop;
  if (top < box.scrollTop || top > box.scrollTop + box.clientHeight - 40) box.scrollTop = top - box.clientHeight / 3;
}

function markSplit() {
  const found = known.pairs[at.pair].text;
  for (const side of found ? [0, 1] : []) {
    const token = found[side ? "b" : "a"].token;
    if (token !== null) textOf(side)?.children[token].classList.add("split");
  }
}

function strips() {
  const holder = viewer.querySelector(".strips");
  holder.replaceChildren();
  for (const side of sides()) {
    const rounds = sequence(side).rounds;
    const lengths = rounds.map((values) => values[known.fields.indexOf("accepted")].length);
    const most = Math.max(known.traces[side].steps + 1, ...lengths);
    const label = `${many ? `${known.names[side]}: ` : ""}accept length of each round, 1 to ${most}`;
    const strip = svg("svg", { class: `strip s${side}`, viewBox: `0 0 ${lengths.length} ${most}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
    strip.style.maxWidth = `${lengths.length * 26}px`;
    const gap = lengths.length > 300 ? 0 : 0.15;
    strip.append(svg("title", {}, `${label}; a click goes to the round`));
    strip.append(svg("path", { d: lengths.map((k, i) => `M${i + gap / 2},${most}v${-k}h${1 - gap}v${k}z`).join("") }));
    strip.append(svg("rect", { y: 0, width: Math.max(1, lengths.length / 400), height: most, opacity: 0.45 }));
    strip.addEventListener("click", (event) => {
      const frame = strip.getBoundingClientRect();
      at.side = side;
      showRound(Math.floor(((event.clientX - frame.left) / frame.width) * lengths.length));
    });
    holder.append(strip);
  }
}

function moveStrip(side) {
  viewer.querySelector(`.strip.s${side} rect`).setAttribute("x", at.rounds[side]);
}

function jumps() {
  const pair = known.pairs[at.pair];
  const found = [["rounds", "First different round"], ["text", "First different token"]];
  viewer.querySelector(".jumps").replaceChildren(
    ...found.filter(([key]) => pair[key] && !(key === "rounds" && pair[key].kind === "prefill")).map(([key, words]) => {
      const button = element("button", { type: "button", "data-jump": key }, words);
      button.addEventListener("click", () => jump(key));
      return button;
    }),
  );
}

function jump(key) {
  const found = known.pairs[at.pair][key];
  if (!found || !sides().length) return;
  const place = () => found[at.side ? "b" : "a"];
  if (place().round === null && found[at.side ? "a" : "b"].round !== null) at.side = 1 - at.side;
  showRound(place().round ?? 0, { node: place().round === null ? null : place().node });
  document.getElementById("said").textContent = `${known.kinds[found.kind]}. ${document.getElementById("said").textContent}`;
  viewer.scrollIntoView({ block: "nearest" });
}

function go(where) {
  const now = at.rounds[at.side];
  showRound({ first: 0, previous: now - 1, next: now + 1, last: Infinity }[where]);
}

function theme(next) {
  const root = document.documentElement;
  if (next === "auto") root.removeAttribute("data-theme");
  else root.setAttribute("data-theme", next);
  document.getElementById("theme").textContent = `Theme: ${next}`;
  try {
    localStorage.setItem("eagle3-theme", next);
  } catch {
    return; // a file opened without storage keeps no theme
  }
}

function nextTheme() {
  const all = ["auto", "light", "dark"];
  const now = document.documentElement.dataset.theme ?? "auto";
  theme(all[(all.indexOf(now) + 1) % all.length]);
}

function key(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest("input, select, textarea")) return;
  const plain = { ArrowLeft: () => go("previous"), ArrowRight: () => go("next"), Home: () => go("first"), End: () => go("last"), Escape: () => event.target.closest(".node") && document.getElementById("round").focus() };
  const letters = {
    p: () => go("previous"), n: () => go("next"), t: nextTheme, "?": () => document.getElementById("help").showModal(),
    "[": () => at.pair > 0 && showPair(at.pair - 1, true), "]": () => at.pair + 1 < known.pairs.length && showPair(at.pair + 1, true),
    d: () => viewer.querySelector(".jumps button")?.click(),
    s: () => { if (sides().length > 1) { at.side = 1 - at.side; showRound(at.rounds[at.side]); } },
  };
  const act = plain[event.key] ?? (document.getElementById("letters").checked ? letters[event.key] : undefined);
  if (!act || (event.shiftKey && event.key.length > 1)) return;
  event.preventDefault();
  act();
}

function fromAddress() {
  const found = /^#p(\d+)(?:r(\d+)(b?))?$/.exec(location.hash);
  const pair = found ? Number(found[1]) : 0;
  if (pair >= known.pairs.length) return showPair(0);
  if (found?.[3]) at.side = 1;
  showPair(pair);
  if (found) document.getElementById(`p${pair}-title`).scrollIntoView({ block: "start" });
  if (found?.[2] !== undefined) showRound(Number(found[2]));
}

for (const tools of document.querySelectorAll(".tools")) tools.hidden = false;
for (const only of document.querySelectorAll(".both")) only.hidden = !many;
document.addEventListener("keydown", key);
document.getElementById("theme").addEventListener("click", nextTheme);
document.getElementById("keys").addEventListener("click", () => document.getElementById("help").showModal());
document.getElementById("round").addEventListener("change", (event) => showRound(Number(event.target.value) || 0));
for (const button of viewer.querySelectorAll("[data-go]")) button.addEventListener("click", () => go(button.dataset.go));
document.getElementById("main").addEventListener("click", (event) => {
  const token = event.target.closest(".tokens.ready > span");
  if (!token || !sides().includes(Number(token.parentNode.dataset.side))) return;
  at.side = Number(token.parentNode.dataset.side);
  showRound(roundOfToken(at.side, [...token.parentNode.children].indexOf(token)));
});
addEventListener("hashchange", fromAddress);
try {
  theme(localStorage.getItem("eagle3-theme") ?? "auto");
} catch {
  theme("auto");
}
fromAddress();
