// The drawn graph of a region: ops from top to bottom, streams side by side.

let drawn = []; // {node, shape}
let extent = { width: 1, height: 1 };

const drawGraph = () => {
  const side = state.stage === 0 ? "after" : state.side;
  const { nodes: sides, drawing } = layoutOf(state.stage, state.region);
  const nodes = sides[side];
  const byName = new Map(nodes.map((node) => [node.id, node]));
  const [laneLayer, ghosts, edges, boxes] = ["lanes", "ghosts", "edges", "nodes"].map((name) => svgElement("g", { class: name }));
  if (drawing.lanes.length > 1) laneLayer.append(...drawing.lanes.flatMap((band) => laneOf(band, drawing.height)));
  const keys = new Set(nodes.map((node) => node.key));
  for (const other of sides[side === "after" ? "before" : "after"]) if (!keys.has(other.key)) ghosts.append(ghost(other));
  drawn = nodes.map((node) => ({ node, shape: box(node, side) }));
  boxes.append(...drawn.map(({ shape }) => shape));
  for (const node of nodes) {
    for (const { from, kind } of edgesOf(node)) {
      const above = byName.get(from);
      const across = kind === "data" && above.stream !== node.stream;
      edges.append(edge(drawing, above, node, across ? "across" : kind));
    }
  }
  extent = { width: Math.max(drawing.width, 1), height: Math.max(drawing.height, 1) };
  const label = `${state.region} ${side} ${STAGES[state.stage].name}: ${nodes.length} nodes`;
  byId("canvas").replaceChildren(svgElement("g", { id: "world" }, laneLayer, ghosts, edges, boxes));
  byId("canvas").setAttribute("aria-label", label);
  byId("graph-legend").replaceChildren(...legend(side, ghosts.children.length));
  drawMap();
  markGraph();
  moveCamera();
};

const laneOf = ({ lane, x, width }, height) => {
  const label = svgElement("text", { class: "lane-name", x: x - 4, y: -18 });
  label.textContent = `stream ${lane}`;
  return [svgElement("rect", { class: "lane", x: x - 16, y: -40, width: width + 32, height: height + 56, rx: 8 }), label];
};

const ghost = ({ x, y, width, height }) => svgElement("rect", { class: "ghost", x, y, width, height, rx: 6 });

const box = (node, side) => {
  const { line } = node;
  const change = changeOf(state.stage, state.region);
  const fresh = change ? (side === "before" ? change.removed : change.made) : new Set();
  const changed = line.n.some((name) => fresh.has(name)) ? (side === "before" ? "gone" : "new") : "";
  const heat = badgeOf(line, stageOf(side), regionOf(side));
  const group = svgElement("g", {
    class: ["node", changed, node.input ? "input" : "", line.k === "return" ? "result" : "",
      line.x ? "meets" : "", heat ? (heat.hue === undefined ? "hot" : "tinted") : ""].filter(Boolean).join(" "),
    style: heat ? `--heat:${heat.heat};--hue:${heat.hue ?? 10}` : "",
    transform: `translate(${node.x},${node.y})`,
    "data-name": node.id,
    role: "button",
    tabindex: -1,
    "aria-label": [node.text.map((row) => row.text).join(" "), heat && heat.text, line.x,
      { gone: "taken out", new: "made here" }[changed]].filter(Boolean).join(", "),
  }, svgElement("rect", { width: node.width, height: node.height, rx: 6 }));
  node.text.forEach((row, index) => {
    const text = svgElement("text", { x: TEXT.pad, y: TEXT.pad + 7 + index * TEXT.line, class: row.name });
    text.textContent = row.text;
    if (row.name === "op" && line.k.startsWith("dsa.")) text.classList.add("ours");
    group.append(text);
  });
  if (heat) {
    const text = svgElement("text", { x: node.width - 8, y: -4, class: "heat", "text-anchor": "end" });
    text.textContent = heat.text;
    group.append(text);
  }
  const hover = svgElement("title");
  hover.textContent = [shortCode(line.c), line.t, line.x, line.m].filter(Boolean).join("\n");
  group.append(hover);
  return group;
};

const edge = (drawing, from, to, kind) => svgElement("path", {
  class: `edge ${kind}`,
  d: curve(drawing.route(from.key, to.key)),
  "data-from": from.id,
  "data-to": to.id,
});

// Straight down through a rank, bent between two.
const curve = ([first, ...points]) => {
  let path = `M${first.x},${first.y}`;
  let at = first;
  for (const point of points) {
    const middle = (at.y + point.y) / 2;
    path += point.x === at.x ? `V${point.y}` : `C${at.x},${middle} ${point.x},${middle} ${point.x},${point.y}`;
    at = point;
  }
  return path;
};

const legend = (side, ghosts) => [
  side === "before" ? element("i", { class: "gone" }, "taken out") : element("i", { class: "new" }, "made here"),
  ghosts ? element("i", { class: "ghost" }, side === "before" ? "place of what is made" : "place of what was taken out") : null,
  byId("canvas").querySelector(".edge.cache") ? element("i", { class: "cache" }, "through a cache") : null,
  byId("canvas").querySelector(".node.meets") ? element("i", { class: "meets" }, "meets other ranks") : null,
  byId("canvas").querySelector(".lane") ? element("i", { class: "wait" }, "waits for another stream") : null,
].filter(Boolean);

const markGraph = () => {
  const side = state.stage === 0 ? "after" : state.side;
  const chosen = selection();
  const focus = drawn.find(({ node }) => node.line.n.includes(state.node));
  for (const each of drawn) {
    each.shape.classList.toggle("chosen", each.node.line.n.some((name) => chosen[side].has(name)));
    each.shape.classList.toggle("focus", each === focus);
    each.shape.setAttribute("aria-pressed", each === focus);
    // one node can be reached by Tab; arrows lead to the others
    each.shape.setAttribute("tabindex", each === (focus || drawn[0]) ? 0 : -1);
  }
  for (const path of byId("canvas").querySelectorAll(".edge")) {
    const near = focus && (path.dataset.from === focus.node.id || path.dataset.to === focus.node.id);
    path.classList.toggle("near", Boolean(near));
  }
};

// From the selected node along an edge, or to the next node of its rank.
const stepGraph = (key) => {
  const focus = drawn.find(({ node }) => node.line.n.includes(state.node)) || drawn[0];
  if (!focus) return;
  const { node } = focus;
  const nodes = drawn.map((each) => each.node);
  const nearest = (found) => found.sort((a, b) => Math.abs(a.x - node.x) - Math.abs(b.x - node.x))[0];
  const sources = new Set(edgesOf(node).map(({ from }) => from));
  const next = {
    ArrowUp: () => nearest(nodes.filter((one) => sources.has(one.id))),
    ArrowDown: () => nearest(nodes.filter((one) => edgesOf(one).some(({ from }) => from === node.id))),
    ArrowLeft: () => nearest(nodes.filter((one) => one.y === node.y && one.x < node.x)),
    ArrowRight: () => nearest(nodes.filter((one) => one.y === node.y && one.x > node.x)),
  }[key]();
  const wanted = state.node ? next : node;
  if (!wanted) return;
  go({ node: wanted.id });
  const shape = drawn.find((each) => each.node.id === wanted.id).shape;
  shape.focus({ preventScroll: true });
  showInCamera(wanted);
};
