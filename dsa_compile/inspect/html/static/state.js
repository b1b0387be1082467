// What is shown, and its form in the address, so that a place in the report can be sent to others.

const state = {
  stage: 0,
  region: "",
  view: "overview", // or "diff" or "graph", of a pass
  side: "after", // of the selected node, and of the graph that is drawn
  node: "", // a name; empty for none
  unfolded: false,
  wrapped: true,
  explained: true, // what the pass is for is unfolded
  inputs: false,
  overlay: "",
};
const listeners = [];
const onChange = (listener) => listeners.push(listener);

const writeAddress = (remember) => {
  const fields = new URLSearchParams();
  if (state.view !== "overview") {
    fields.set("pass", STAGES[state.stage].name);
    fields.set("region", state.region);
    if (state.view !== "diff") fields.set("view", state.view);
    if (state.node) fields.set("node", state.node);
    if (state.side !== "after") fields.set("side", state.side);
    if (state.overlay) fields.set("overlay", state.overlay);
  }
  const address = `#${fields}`;
  if (address === (location.hash || "#")) return;
  if (remember) history.pushState(null, "", address);
  else history.replaceState(null, "", address);
};

const readAddress = () => {
  const fields = new URLSearchParams(location.hash.slice(1));
  const wanted = fields.get("pass");
  const stage = STAGES.findIndex((one) => one.name === wanted);
  state.stage = stage >= 0 ? stage : wanted ? firstStage() : 0;
  const region = fields.get("region");
  state.region = region in STAGES[state.stage].graphs ? region : changedRegion(state.stage, region);
  state.view = !fields.has("pass") ? "overview" : fields.get("view") === "graph" ? "graph" : "diff";
  state.side = fields.get("side") === "before" ? "before" : "after";
  state.overlay = fields.get("overlay") || "";
  const node = fields.get("node") || "";
  state.node = lookedAt().definition.has(node) ? node : "";
};

// Where the walk through the passes begins.
const firstStage = () => Math.max(0, STAGES.findIndex((one) => one.rewrites));

// The graph that the selected node is in.
const stageOf = (side) => (side === "before" ? state.stage - 1 : state.stage);
const regionOf = (side) =>
  side === "before" ? regionBefore(state.stage, state.region) : state.region;
const lookedAt = (side = state.side) => indexOf(stageOf(side), regionOf(side));

// Change what is shown: `go({stage: 3}, true)`; true makes it a step that the browser's back undoes.
const go = (changed, remember = false) => {
  const old = { ...state };
  // a place in a pass leads out of the overview
  if (old.view === "overview" && ("stage" in changed || changed.node)) state.view = "diff";
  Object.assign(state, changed);
  if (changed.stage !== undefined && changed.stage !== old.stage && changed.region === undefined) {
    state.region = changedRegion(state.stage, old.region);
  }
  if (state.stage === 0) state.side = "after";
  const moved = state.stage !== old.stage || state.region !== old.region || state.view !== old.view;
  if (state.node && !lookedAt().definition.has(state.node)) state.node = "";
  writeAddress(remember || moved);
  for (const listener of listeners) listener(old, moved);
};

// The names on both sides that belong to the selected node: through its rewrite, or by its name.
const selection = () => {
  const chosen = { before: new Set(), after: new Set(), touched: new Set(), hunk: null };
  if (!state.node) return chosen;
  const change = changeOf(state.stage, state.region);
  chosen[state.side].add(state.node);
  if (!change) {
    chosen[state.side === "before" ? "after" : "before"].add(state.node);
    return chosen;
  }
  let index = change.hunkOf(state.side, state.node);
  if (index !== undefined) {
    const hunk = change.hunks[index];
    chosen.hunk = index;
    for (const name of hunk.removed) chosen.before.add(name);
    for (const name of hunk.made) chosen.after.add(name);
    for (const [, name] of hunk.changed) chosen.touched.add(name);
    return chosen;
  }
  const other = state.side === "before" ? change.forward(state.node) : change.backward(state.node);
  if (other) chosen[state.side === "before" ? "after" : "before"].add(other);
  index = change.touched.get(state.side === "after" ? state.node : other);
  if (index !== undefined) chosen.hunk = index;
  return chosen;
};
