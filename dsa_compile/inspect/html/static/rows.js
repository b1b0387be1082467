// Two graphs line by line: which line stands beside which.

// Lines of the two sides that define the same node, by index: [left, right], in order of the left.
const pairedLines = (left, right, change) => {
  const at = new Map();
  right.forEach((line, index) => line.n.forEach((name) => at.set(name, index)));
  const pairs = [];
  const taken = new Set();
  left.forEach((line, index) => {
    for (const name of line.n) {
      const other = change ? change.forward(name) : name;
      const place = other === null ? undefined : at.get(other);
      if (place !== undefined && !taken.has(place)) {
        taken.add(place);
        pairs.push([index, place]);
        return;
      }
    }
  });
  return pairs;
};

// The longest part of the pairs whose right sides ascend: the lines that did not move.
const unmoved = (pairs) => {
  const tails = []; // index into pairs of the last pair of the best run of each length
  const previous = [];
  pairs.forEach(([, right], index) => {
    let low = 0;
    let high = tails.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (pairs[tails[middle]][1] < right) low = middle + 1;
      else high = middle;
    }
    previous[index] = low ? tails[low - 1] : -1;
    tails[low] = index;
  });
  const run = [];
  for (let index = tails.length ? tails[tails.length - 1] : -1; index >= 0; index = previous[index]) {
    run.push(pairs[index]);
  }
  return run.reverse();
};

const sideClass = (line, change, side) => {
  if (!line || !change) return "";
  const fresh = side === "before" ? change.removed : change.made;
  if (line.n.some((name) => fresh.has(name))) return side === "before" ? "gone" : "new";
  return side === "after" && line.n.some((name) => change.touched.has(name)) ? "touched" : "";
};

// Rows of the diff: {left, right (lines or null), their classes, moved (by side), retyped, quiet:
// nothing happened here}.
const diffRows = (stage, region) => {
  const change = changeOf(stage, region);
  const from = regionBefore(stage, region);
  const right = graphLines(stage, region);
  const left = stage === 0 || from === null ? [] : graphLines(stage - 1, from);
  const rows = [];
  let [l, r] = [0, 0];
  const pairs = pairedLines(left, right, change);
  const partner = new Map(pairs);
  const reached = new Set(pairs.map(([, place]) => place));
  const add = (one, other) => rows.push({
    left: one,
    right: other,
    leftClass: sideClass(one, change, "before"),
    rightClass: sideClass(other, change, "after"),
  });
  const fill = (untilLeft, untilRight) => {
    while (l < untilLeft || r < untilRight) {
      const one = l < untilLeft ? left[l++] : null;
      const other = r < untilRight ? right[r++] : null;
      add(one, other);
      const row = rows[rows.length - 1];
      row.moved = { before: one && partner.has(l - 1), after: other && reached.has(r - 1) };
    }
  };
  for (const [one, other] of unmoved(pairs)) {
    fill(one, other);
    add(left[l++], right[r++]);
  }
  fill(left.length, right.length);
  for (const row of rows) {
    const both = row.left && row.right;
    const alike = both && row.left.c === row.right.c;
    if (both && !alike && !row.leftClass && !row.rightClass) row.rightClass = "touched";
    // another type alone is marked, and no reason to show a line: it spreads over whole graphs
    row.retyped = Boolean(both && !row.leftClass && row.rightClass !== "new" && row.left.t !== row.right.t);
    row.quiet = Boolean(alike && !row.leftClass && !row.rightClass) || stage === 0;
  }
  return rows;
};
