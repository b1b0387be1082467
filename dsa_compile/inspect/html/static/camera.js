// Which part of the drawn graph is seen: drag, wheel, pinch, buttons, and a map of the whole.

let camera = { x: 20, y: 20, scale: 1 };
const MARGIN = { side: 28, top: 76, bottom: 20 };
const ZOOM = { least: 0.02, most: 3, step: 1.3, readable: 0.8 };

const pane = () => byId("graph").getBoundingClientRect();

const moveCamera = () => {
  const world = byId("world");
  if (!world) return;
  world.setAttribute("transform", `translate(${camera.x},${camera.y}) scale(${camera.scale})`);
  byId("scale").textContent = `${Math.round(100 * camera.scale)} %`;
  const seen = byId("seen");
  const box = pane();
  for (const [name, value] of Object.entries({
    x: -camera.x / camera.scale, y: -camera.y / camera.scale,
    width: box.width / camera.scale, height: box.height / camera.scale,
  })) seen.setAttribute(name, value);
  const whole = camera.x >= 0 && camera.y >= 0 && camera.x + extent.width * camera.scale <= box.width &&
    camera.y + extent.height * camera.scale <= box.height;
  byId("map").toggleAttribute("hidden", whole);
};

// The scale at which the whole graph is seen.
const wholeScale = () => {
  const box = pane();
  return Math.min(1.15, (box.width - 2 * MARGIN.side) / extent.width,
    (box.height - MARGIN.top - MARGIN.bottom) / extent.height);
};

const fitGraph = () => {
  const box = pane();
  const scale = Math.max(ZOOM.least, wholeScale());
  camera = {
    scale,
    x: (box.width - extent.width * scale) / 2,
    y: MARGIN.top + Math.max(0, (box.height - MARGIN.top - MARGIN.bottom - extent.height * scale) / 2),
  };
  moveCamera();
};

// A graph that would be too small to read when it is whole opens at the node that is selected, or at
// the first that changed; the map shows where that is.
const openGraph = () => {
  fitGraph();
  if (camera.scale >= ZOOM.readable) return;
  const box = pane();
  const focus = drawn.find(({ node }) => node.line.n.includes(state.node)) ||
    drawn.find(({ shape }) => shape.matches(".new, .gone"));
  const scale = ZOOM.readable;
  const { x, y, width } = focus ? focus.node : { x: extent.width / 2, y: 0, width: 0 };
  const beside = box.width - extent.width * scale; // room left, or negative
  camera = {
    scale,
    x: beside > 0 ? beside / 2 : Math.min(MARGIN.side, Math.max(beside - MARGIN.side, box.width / 2 - (x + width / 2) * scale)),
    y: Math.min(MARGIN.top, box.height / 3 - y * scale),
  };
  moveCamera();
};

const zoomAt = (factor, x = pane().width / 2, y = pane().height / 2) => {
  const scale = Math.min(ZOOM.most, Math.max(ZOOM.least, camera.scale * factor));
  camera.x = x - (x - camera.x) * (scale / camera.scale);
  camera.y = y - (y - camera.y) * (scale / camera.scale);
  camera.scale = scale;
  moveCamera();
};

// Move as little as needed to see a node.
const showInCamera = ({ x, y, width, height }) => {
  const box = pane();
  const into = (from, size, at, room, margin) => {
    const start = at + from * camera.scale;
    const end = start + size * camera.scale;
    if (start < margin) return at + margin - start;
    return end > room - MARGIN.bottom ? at - (end - room + MARGIN.bottom) : at;
  };
  camera.x = into(x, width, camera.x, box.width, MARGIN.side);
  camera.y = into(y, height, camera.y, box.height, MARGIN.top);
  moveCamera();
};

const drawMap = () => {
  const map = byId("map");
  const edge = 24;
  map.setAttribute("viewBox", `${-edge} ${-edge} ${extent.width + 2 * edge} ${extent.height + 2 * edge}`);
  map.replaceChildren(
    ...drawn.map(({ node, shape }) => svgElement("rect", {
      class: ["new", "gone"].find((name) => shape.classList.contains(name)) || "still", x: node.x, y: node.y, width: node.width, height: node.height,
    })),
    svgElement("rect", { id: "seen" }),
  );
};

const mapAt = (event) => {
  const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(byId("map").getScreenCTM().inverse());
  const box = pane();
  camera.x = box.width / 2 - point.x * camera.scale;
  camera.y = box.height / 2 - point.y * camera.scale;
  moveCamera();
};

const steerGraph = () => {
  const graph = byId("graph");
  const fingers = new Map(); // pointers that are down on the graph: {x, y}
  let far = 0;
  const middle = () => {
    const [a, b] = [...fingers.values()];
    const box = pane();
    return { x: (a.x + b.x) / 2 - box.left, y: (a.y + b.y) / 2 - box.top, apart: Math.hypot(a.x - b.x, a.y - b.y) };
  };
  graph.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = pane();
    if (event.ctrlKey || event.metaKey) zoomAt(Math.exp(-event.deltaY / 300), event.clientX - box.left, event.clientY - box.top);
    else {
      const [x, y] = event.shiftKey && !event.deltaX ? [event.deltaY, 0] : [event.deltaX, event.deltaY];
      camera.x -= x;
      camera.y -= y;
      moveCamera();
    }
  }, { passive: false });
  graph.addEventListener("pointerdown", (event) => {
    if (event.target.closest("#map")) {
      byId("map").setPointerCapture(event.pointerId);
      mapAt(event);
    } else if (!event.target.closest("button")) {
      fingers.set(event.pointerId, { x: event.clientX, y: event.clientY });
      far = 0;
    }
  });
  byId("map").addEventListener("pointermove", (event) => event.buttons && mapAt(event));
  addEventListener("pointermove", (event) => {
    const finger = fingers.get(event.pointerId);
    if (!finger) return;
    const [dx, dy] = [event.clientX - finger.x, event.clientY - finger.y];
    const before = fingers.size === 2 ? middle() : null;
    fingers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    far += Math.abs(dx) + Math.abs(dy);
    if (before) {
      const now = middle();
      camera.x += now.x - before.x;
      camera.y += now.y - before.y;
      zoomAt(now.apart / (before.apart || 1), now.x, now.y);
    } else {
      camera.x += dx;
      camera.y += dy;
      moveCamera();
    }
  });
  addEventListener("pointercancel", (event) => fingers.delete(event.pointerId));
  addEventListener("pointerup", (event) => {
    const still = fingers.delete(event.pointerId) && !fingers.size && far < 5;
    const node = still && event.target.closest && event.target.closest("#canvas .node");
    if (node) go({ node: node.dataset.name }, true);
    else if (still && event.target.closest("#canvas")) go({ node: "" });
  });
  graph.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const node = event.target.closest(".node");
    if (event.key.startsWith("Arrow")) stepGraph(event.key);
    else if (node && (event.key === "Enter" || event.key === " ")) go({ node: node.dataset.name }, true);
    else return;
    event.preventDefault();
  });
};
