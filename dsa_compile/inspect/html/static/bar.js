// The bar above the views: the pass, its purpose, its regions, and what steers the views.

const showBar = () => {
  const stage = STAGES[state.stage];
  byId("pass-title").replaceChildren(
    ...(state.stage ? [`${state.stage} `, ...breakable(stage.name)] : ["as exported"]),
    element("small", {}, state.stage
      ? `${stage.numerics} · ${count(stage.rewrites)} rewrites` +
        `${stage.expected === null ? "" : ` of ${count(stage.expected)} promised`} · ` +
        `${count(stage.before)} → ${count(stage.after)} nodes · ${(1e3 * stage.seconds).toFixed(0)} ms`
      : "the reference model's graphs, before the first pass"),
  );
  byId("purpose").replaceChildren(...(stage.about ? prose(stage.about.purpose) : []));
  byId("regions").replaceChildren(...Object.keys(stage.graphs).map((region) => regionButton(stage, region)));
  showWalk();
};

const regionButton = (stage, region) => {
  const change = stage.changed[region];
  const layers = layersOf(region);
  const rewrites = change ? change.hunks.length : 0;
  return element("button", {
    "aria-pressed": String(region === state.region),
    "data-region": region,
    class: `${region === state.region ? "current" : ""} ${change || !state.stage ? "" : "same"}`,
    title: [layers ? `layers ${layers}` : "once a step", rewrites ? `${rewrites} rewrites` : ""].filter(Boolean).join(", "),
    onclick: () => go({ region, node: "" }, true),
  }, region, timesOf(region) > 1 ? element("small", {}, `× ${timesOf(region)}`) : null,
  rewrites ? element("b", {}, String(rewrites)) : null);
};

const press = (button, on) => {
  button.classList.toggle("on", on);
  button.setAttribute("aria-pressed", String(on));
};

const showWalk = () => {
  const change = changeOf(state.stage, state.region);
  const rewrites = change ? change.hunks.length : 0;
  const chosen = selection().hunk;
  byId("position").textContent = rewrites
    ? `${chosen === null ? "" : `${chosen + 1} of `}${rewrites} rewrite${rewrites > 1 ? "s" : ""}`
    : state.stage ? "unchanged here" : "";
  const graph = state.view === "graph";
  byId("previous").disabled = byId("next").disabled = !rewrites;
  byId("unfold").hidden = byId("wrap").hidden = graph;
  byId("sides").hidden = !graph || !state.stage;
  byId("inputs").hidden = !graph;
  press(byId("unfold"), state.unfolded);
  press(byId("wrap"), state.wrapped);
  press(byId("inputs"), state.inputs);
  for (const button of byId("sides").children) press(button, button.dataset.side === state.side);
  byId("overlay").value = state.overlay;
};

const showTabs = () => {
  for (const tab of byId("views").children) {
    const current = tab.dataset.view === state.view;
    tab.classList.toggle("current", current);
    tab.setAttribute("aria-selected", String(current));
    tab.setAttribute("tabindex", current ? 0 : -1);
  }
};

// Left and right move among the views, as in every list of tabs.
const walkTabs = (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  const tabs = [...byId("views").children];
  const next = tabs[(tabs.indexOf(event.target) + step + tabs.length) % tabs.length];
  event.preventDefault();
  next.click();
  next.focus();
};

// On a narrow screen the passes and the details lie over the page: "passes", "details" or "".
const openDrawer = (name) => {
  document.body.dataset.drawer = name;
  byId("veil").hidden = !name;
  byId("menu").setAttribute("aria-expanded", String(name === "passes"));
  byId("more").setAttribute("aria-expanded", String(name === "details"));
  if (name === "passes") timelineRows[state.view === "overview" ? 0 : state.stage].firstChild.focus();
  if (name === "details") byId("details").focus();
};
