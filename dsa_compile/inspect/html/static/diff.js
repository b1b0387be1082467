// The side-by-side view: what a pass was given on the left, what it made of it on the right.

const CONTEXT = 3; // unchanged lines shown around a change
const WORDS = /("[^"]*")|([A-Za-z_][\w.]*)|(-?\d[\w.+-]*)|([^A-Za-z_"\d]+)/g;
let shownRows = []; // {row, cells: {before, after}}
let opened = new Set(); // folds that were opened by hand, by their first row

const codeSpan = (line, graph) => {
  const code = element("code");
  for (const [text, quoted, word, number] of shortCode(line.c).matchAll(WORDS)) {
    if (word && graph.definition.has(word)) {
      code.append(element("b", { "data-name": word }, text));
    } else if (word && /^(dsa|aten|operator|torch|transformers)\./.test(word)) {
      code.append(element("span", { class: word.startsWith("dsa.") ? "op ours" : "op" }, text));
    } else if (number || quoted) {
      code.append(element("span", { class: "literal" }, text));
    } else code.append(text);
  }
  return code;
};

const lineCell = (line, side, className, graph) => {
  const cell = element("div", { class: `cell ${side} ${className}`, "data-side": side, role: "gridcell" });
  if (!line) {
    cell.classList.add("empty");
    return cell;
  }
  cell.dataset.names = line.n.join(" ");
  cell.setAttribute("tabindex", -1);
  const badge = badgeOf(line, stageOf(side), regionOf(side));
  cell.append(
    element("span", { class: "sign" }, { gone: "−", new: "+", touched: "~" }[className] || ""),
    className ? element("span", { class: "unseen" }, { gone: "taken out: ", new: "made here: ", touched: "rewired: " }[className]) : "",
    codeSpan(line, graph),
    " ",
    line.t ? element("span", { class: "type" }, line.t) : "",
    " ",
    line.m ? element("span", { class: "module" }, line.m) : "",
    line.y && line.y !== line.n[0] ? element("span", { class: "module" }, line.y) : "",
  );
  if (badge) {
    const style = `--heat:${badge.heat};--hue:${badge.hue ?? 4}`;
    cell.append(" ", element("span", { class: "badge", style }, badge.text));
  }
  return cell;
};

const drawDiff = () => {
  const pane = byId("diff");
  const rows = diffRows(state.stage, state.region);
  const graphs = { before: lookedAt("before"), after: lookedAt("after") };
  const body = element("div", { id: "rows", role: "grid", "aria-label": `${state.region} before and after` });
  const gutter = svgElement("svg", { id: "ribbons" });
  shownRows = [];
  const noted = rows.some((row) => !row.quiet);
  const visible = rows.map((row, index) => {
    if (state.unfolded || !noted || !row.quiet) return true;
    if (isInput(row.left || row.right)) return false; // a list of weights is no context
    for (let near = index - CONTEXT; near <= index + CONTEXT; near += 1) {
      if (rows[near] && !rows[near].quiet) return true;
    }
    return false;
  });
  for (let index = 0; index < rows.length; index += 1) {
    let end = index;
    while (end < rows.length && !visible[end]) end += 1;
    if (end > index && !opened.has(index)) {
      const first = index;
      const unfold = element("button", { class: "fold", onclick: () => { opened.add(first); drawDiff(); } },
        `⋯ ${end - index} unchanged`);
      body.append(element("div", { role: "row", class: "row" }, element("div", { role: "gridcell", class: "folded" }, unfold)));
      index = end - 1;
      continue;
    }
    const until = Math.max(end, index + 1);
    for (; index < until; index += 1) {
      const row = rows[index];
      const cells = {
        before: lineCell(row.left, "before", row.leftClass, graphs.before),
        after: lineCell(row.right, "after", row.rightClass, graphs.after),
      };
      if (row.retyped && cells.after.querySelector(".type")) {
        cells.after.querySelector(".type").classList.add("other");
      }
      for (const side of ["before", "after"]) {
        cells[side].classList.toggle("moved", Boolean(row.moved && row.moved[side]));
      }
      const kind = row.quiet && row.left && row.right ? "row same" : "row";
      body.append(element("div", { role: "row", class: kind }, cells.before, cells.after));
      shownRows.push({ row, cells });
    }
    index -= 1;
  }
  pane.replaceChildren(...[aboutPass(), element("div", { id: "sheet" }, body, gutter)].filter(Boolean));
  pane.classList.toggle("wrapped", state.wrapped);
  pane.classList.toggle("alone", state.stage === 0);
  markSelection();
};

const cellOf = (side, names) =>
  shownRows.filter(({ row }) => {
    const line = side === "before" ? row.left : row.right;
    return line && line.n.some((name) => names.has(name));
  }).map(({ cells }) => cells[side]);

const markSelection = () => {
  const chosen = selection();
  for (const { row, cells } of shownRows) {
    for (const [side, line] of [["before", row.left], ["after", row.right]]) {
      const names = line ? line.n : [];
      cells[side].classList.toggle("chosen", names.some((name) => chosen[side].has(name)));
      cells[side].classList.toggle("near", side === "after" && names.some((name) => chosen.touched.has(name)));
      const focus = side === state.side && names.includes(state.node);
      cells[side].classList.toggle("focus", focus);
      cells[side].setAttribute("aria-selected", String(focus));
    }
  }
  for (const word of byId("diff").querySelectorAll("b.same")) word.classList.remove("same");
  if (state.node) {
    for (const word of byId("diff").querySelectorAll(`.${state.side} b[data-name="${CSS.escape(state.node)}"]`)) {
      word.classList.add("same");
    }
  }
  drawRibbons(chosen);
};

// Those of some names that are no inputs of the region.
const calls = (side, names) => {
  const { definition } = lookedAt(side);
  return new Set(names.filter((name) => definition.has(name) && !isInput(definition.get(name))));
};

// A curve from every line that a rewrite took out to every line that it put in.
const drawRibbons = (chosen) => {
  const gutter = byId("ribbons");
  const change = changeOf(state.stage, state.region);
  gutter.replaceChildren();
  if (!change) return;
  const sheet = byId("sheet").getBoundingClientRect();
  gutter.setAttribute("height", sheet.height);
  const middle = (cell) => {
    const box = cell.getBoundingClientRect();
    return box.top - sheet.top + Math.min(box.height, 20) / 2;
  };
  change.hunks.forEach((hunk, index) => {
    const left = cellOf("before", calls("before", hunk.removed)).map(middle);
    const right = cellOf("after", calls("after", hunk.made)).map(middle);
    if (!left.length || !right.length) return;
    const waist = [...left, ...right].reduce((sum, y) => sum + y, 0) / (left.length + right.length);
    const draw = (x, y) => `M${x},${y} C${x < 14 ? 8 : 20},${y} ${x < 14 ? 8 : 20},${waist} 14,${waist}`;
    gutter.append(svgElement("path", {
      class: index === chosen.hunk ? "ribbon chosen" : "ribbon",
      d: [...left.map((y) => draw(0, y)), ...right.map((y) => draw(28, y))].join(" "),
    }));
  });
};

const showNode = () => {
  const focus = byId("diff").querySelector(".focus");
  if (!focus) return;
  const [pane, box] = [byId("diff").getBoundingClientRect(), focus.getBoundingClientRect()];
  if (box.top < pane.top || box.bottom > pane.bottom) focus.scrollIntoView({ block: "center" });
};

const clickDiff = (event) => {
  const cell = event.target.closest(".cell");
  if (!cell || cell.classList.contains("empty") || String(getSelection())) return;
  const word = event.target.closest("b[data-name]");
  go({ side: cell.dataset.side, node: word ? word.dataset.name : cell.dataset.names.split(" ")[0] }, true);
};

// Rewrites in the order of the page; selecting one selects its first node.
const walkRewrites = (step) => {
  const change = changeOf(state.stage, state.region);
  if (!change || !change.hunks.length) return;
  const chosen = selection().hunk;
  const index = chosen === null ? (step > 0 ? 0 : change.hunks.length - 1)
    : (chosen + step + change.hunks.length) % change.hunks.length;
  chooseHunk(index);
};
const chooseHunk = (index, region = state.region) => {
  const hunk = changeOf(state.stage, region).hunks[index];
  const [side, node] = hunk.made.length ? ["after", hunk.made[0]]
    : hunk.removed.length ? ["before", hunk.removed[0]] : ["after", (hunk.changed[0] || ["", ""])[1]];
  go({ region, side, node }, region !== state.region);
};

// Up and down lead from line to line of a side, left and right to the other side.
const stepDiff = (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !event.key.startsWith("Arrow")) return;
  if (event.target.closest("#about-pass")) return;
  event.preventDefault();
  const there = (side) => shownRows.map(({ row }) => (side === "before" ? row.left : row.right));
  const at = there(state.side).findIndex((line) => line && line.n.includes(state.node));
  const sideways = { ArrowLeft: "before", ArrowRight: "after" }[event.key];
  const side = sideways || state.side;
  const lines = there(side);
  const step = event.key === "ArrowUp" ? -1 : 1;
  let next = at < 0 ? lines.findIndex((line) => line && !isInput(line)) : sideways ? at : at + step;
  while (!sideways && lines[next] === null) next += step;
  if (!lines[next] || (sideways && !state.stage)) return;
  go({ side, node: lines[next].n[0] });
  const focus = byId("diff").querySelector(".focus");
  if (focus) focus.focus({ preventScroll: true });
};
