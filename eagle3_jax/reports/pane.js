// One round in words, its tree, the chosen node, and all nodes as a table.

function sentence(side) {
  const round = roundAt(side, at.rounds[side]);
  const own = names.full(round.bonus);
  const last = round.accepted[round.accepted.length - 1];
  if (round.reason === "plain") return `Plain decoding: the target wrote ${own}.`;
  const below = round.tokens.filter((_, node) => round.parents[node] === last).map(names.full);
  const why = {
    full: `Every level was accepted; the target adds ${own}.`,
    refused: `The path stops after node ${last}: the target chose ${own}, drafted there: ${below.slice(0, 4).join(", ")}${below.length > 4 ? ` and ${below.length - 4} more` : ""}.`,
    bare: `The path stops after node ${last}: no node was drafted below it; the target adds ${own}.`,
    unknown: `The path stops after node ${last}: the target's token there is not recorded.`,
    broken: `The path stops after node ${last} although the target's token ${own} was drafted there: greedy acceptance would take it.`,
  }[round.reason];
  let text = `Accept length ${round.accepted.length}. ${why}`;
  if (round.written < round.accepted.length) {
    const finish = sequence(side).finish;
    const by = { stop: "a stop token", length: "max_new_tokens" }[finish] ?? "the end";
    text += ` ${round.written} of the ${round.accepted.length} tokens were written: ${by} cut the rest.`;
  }
  return text;
}

function differingNode(side) {
  const pair = known.pairs[at.pair];
  for (const found of [pair.rounds, pair.text]) {
    const place = found && found[side ? "b" : "a"];
    if (place && place.round === at.rounds[side] && place.node !== null) return place.node;
  }
  return null;
}

function pane(side, node) {
  const index = at.rounds[side];
  const round = roundAt(side, index);
  const facts = element("dl", { class: "facts", "aria-label": "The chosen node" });
  const choose = (chosen, tree) => facts.replaceChildren(...nodeFacts(side, round, chosen, tree));
  const label = `${many ? `${known.names[side]}: ` : ""}round ${index}, ${round.tokens.length} nodes`;
  const apart = differingNode(side);
  const drawn = drawTree(round, names, { label, apart, chosen: node, choose });
  const title = element("h4", {});
  if (many) title.append(element("b", { class: `s${side}` }, known.names[side]), ` round ${index}, `);
  title.append(`from position ${round.length}, ${round.tokens.length} nodes`);
  const table = element("details", {}, element("summary", {}, "All nodes as a table"));
  table.addEventListener("toggle", () => {
    if (table.open && table.children.length < 2) table.append(nodeTable(side, round, drawn.tree));
  });
  const parts = [
    title, element("p", { class: "why" }, sentence(side)), element("div", { class: "tree-box" }, drawn.picture),
    element("p", { class: "key" }, "✓ accepted, p draft probability, s score along the path, → the target's own next token"),
    facts, table,
  ];
  return element("div", { class: "pane", "data-side": side }, ...parts);
}

function position(round, tree, node) {
  return round.positions ? round.positions[node] : round.length + tree.depth[node];
}

function nodeFacts(side, round, node, tree) {
  const own = node === tree.count;
  const id = own ? round.bonus : round.tokens[node];
  const fate = own ? "the target's own" : node === 0 ? "root: the pending token" : tree.taken.has(node) ? "accepted" : "not accepted";
  const list = [
    ["node", own ? "none" : node],
    ["token", names.short(id)],
    ["id", id < 0 ? "not recorded" : id],
    ["fate", fate],
    ["parent", node === 0 ? "none" : tree.parents[node]],
    ["depth", tree.depth[node]],
    ["position", own ? round.length + tree.depth[node] : position(round, tree, node)],
  ];
  if (!own && node) {
    if (round.probs) list.push(["draft probability", shown(round.probs[node])]);
    list.push(["score", round.scores ? shown(round.scores[node]) : known.traces[side].chain ? "a chain has none" : "not recorded"]);
  }
  if (!own && round.predicted) list.push(["target's next token", names.full(round.predicted[node])]);
  if (!own && round.margins) list.push(["target's margin", shown(round.margins[node])]);
  return list.map(([key, value]) => element("div", {}, element("dt", {}, key), element("dd", {}, String(value))));
}

function nodeTable(side, round, tree) {
  const heads = ["node", "token", "id", "parent", "depth", "position", "draft prob", "score", "target's next", "margin", "accepted"];
  const body = element("tbody");
  for (let node = 0; node < tree.count; node++) {
    const cell = (list) => (list ? shown(list[node]) : "–");
    const values = [
      names.short(round.tokens[node]), round.tokens[node], round.parents[node] < 0 ? "–" : round.parents[node],
      tree.depth[node], position(round, tree, node), cell(round.probs), cell(round.scores),
      round.predicted ? names.short(round.predicted[node]) : "–", cell(round.margins), tree.taken.has(node) ? "✓" : "",
    ];
    body.append(element("tr", {}, element("th", { scope: "row" }, String(node)), ...values.map((v) => element("td", {}, String(v)))));
  }
  const head = element("thead", {}, element("tr", {}, ...heads.map((h) => element("th", { scope: "col" }, h))));
  return element("div", { class: "nodes", tabindex: 0, role: "region", "aria-label": `Nodes${many ? ` of ${known.names[side]}` : ""}` }, element("table", {}, head, body));
}

/** Scrolls a tree so that its chosen node is in sight. */
function reveal(box) {
  const node = box.querySelector('[aria-selected="true"]').getBoundingClientRect();
  const frame = box.getBoundingClientRect();
  if (node.right > frame.right) box.scrollLeft += node.right - frame.right + 12;
  if (node.bottom > frame.bottom) box.scrollTop += node.bottom - frame.top - frame.height / 2;
}
