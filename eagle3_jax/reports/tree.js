"use strict";
// A round as an SVG tree: levels from left to right, the accepted path a straight line at the top.

const BOX = { width: 178, height: 42, right: 34, down: 12, margin: 10 };
const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes = {}, text = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const shown = (value) => (value === null || value === undefined ? "–" : String(value));

const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60]|\p{Extended_Pictographic}/u;

/** The text in at most `size` columns; East Asian characters take two. */
function cut(text, size) {
  const characters = Array.from(text);
  let columns = 0;
  const end = characters.findIndex((c) => (columns += WIDE.test(c) ? 2 : 1) > size);
  return end < 0 ? text : characters.slice(0, end).join("").slice(0, -1) + "…";
}

/** Children by node, accepted ones first; the target's own token is node `count`. */
function structure(round) {
  const count = round.tokens.length;
  const taken = new Set(round.accepted);
  const last = round.accepted[round.accepted.length - 1];
  const children = Array.from({ length: count + 1 }, () => []);
  const depth = [0];
  for (let node = 1; node < count; node++) {
    children[round.parents[node]].push(node);
    depth[node] = depth[round.parents[node]] + 1;
  }
  depth[count] = depth[last] + 1;
  for (const list of children) list.sort((a, b) => taken.has(b) - taken.has(a) || a - b);
  children[last].unshift(count);
  const parents = [...round.parents, last];
  return { count, taken, last, children, depth, parents };
}

/** Row of each node, and the nodes as one reads them. */
function layout(tree) {
  const row = [];
  const order = [];
  let next = 0;
  const stack = [0];
  while (stack.length) {
    const node = stack.pop();
    order.push(node);
    const parent = tree.parents[node];
    const first = node === 0 || tree.children[parent][0] === node;
    row[node] = first && node !== 0 ? row[parent] : next;
    next = Math.max(next, row[node] + 1);
    stack.push(...tree.children[node].slice().reverse());
  }
  return { row, order };
}

function describe(node, round, tree, names) {
  if (node === tree.count) {
    return `the target's own token ${names.full(round.bonus)}, depth ${tree.depth[node]}`;
  }
  const parts = [`node ${node}`, names.full(round.tokens[node]), `depth ${tree.depth[node]}`];
  if (node && round.probs) parts.push(`draft probability ${shown(round.probs[node])}`);
  if (node && round.scores) parts.push(`score ${shown(round.scores[node])}`);
  if (round.predicted) parts.push(`the target's next token ${names.full(round.predicted[node])}`);
  parts.push(node === 0 ? "root, pending" : tree.taken.has(node) ? "accepted" : "not accepted");
  return parts.join(", ");
}

/** Draws a round; `choose(node)` is called for a click or a key. Returns the svg element. */
function drawTree(round, names, { label, apart, chosen, choose }) {
  const tree = structure(round);
  const { row, order } = layout(tree);
  const x = (node) => BOX.margin + tree.depth[node] * (BOX.width + BOX.right);
  const y = (node) => BOX.margin + row[node] * (BOX.height + BOX.down);
  const width = Math.max(...order.map(x)) + BOX.width + BOX.margin;
  const height = Math.max(...order.map(y)) + BOX.height + BOX.margin;
  const picture = svg("svg", { width, height, role: "tree", "aria-label": label });
  for (const node of order) {
    if (node === 0) continue;
    const from = tree.parents[node];
    const [x1, y1] = [x(from) + BOX.width, y(from) + BOX.height / 2];
    const [x2, y2] = [x(node), y(node) + BOX.height / 2];
    const middle = (x1 + x2) / 2;
    const kind = node === tree.count ? " own" : tree.taken.has(node) ? " taken" : "";
    picture.append(svg("path", { class: `edge${kind}`, d: `M${x1},${y1}C${middle},${y1} ${middle},${y2} ${x2},${y2}` }));
  }
  for (const node of order) picture.append(box(node, round, tree, names, x(node), y(node), apart));
  const boxes = new Map([...picture.querySelectorAll(".node")].map((g) => [Number(g.dataset.node), g]));
  const pick = (node, focus) => {
    for (const [key, g] of boxes) {
      g.setAttribute("aria-selected", key === node);
      g.setAttribute("tabindex", key === node ? 0 : -1);
    }
    if (focus) boxes.get(node).focus();
    choose(node, tree);
  };
  picture.addEventListener("click", (event) => {
    const g = event.target.closest(".node");
    if (g) pick(Number(g.dataset.node), true);
  });
  picture.addEventListener("keydown", (event) => {
    const g = event.target.closest(".node");
    if (!g || event.ctrlKey || event.altKey || event.metaKey) return;
    const node = Number(g.dataset.node);
    const at = order.indexOf(node);
    const to = {
      ArrowDown: order[at + 1],
      ArrowUp: order[at - 1],
      ArrowLeft: node ? tree.parents[node] : undefined,
      ArrowRight: tree.children[node][0],
      Home: order[0],
      End: order[order.length - 1],
    };
    if (!(event.key in to)) return;
    event.preventDefault();
    event.stopPropagation();
    if (to[event.key] !== undefined) pick(to[event.key], true);
  });
  pick(chosen ?? apart ?? tree.count, false);
  return { picture, tree, order };
}

function box(node, round, tree, names, x, y, apart) {
  const own = node === tree.count;
  const taken = tree.taken.has(node);
  const depth = Math.min(tree.depth[node], 8);
  const kind = own ? " own" : taken ? ` taken t${depth}` : "";
  const group = svg("g", {
    class: `node${kind}${node === apart ? " apart" : ""}`,
    role: "treeitem",
    "aria-level": tree.depth[node] + 1,
    "aria-label": describe(node, round, tree, names),
    "data-node": node,
    transform: `translate(${x},${y})`,
  });
  group.append(svg("title", {}, describe(node, round, tree, names)));
  group.append(svg("rect", { class: "box", width: BOX.width, height: BOX.height, rx: own ? 20 : 6 }));
  group.append(svg("rect", { class: "ring", x: -3, y: -3, width: BOX.width + 6, height: BOX.height + 6, rx: own ? 22 : 8 }));
  const id = own ? round.bonus : round.tokens[node];
  const mark = taken && node ? "✓ " : "";
  const name = names.short(id);
  const corner = own ? "target" : `${mark}${node}`;
  group.append(svg("text", { "aria-hidden": true, class: "token", x: own ? 16 : 8, y: 17 }, cut(name, own ? 12 : 16)));
  group.append(svg("text", { "aria-hidden": true, class: "quiet", x: BOX.width - (own ? 16 : 8), y: 16, "text-anchor": "end" }, corner));
  const left = own ? `id ${id < 0 ? "unknown" : id}` : node === 0 ? "pending" : numbers(node, round);
  group.append(svg("text", { "aria-hidden": true, x: own ? 16 : 8, y: 34 }, left));
  if (!own && round.predicted) {
    const next = `→ ${cut(names.short(round.predicted[node]), node === 0 ? 14 : 9)}`;
    group.append(svg("text", { "aria-hidden": true, class: "quiet", x: BOX.width - 8, y: 34, "text-anchor": "end" }, next));
  }
  return group;
}

function numbers(node, round) {
  const two = (v) => (v === null ? "–" : v >= 0.995 ? "1.0" : v < 0.0005 ? "0" : v.toFixed(2).slice(1));
  const parts = [];
  if (round.probs) parts.push(`p${two(round.probs[node])}`);
  if (round.scores) parts.push(`s${two(round.scores[node])}`);
  return parts.join(" ");
}
