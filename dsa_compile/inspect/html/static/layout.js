// Where the nodes of a drawn graph go. The graphs before and after a pass are laid out as one, so that
// what stays does not move from the one to the other.

const MARKERS = new Set(["dsa.record_event", "dsa.wait_event", "dsa.keep_alive"]);
const TEXT = { op: 7.3, small: 6.7, line: 15, most: 34, pad: 10 };

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
    const waits = input ? [] : awaited.filter((one) => !inputs.includes(one) && !after.includes(one));
    nodes.push({ id, line, inputs, input, stream: lane, waits: [...new Set(waits)], after: [...new Set(after)] });
    if (!input) {
      for (const name of shared) caches.set(name, id);
      latest.set(stream, id);
      awaited = [];
    }
  }
  return nodes;
};

const edgesOf = (node) => [
  ...node.inputs.map((from) => ({ from, kind: "data" })),
  ...node.after.map((from) => ({ from, kind: "cache" })),
  ...node.waits.map((from) => ({ from, kind: "wait" })),
];

// The lines of text in a box: {name, text}.
const boxText = (node) => {
  const { line } = node;
  const title = node.input ? line.n[0] : line.k.replace(/^dsa\.|^aten\.|^operator\./, "");
  const rows = (name, text) => wrapped(text).map((part) => ({ name, text: part }));
  return [...rows("op", title), ...rows("sub", node.input ? line.k : (line.m || "")), ...rows("sub type", line.t || "")];
};
const wrapped = (text) => {
  const rows = [];
  for (const part of text.split(/(?<=[_.]|, )/)) {
    const last = rows.length - 1;
    if (last >= 0 && (rows[last] + part).trimEnd().length <= TEXT.most) rows[last] += part;
    else rows.push(part);
  }
  return rows.map((row) => row.trim()).filter(Boolean);
};
const measure = (node) => {
  node.text = boxText(node);
  const wide = (row) => row.text.length * (row.name === "op" ? TEXT.op : TEXT.small);
  node.width = Math.ceil(Math.max(96, ...node.text.map(wide)) + 2 * TEXT.pad);
  node.height = node.text.length * TEXT.line + TEXT.pad;
};

// {nodes: {before, after}, place: drawing of both}; each node of a side has its key, x and y. A node
// of the other side alone keeps its place empty.
const layouts = new Map();
const layoutOf = (stage, region) => {
  const key = `${stage} ${region} ${state.inputs}`;
  if (!layouts.has(key)) layouts.set(key, makeLayout(stage, region));
  return layouts.get(key);
};

const makeLayout = (stage, region) => {
  const from = regionBefore(stage, region);
  const after = graphNodes(indexOf(stage, region));
  const before = stage > 0 && from !== null ? graphNodes(indexOf(stage - 1, from)) : [];
  const keys = { before: new Map(), after: new Map(after.map((node) => [node.id, node.id])) };
  const taken = new Set();
  const change = changeOf(stage, region);
  for (const node of before) {
    const same = node.line.n.map((name) => (change ? change.forward(name) : name))
      .find((name) => keys.after.has(name) && !taken.has(name));
    keys.before.set(node.id, same || `before ${node.id}`);
    if (same) taken.add(same);
  }
  const cells = new Map(); // key -> {id, width, height, lane}
  for (const [side, nodes] of [["after", after], ["before", before]]) {
    for (const node of nodes) {
      measure(node);
      node.key = keys[side].get(node.id);
      const cell = cells.get(node.key) || { id: node.key, width: 0, height: 0, lane: node.stream };
      cells.set(node.key, cell);
      cell.width = Math.max(cell.width, node.width);
      cell.height = Math.max(cell.height, node.height);
    }
  }
  const edges = jointEdges([["after", after], ["before", before]], keys);
  const drawing = layered(inOrder(cells, edges), edges);
  for (const node of [...after, ...before]) {
    const { x, y, width, height } = cells.get(node.key);
    Object.assign(node, { x, y, width, height });
  }
  return { nodes: { before, after }, drawing };
};

// The edges of both sides; those before that would close a circle with those after are left out, and
// drawn without a place of their own. With several streams the calls of each keep their order.
const jointEdges = (sides, keys) => {
  const below = new Map();
  const reaches = (from, to, seen = new Set()) => from === to || [...(below.get(from) || [])].some((next) =>
    !seen.has(next) && seen.add(next) && reaches(next, to, seen));
  const edges = new Map();
  const add = (from, to, order) => {
    const name = `${from} ${to}`;
    if (!below.has(from)) below.set(from, new Set());
    below.get(from).add(to);
    if (!edges.has(name) || !order) edges.set(name, { from, to, order });
  };
  for (const [side, nodes] of sides) {
    const last = new Map();
    const inLanes = side === "after" && nodes.some((node) => node.stream > 0);
    for (const node of nodes) {
      for (const { from } of edgesOf(node)) {
        const above = keys[side].get(from);
        if (side === "after" || !reaches(node.key, above)) add(above, node.key, false);
      }
      if (inLanes && last.has(node.stream)) add(last.get(node.stream), node.key, true);
      last.set(node.stream, node.key);
    }
  }
  return [...edges.values()];
};

// Cells so that every edge leads forwards; the order of the graph where edges do not decide.
const inOrder = (cells, edges) => {
  const missing = new Map([...cells.keys()].map((key) => [key, 0]));
  const next = new Map();
  for (const { from, to } of edges) {
    missing.set(to, missing.get(to) + 1);
    next.set(from, [...(next.get(from) || []), to]);
  }
  const order = [];
  const visit = (key) => {
    order.push(cells.get(key));
    missing.delete(key);
    for (const to of next.get(key) || []) missing.set(to, missing.get(to) - 1);
  };
  while (missing.size) visit([...missing.keys()].find((key) => missing.get(key) === 0));
  return order;
};
