// What a pass is for, and where it did it: above the lines that it changed.

const openPass = (stage) => go({ stage, node: "" }, true);

const aboutPass = () => {
  const stage = STAGES[state.stage];
  if (!state.stage) return null;
  const parts = stage.about ? stage.about.rest : [];
  return element("details", { id: "about-pass", open: state.explained, ontoggle: (event) => { state.explained = event.target.open; } },
    element("summary", {}, "What it is for, and where it did it"),
    ...parts.map((part) => ("title" in part ? drawingOf(part) : element("p", {}, ...prose(part.text)))),
    ...stage.remarks.map((text) => element("p", { class: "remark" }, text)),
    placesOf(stage));
};

const drawingOf = (part) => {
  const side = (title, text, style) => element("figure", { class: style },
    element("figcaption", {}, ...prose(title)),
    element("pre", { tabindex: 0, "aria-label": title }, text.replace(/\n{3,}/g, "\n\n")));
  return element("div", { class: part.title_after ? "drawing" : "drawing alone" },
    side(part.title, part.text, "gone"),
    part.title_after ? side(part.title_after, part.text_after, "new") : null);
};

// Every region that the pass changed, with the modules that its rewrites are in; each opens the first.
const placesOf = (stage) => {
  const rows = Object.entries(stage.changed).filter(([, change]) => change.hunks.length).map(([region, change]) => {
    const first = new Map(); // module -> [first rewrite, how many]
    change.hunks.forEach((hunk, index) => {
      const path = hunk.path || "(no module)";
      first.set(path, [first.has(path) ? first.get(path)[0] : index, (first.has(path) ? first.get(path)[1] : 0) + 1]);
    });
    return element("li", {},
      element("b", {}, region),
      element("span", {}, layersOf(region) ? `${timesOf(region)} × layers ${layersOf(region)}` : "once a step"),
      ...[...first].map(([path, [index, times]]) => element("button", {
        class: "place",
        "data-region": region,
        onclick: () => chooseHunk(index, region),
      }, ...breakable(path), times > 1 ? element("small", {}, ` × ${times}`) : null)));
  });
  return element("div", { id: "places" },
    element("h3", {}, rows.length ? "Where" : "Nowhere in this model"),
    rows.length ? element("ul", {}, ...rows) : null);
};
