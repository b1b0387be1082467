// The passes: a list with what each did, and above it how many nodes a step has after each.

const timelineRows = [];

const errorOf = (name) => DATA.numerics && DATA.numerics.passes[name];
// What a layer takes more without a pass, most first: {name of the case, us, part of the layer}.
const savedBy = (name) => (DATA.times || [])
  .filter((one) => name in one.saved)
  .map((one) => ({ name: one.case, us: one.saved[name], part: one.saved[name] / one.layer_us }))
  .sort((a, b) => b.part - a.part);
const count = (number) => number.toLocaleString("en");

const drawTimeline = () => {
  const list = byId("timeline");
  const most = Math.max(...STAGES.map((stage) => stage.after || stage.before || 1));
  STAGES.forEach((stage, number) => {
    const idle = number > 0 && !Object.keys(stage.changed).length;
    const after = stage.after || (STAGES[1] && STAGES[1].before) || 0;
    const delta = number ? stage.after - stage.before : 0;
    const checked = errorOf(stage.name);
    const [saved] = savedBy(stage.name);
    const odd = (stage.outliers || []).length;
    const row = element(
      "li",
      {
        class: [idle ? "idle" : "", checked && checked.problem ? "wrong" : ""].join(" "),
        "data-stage": number,
        title: number ? titleOf(stage) : "the program as exported",
        onclick: () => go({ stage: number, node: "" }, true),
      },
      element("span", { class: "number" }, String(number)),
      element("span", { class: "pass" }, stage.name),
      element("span", { class: "marks" },
        stage.numerics === "tolerance" ? element("i", { class: "tolerance", title: "may round otherwise" }, "≈") : null,
        odd ? element("i", { class: "odd", title: stage.outliers.join("\n") }, "!") : null,
        checked ? element("i", { class: checked.problem ? "bad" : "good",
          title: checked.problem || `worst error ${shownNumber(checked.error)}` }, checked.problem ? "✗" : "✓") : null,
        saved ? element("i", { class: "saved", title: `a layer takes so much more without it (${saved.name})` },
          `${(100 * saved.part).toFixed(saved.part < 0.0995 ? 1 : 0)}%`) : null),
      element("span", { class: "rewrites" }, number ? count(stage.rewrites || 0) : ""),
      element("span", { class: "delta" }, delta ? `${delta > 0 ? "+" : "−"}${count(Math.abs(delta))}` : ""),
      element("span", { class: "bar", style: `--part:${after / most}` }),
    );
    timelineRows.push(row);
    list.append(row);
  });
  drawChart(most);
};

const titleOf = (stage) => [
  `${stage.name}: ${stage.numerics}`,
  `${count(stage.rewrites)} rewrites` + (stage.expected === null ? "" : `, ${count(stage.expected)} promised`),
  `${count(stage.before)} → ${count(stage.after)} nodes a step`,
  `${(1e3 * stage.seconds).toFixed(0)} ms`,
].join("\n");

const drawChart = (most) => {
  const chart = byId("chart");
  const [width, height] = [300, 46];
  const step = width / Math.max(1, STAGES.length - 1);
  const points = STAGES.map((stage, number) => {
    const nodes = number ? stage.after : (STAGES[1] || { before: 0 }).before;
    return `${(number * step).toFixed(1)},${(height - 3 - (height - 8) * (nodes / most)).toFixed(1)}`;
  });
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.setAttribute("preserveAspectRatio", "none");
  chart.append(
    svgElement("path", { class: "area", d: `M0,${height} L${points.join(" L")} L${width},${height} Z` }),
    svgElement("polyline", { class: "line", points: points.join(" ") }),
    svgElement("line", { id: "now", y1: 0, y2: height }),
  );
  chart.addEventListener("click", (event) => {
    const box = chart.getBoundingClientRect();
    const part = (event.clientX - box.left) / box.width;
    go({ stage: Math.round(part * (STAGES.length - 1)), node: "" }, true);
  });
  chart.dataset.step = step;
};

const showTimeline = () => {
  timelineRows.forEach((row, number) => row.classList.toggle("current", number === state.stage));
  timelineRows[state.stage].scrollIntoView({ block: "nearest" });
  const x = state.stage * Number(byId("chart").dataset.step);
  byId("now").setAttribute("x1", x);
  byId("now").setAttribute("x2", x);
};

// The next pass in a direction that changed something.
const neighbour = (step) => {
  let stage = state.stage + step;
  while (stage > 0 && stage < STAGES.length && !Object.keys(STAGES[stage].changed).length) stage += step;
  return stage >= 0 && stage < STAGES.length ? stage : state.stage;
};
