// What is known of the selected node, of its rewrite and of its way through the passes; and the
// overlays, which lay a number or a colour over every node.

const OVERLAYS = [["", "none"], ["pass", "pass that made it"]];
if (DATA.numerics) OVERLAYS.push(["numerics", "error of its rewrite"]);
if (DATA.times) {
  for (const one of DATA.times) OVERLAYS.push([`time ${one.case}`, `time, ${one.case}`]);
}

const makers = new Map(); // the latest rewrite that made a node
const makerOf = (stage, region, name) => {
  const key = `${stage} ${region} ${name}`;
  if (!makers.has(key)) makers.set(key, ancestry(stage, region, name).steps[0] || null);
  return makers.get(key);
};

const siteError = (step) => {
  const sites = step && DATA.numerics && DATA.numerics.sites[STAGES[step.stage].name];
  if (!sites) return null;
  const known = step.hunk.sites.map((number) => sites[number]).filter(Boolean);
  const rank = (one) => [one.problem ? 1 : 0, errorSize(one.error)];
  return known.reduce((worst, one) => {
    const [mine, theirs] = [rank(one), worst ? rank(worst) : [-1, 0]];
    return mine[0] > theirs[0] || (mine[0] === theirs[0] && mine[1] > theirs[1]) ? one : worst;
  }, null);
};
// An error that is not finite is null in the data.
const errorSize = (error) => (error === null ? Infinity : error);
const shownNumber = (error) => (error === null ? "not finite" : error ? Number(error).toExponential(1) : "0");
const shownError = (found) => (found.bitwise ? "bitwise" : shownNumber(found.error));

// {heat: 0 to 1, hue, text} of a line under the overlay; null for none.
const badgeOf = (line, stage, region) => {
  if (!state.overlay || line.k === "return" || !line.i) return null;
  if (state.overlay === "pass") {
    const made = STAGES.findIndex((one) => one.name === line.o);
    return made < 0 ? null : { heat: made ? 0.3 : 0.08, hue: (made * 47) % 360, text: line.o };
  }
  if (state.overlay === "numerics") {
    const found = siteError(makerOf(stage, region, line.n[0]));
    if (!found) return null;
    const heat = found.problem ? 1 : Math.min(1, Math.max(0, (Math.log10(errorSize(found.error) || 1e-12) + 9) / 9));
    return { heat, text: found.problem ? `✗ ${shownError(found)}` : shownError(found) };
  }
  const run = timed();
  if (!run || kindOf(region) !== kindOf(run.region)) return null;
  // an earlier node takes the time of the finished call that it still is
  const end = fate(stage, region, line.n[0]).find((one) => one.region === run.region);
  const us = end && run.calls[end.final];
  if (us === undefined) return null;
  return { heat: us / Math.max(...Object.values(run.calls)), text: `${us.toFixed(1)} µs` };
};
const timed = () => (DATA.times || []).find((one) => `time ${one.case}` === state.overlay);

const field = (name, ...content) =>
  element("div", { class: "field" }, element("dt", {}, name), element("dd", {}, ...content));
const facts = (...fields) => element("dl", {}, ...fields);

const nodeLink = (stage, region, name, side = "after", text = name) => element("a", {
  href: "#",
  class: "node-link",
  onclick: (event) => {
    event.preventDefault();
    go({ stage, region, side, node: name }, true);
  },
}, text);

const list = (items) => items.flatMap((item, index) => (index ? [", ", item] : [item]));
const few = (names, make, most = 14) => [
  ...list(names.slice(0, most).map(make)),
  names.length > most ? `, … ${names.length - most} more` : "",
];

const showDetails = () => {
  const pane = byId("details");
  pane.replaceChildren();
  if (state.node) pane.append(...nodeDetails());
  pane.append(...passDetails());
  pane.scrollTop = 0;
};

const nodeDetails = () => {
  const [stage, region] = [stageOf(state.side), regionOf(state.side)];
  const graph = lookedAt();
  const line = graph.definition.get(state.node);
  const here = (name) => nodeLink(state.stage, state.region, name, state.side);
  const users = (graph.users.get(state.node) || []).map((one) => one.n[0]);
  const kernels = DATA.kernels[line.k];
  const fields = [
    field("yields", element("span", { class: "type" }, line.t || "nothing")),
  ];
  if (line.m) fields.push(field("module", line.m));
  if (line.y) fields.push(field(line.k, line.y));
  if (line.s) fields.push(field("source", line.s.split("/").slice(-1)[0]));
  if (line.i && line.i.length) fields.push(field("takes", ...few(line.i, here)));
  if (users.length) fields.push(field("goes to", ...few(users, here)));
  if (line.x) fields.push(field("exchanges", line.x));
  if (kernels) fields.push(field("kernel", kernels.join(", ")));
  const badge = badgeOf(line, stage, region);
  if (badge) fields.push(field("overlay", badge.text));
  return [element("h3", {}, ...breakable(state.node)), element("pre", {}, shortCode(line.c)), facts(...fields),
    ...rewriteDetails(), ...historyDetails(stage, region)];
};

const rewriteDetails = () => {
  const change = changeOf(state.stage, state.region);
  const index = selection().hunk;
  if (!change || index === null) return [];
  const hunk = change.hunks[index];
  const number = hunk.sites.length ? `site ${hunk.sites.join(", ")}` : "of the whole program";
  const alike = change.hunks.filter((one) => one.f === hunk.f).length;
  const from = (name) => nodeLink(state.stage, state.region, name, "before");
  const to = (name) => nodeLink(state.stage, state.region, name, "after");
  const step = { stage: state.stage, hunk };
  const found = siteError(step);
  return [
    element("h3", {}, `rewrite, ${sizeOf(hunk)}`),
    facts(field("rewrite", `${number}${hunk.path ? `, ${hunk.path}` : ""}`),
    field("in", layersOf(state.region) ? `${state.region}, layers ${layersOf(state.region)}` : state.region),
    hunk.removed.length ? field("took out", ...few(hunk.removed, from)) : null,
    hunk.made.length ? field("made", ...few(hunk.made, to)) : null,
    hunk.changed.length ? field("rewired", ...few(hunk.changed.map(([, name]) => name), to)) : null,
    alike > 1 ? field("equal", `${alike} rewrites of this region`) : null,
    found ? field("verified", `${shownError(found)}, worst in layer ${found.layer}, ${found.inputs}`,
      found.problem ? element("b", { class: "bad" }, ` ${found.problem}`) : "") : null),
  ];
};

const historyDetails = (stage, region) => {
  if (stage < 0) return [];
  const { steps, roots } = ancestry(stage, region, state.node);
  const rows = [];
  for (const end of fate(stage, region, state.node)) {
    if (end.final !== undefined) {
      rows.push(element("li", { class: "end" }, `in the finished ${end.region} as `,
        nodeLink(end.stage, end.region, nameBefore(end), "after", end.final)));
    } else {
      const hunk = end.index === undefined ? null : changeOf(end.stage, end.region).hunks[end.index];
      rows.push(element("li", { class: "out" }, stageLink(end.stage, end.region, hunk),
        hunk && hunk.made.length ? " puts in its place " : " takes it out",
        ...(hunk ? few(callsFirst(hunk), (name) => nodeLink(end.stage, end.region, name), 5) : [])));
    }
  }
  for (const step of steps) {
    rows.push(element("li", { class: "made" }, stageLink(step.stage, step.region, step.hunk), " made ",
      ...few(step.now, (name) => nodeLink(step.stage, step.region, name), 4),
      step.names.length ? " of " : "",
      ...few(step.names, (name) => nodeLink(step.stage, step.region, name, "before"), 8)));
  }
  const origin = kindRoot(region);
  const sources = new Set();
  const exported = indexOf(0, origin).definition;
  for (const name of roots) if (exported.has(name) && exported.get(name).s) sources.add(exported.get(name).s);
  if (roots.length) {
    rows.push(element("li", { class: "root" }, element("span", {}, "exported: "),
      ...few(roots, (name) => nodeLink(0, origin, name), 10),
      sources.size ? element("div", { class: "module" }, sourceLines(sources)) : null));
  }
  return [element("h3", {}, "history"), element("ol", { id: "history" }, ...rows)];
};

const callsFirst = (hunk) => [...hunk.made].sort((a, b) => (b in hunk.of) - (a in hunk.of));
const kindRoot = (region) => (region in STAGES[0].graphs ? region : kindOf(region));
const nameBefore = (end) => {
  const names = DATA.names[end.region] || {};
  return Object.keys(names).find((name) => names[name] === end.final) || end.final;
};
const stageLink = (stage, region, hunk) => element("a", {
  href: "#",
  class: "stage-link",
  onclick: (event) => {
    event.preventDefault();
    const side = hunk && hunk.made.length ? "after" : "before";
    const node = hunk ? (hunk.made[0] || hunk.removed[0] || "") : "";
    go({ stage, region, side, node }, true);
  },
}, passLabel(stage));

// modeling_deepseek_v32.py:213, 215, 220
const sourceLines = (sources) => {
  const byFile = new Map();
  for (const source of sources) {
    const [file, line] = source.split("/").slice(-1)[0].split(":");
    byFile.set(file, [...(byFile.get(file) || []), Number(line)]);
  }
  return [...byFile].map(([file, lines]) => `${file}:${lines.sort((a, b) => a - b).join(", ")}`).join("; ");
};

const sizeOf = (hunk) => (hunk.removed.length + hunk.made.length
  ? `${hunk.removed.length} → ${hunk.made.length} nodes` : "in place");

const passDetails = () => {
  const stage = STAGES[state.stage];
  if (!state.stage) return [];
  const checked = errorOf(stage.name);
  const saved = savedBy(stage.name);
  const spent = (timed() || (DATA.times || [])[0] || { passes: {} }).passes[stage.name];
  const change = changeOf(state.stage, state.region);
  const forms = new Map();
  for (const [index, hunk] of (change ? change.hunks : []).entries()) {
    if (!forms.has(hunk.f)) forms.set(hunk.f, []);
    forms.get(hunk.f).push(index);
  }
  const rows = [...forms.values()].map((indices) => element("li", {},
    `${indices.length} × ${sizeOf(change.hunks[indices[0]])}: `,
    ...list(indices.slice(0, 8).map((index) => element("a", {
      href: "#",
      onclick: (event) => { event.preventDefault(); chooseHunk(index); },
    }, change.hunks[index].path || "(no module)"))),
    indices.length > 8 ? ` … ${indices.length - 8} more` : ""));
  return [
    element("h3", {}, ...breakable(stage.name)),
    facts(field("numerics", stage.numerics),
    field("rewrites", `${count(stage.rewrites)}${stage.expected === null ? "" : ` of ${count(stage.expected)} promised`}`),
    field("nodes", `${count(stage.before)} → ${count(stage.after)} a step`),
    stage.remarks.length ? field("remarks", ...stage.remarks.map((text) => element("div", {}, text))) : null,
    checked ? field("verified", checked.problem
      ? element("b", { class: "bad" }, checked.problem) : `worst error ${shownNumber(checked.error)}`) : null,
    checked && checked.suspect ? field("suspect", `wrong from rewrite ${checked.suspect} on`) : null,
    saved.length ? field("saves", ...saved.map(({ name, us, part }) =>
      element("div", {}, `${us.toFixed(1)} µs a layer, ${(100 * part).toFixed(1)} %: ${name}`))) : null,
    spent !== undefined ? field("its calls", `${spent.toFixed(1)} µs a layer`) : null,
    stage.outliers.length ? field("outliers", ...stage.outliers.map((text) => element("div", { class: "odd" }, text))) : null,
    rows.length ? field("in this graph", element("ul", {}, ...rows)) : null,
    stage.misses.length ? field("near misses", element("details", {},
      element("summary", {}, String(stage.misses.length)),
      ...stage.misses.map((text) => element("div", { class: "miss" }, text)))) : null),
  ];
};
