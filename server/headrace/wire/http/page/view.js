// The view of one version: its state, what it did in the last minute, what limits it, and a form to try it.

import { chart, columns, ranking, stack } from "./charts.js";
import { get, versionPath } from "./client.js";
import { element, say } from "./dom.js";
import { count, milliseconds, several, share } from "./format.js";
import { StepGraph } from "./graph.js";
import { curve, keyOf } from "./history.js";
import { figureList, runtimeOf, showFigures, stateOf } from "./models.js";

// More sizes than this do not fit on a phone: they are put together by powers of two.
const MAX_COLUMNS = 12;
// Why the batcher stopped to wait for more requests: the values of `closed_by`, as in metrics, `headrace explain` and `simulate`.
const REASONS = ["full", "preferred", "delay", "idle", "single", "drain", "deadline"];
const ENDED_BY = {
  end: "by END", restart: "by START on the same id", idle: "idle", cancelled: "queued request cancelled or timed out", died: "instance died",
  unloaded: "model unloaded",
};
const REFUSED_AS = { not_live: "without START", queue_full: "queue full", unloading: "model being unloaded", ended: "queued when their sequence ended" };
const PHASES = [["queue", "queue_ns"], ["assemble", "assemble_ns"], ["compute", "compute_ns"], ["split", "split_ns"]];
const LAYERS_SHOWN = 40;

export class ModelView {
  constructor(model) {
    this.model = model;
    this.badge = element("span", { className: "badge" });
    this.reason = element("p", { className: "reason" });
    this.what = element("p", { className: "soft" });
    this.chart = chart("requests a second");
    const { figures, list } = figureList();
    this.figures = figures;
    this.graph = new StepGraph();
    this.sequences = element("div", { className: "sequences" });
    this.traffic = element("div", { className: "traffic" });
    this.time = element("div");
    this.sizes = element("div");
    this.closed = element("div");
    this.failures = element("div");
    this.serving = element("div", {}, this.what, list, this.chart.root, this.graph.root, this.sequences, this.traffic,
      element("div", { className: "two" }, element("div", {}, this.time, this.closed), element("div", {}, this.sizes, this.failures)), this.details());
    const name = element("h2", {}, model.name, " ", element("small", {}, model.version ? `version ${model.version}` : ""));
    this.root = element("article", { className: "card" }, element("p", {}, element("a", { href: "#" }, "All models")),
      element("header", {}, name, this.badge), this.reason, this.serving);
  }

  /** Show the latest answer of a `History`. */
  update(history) {
    const { status, versions } = history.latest;
    const model = versions.get(keyOf(this.model));
    const { word, colour, reason } = model ? stateOf(model) : { word: "NOT THERE", colour: "bad", reason: "The server has no such version any more." };
    say(this.badge, word);
    this.badge.className = `badge ${colour}`;
    say(this.reason, reason);
    this.reason.hidden = !reason;
    this.serving.hidden = !model?.serving;
    this.graph.root.hidden = !model?.serving?.pipeline;
    if (model?.serving?.pipeline) this.graph.update(model.serving.pipeline, history.steps(keyOf(model)), status.buckets_per_doubling);
    if (model?.serving) this.show(model.serving, history.recent(keyOf(model)), history.rates(keyOf(model)), status.buckets_per_doubling);
  }

  show(serving, recent, rates, perDoubling) {
    say(this.what, `${runtimeOf(serving)}; ${several(serving.requests, "request")} since it was loaded`);
    showFigures(this.figures, serving, recent, rates, perDoubling);
    this.chart.draw(curve([serving]));
    section(this.sequences, "Sequences", "now", serving.sequences ? sequencesOf(serving.sequences) : []);
    section(this.traffic, "Traffic", "of requests that name no version", serving.traffic ? trafficOf(serving.traffic) : []);
    const shown = recent.requests ? recent : serving;
    const when = recent.requests ? "last minute" : "since loaded";
    const phases = PHASES.map(([label, name]) => [label, shown[name], milliseconds(shown[name] / (shown.requests || 1) / 1e6)]);
    section(this.time, "Where the time goes", when, shown.requests ? stack(phases) : []);
    section(this.sizes, "Rows a batch", when, Object.keys(shown.sizes ?? {}).length ? [columns(sizesOf(shown.sizes))] : []);
    section(this.closed, "Why batches closed", when, Object.keys(shown.batches ?? {}).length ? stack(closedBy(shown.batches)) : []);
    const lately = recent.late > 0 || Object.keys(recent.failures).length > 0;
    const { late, failures } = lately ? recent : serving;
    const failed = { ...failures, ...(late ? { "answered late": late } : {}) };
    const most = Math.max(...Object.values(failed), 1);
    const bars = Object.entries(failed).sort((a, b) => b[1] - a[1]).map(([reason, value]) => [reason, value / most, count(value)]);
    section(this.failures, "Errors", lately ? "last minute" : "since loaded", bars.length ? [ranking(bars)] : []);
  }

  /** Details that are loaded only when they are open. */
  details() {
    const inside = element("div");
    const details = element("details", {}, element("summary", {}, "What limits it, compute times, layers"), inside);
    details.addEventListener("toggle", () => {
      if (details.open) void this.fill(inside);
    });
    return details;
  }

  async fill(inside) {
    const path = versionPath(this.model);
    const parts = await Promise.all([limit(path), profile(path), layers(path)].map((part) => part.catch((error) => [element("p", { className: "soft" }, error.message)])));
    inside.replaceChildren(...parts.flat());
  }
}

async function limit(path) {
  const { findings } = await get(`${path}/explain`);
  const items = findings.flatMap((finding) => [
    element("p", {}, sentence(finding.explanation)),
    ...(finding.cure ? [element("p", { className: "soft" }, sentence(`${finding.cure}${finding.setting ? ` (${finding.setting})` : ""}${finding.expected ? `: ${finding.expected}` : ""}`))] : []),
  ]);
  return items.length ? [element("h4", {}, "What limits it now"), ...items] : [];
}

async function profile(path) {
  const { profile: rows } = await get(`${path}/profile`);
  if (!rows.length) return [];
  const longest = Math.max(...rows.map((row) => row.p95_us));
  const name = (row) => several(row.rows, "row") + (row.instances > 1 ? `, ${row.instances} instances at work` : "");
  const bars = rows.map((row) => [name(row), row.median_us / longest, `${milliseconds(row.median_us / 1e3)}, p95 ${milliseconds(row.p95_us / 1e3)}`]);
  return [element("h4", {}, "A batch computes for"), ranking(bars)];
}

async function layers(path) {
  const report = await get(`${path}/layers`);
  if (!report.layers.length) return [element("p", { className: "soft" }, sentence(report.reason))];
  const ranked = [...report.layers].sort((a, b) => b.time_us - a.time_us);
  const longest = Math.max(ranked[0]?.time_us ?? 0, 1e-9);
  const bars = ranked.slice(0, LAYERS_SHOWN).map((layer) => [
    `${layer.nodes.join(", ") || layer.name} (${[layer.kind, layer.precision].filter(Boolean).join(", ")})`, layer.time_us / longest,
    `${milliseconds(layer.time_us / 1e3)} ${share(layer.share)}`,
  ]);
  const left = ranked.length > LAYERS_SHOWN ? `; the ${LAYERS_SHOWN} longest` : "";
  const about = `${report.artefact}, ${several(report.rows, "row")}, ${milliseconds(report.median_us / 1e3)} an execution; ${several(ranked.length, "layer")}${left}. ${report.machine}`;
  return [element("h4", {}, "Layers"), element("p", { className: "soft" }, about), ranking(bars)];
}

/** Slots, backlog, and what became of the sequences and refused requests since the version was loaded. */
function sequencesOf({ live, slots, used, backlog, ends, refusals }) {
  const most = Math.max(slots, backlog, 1);
  const bars = [["slots in use", used / Math.max(slots, 1), `${count(used)} of ${count(slots)}`], ["waiting for a slot", backlog / most, count(backlog)]];
  const totals = [["ended", ends, ENDED_BY], ["refused requests", refusals, REFUSED_AS]].flatMap(([title, counts, texts]) => {
    const parts = Object.entries(counts).filter(([, value]) => value).map(([reason, value]) => `${texts[reason] ?? reason} ${count(value)}`);
    return parts.length ? [`${title}: ${parts.join(", ")}`] : [];
  });
  const since = totals.length ? [element("p", { className: "soft" }, `Since it was loaded: ${totals.join("; ")}.`)] : [];
  return [element("p", {}, `${several(live, "live sequence")}.`), ranking(bars), ...since];
}

/** State and share of the version, its shadow answers, and what keeps it from being promoted. */
function trafficOf({ state, share: part, reason, promotion, routed, agreement, max_difference, shadow }) {
  const bars = [[state.replaceAll("_", " "), part, share(part)]];
  if (agreement !== null) bars.push(["agreement of shadow answers", agreement, `${share(agreement)}, largest difference ${max_difference}`]);
  const outcomes = Object.entries(shadow).map(([outcome, value]) => `${outcome.replaceAll("_", " ")} ${count(value)}`);
  const texts = [`${several(routed, "request")} routed here.`, ...(outcomes.length ? [`Shadow requests: ${outcomes.join(", ")}.`] : []),
    ...(reason ? [`Undone: ${reason}.`] : []), ...(promotion ? [`Not promoted: ${promotion}.`] : [])];
  return [ranking(bars), ...texts.map((text) => element("p", { className: "soft" }, text))];
}

function section(place, title, when, content) {
  place.hidden = content.length === 0;
  if (content.length) place.replaceChildren(element("h4", {}, title, " ", element("small", {}, when)), ...content);
}

function sentence(text) {
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
}

/** [label, batches] by rows; ranges where there are many sizes. */
function sizesOf(sizes) {
  const entries = Object.entries(sizes).map(([rows, batches]) => [Number(rows), batches]).sort((a, b) => a[0] - b[0]);
  if (entries.length <= MAX_COLUMNS) return entries.map(([rows, batches]) => [String(rows), batches]);
  const ranges = new Map();
  for (const [rows, batches] of entries) {
    const power = 2 ** Math.ceil(Math.log2(Math.max(rows, 1)));
    ranges.set(power, (ranges.get(power) ?? 0) + batches);
  }
  return [...ranges].map(([power, batches]) => [power > 2 ? `≤${power}` : String(power), batches]);
}

/** [what, batches, written, tone], always in one order, so that a reason keeps its colour. */
function closedBy(batches) {
  const names = [...REASONS, ...Object.keys(batches).filter((name) => !REASONS.includes(name)).sort()];
  const sum = Object.values(batches).reduce((total, value) => total + value, 0) || 1;
  return names.map((name, tone) => [name, batches[name] ?? 0, share((batches[name] ?? 0) / sum), tone]).filter(([, value]) => value > 0);
}
