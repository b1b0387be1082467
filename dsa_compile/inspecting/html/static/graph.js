// The drawn graph of a region: ops from top to bottom, streams side by side.

const MARKERS = new Set(["dsa.record_event", "dsa.wait_event", "dsa.keep_alive"]);
let camera = { x: 20, y: 20, scale: 1 };
let drawn = []; // {node, shape}
let extent = { width: 1, height: 1 };

// The nodes to draw; a line that unpacks several results is one node.
const graphNodes = (graph) => {
  const owner = new Map();
  const events = new Map();
  const nodes = [];
  let stream = 0;
  const caches = new Map(); // the last call that takes each cache: it may have written it
  const latest = new Map(); // the last call on each stream: what an event stands for
  let awaited = [];
  for (const line of graph.lines) {
    if (line.k === "dsa.on_stream") {
      stream = Number(line.c.match(/\((\d+)\)/)[1]);
      continue;
    }
    if (MARKERS.has(line.k)) {
      const event = Number((line.c.match(/\((\d+)\)/) || [])[1]);
      if (line.k === "dsa.record_event") events.set(event, latest.get(stream) || null);
      if (line.k === "dsa.wait_event" && events.get(event)) awaited.push(events.get(event));
      continue;
    }
    const input = isInput(line);
    if (input && line.k === "cache") caches.set(line.n[0], null);
    if ((input || isSize(line)) && line.k !== "return" && !state.inputs) continue;
    const id = line.n[0];
    for (const name of line.n) owner.set(name, id);
    const inputs = [...new Set((line.i || []).map((name) => owner.get(name)).filter(Boolean))];
    const lane = input || line.k === "return" ? 0 : stream;
    const shared = (line.i || []).filter((name) => caches.has(name));
    const after = shared.map((name) => caches.get(name)).filter((one) => one && !inputs.includes(one));
    nodes.push({ id, line, inputs, input, stream: lane, waits: input ? [] : awaited, after });
    if (!input) {
      for (const name of shared) caches.set(name, id);
      latest.set(stream, id);
      awaited = [];
    }
  }
  return nodes;
};

const drawGraph = () => {
  const side = state.stage === 0 ? "after" : state.side;
  const graph = lookedAt(side);
  const nodes = graphNodes(graph);
  const { lanes, height } = placeNodes(nodes);
  const change = changeOf(state.stage, state.region);
  const fresh = change ? (side === "before" ? change.removed : change.made) : new Set();
  const byName = new Map(nodes.map((node) => [node.id, node]));
  const [laneLayer, edges, boxes] = ["lanes", "edges", "nodes"].map((name) => svgElement("g", { class: name }));
  for (const stream of lanes) laneLayer.append(...laneOf(stream, nodes.filter((n) => n.stream === stream), height));
  drawn = [];
  for (const node of nodes) {
    for (const id of node.inputs) {
      const from = byName.get(id);
      if (from) edges.append(edge(from, node, from.stream === node.stream ? "" : "across"));
    }
    for (const id of node.after) edges.append(edge(byName.get(id), node, "cache"));
    for (const id of node.waits) {
      if (byName.has(id) && !node.inputs.includes(id)) edges.append(edge(byName.get(id), node, "wait"));
    }
    const shape = box(node, side, node.line.n.some((name) => fresh.has(name)));
    boxes.append(shape);
    drawn.push({ node, shape });
  }
  extent = {
    width: Math.max(...nodes.map((node) => node.x + NODE.width), 1),
    height: Math.max(height, 1),
  };
  const world = svgElement("g", { id: "world" }, laneLayer, edges, boxes);
  byId("graph").replaceChildren(svgElement("svg", { id: "canvas" }, world));
  byId("graph").append(legend(side));
  markGraph();
  moveCamera();
};

const laneOf = (stream, members, height) => {
  const left = Math.min(...members.map((node) => node.x)) - NODE.gapX / 2;
  const right = Math.max(...members.map((node) => node.x)) + NODE.width + NODE.gapX / 2;
  const label = svgElement("text", { class: "lane-name", x: left + 8, y: -12 });
  label.textContent = `stream ${stream}`;
  return [svgElement("rect", { class: "lane", x: left, y: -30, width: right - left, height: height + 36, rx: 8 }), label];
};

const box = (node, side, fresh) => {
  const { line } = node;
  const group = svgElement("g", {
    class: `node ${fresh ? (side === "before" ? "gone" : "new") : ""} ${node.input ? "input" : ""} ${line.k === "return" ? "result" : ""}`,
    transform: `translate(${node.x},${node.y})`,
    "data-name": node.id,
  });
  const heat = badgeOf(line, stageOf(side), regionOf(side));
  if (heat) group.setAttribute("style", `--heat:${heat.heat};--hue:${heat.hue ?? 10}`);
  if (heat) group.classList.add(heat.hue === undefined ? "hot" : "tinted");
  const [title, module, below] = [["op", 14], ["sub", 27], ["sub type", 40]].map(([name, y]) =>
    svgElement("text", { x: 9, y, class: name }));
  title.textContent = node.input ? line.n[0] : line.k.replace(/^dsa\.|^aten\.|^operator\./, "");
  if (line.k.startsWith("dsa.")) title.classList.add("ours");
  module.textContent = node.input ? line.k : (line.m || "");
  below.textContent = heat ? heat.text : (line.t || "");
  const hover = svgElement("title");
  hover.textContent = `${shortCode(line.c)}\n${line.t || ""}\n${line.m || ""}`;
  group.append(svgElement("rect", { width: NODE.width, height: NODE.height, rx: 6 }), title, module, below, hover);
  clip(title, NODE.width - 16);
  clip(module, NODE.width - 16);
  clip(below, NODE.width - 16);
  return group;
};

// About 6.2 units a letter; measuring would lay the page out for every node.
const clip = (text, width) => {
  const most = Math.floor(width / (text.classList.contains("op") ? 6.6 : 5.6));
  if (text.textContent.length > most) text.textContent = `${text.textContent.slice(0, most - 1)}…`;
};

const edge = (from, to, kind) => {
  const [x1, y1] = [from.x + NODE.width / 2, from.y + NODE.height];
  const [x2, y2] = [to.x + NODE.width / 2, to.y];
  const bend = Math.max(14, Math.min(60, (y2 - y1) / 2));
  return svgElement("path", {
    class: `edge ${kind}`,
    d: `M${x1},${y1} C${x1},${y1 + bend} ${x2},${y2 - bend} ${x2},${y2}`,
    "data-from": from.id,
    "data-to": to.id,
  });
};

const legend = (side) => element("div", { id: "legend" },
  element("span", {}, `${state.region} ${side === "before" ? "before" : "after"} ${STAGES[state.stage].name}`),
  side === "before" ? element("i", { class: "gone" }, "taken out") : element("i", { class: "new" }, "made here"),
  byId("graph").querySelector(".edge.cache") ? element("i", { class: "cache" }, "through a cache") : null,
  byId("graph").querySelector(".lane") ? element("i", { class: "wait" }, "waits for another stream") : null,
);

const markGraph = () => {
  const side = state.stage === 0 ? "after" : state.side;
  const chosen = selection();
  for (const { node, shape } of drawn) {
    shape.classList.toggle("chosen", node.line.n.some((name) => chosen[side].has(name)));
    shape.classList.toggle("focus", node.line.n.includes(state.node));
  }
  const focus = drawn.find(({ node }) => node.line.n.includes(state.node));
  for (const path of byId("graph").querySelectorAll(".edge")) {
    const near = focus && (path.dataset.from === focus.node.id || path.dataset.to === focus.node.id);
    path.classList.toggle("near", Boolean(near));
  }
};

const moveCamera = () => {
  const world = byId("world");
  if (world) world.setAttribute("transform", `translate(${camera.x},${camera.y}) scale(${camera.scale})`);
};

const fitGraph = () => {
  const box = byId("graph").getBoundingClientRect();
  const scale = Math.min(1.15, box.width / (extent.width + 60), box.height / (extent.height + 60));
  // a tall graph stays readable: its top is shown, the rest is a drag away
  camera = { scale: Math.max(scale, 0.72), x: 0, y: 44 };
  camera.x = Math.max(20, (box.width - extent.width * camera.scale) / 2);
  const focus = drawn.find(({ node }) => node.line.n.includes(state.node));
  const made = focus || drawn.find(({ shape }) => shape.matches(".new, .gone"));
  if (made && (extent.height + 60) * camera.scale > box.height) {
    camera.y = Math.min(44, box.height / 2 - made.node.y * camera.scale);
    camera.x = Math.min(camera.x, box.width / 2 - made.node.x * camera.scale);
    camera.x = Math.max(camera.x, box.width - extent.width * camera.scale - 20);
    if (extent.width * camera.scale < box.width) camera.x = (box.width - extent.width * camera.scale) / 2;
  }
  moveCamera();
};

const steerGraph = () => {
  const pane = byId("graph");
  let grip = null;
  pane.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = pane.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    if (!event.ctrlKey && !event.metaKey && !event.altKey) {
      camera.x -= event.deltaX;
      camera.y -= event.deltaY;
    } else {
      const scale = Math.min(3, Math.max(0.1, camera.scale * Math.exp(-event.deltaY / 300)));
      camera.x = x - (x - camera.x) * (scale / camera.scale);
      camera.y = y - (y - camera.y) * (scale / camera.scale);
      camera.scale = scale;
    }
    moveCamera();
  }, { passive: false });
  pane.addEventListener("pointerdown", (event) => { grip = { x: event.clientX, y: event.clientY, far: 0 }; });
  addEventListener("pointermove", (event) => {
    if (!grip) return;
    camera.x += event.clientX - grip.x;
    camera.y += event.clientY - grip.y;
    grip = { x: event.clientX, y: event.clientY, far: grip.far + Math.abs(event.movementX) + Math.abs(event.movementY) };
    moveCamera();
  });
  addEventListener("pointerup", (event) => {
    const still = grip && grip.far < 5;
    grip = null;
    const node = still && event.target.closest && event.target.closest("#graph .node");
    if (node) go({ node: node.dataset.name }, true);
    else if (still && event.target.closest("#canvas")) go({ node: "" });
  });
};
