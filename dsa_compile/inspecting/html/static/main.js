// The bar above the views, the keys, and the beginning.

const showBar = () => {
  const stage = STAGES[state.stage];
  byId("pass-title").replaceChildren(
    state.stage ? passLabel(state.stage) : "as exported",
    element("small", {}, state.stage
      ? `${stage.numerics} · ${count(stage.rewrites)} rewrites` +
        `${stage.expected === null ? "" : ` of ${count(stage.expected)} promised`} · ` +
        `${count(stage.before)} → ${count(stage.after)} nodes · ${(1e3 * stage.seconds).toFixed(0)} ms`
      : "the reference model's graphs, before the first pass"),
  );
  byId("remarks").replaceChildren(...(stage.remarks || []).map((text) => element("div", {}, text)));
  byId("regions").replaceChildren(...Object.keys(stage.graphs).map((region) => {
    const change = stage.changed[region];
    const layers = layersOf(region);
    return element("button", {
      role: "tab",
      "data-region": region,
      class: `${region === state.region ? "current" : ""} ${change || !state.stage ? "" : "same"}`,
      title: layers ? `layers ${layers}` : "once a step",
      onclick: () => go({ region, node: "" }, true),
    }, region, timesOf(region) > 1 ? element("small", {}, `× ${timesOf(region)}`) : null,
    change && change.hunks.length ? element("b", {}, String(change.hunks.length)) : null);
  }));
  const change = changeOf(state.stage, state.region);
  const rewrites = change ? change.hunks.length : 0;
  const chosen = selection().hunk;
  byId("position").textContent = rewrites
    ? `${chosen === null ? "" : `${chosen + 1} of `}${rewrites} rewrite${rewrites > 1 ? "s" : ""}`
    : state.stage ? "unchanged here" : "";
  const graph = state.view === "graph";
  byId("previous").disabled = byId("next").disabled = !rewrites;
  byId("unfold").hidden = byId("wrap").hidden = graph;
  byId("side").hidden = !graph || !state.stage;
  byId("inputs").hidden = byId("fit").hidden = !graph;
  byId("unfold").classList.toggle("on", state.unfolded);
  byId("wrap").classList.toggle("on", state.wrapped);
  byId("inputs").classList.toggle("on", state.inputs);
  byId("side").textContent = state.side === "before" ? "before" : "after";
  for (const tab of byId("views").children) tab.classList.toggle("current", tab.dataset.view === state.view);
  byId("overlay").value = state.overlay;
  document.title = `${STAGES[state.stage].name} · ${state.region} · ${DATA.name}`;
};

const show = (old, moved) => {
  const graph = state.view === "graph";
  byId("diff").hidden = graph;
  byId("graph").hidden = !graph;
  if (moved) opened = new Set();
  if (moved || old.stage !== state.stage) showTimeline();
  const redraw = moved || old.view !== state.view || old.overlay !== state.overlay ||
    old.unfolded !== state.unfolded || old.wrapped !== state.wrapped || old.inputs !== state.inputs;
  if (graph) {
    if (redraw || old.side !== state.side) {
      drawGraph();
      if (moved || old.view !== state.view || old.inputs !== state.inputs) fitGraph();
    } else markGraph();
  } else if (redraw) {
    const pane = byId("diff");
    drawDiff();
    if (moved) pane.scrollTop = 0;
  } else markSelection();
  if (!graph && state.node) {
    reveal();
    showNode();
  }
  showBar();
  showDetails();
};

// A selected line that is folded away is opened.
const reveal = () => {
  if (byId("diff").querySelector(".focus") || state.unfolded) return;
  go({ unfolded: true });
};

const KEYS = [
  ["j  k", "next, previous pass that changed something", { j: () => go({ stage: neighbour(1), node: "" }, true), k: () => go({ stage: neighbour(-1), node: "" }, true) }],
  ["n  p", "next, previous rewrite", { n: () => walkRewrites(1), p: () => walkRewrites(-1) }],
  ["[  ]", "previous, next region", { "[": () => walkRegions(-1), "]": () => walkRegions(1) }],
  ["d  g", "diff, graph", { d: () => go({ view: "diff" }, true), g: () => go({ view: "graph" }, true) }],
  ["x", "to the other side of the rewrite", { x: () => crossOver() }],
  ["/", "search; ↑ ↓ Enter choose", { "/": () => byId("search").select() }],
  ["o", "next overlay", { o: () => go({ overlay: OVERLAYS[(OVERLAYS.findIndex(([key]) => key === state.overlay) + 1) % OVERLAYS.length][0] }) }],
  ["u", "unchanged lines", { u: () => go({ unfolded: !state.unfolded }) }],
  ["w", "wrap long lines", { w: () => go({ wrapped: !state.wrapped }) }],
  ["b", "graph before or after the pass", { b: () => go({ side: state.side === "before" ? "after" : "before", node: "" }) }],
  ["i", "inputs in the graph", { i: () => go({ inputs: !state.inputs }) }],
  ["f", "fit the graph; drag moves, Ctrl+wheel zooms", { f: () => state.view === "graph" && fitGraph() }],
  ["t", "dark, light", { t: () => switchTheme() }],
  ["Esc", "select nothing", { Escape: () => go({ node: "" }) }],
  ["?", "these keys", { "?": () => byId("help").showModal() }],
];

const walkRegions = (step) => {
  const names = Object.keys(STAGES[state.stage].graphs);
  const index = (names.indexOf(state.region) + step + names.length) % names.length;
  go({ region: names[index], node: "" }, true);
};

const crossOver = () => {
  const chosen = selection();
  const side = state.side === "before" ? "after" : "before";
  const [name] = chosen[side];
  if (name && state.stage) go({ side, node: name }, true);
};

const switchTheme = () => {
  const root = document.documentElement;
  const dark = getComputedStyle(root).colorScheme === "dark";
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("dsa-theme", root.dataset.theme);
  } catch { /* a file may not be allowed to remember */ }
};

// Whether verify was content; a click goes to the first pass that it was not content with.
const showVerdict = () => {
  const found = DATA.numerics;
  if (!found) return;
  const wrong = STAGES.findIndex((stage) => errorOf(stage.name) && errorOf(stage.name).problem);
  const problems = [...found.hazards, ...found.emission,
    ...STAGES.map((stage) => errorOf(stage.name)).filter((one) => one && one.problem).map((one) => one.problem)];
  const verdict = byId("verdict");
  verdict.hidden = false;
  verdict.className = found.ok ? "good" : "bad";
  verdict.textContent = found.ok ? `✓ verified on ${count(found.tokens)} tokens` : "✗ verify found faults";
  verdict.title = problems.join("\n");
  if (wrong > 0) verdict.addEventListener("click", () => go({ stage: wrong, node: "" }, true));
};

const start = () => {
  try {
    const theme = localStorage.getItem("dsa-theme");
    if (theme) document.documentElement.dataset.theme = theme;
  } catch { /* as above */ }
  byId("name").textContent = DATA.name;
  byId("about").textContent = `${DATA.target} · ${DATA.recipe} · ${Object.keys(DATA.layers).length} layers`;
  byId("about").title = Object.entries(DATA.producer).map((pair) => pair.join(" ")).join("\n");
  byId("overlay").append(...OVERLAYS.map(([value, label]) => element("option", { value }, label)));
  byId("overlay").addEventListener("change", (event) => go({ overlay: event.target.value }));
  for (const tab of byId("views").children) tab.addEventListener("click", () => go({ view: tab.dataset.view }, true));
  const bindings = Object.assign({}, ...KEYS.map(([, , keys]) => keys));
  for (const [id, key] of Object.entries({ previous: "p", next: "n", unfold: "u", wrap: "w", side: "b", inputs: "i", fit: "f", theme: "t", "help-button": "?" })) {
    byId(id).addEventListener("click", bindings[key]);
  }
  byId("keys").append(...KEYS.map(([keys, text]) => element("tr", {},
    element("td", {}, ...keys.split("  ").map((key) => element("kbd", {}, key))), element("td", {}, text))));
  byId("help").addEventListener("click", () => byId("help").close());
  byId("diff").addEventListener("click", clickDiff);
  byId("search").addEventListener("input", showFound);
  byId("search").addEventListener("focus", showFound);
  byId("search").addEventListener("blur", () => { byId("found").hidden = true; });
  byId("search").addEventListener("keydown", searchKeys);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
    if (byId("help").open && event.key !== "?") return;
    const action = bindings[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  addEventListener("popstate", () => {
    const old = { ...state };
    readAddress();
    show(old, true);
  });
  addEventListener("resize", () => state.view === "diff" && drawRibbons(selection()));
  steerGraph();
  showVerdict();
  drawTimeline();
  readAddress();
  onChange(show);
  show({ ...state, stage: -1 }, true);
  document.documentElement.dataset.ready = "";
};

start();
