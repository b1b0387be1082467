// Search: layers by number, passes, then nodes of the shown stage, then nodes of the others.

const MOST_FOUND = 60;
let hits = [];
let picked = 0;

const matches = (words, text) => words.every((word) => text.includes(word));

// "layer 37": the regions that it runs.
const layerFound = ([word, number, ...rest]) => {
  const kind = word === "layer" && !rest.length ? DATA.layers[number] : undefined;
  return Object.keys(STAGES[state.stage].graphs)
    .filter((region) => kind !== undefined && kindOf(region) === kind)
    .map((region) => ({ stage: state.stage, region, label: `layer ${number}`, code: region,
      note: `as layers ${layersOf(region)}` }));
};

const searchAll = (query) => {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const found = layerFound(words);
  STAGES.forEach((stage, number) => {
    if (matches(words, stage.name)) found.push({ stage: number, label: passLabel(number), note: "pass" });
  });
  const seen = new Set();
  const told = new Set(); // a statement is found once, where it stands last
  const look = (number) => {
    for (const region of Object.keys(STAGES[number].graphs)) {
      const graph = STAGES[number].graphs[region];
      if (seen.has(graph)) continue;
      seen.add(graph);
      for (const line of graphLines(number, region)) {
        if (found.length >= MOST_FOUND) return;
        const text = `${line.n.join(" ")} ${line.k} ${line.m || ""} ${line.y || ""} ${line.t || ""} ${line.s || ""}`;
        const statement = `${region} ${line.c}`;
        if (told.has(statement) || !matches(words, text.toLowerCase())) continue;
        told.add(statement);
        found.push({ stage: number, region, node: line.n[0], label: line.n[0], code: shortCode(line.c),
          note: `${number === state.stage ? "" : `${passLabel(number)} · `}${region}${line.m ? ` · ${line.m}` : ""}` });
      }
    }
  };
  look(state.stage);
  // the other way round a name would be found at the export first, long before it means something
  for (let number = STAGES.length - 1; number >= 0; number -= 1) if (number !== state.stage) look(number);
  return found;
};

const showFound = () => {
  hits = searchAll(byId("search").value);
  picked = 0;
  const box = byId("found");
  box.hidden = !byId("search").value.trim();
  byId("search").setAttribute("aria-expanded", String(!box.hidden));
  box.replaceChildren(...hits.map((hit, index) => element("li", {
    role: "option",
    id: `found-${index}`,
    onmousedown: (event) => { event.preventDefault(); openFound(index); },
  }, element("b", {}, hit.label), element("code", {}, hit.code || ""), element("span", { class: "module" }, hit.note))));
  if (!hits.length) box.append(element("li", { class: "none", role: "option", "aria-disabled": "true" }, "nothing found"));
  markPicked();
};

const markPicked = () => {
  [...byId("found").children].forEach((row, index) => {
    row.classList.toggle("picked", index === picked);
    row.setAttribute("aria-selected", String(index === picked));
  });
  byId("search").setAttribute("aria-activedescendant", hits.length && !byId("found").hidden ? `found-${picked}` : "");
  const row = byId("found").children[picked];
  if (row) row.scrollIntoView({ block: "nearest" });
};

const openFound = (index) => {
  const hit = hits[index];
  if (!hit) return;
  closeFound();
  go({ stage: hit.stage, node: hit.node || "", side: "after", ...(hit.region ? { region: hit.region } : {}) }, true);
};

const searchKeys = (event) => {
  if (event.key === "Escape") closeFound();
  else if (event.key === "Enter") openFound(picked);
  else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    picked = Math.max(0, Math.min(hits.length - 1, picked + (event.key === "ArrowDown" ? 1 : -1)));
    markPicked();
  } else return;
  event.stopPropagation();
};

const closeFound = () => {
  byId("found").hidden = true;
  byId("search").setAttribute("aria-expanded", "false");
  byId("search").blur();
};

const listenToSearch = () => {
  byId("search").addEventListener("input", showFound);
  byId("search").addEventListener("focus", showFound);
  byId("search").addEventListener("blur", () => { byId("found").hidden = true; });
  byId("search").addEventListener("keydown", searchKeys);
};
