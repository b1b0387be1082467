// The page that opens first: what was compiled, and what each pass is for and did.

const exported = () => (STAGES[1] ? STAGES[1].before : 0);
const finished = () => (STAGES.length > 1 ? STAGES[STAGES.length - 1].after : 0);
const passStages = () => STAGES.slice(1);
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

// The marks of a docstring: ``code``, :mod:`name` and *emphasis*.
const prose = (text) => [...text.matchAll(/``(.+?)``|:\w+:`(.+?)`|\*(\w[^*]*)\*|[^`:*]+|./gs)].map(([all, code, name, strong]) =>
  (code || name ? element("code", {}, code || name) : strong ? element("em", {}, strong) : all));

const drawOverview = () => {
  byId("overview").replaceChildren(
    element("h2", {}, `${DATA.name}: ${layerCount()} layers for ${DATA.target}, recipe ${DATA.recipe}`),
    element("p", { class: "lead" },
      `dsa-compile rewrote DeepSeek-V3.2 in ${passStages().length} passes, from the graphs that torch.export gives to ` +
      "those that the runtime launches. A kind of layer is one graph, whatever the number of layers that run it. " +
      "Choose a pass to see what it is for and every line that it changed."),
    tiles(),
    element("div", { class: "columns" }, compiled(), layers()),
    element("h3", {}, "Passes"),
    passTable(),
  );
};

const layerCount = () => Object.keys(DATA.layers).length;

const tiles = () => {
  const [run] = DATA.times || [];
  const found = DATA.numerics;
  return element("ul", { id: "tiles" }, ...[
    [count(layerCount()), layerCount() === DATA.model.num_hidden_layers ? "layers" : `of ${DATA.model.num_hidden_layers} layers`],
    [`${passStages().filter((stage) => stage.rewrites).length} of ${passStages().length}`, "passes found something"],
    [count(sum(passStages().map((stage) => stage.rewrites))), "rewrites, over all layers"],
    [`${count(exported())} → ${count(finished())}`, "graph nodes of one step"],
    [`${sum(passStages().map((stage) => stage.seconds)).toFixed(1)} s`, "in passes"],
    found ? [found.ok ? "✓ right" : "✗ wrong", `verify, ${count(found.tokens)} tokens`, found.ok ? "good" : "bad"]
      : ["not run", "dsa-inspect ARTIFACT verify"],
    run ? [`${run.layer_us.toFixed(0)} µs`, `a layer, ${run.case}`] : null,
  ].filter(Boolean).map(([value, label, style]) =>
    element("li", { class: style || "" }, element("b", {}, value), element("span", {}, label))));
};

const compiled = () => {
  const { model, options } = DATA;
  const experts = `${count(model.n_routed_experts)} + ${model.n_shared_experts} shared, ${model.num_experts_per_tok} a token`;
  return element("section", {},
    element("h3", {}, "Compiled"),
    facts(
      field("model", `hidden ${count(model.hidden_size)}, ${model.num_attention_heads} heads, vocabulary ${count(model.vocab_size)}`),
      field("experts", experts),
      field("attention", `top ${count(model.index_topk)} keys by ${model.index_n_heads} index heads; latent ${model.kv_lora_rank}`),
      field("target", DATA.target),
      field("recipe", `${DATA.recipe} (${options.dtype}, cache blocks of ${options.block_size} tokens)`),
      field("weights", options.weights),
      options.disabled.length ? field("disabled", options.disabled.join(", ")) : null,
      options.stop_after ? field("stopped after", options.stop_after) : null,
      field("by", Object.entries(DATA.producer).map((pair) => pair.join(" ")).join(", ")),
      field("digest", element("code", { title: DATA.digest }, DATA.digest.slice(0, 16))),
    ));
};

// Each finished graph: where it runs and how large it is.
const layers = () => {
  const last = STAGES.length - 1;
  const rows = Object.keys(STAGES[last].graphs).map((region) => {
    const calls = (stage, name) => graphLines(stage, name).filter((line) => !isInput(line) && line.k !== "return").length;
    const root = kindRoot(region);
    return element("tr", {},
      element("th", { scope: "row" }, element("button", { class: "link",
        onclick: () => go({ stage: last, region, view: "graph", node: "" }, true) }, region)),
      element("td", {}, layersOf(region) || "once a step"),
      element("td", { class: "figure" }, layersOf(region) ? String(timesOf(region)) : ""),
      element("td", { class: "figure" }, `${count(calls(0, root))} → ${count(calls(last, region))}`));
  });
  return element("section", {},
    element("h3", {}, "Graphs"),
    element("table", { id: "kinds" },
      element("thead", {}, element("tr", {}, ...["graph", "layers", "how many", "lines"].map((name, index) =>
        element("th", { scope: "col", class: index > 1 ? "figure" : "" }, name)))),
      element("tbody", {}, ...rows)));
};

const passTable = () => {
  const errors = Boolean(DATA.numerics);
  const saved = Boolean(DATA.times);
  const columns = [["", "figure"], ["pass", ""], ["rewrites", "figure"], ["nodes", "figure"], ["results", ""],
    ["ms", "figure"], ...(errors ? [["error", "figure"]] : []), ...(saved ? [["saves", "figure"]] : [])];
  return element("table", { id: "summary" },
    element("thead", {}, element("tr", {}, ...columns.map(([name, style]) => element("th", { scope: "col", class: style },
      name || element("span", { class: "unseen" }, "number"))))),
    element("tbody", {}, ...passStages().map((stage, index) => passRow(stage, index + 1, errors, saved))));
};

const passRow = (stage, number, errors, saved) => {
  const delta = stage.after - stage.before;
  const checked = errorOf(stage.name);
  const [best] = savedBy(stage.name);
  const promise = stage.expected === null ? "" : ` of ${count(stage.expected)}`;
  const cell = (text, style = "figure") => element("td", { class: style }, text);
  return element("tr", { class: stage.rewrites ? "" : "idle", "data-stage": number },
    cell(String(number)),
    element("th", { scope: "row" },
      element("button", { class: "link", onclick: () => openPass(number) }, ...breakable(stage.name)),
      stage.about ? element("div", { class: "purpose" }, ...prose(stage.about.purpose)) : null),
    cell(stage.rewrites ? `${count(stage.rewrites)}${promise}` : "none"),
    cell(delta ? `${delta > 0 ? "+" : "−"}${count(Math.abs(delta))}` : ""),
    cell(stage.numerics === "tolerance" ? "≈ rounded otherwise" : "same bits", ""),
    cell((1e3 * stage.seconds).toFixed(0)),
    errors ? cell(checked ? (checked.problem ? `✗ ${checked.problem}` : shownNumber(checked.error)) : "",
      checked && checked.problem ? "bad" : "figure") : null,
    saved ? cell(best ? `${best.us.toFixed(1)} µs` : "") : null);
};
