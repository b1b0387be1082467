// A layered drawing (Sugiyama): ranks from top to bottom; in each rank an order in which edges cross
// little; then columns, so that edges run straight. An edge over several ranks has a place of its own
// in each of them, so that none runs behind a box.

const SPACE = { x: 26, y: 34, edge: 12, lane: 64 };

// nodes: [{id, width, height, lane}] and edges: [{from, to, order}], a DAG whose nodes stand in order.
// An edge with order set keeps one node below the other, and is not drawn.
// Sets x and y (top left) of each node; returns {width, height, lanes: [{lane, x, width}],
// route: (from, to) => points from bottom to top of the boxes}.
const layered = (nodes, edges) => {
  const lanes = [...new Set(nodes.map((node) => node.lane))].sort((a, b) => a - b);
  const byName = new Map(nodes.map((node) => [node.id, { node, lane: node.lane, ins: [], outs: [] }]));
  const vertices = [...byName.values()];
  rankVertices(vertices, byName, edges);
  const trunks = trunksOf(byName, edges.filter((edge) => !edge.order));
  const ranks = [];
  for (const one of [...vertices, ...[...trunks.values()].flat()]) (ranks[one.rank] = ranks[one.rank] || []).push(one);
  for (let rank = 0; rank < ranks.length; rank += 1) ranks[rank] = ranks[rank] || [];
  orderRanks(ranks);
  const bands = placeColumns(ranks, lanes);
  const rows = placeRows(ranks);
  for (const { node, x, rank } of vertices) {
    node.x = x - node.width / 2;
    node.y = rows[rank].top;
  }
  const route = (from, to) => {
    const [a, b] = [byName.get(from), byName.get(to)];
    const points = [{ x: a.x, y: a.node.y + a.node.height }, { x: a.x, y: rows[a.rank].bottom }];
    for (const dummy of trunks.get(`${from} ${b.lane}`) || []) {
      if (dummy.rank >= b.rank) break;
      points.push({ x: dummy.x, y: rows[dummy.rank].top }, { x: dummy.x, y: rows[dummy.rank].bottom });
    }
    points.push({ x: b.x, y: b.node.y });
    return points;
  };
  const last = rows[rows.length - 1];
  return {
    width: Math.max(0, ...bands.map((band) => band.x + band.width)),
    height: last ? last.bottom : 0,
    lanes: bands,
    route,
  };
};

// The longest way from above; what has more below than above then moves down to it.
const rankVertices = (vertices, byName, edges) => {
  const above = new Map(vertices.map((one) => [one, []]));
  const below = new Map(vertices.map((one) => [one, []]));
  for (const { from, to } of edges) {
    above.get(byName.get(to)).push(byName.get(from));
    below.get(byName.get(from)).push(byName.get(to));
  }
  for (const one of vertices) one.rank = Math.max(0, ...above.get(one).map((each) => each.rank + 1));
  for (const one of [...vertices].reverse()) {
    const users = below.get(one);
    if (users.length > above.get(one).length) one.rank = Math.min(...users.map((each) => each.rank)) - 1;
  }
};

// The places of long edges, one in each rank between: a node's edges into a lane share them.
const trunksOf = (byName, edges) => {
  const trunks = new Map();
  for (const { from, to } of edges) {
    const [a, b] = [byName.get(from), byName.get(to)];
    const key = `${from} ${b.lane}`;
    if (!trunks.has(key)) trunks.set(key, []);
    const trunk = trunks.get(key);
    for (let rank = a.rank + 1 + trunk.length; rank < b.rank; rank += 1) {
      const made = { rank, lane: b.lane, ins: [], outs: [] };
      link(trunk[trunk.length - 1] || a, made);
      trunk.push(made);
    }
    link(b.rank - a.rank > 1 ? trunk[b.rank - a.rank - 2] : a, b);
  }
  return trunks;
};
const link = (a, b) => {
  if (a.outs.includes(b)) return;
  a.outs.push(b);
  b.ins.push(a);
};

// By the mean place of the neighbours above, then below, and so on; the best order is kept.
const orderRanks = (ranks) => {
  const number = () => ranks.forEach((rank) => rank.forEach((one, index) => { one.place = index; }));
  const mean = (around, place) => (around.length ? around.reduce((sum, one) => sum + one.place, 0) / around.length : place);
  number();
  let best = null;
  for (let sweep = 0; sweep < 10; sweep += 1) {
    const down = sweep % 2 === 0;
    for (const rank of down ? ranks : [...ranks].reverse()) {
      for (const one of rank) one.wish = mean(down ? one.ins : one.outs, one.place);
      rank.sort((a, b) => a.lane - b.lane || a.wish - b.wish);
      rank.forEach((one, index) => { one.place = index; });
    }
    const crossings = countCrossings(ranks);
    if (!best || crossings < best.crossings) best = { crossings, order: ranks.map((rank) => [...rank]) };
    if (!crossings) break;
  }
  best.order.forEach((rank, index) => { ranks[index].splice(0, rank.length, ...rank); });
  number();
};

const countCrossings = (ranks) => {
  let found = 0;
  for (const rank of ranks) {
    const ends = rank.flatMap((one) => one.outs.map((each) => each.place).sort((a, b) => a - b));
    for (let i = 1; i < ends.length; i += 1) for (let j = 0; j < i; j += 1) if (ends[j] > ends[i]) found += 1;
  }
  return found;
};

// Columns: each rank goes as near as it can to the mean of its neighbours, in its order. Returns the
// bands of the lanes.
const placeColumns = (ranks, lanes) => {
  const half = (one) => (one.node ? one.node.width / 2 : 0);
  const gap = (a, b) => half(a) + half(b) + (a.node && b.node ? SPACE.x : SPACE.edge);
  // long edges are kept straight before short ones
  const pull = (a, b) => (a.node && b.node ? 1 : a.node || b.node ? 2 : 8);
  const bands = [];
  let left = 0;
  for (const lane of lanes) {
    const rows = ranks.map((rank) => rank.filter((one) => one.lane === lane));
    for (const row of rows) {
      let x = 0;
      row.forEach((one, index) => {
        x = index ? x + gap(row[index - 1], one) : 0;
        Object.assign(one, { x, left: row[index - 1], right: row[index + 1] });
      });
    }
    // in lanes the calls of a stream stand below each other
    const column = lanes.length > 1 ? 30 : 0;
    for (let sweep = 0; sweep < 24; sweep += 1) {
      const down = sweep % 2 === 0;
      for (const row of down ? rows : [...rows].reverse()) {
        for (const one of row) {
          const around = (sweep > 15 ? [...one.ins, ...one.outs] : down ? one.ins : one.outs)
            .filter((each) => each.lane === lane);
          const weight = around.reduce((sum, each) => sum + pull(one, each), 0);
          const own = one.node ? column : 0;
          one.wish = weight || own ? around.reduce((sum, each) => sum + pull(one, each) * each.x, 0) / (weight + own) : one.x;
          one.weight = weight + own || 0.01;
        }
        settle(row, gap);
      }
    }
    for (let round = 0; round < 4; round += 1) rows.forEach((row) => row.forEach((one) => straighten(one, gap)));
    const all = rows.flat();
    const from = Math.min(...all.map((one) => one.x - half(one)));
    const to = Math.max(...all.map((one) => one.x + half(one)));
    for (const one of all) one.x += left - from;
    bands.push({ lane, x: left, width: to - from });
    left += to - from + SPACE.lane;
  }
  return bands;
};

// The places nearest to the wishes (least squares) that keep the order and the gaps: blocks of
// neighbours that stand in each other's way share the mean of their wishes.
const settle = (row, gap) => {
  const blocks = [];
  let offset = 0;
  row.forEach((one, index) => {
    offset = index ? offset + gap(row[index - 1], one) : 0;
    blocks.push({ from: index, sum: one.weight * (one.wish - offset), weight: one.weight });
    one.offset = offset;
    for (let top = blocks.length - 1; top > 0; top -= 1) {
      const [a, b] = [blocks[top - 1], blocks[top]];
      if (a.sum / a.weight <= b.sum / b.weight) break;
      blocks.splice(top - 1, 2, { from: a.from, sum: a.sum + b.sum, weight: a.weight + b.weight });
    }
  });
  blocks.forEach((block, index) => {
    const until = index + 1 < blocks.length ? blocks[index + 1].from : row.length;
    for (let at = block.from; at < until; at += 1) row[at].x = block.sum / block.weight + row[at].offset;
  });
};

// A chain, of calls or of the places of a long edge, moves to one column if its neighbours leave it one.
const straighten = (first, gap) => {
  const after = (one) => (one.outs.length === 1 && one.outs[0].ins.length === 1 ? one.outs[0]
    : one.node ? undefined : one.outs.find((each) => !each.node));
  const chain = [first];
  for (let next = after(first); next && next.lane === first.lane; next = after(next)) chain.push(next);
  if (chain.length === 1) return;
  const least = Math.max(...chain.map((one) => (one.left ? one.left.x + gap(one.left, one) : -Infinity)));
  const most = Math.min(...chain.map((one) => (one.right ? one.right.x - gap(one, one.right) : Infinity)));
  if (least > most) return;
  const mean = chain.reduce((sum, one) => sum + one.x, 0) / chain.length;
  for (const one of chain) one.x = Math.min(most, Math.max(least, mean));
};

// A rank is as high as its highest box.
const placeRows = (ranks) => {
  let top = 0;
  return ranks.map((rank) => {
    const height = Math.max(0, ...rank.map((one) => (one.node ? one.node.height : 0)));
    const row = { top, bottom: top + height };
    top = row.bottom + SPACE.y;
    return row;
  });
};
