// A card for each version of a model: its state, and what it did in the last minute.

import { columns, ranking, sparkline, stack } from "./charts.js";
import { get, versionPath } from "./client.js";
import { element, say } from "./dom.js";
import { count, milliseconds, rate, several, share } from "./format.js";
import { keyOf, percentile } from "./history.js";

// More sizes than this do not fit on a phone: they are put together by powers of two.
const MAX_COLUMNS = 12;
const CLOSED_BY = {
  full: "full", preferred: "preferred size", delay: "delay over", idle: "instance idle", single: "never merged", drain: "unloading", deadline: "deadline near",
};
const REASONS = Object.keys(CLOSED_BY);
const PHASES = [["queue", "queue_ns"], ["assemble", "assemble_ns"], ["compute", "compute_ns"], ["split", "split_ns"]];
const FIGURES = [["rate", "requests/s"], ["p50", "p50"], ["p95", "p95"], ["p99", "p99"], ["queued", "queued"], ["wait", "wait ahead"], ["flight", "in flight"], ["living", "instances"]];

const LAYERS_SHOWN = 40;

export class ModelCards {
  constructor(place, onTry) {
    this.place = place;
    this.onTry = onTry;
    this.cards = new Map();
  }

  /** Show the latest answer of a `History`. */
  update(history, filter) {
    const { status, versions } = history.latest;
    for (const [key, card] of this.cards) {
      if (!versions.has(key)) {
        card.root.remove();
        this.cards.delete(key);
      }
    }
    for (const model of status.models) {
      const key = keyOf(model);
      let card = this.cards.get(key);
      if (!card) {
        card = new Card(model, this.onTry);
        this.cards.set(key, card);
      }
      card.root.hidden = !model.name.toLowerCase().includes(filter);
      if (!card.root.hidden) card.update(model, history, status.buckets_per_doubling);
    }
    // In the order of the index, and moved only where that has changed.
    const roots = status.models.map((model) => this.cards.get(keyOf(model)).root);
    if (roots.some((root, at) => this.place.children[at] !== root)) this.place.replaceChildren(...roots);
  }
}

class Card {
  constructor(model, onTry) {
    this.model = model;
    this.seen = "";
    this.badge = element("span", { className: "badge" });
    this.reason = element("p", { className: "reason" });
    this.what = element("p", { className: "soft" });
    this.spark = sparkline("requests a second");
    this.figures = Object.fromEntries(FIGURES.map(([name]) => [name, element("dd")]));
    this.time = element("div");
    this.sizes = element("div");
    this.closed = element("div");
    this.failures = element("div");
    this.serving = element("div", {},
      this.what,
      element("dl", { className: "figures" }, ...FIGURES.map(([name, label]) => element("div", {}, element("dt", {}, label), this.figures[name]))),
      this.spark.svg, this.time, this.sizes, this.closed, this.failures, this.details(),
      element("button", { type: "button", className: "try", onclick: () => onTry(model) }, "Try it"));
    const name = element("h3", {}, model.name, " ", element("small", {}, model.version ? `version ${model.version}` : ""));
    this.root = element("article", { className: "card" }, element("header", {}, name, this.badge), this.reason, this.serving);
  }

  update(model, history, perDoubling) {
    const { serving } = model;
    const key = keyOf(model);
    const rates = history.rates(key);
    const recent = history.recent(key);
    const moving = rates.some((value) => value > 0) ? history.latest.time_ns : 0;
    const seen = JSON.stringify([model, { ...recent, seconds: 0 }, moving]);
    // Nothing has come, nothing is to be drawn: a repository of a thousand models costs the browser no more than those at work.
    if (seen === this.seen) return;
    this.seen = seen;
    const dead = serving && serving.living === 0 && !serving.parked;
    const state = dead ? "NO INSTANCE" : serving?.parked ? "PARKED" : model.state;
    say(this.badge, state);
    this.badge.className = `badge ${!dead && model.state === "READY" ? "good" : model.state === "UNAVAILABLE" || dead ? "bad" : "soft"}`;
    const reason = model.reason || (serving?.not_on_gpu ? `not on the GPU: ${serving.not_on_gpu}` : "");
    say(this.reason, reason);
    this.reason.hidden = !reason;
    this.serving.hidden = !serving;
    if (serving) this.show(serving, recent, rates, perDoubling);
  }

  show(serving, recent, rates, perDoubling) {
    const runtime = { onnxruntime: "ONNX Runtime", tensorrt: "TensorRT" }[serving.runtime] ?? serving.runtime;
    const engine = serving.engine ? `, ${serving.engine} engine` : "";
    const batches = serving.max_batch_size ? `, up to ${serving.max_batch_size} rows a batch` : ", no batches";
    say(this.what, `${runtime} on ${serving.device === "CPU" ? "the CPU" : serving.device}${engine}${batches}; ${several(serving.requests, "request")} since it was loaded`);
    const texts = {
      rate: rate(recent.seconds ? average(rates.slice(-5)) : 0),
      queued: count(serving.queued),
      wait: milliseconds(serving.wait_ns / 1e6),
      flight: count(serving.in_flight),
      living: `${serving.living}/${serving.instances}`,
    };
    for (const [name, quantile] of [["p50", 0.5], ["p95", 0.95], ["p99", 0.99]]) texts[name] = milliseconds(percentile(recent.latency, quantile, perDoubling));
    for (const [name, text] of Object.entries(texts)) say(this.figures[name], text);
    this.figures.living.classList.toggle("alarm", serving.living < serving.instances && !serving.parked);
    this.spark.draw(rates);
    // What happened lately says more; where nothing did, what happened at all.
    const shown = recent.requests ? recent : serving;
    const when = recent.requests ? "last minute" : "since loaded";
    const phases = PHASES.map(([label, name]) => [label, shown[name], milliseconds(shown[name] / (shown.requests || 1) / 1e6)]);
    section(this.time, "Where the time goes", when, shown.requests ? stack(phases) : []);
    section(this.sizes, "Rows a batch", when, shown.requests ? [columns(sizesOf(shown.sizes))] : []);
    section(this.closed, "Why batches closed", when, shown.requests ? stack(closedBy(shown.batches)) : []);
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

function section(place, title, when, content) {
  place.hidden = content.length === 0;
  if (content.length) place.replaceChildren(element("h4", {}, title, " ", element("small", {}, when)), ...content);
}

function sentence(text) {
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
}

function average(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0;
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
  return names.map((name, tone) => [CLOSED_BY[name] ?? name.replaceAll("_", " "), batches[name] ?? 0, share((batches[name] ?? 0) / sum), tone]).filter(([, value]) => value > 0);
}
