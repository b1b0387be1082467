// What is shown after a change, and the beginning.

const show = (old, moved) => {
  const { view } = state;
  document.body.dataset.view = view;
  byId("overview").hidden = view !== "overview";
  byId("bar").hidden = view === "overview";
  byId("diff").hidden = view !== "diff";
  byId("graph").hidden = view !== "graph";
  if (moved) opened = new Set();
  if (moved) showTimeline();
  if (moved) openDrawer("");
  const redraw = moved || old.overlay !== state.overlay || old.unfolded !== state.unfolded ||
    old.wrapped !== state.wrapped || old.inputs !== state.inputs;
  showTabs();
  if (view === "overview") {
    document.title = DATA.name;
    return;
  }
  showBar();
  if (view === "graph") {
    if (redraw || old.side !== state.side) {
      drawGraph();
      if (moved || old.inputs !== state.inputs) openGraph();
    } else markGraph();
  } else if (redraw) {
    drawDiff();
    if (moved) byId("diff").scrollTop = 0;
  } else markSelection();
  if (view === "diff" && state.node) {
    reveal();
    showNode();
  }
  showDetails();
  document.title = `${STAGES[state.stage].name} · ${state.region} · ${DATA.name}`;
};

// A selected line that is folded away is opened.
const reveal = () => {
  if (byId("diff").querySelector(".focus") || state.unfolded) return;
  go({ unfolded: true });
};

// Whether verify was content; a click goes to the first pass that it was not content with.
const showVerdict = () => {
  const found = DATA.numerics;
  byId("sign-verify").hidden = !found;
  byId("sign-saved").hidden = !DATA.times;
  if (!found) return;
  const wrong = STAGES.findIndex((stage) => errorOf(stage.name) && errorOf(stage.name).problem);
  const problems = [...found.hazards, ...found.emission, ...found.kernels,
    ...STAGES.map((stage) => errorOf(stage.name)).filter((one) => one && one.problem).map((one) => one.problem)];
  const verdict = byId("verdict");
  verdict.hidden = false;
  verdict.className = found.ok ? "good" : "bad";
  verdict.textContent = found.ok ? `✓ verified on ${count(found.tokens)} tokens` : "✗ verify found faults";
  verdict.title = problems.join("\n");
  if (wrong > 0) verdict.addEventListener("click", () => go({ stage: wrong, node: "" }, true));
};

const listen = () => {
  byId("overlay").addEventListener("change", (event) => go({ overlay: event.target.value }));
  for (const tab of byId("views").children) tab.addEventListener("click", () => go({ view: tab.dataset.view }, true));
  byId("views").addEventListener("keydown", walkTabs);
  for (const button of byId("sides").children) button.addEventListener("click", () => showSide(button.dataset.side));
  for (const [id, name] of [["menu", "passes"], ["more", "details"]]) {
    byId(id).addEventListener("click", () => openDrawer(document.body.dataset.drawer === name ? "" : name));
  }
  byId("veil").addEventListener("click", () => openDrawer(""));
  byId("help-close").addEventListener("click", () => byId("help").close());
  byId("diff").addEventListener("click", clickDiff);
  byId("diff").addEventListener("keydown", stepDiff);
  listenToSearch();
  listenToKeys();
  steerGraph();
  addEventListener("popstate", () => {
    const old = { ...state };
    readAddress();
    show(old, true);
  });
  addEventListener("resize", () => {
    if (state.view === "diff") drawRibbons(selection());
    if (state.view === "graph") moveCamera();
  });
};

const start = () => {
  try {
    const theme = localStorage.getItem("dsa-theme");
    if (theme) document.documentElement.dataset.theme = theme;
  } catch { /* as above */ }
  byId("home").textContent = DATA.name;
  byId("about").textContent = `${DATA.target} · ${DATA.recipe} · ${layerCount()} layers`;
  byId("overlay").append(...OVERLAYS.map(([value, label]) => element("option", { value }, label)));
  listen();
  showVerdict();
  drawTimeline();
  drawOverview();
  readAddress();
  onChange(show);
  show({ ...state, stage: -1 }, true);
  document.documentElement.dataset.ready = "";
};

start();
