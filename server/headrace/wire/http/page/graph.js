// The graph of a pipeline with live figures, and a table with the same figures.

import { drawn, element, say } from "./dom.js";
import { count, milliseconds, rate } from "./format.js";
import { percentile } from "./history.js";
import { ENDS, edgesOf, placed } from "./layout.js";
import { linkTo } from "./models.js";

const NODE_WIDTH = 190;
const END_SIZE = [86, 34];
const PADDING = 10;
const LINE = 17;
const MARGIN = 4;
const MIN_GAP = 46;
const LABEL_WIDTH = 120;
const FONT_PX = 12;
// Below this width the graph goes from the top to the bottom.
const NARROW_PX = 640;

const pen = document.createElement("canvas").getContext("2d");

/** The text as far as it fits in a width, measured in the font of the page. */
function fitted(text, width, weight = 400) {
  pen.font = `${weight} ${FONT_PX}px ${getComputedStyle(document.body).fontFamily}`;
  if (pen.measureText(text).width <= width) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (pen.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle;
    else high = middle - 1;
  }
  return `${text.slice(0, low)}…`;
}

function widthOf(text) {
  pen.font = `400 ${FONT_PX}px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

function line(text, x, y, attributes = {}) {
  return drawn("text", { x, y, ...attributes }, text);
}

function modelOf(step) {
  return step.builtin ? `built-in step ${step.model}` : step.model;
}

/** What a step has beside its model: the step that runs in the same call, condition, rows of a tensor, fallback. */
function marksOf(step) {
  return [["with", step.joined], ["when", step.when], ["each", step.each], ["fallback", step.fallback]].filter(([, value]) => value).map(([word, value]) => `${word} ${value}`);
}

/** The parts of a pipeline that do not change until it is loaded again. */
function structureOf({ inputs, outputs, steps }) {
  return JSON.stringify([inputs, outputs, steps.map(({ name, model, joined, version, inputs, outputs, when, each, fallback }) => [name, model, joined, version, inputs, outputs, when, each, fallback])]);
}

/** One box of the graph: its elements that change, and its size. */
class StepBox {
  constructor(step) {
    this.lines = [modelOf(step), ...marksOf(step)];
    this.width = NODE_WIDTH;
    this.height = (3 + this.lines.length) * LINE + PADDING;
    this.rate = line("", PADDING, 0);
    this.limits = line("", NODE_WIDTH - PADDING, 0, { class: "limits", "text-anchor": "end" });
    this.times = line("", PADDING, 0);
    const room = NODE_WIDTH - 2 * PADDING;
    const texts = [line(fitted(step.name, room, 600), PADDING, 0, { class: "name" }), ...this.lines.map((text) => line(fitted(text, room), PADDING, 0, { class: "soft" })), this.rate, this.times];
    texts.forEach((text, place) => text.setAttribute("y", PADDING / 2 + LINE * (place + 1) - 4));
    this.limits.setAttribute("y", this.rate.getAttribute("y"));
    this.border = drawn("rect", { x: 1, y: 1, width: this.width - 2, height: this.height - 2, rx: 8 });
    const title = drawn("title", {}, [`step ${step.name}`, ...this.lines].join("\n"));
    const inside = [title, this.border, ...texts, this.limits];
    const label = `step ${step.name}, ${[step.builtin ? "" : "model", ...this.lines].join(" ").trim()}`;
    this.content = step.builtin ? drawn("g", {}, ...inside) : drawn("a", { href: linkTo({ name: step.model, version: step.version }), "aria-label": label }, ...inside);
    this.root = drawn("g", { class: "step" }, this.content);
  }

  update(figures) {
    say(this.rate, `${figures.rate} requests/s`);
    say(this.times, figures.isReady ? `${figures.waiting} waiting, p50 ${figures.p50}` : "not served");
    say(this.limits, figures.limits ? "limits" : "");
    this.root.setAttribute("class", `step${figures.limits ? " limiting" : ""}${figures.isReady ? "" : " lost"}`);
  }
}

class EndBox {
  constructor(word) {
    [this.width, this.height] = END_SIZE;
    this.root = drawn("g", { class: "end" }, drawn("rect", { x: 1, y: 1, width: this.width - 2, height: this.height - 2, rx: 16 }),
      line(word, this.width / 2, this.height / 2 + 4, { "text-anchor": "middle" }));
  }
}

/** A way through the points: curves between layers, straight beside the nodes of a layer. */
function pathOf(points, at) {
  const parts = [`M${at(points[0])}`];
  points.slice(1).forEach((point, place) => {
    const before = points[place];
    const middle = (before[0] + point[0]) / 2;
    parts.push(place % 2 === 0 ? `C${at([middle, before[1]])} ${at([middle, point[1]])} ${at(point)}` : `L${at(point)}`);
  });
  return parts.join("");
}

export class StepGraph {
  constructor() {
    this.structure = "";
    this.boxes = [];
    this.region = element("div", { className: "graph", tabIndex: 0, role: "region", "aria-label": "Graph of the steps" });
    this.body = element("tbody");
    const heads = ["Step", "requests/s", "waiting", "p50"].map((text) => element("th", { scope: "col" }, text));
    this.table = element("table", { className: "steps" }, element("caption", { className: "hint" }, "Steps of the pipeline with the figures of the graph"),
      element("thead", {}, element("tr", {}, ...heads)), this.body);
    this.about = element("p", { className: "soft" },
      "p50 is the time from a step's queue to its result, in the last minute. Waiting requests are those of all callers of the model. The step with the longest mean time limits the pipeline.");
    this.root = element("div", {}, element("h4", {}, "Steps"), this.region, this.table, this.about);
  }

  /** Show a pipeline; `recent` has what its steps did lately, see `History.steps`. */
  update(pipeline, recent, perDoubling) {
    const isNarrow = this.root.clientWidth < NARROW_PX;
    const structure = structureOf(pipeline) + isNarrow;
    if (structure !== this.structure) {
      this.structure = structure;
      this.draw(pipeline, isNarrow);
    }
    pipeline.steps.forEach((step, place) => {
      const latency = recent[place].requests ? recent[place].latency : step.latency;
      const figures = {
        rate: rate(recent[place].rate), waiting: count(step.queued), p50: milliseconds(percentile(latency, 0.5, perDoubling)),
        limits: step.name === pipeline.limiting, isReady: step.ready,
      };
      this.boxes[place].update(figures);
      this.rows[place].update(figures, recent[place]);
    });
  }

  draw(pipeline, isNarrow) {
    this.boxes = pipeline.steps.map((step) => new StepBox(step));
    const ends = [[ENDS.REQUEST, new EndBox("request")], [ENDS.RESPONSE, new EndBox("response")]];
    const boxes = new Map([ends[0], ...this.boxes.entries(), ends[1]]);
    const sizes = new Map([...boxes].map(([index, { width, height }]) => [index, isNarrow ? { along: height, across: width } : { along: width, across: height }]));
    const labels = new Map();
    const labelOf = (edge) => fitted(edge.tensors.join(", "), LABEL_WIDTH);
    const longest = Math.max(...edgesOf(pipeline).map((edge) => widthOf(labelOf(edge))));
    const places = placed(pipeline, sizes, isNarrow ? MIN_GAP : Math.max(MIN_GAP, longest + 30));
    const point = ([along, across]) => (isNarrow ? [across + MARGIN, along + MARGIN] : [along + MARGIN, across + MARGIN]);
    const at = (each) => point(each).map((value) => value.toFixed(1)).join(",");
    const edges = places.edges.map((edge) => drawn("path", { d: pathOf(edge.points, at), class: edge.isCondition ? "edge condition" : "edge", "marker-end": "url(#arrow)" },
      drawn("title", {}, edge.tensors.join(", "))));
    for (const edge of places.edges) {
      const label = roomFor(edge, widthOf(labelOf(edge)), point, [...labels.values()]);
      if (label) labels.set(edge, label);
    }
    const words = [...labels].map(([edge, { x, y }]) => line(labelOf(edge), x, y, { class: "tensor", "text-anchor": "middle" }));
    for (const [index, { root }] of boxes) root.setAttribute("transform", `translate(${at([places.nodes.get(index).along, places.nodes.get(index).across])})`);
    const [width, height] = point([places.along + MARGIN, places.across + MARGIN]).map(Math.ceil);
    const arrow = drawn("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 8, refY: 4, markerWidth: 8, markerHeight: 8, orient: "auto" }, drawn("path", { d: "M0,0L8,4L0,8Z" }));
    this.region.replaceChildren(drawn("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Steps and the tensors between them; the table has the same figures" },
      drawn("defs", {}, arrow), ...edges, ...[...boxes.values()].map(({ root }) => root), ...words));
    this.rows = pipeline.steps.map((step) => new StepRow(step));
    this.body.replaceChildren(...this.rows.map(({ root }) => root));
  }
}

/** Where the name of an edge can stand without touching another one: the centre of its text; null if there is no room. */
function roomFor(edge, width, point, others) {
  const { points } = edge;
  for (const [from, to] of [[points[0], points[1]], [points.at(-2), points.at(-1)]]) {
    const [x, middle] = point([(from[0] + to[0]) / 2, (from[1] + to[1]) / 2]);
    const box = { x, y: middle + 4, width };
    if (x - width / 2 >= 0 && others.every((other) => Math.abs(other.x - x) > (other.width + width) / 2 + 6 || Math.abs(other.y - box.y) > FONT_PX + 3)) return box;
  }
  return null;
}

/** The row of a step in the table. */
class StepRow {
  constructor(step) {
    this.cells = ["rate", "waiting", "p50"].map((name) => [name, element("td")]);
    this.limits = element("span", { className: "badge warn" }, "limits the pipeline");
    this.lost = element("span", { className: "badge bad" }, "not served");
    this.lately = element("span", { className: "soft" });
    const model = step.builtin ? modelOf(step) : element("a", { href: linkTo({ name: step.model, version: step.version }) }, step.model);
    const tensors = (names) => Object.values(names).join(", ");
    const about = `reads ${tensors(step.inputs)}; writes ${tensors(step.outputs)}${marksOf(step).map((mark) => `; ${mark}`).join("")}`;
    this.root = element("tr", {}, element("th", { scope: "row" }, step.name, " ", this.limits, this.lost, element("div", { className: "soft" }, model, `; ${about}`), this.lately), ...this.cells.map(([, cell]) => cell));
  }

  update(figures, recent) {
    for (const [name, cell] of this.cells) say(cell, figures[name]);
    this.limits.hidden = !figures.limits;
    this.lost.hidden = figures.isReady;
    const counts = [[recent.skipped, "skipped"], [recent.fallbacks, "by the fallback"], [recent.failures, "failed"]].filter(([value]) => value > 0);
    say(this.lately, counts.length ? `last minute: ${counts.map(([value, word]) => `${count(value)} ${word}`).join(", ")}` : "");
    this.lately.hidden = counts.length === 0;
  }
}
