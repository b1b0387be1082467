// The passes: a list with what each did, and above it how many nodes a step has after each.

const timelineRows = [];

const errorOf = (name) => DATA.numerics && DATA.numerics.passes[name];
// What a layer takes more without a pass, most first: {name of the case, us, part of the layer}.
const savedBy = (name) => (DATA.times || [])
  .filter((one) => name in one.saved)
  .map((one) => ({ name: one.case, us: one.saved[name], part: one.saved[name] / one.layer_us }))
  .sort((a, b) => b.part - a.part);

const nodesAfter = (number) => (number ? STAGES[number].after : (STAGES[1] || { before: 0 }).before);

const drawTimeline = () => {
  const most = Math.max(1, ...STAGES.map((_, number) => nodesAfter(number)));
  STAGES.forEach((stage, number) => {
    const row = timelineRow(stage, number, nodesAfter(number) / most);
    timelineRows.push(row);
    byId("timeline").append(row);
  });
  byId("timeline").addEventListener("keydown", walkTimeline);
  drawChart(most);
};

const mark = (style, sign, title) => element("i", { class: style, title, role: "img", "aria-label": title }, sign);

const timelineRow = (stage, number, part) => {
  const idle = number > 0 && !Object.keys(stage.changed).length;
  const delta = number ? stage.after - stage.before : 0;
  const checked = errorOf(stage.name);
  const [saved] = savedBy(stage.name);
  const odd = (stage.outliers || []).length;
  return element(
    "li",
    { class: [idle ? "idle" : "", checked && checked.problem ? "wrong" : ""].join(" ").trim(), "data-stage": number },
    element(
      "button",
      { title: number ? titleOf(stage) : "the program as exported", onclick: () => openPass(number) },
      element("span", { class: "number" }, String(number)),
      element("span", { class: "pass" }, ...breakable(stage.name)),
      element("span", { class: "marks" },
        stage.numerics === "tolerance" ? mark("tolerance", "≈", "may round otherwise") : null,
        odd ? mark("odd", "!", stage.outliers.join("\n")) : null,
        checked ? mark(checked.problem ? "bad" : "good", checked.problem ? "✗" : "✓",
          checked.problem || `worst error ${shownNumber(checked.error)}`) : null,
        saved ? element("i", { class: "saved", title: `a layer takes so much more without it (${saved.name})` },
          `${(100 * saved.part).toFixed(saved.part < 0.0995 ? 1 : 0)}%`) : null),
      element("span", { class: "rewrites" }, number ? count(stage.rewrites || 0) : ""),
      element("span", { class: "delta" }, delta ? `${delta > 0 ? "+" : "−"}${count(Math.abs(delta))}` : ""),
      element("span", { class: "bar", style: `--part:${part}` }),
    ),
  );
};

const titleOf = (stage) => [
  stage.about ? stage.about.purpose.replaceAll("``", "") : stage.name,
  `${stage.numerics}, ${count(stage.rewrites)} rewrites` +
    (stage.expected === null ? "" : `, ${count(stage.expected)} promised`),
  `${count(stage.before)} → ${count(stage.after)} nodes a step, ${(1e3 * stage.seconds).toFixed(0)} ms`,
].join("\n");

// Up, down, Home and End move among the passes; Enter opens one.
const walkTimeline = (event) => {
  const at = timelineRows.indexOf(event.target.closest("li"));
  const next = { ArrowUp: at - 1, ArrowDown: at + 1, Home: 0, End: timelineRows.length - 1 }[event.key];
  if (next === undefined || !timelineRows[next]) return;
  event.preventDefault();
  timelineRows[next].firstChild.focus();
};

const drawChart = (most) => {
  const chart = byId("chart");
  const [width, height] = [300, 46];
  const step = width / Math.max(1, STAGES.length - 1);
  const points = STAGES.map((_, number) =>
    `${(number * step).toFixed(1)},${(height - 3 - (height - 8) * (nodesAfter(number) / most)).toFixed(1)}`);
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
    openPass(Math.round(part * (STAGES.length - 1)));
  });
  chart.dataset.step = step;
};

const showTimeline = () => {
  const current = state.view === "overview" ? -1 : state.stage;
  timelineRows.forEach((row, number) => {
    row.classList.toggle("current", number === current);
    if (number === current) row.firstChild.setAttribute("aria-current", "true");
    else row.firstChild.removeAttribute("aria-current");
    row.firstChild.setAttribute("tabindex", number === Math.max(0, current) ? 0 : -1);
  });
  timelineRows[Math.max(0, current)].scrollIntoView({ block: "nearest" });
  const x = Math.max(0, current) * Number(byId("chart").dataset.step);
  byId("now").setAttribute("x1", x);
  byId("now").setAttribute("x2", x);
};

// The next pass in a direction that changed something.
const neighbour = (step) => {
  let stage = state.stage + step;
  while (stage > 0 && stage < STAGES.length && !Object.keys(STAGES[stage].changed).length) stage += step;
  return stage >= 0 && stage < STAGES.length ? stage : state.stage;
};
