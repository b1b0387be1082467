// Where the nodes of a drawn graph go: ranks from top to bottom; columns by stream, or so that edges
// cross little.

const NODE = { width: 176, height: 46, gapX: 22, gapY: 24 };

// nodes: [{id, inputs: [id], after: [id], stream}] in the order of the graph; returns the same with x and y.
const placeNodes = (nodes) => {
  const byName = new Map(nodes.map((node) => [node.id, node]));
  const streams = [...new Set(nodes.map((node) => node.stream))];
  const lanes = streams.length > 1;
  const last = new Map();
  for (const node of nodes) {
    const above = [...node.inputs, ...node.after].map((id) => byName.get(id)).filter(Boolean);
    if (lanes && last.has(node.stream)) above.push(last.get(node.stream));
    node.rank = above.reduce((most, one) => Math.max(most, one.rank + 1), 0);
    last.set(node.stream, node);
  }
  if (!lanes) sinkInputs(nodes, byName);
  const ranks = [];
  for (const node of nodes) (ranks[node.rank] = ranks[node.rank] || []).push(node);
  for (let rank = 0; rank < ranks.length; rank += 1) ranks[rank] = ranks[rank] || [];
  if (lanes) placeLanes(ranks, streams);
  else placeLayers(ranks, byName);
  for (const node of nodes) node.y = node.rank * (NODE.height + NODE.gapY);
  return { lanes: lanes ? streams : [], height: ranks.length * (NODE.height + NODE.gapY) };
};

// What nothing precedes goes directly above what takes it first.
const sinkInputs = (nodes, byName) => {
  const users = new Map();
  for (const node of nodes) {
    for (const id of node.inputs) {
      if (byName.has(id)) users.set(id, Math.min(users.get(id) ?? Infinity, node.rank));
    }
  }
  for (const node of nodes) {
    const free = !node.inputs.some((id) => byName.has(id));
    if (free && users.has(node.id)) node.rank = Math.max(0, users.get(node.id) - 1);
  }
};

const placeLanes = (ranks, streams) => {
  const width = new Map(streams.map((stream) => [stream, 1]));
  for (const rank of ranks) {
    for (const stream of streams) {
      width.set(stream, Math.max(width.get(stream), rank.filter((n) => n.stream === stream).length));
    }
  }
  let left = 0;
  for (const stream of [...streams].sort((a, b) => a - b)) {
    for (const rank of ranks) {
      rank.filter((node) => node.stream === stream).forEach((node, index) => {
        node.x = left + index * (NODE.width + NODE.gapX);
      });
    }
    left += width.get(stream) * (NODE.width + NODE.gapX) + 3 * NODE.gapX;
  }
};

const placeLayers = (ranks, byName) => {
  const inputs = (node) => node.inputs.map((id) => byName.get(id)).filter(Boolean);
  const outputs = new Map();
  for (const rank of ranks) {
    for (const node of rank) {
      for (const one of inputs(node)) {
        if (!outputs.has(one)) outputs.set(one, []);
        outputs.get(one).push(node);
      }
    }
  }
  const step = NODE.width + NODE.gapX;
  for (const rank of ranks) rank.forEach((node, index) => { node.x = index * step; });
  const mean = (around) => around.reduce((sum, one) => sum + one.x, 0) / around.length;
  const settle = (rank, neighbours) => {
    for (const node of rank) {
      const around = neighbours(node);
      node.wish = around.length ? mean(around) : node.x;
    }
    rank.sort((a, b) => a.wish - b.wish);
    // keep the order and the gaps, then shift all to where they wish to be on average
    let free = -Infinity;
    for (const node of rank) {
      node.x = Math.max(node.wish, free);
      free = node.x + step;
    }
    const drift = rank.reduce((sum, node) => sum + node.wish - node.x, 0) / (rank.length || 1);
    for (const node of rank) node.x += drift;
  };
  for (let sweep = 0; sweep < 6; sweep += 1) {
    for (const rank of ranks) settle(rank, inputs);
    for (const rank of [...ranks].reverse()) settle(rank, (node) => outputs.get(node) || []);
  }
  const least = Math.min(...ranks.flat().map((node) => node.x));
  for (const node of ranks.flat()) node.x -= least;
};
