// The recorded program: stages, graphs, and which nodes of two stages are the same.

const DATA = JSON.parse(document.getElementById("data").textContent);
const STAGES = DATA.stages;
const LINES = DATA.lines;

const kindOf = (region) => region.split(".")[0];
const passLabel = (number) => `${String(number).padStart(2, "0")} ${STAGES[number].name}`;
const shortCode = (code) => code.replace(/\bops\./g, "");

// The lines of a region after a stage, in order; none if it does not exist there.
const graphLines = (stage, region) => {
  const number = STAGES[stage] && STAGES[stage].graphs[region];
  return number === undefined ? [] : DATA.graphs[number].map((index) => LINES[index]);
};

// An input of the region, as opposed to a call; a size is what a call yields that is no tensor.
const isInput = (line) => line.c === `${line.n[0]},`;
const isSize = (line) => Boolean(line.t) && !line.t.includes("[");

// One graph to look things up in: the line that defines a name, and the lines that take it.
const indexes = new Map();
const indexOf = (stage, region) => {
  const number = STAGES[stage] && STAGES[stage].graphs[region];
  if (number === undefined) return { lines: [], definition: new Map(), users: new Map() };
  if (!indexes.has(number)) {
    const lines = graphLines(stage, region);
    const definition = new Map();
    const users = new Map();
    for (const line of lines) {
      for (const name of line.n) definition.set(name, line);
      for (const name of line.i || []) {
        if (!users.has(name)) users.set(name, []);
        users.get(name).push(line);
      }
    }
    indexes.set(number, { lines, definition, users });
  }
  return indexes.get(number);
};

// What a stage did to a region: null if nothing.
const changes = new Map();
const changeOf = (stage, region) => {
  const data = STAGES[stage].changed[region];
  if (!data) return null;
  const key = `${stage} ${region}`;
  if (!changes.has(key)) {
    const backwards = Object.fromEntries(Object.entries(data.renamed).map(([a, b]) => [b, a]));
    const before = new Map();
    const after = new Map();
    const touched = new Map(); // nodes that stay, and take other inputs because of a rewrite
    data.hunks.forEach((hunk, index) => {
      for (const name of hunk.removed) before.set(name, index);
      for (const name of hunk.made) after.set(name, index);
      for (const [, name] of hunk.changed) touched.set(name, index);
    });
    const removed = new Set(data.removed);
    const made = new Set(data.made);
    changes.set(key, {
      ...data,
      removed,
      made,
      touched,
      hunkOf: (side, name) => (side === "before" ? before : after).get(name),
      forward: (name) => (removed.has(name) ? null : data.renamed[name] || name),
      backward: (name) => (made.has(name) ? null : backwards[name] || name),
    });
  }
  return changes.get(key);
};

// The name of a region one stage earlier, and the regions it became one stage later.
const regionBefore = (stage, region) => {
  const change = STAGES[stage].changed[region];
  if (change) return change.from;
  return stage > 0 && region in STAGES[stage - 1].graphs ? region : null;
};
const regionsAfter = (stage, region) =>
  stage + 1 < STAGES.length
    ? Object.keys(STAGES[stage + 1].graphs).filter((r) => regionBefore(stage + 1, r) === region)
    : [];

// How many layers of the model run a region, and which; 1 and "" for those outside layers.
const timesOf = (region) => (DATA.regions[kindOf(region)] || { times: 1 }).times;
const layersOf = (region) => (DATA.regions[kindOf(region)] || { layers: "" }).layers;

// The region of a stage that comes closest to one of another stage.
const nearestRegion = (stage, region) => {
  const known = Object.keys(STAGES[stage].graphs);
  const kind = kindOf(region || "");
  const alike = known.filter((name) => kindOf(name) === kind);
  const longest = (names) => [...names].sort((a, b) => graphLines(stage, b).length - graphLines(stage, a).length)[0];
  return known.includes(region) ? region : alike[0] || longest(known);
};

// The region that a pass changed most, preferring one that is asked for.
const changedRegion = (stage, preferred) => {
  const changed = STAGES[stage].changed;
  const names = Object.keys(changed);
  const near = names.find((name) => name === preferred) ||
    names.find((name) => kindOf(name) === kindOf(preferred || ""));
  if (near && changed[near].hunks.length) return near;
  const weight = (name) => changed[name].hunks.length + timesOf(name) / 1e4;
  const busiest = [...names].sort((a, b) => weight(b) - weight(a))[0];
  return busiest || nearestRegion(stage, preferred);
};
