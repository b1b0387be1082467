// What a key does; the buttons with the same purpose do it through the same table.

const KEYS = [
  ["h", "overview", { h: () => go({ view: "overview", node: "" }, true) }],
  ["j  k", "next, previous pass that changed something", { j: () => walkPasses(1), k: () => walkPasses(-1) }],
  ["n  p", "next, previous rewrite", { n: () => walkRewrites(1), p: () => walkRewrites(-1) }],
  ["[  ]", "previous, next graph", { "[": () => walkRegions(-1), "]": () => walkRegions(1) }],
  ["d  g", "diff, graph", { d: () => go({ view: "diff" }, true), g: () => go({ view: "graph" }, true) }],
  ["↑  ↓  ←  →", "in a diff or graph: to the next line or node, to the other side"],
  ["x", "to the other side of the rewrite", { x: () => crossOver() }],
  ["/", "search; ↑ ↓ Enter choose", { "/": () => byId("search").select() }],
  ["o", "next overlay", { o: () => nextOverlay() }],
  ["u", "unchanged lines", { u: () => go({ unfolded: !state.unfolded }) }],
  ["w", "wrap long lines", { w: () => go({ wrapped: !state.wrapped }) }],
  ["b", "graph before or after the pass", { b: () => showSide(state.side === "before" ? "after" : "before") }],
  ["i", "inputs in the graph", { i: () => go({ inputs: !state.inputs }) }],
  ["f  0", "the whole graph, full size; drag or wheel moves", { f: () => inGraph(fitGraph), 0: () => inGraph(() => zoomAt(1 / camera.scale)) }],
  ["+  −", "larger, smaller; so do Ctrl+wheel and pinch", { "+": () => inGraph(() => zoomAt(ZOOM.step)), "-": () => inGraph(() => zoomAt(1 / ZOOM.step)) }],
  ["t", "dark, light", { t: () => switchTheme() }],
  ["Esc", "select nothing, close", { Escape: () => (document.body.dataset.drawer ? openDrawer("") : go({ node: "" })) }],
  ["?", "these keys", { "?": () => byId("help").showModal() }],
];
const BUTTONS = {
  home: "h", previous: "p", next: "n", unfold: "u", wrap: "w", inputs: "i", fit: "f", scale: "0",
  "zoom-in": "+", "zoom-out": "-", theme: "t", "help-button": "?",
};

const inGraph = (action) => {
  if (state.view === "graph") action();
};

const walkPasses = (step) => go({ stage: neighbour(step), node: "" }, true);

const walkRegions = (step) => {
  const names = Object.keys(STAGES[state.stage].graphs);
  const index = (names.indexOf(state.region) + step + names.length) % names.length;
  go({ region: names[index], node: "" }, true);
};

const nextOverlay = () => {
  const at = OVERLAYS.findIndex(([key]) => key === state.overlay);
  go({ overlay: OVERLAYS[(at + 1) % OVERLAYS.length][0] });
};

// The graph of the other side; what is selected stays selected where it is there too.
const showSide = (side) => {
  if (!state.stage || side === state.side) return;
  const [name] = selection()[side];
  go({ side, node: name || "" });
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

const listenToKeys = () => {
  const bindings = Object.assign({}, ...KEYS.map(([, , keys]) => keys));
  for (const [id, key] of Object.entries(BUTTONS)) byId(id).addEventListener("click", bindings[key]);
  byId("keys").append(...KEYS.map(([keys, text]) => element("tr", {},
    element("th", { scope: "row" }, ...keys.split("  ").map((key) => element("kbd", {}, key))), element("td", {}, text))));
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
    if (byId("help").open || event.defaultPrevented) return;
    const action = bindings[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
};
