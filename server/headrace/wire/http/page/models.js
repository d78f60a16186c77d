// The list of models: a card for each version that fails or is busy, a line for each idle one.

import { chart } from "./charts.js";
import { element, say } from "./dom.js";
import { count, milliseconds, rate, several, share } from "./format.js";
import { curve, keyOf, percentile } from "./history.js";

export const FIGURES = [["rate", "requests/s"], ["p50", "p50"], ["p95", "p95"], ["p99", "p99"], ["queued", "queued"], ["wait", "wait ahead"], ["flight", "in flight"], ["living", "instances"]];
const GROUPS = ["failing", "busy", "idle"];

/** State of a version as a word, the colour of its badge, and its reason. */
export function stateOf({ state, reason, serving }) {
  const dead = serving && !serving.pipeline && serving.living === 0 && !serving.parked;
  const word = dead ? "NO INSTANCE" : serving?.parked ? "PARKED" : state;
  const colour = !dead && state === "READY" ? "good" : state === "UNAVAILABLE" || dead ? "bad" : "soft";
  const unproven = serving?.unproven_batches ? `batches are not proven: ${serving.unproven_batches}` : "";
  const parts = [reason || (serving?.not_on_gpu ? `not on the GPU: ${serving.not_on_gpu}` : ""), unproven, serving?.traffic ? trafficText(serving.traffic) : ""];
  return { word, colour, reason: parts.filter(Boolean).join("; ") };
}

/** State and share of a version of a model with traffic, and why a rule has taken the share. */
function trafficText({ state, share: part, reason }) {
  return `${state.replaceAll("_", " ")}, ${share(part)} of the traffic${reason ? `: ${reason}` : ""}`;
}

/** "failing": not served, or with errors of the server in the last minute. "busy": with requests in the last minute. */
export function groupOf(model, recent) {
  const { colour } = stateOf(model);
  if (colour === "bad" || (!model.serving && model.state === "LOADING")) return "failing";
  // Requests that the client must correct say nothing of the model.
  if (recent && Object.keys(recent.failures ?? {}).some((reason) => reason !== "bad_request" && reason !== "cancelled")) return "failing";
  if (recent && (recent.requests > 0 || Object.keys(recent.failures ?? {}).length > 0)) return "busy";
  return model.serving && (model.serving.queued > 0 || model.serving.in_flight > 0) ? "busy" : "idle";
}

export function runtimeOf(serving) {
  if (serving.pipeline) return `${serving.pipeline.kind} of ${several(serving.pipeline.steps.length, "step")}`;
  const runtime = { onnxruntime: "ONNX Runtime", onnxruntime_cuda: "ONNX Runtime (CUDA)", tensorrt: "TensorRT" }[serving.runtime] ?? serving.runtime;
  const engine = serving.engine ? `, ${serving.engine} engine` : "";
  const batches = serving.max_batch_size ? `, up to ${serving.max_batch_size} rows a batch` : ", no batches";
  return `${runtime} on ${serving.device === "CPU" ? "the CPU" : serving.device}${engine}${batches}`;
}

/** Link to a model's own view. */
export function linkTo(model) {
  return `#${encodeURIComponent(model.name)}/${encodeURIComponent(model.version)}`;
}

/** Elements for `FIGURES` by name. */
export function figureList() {
  const figures = Object.fromEntries(FIGURES.map(([name]) => [name, element("dd")]));
  const list = element("dl", { className: "figures" }, ...FIGURES.map(([name, label]) => element("div", {}, element("dt", {}, label), figures[name])));
  return { figures, list };
}

/** Write the figures of a version: percentiles of the last minute, or since it was loaded if there were no requests. */
export function showFigures(figures, serving, recent, rates, perDoubling) {
  const shown = recent.requests ? recent : serving;
  say(figures.rate, rate(average(rates.slice(-5))));
  for (const [name, quantile] of [["p50", 0.5], ["p95", 0.95], ["p99", 0.99]]) say(figures[name], milliseconds(percentile(shown.latency, quantile, perDoubling)));
  say(figures.queued, count(serving.queued));
  say(figures.wait, milliseconds(serving.wait_ns / 1e6));
  say(figures.flight, count(serving.in_flight));
  say(figures.living, `${serving.living}/${serving.instances}`);
  figures.living.parentElement.hidden = Boolean(serving.pipeline);
  figures.living.classList.toggle("alarm", serving.living < serving.instances && !serving.parked);
}

function average(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0;
}

export class ModelList {
  /** `cards` and `lines` are the elements that take failing and busy versions, and idle ones. */
  constructor(cards, lines) {
    this.places = { failing: cards, busy: cards, idle: lines };
    this.entries = new Map();
  }

  /** Show the latest answer of a `History`; the numbers of versions in each group. */
  update(history, filter) {
    const { status, versions } = history.latest;
    for (const [key, entry] of this.entries) {
      if (!versions.has(key)) {
        entry.root.remove();
        this.entries.delete(key);
      }
    }
    const roots = { failing: [], busy: [], idle: [] };
    for (const model of status.models) {
      const key = keyOf(model);
      const recent = history.recent(key);
      const group = groupOf(model, recent);
      let entry = this.entries.get(key);
      if (entry?.isCard !== (group !== "idle")) {
        entry?.root.remove();
        entry = group === "idle" ? new Line(model) : new Card(model);
        this.entries.set(key, entry);
      }
      roots[group].push(entry.root);
      entry.root.hidden = !model.name.toLowerCase().includes(filter);
      if (!entry.root.hidden) entry.update(model, history, recent, status.buckets_per_doubling);
    }
    // Moved only where the order has changed.
    arrange(this.places.failing, [...roots.failing, ...roots.busy]);
    arrange(this.places.idle, roots.idle);
    return Object.fromEntries(GROUPS.map((group) => [group, roots[group].length]));
  }
}

function arrange(place, roots) {
  if (roots.some((root, at) => place.children[at] !== root)) place.replaceChildren(...roots);
  place.hidden = roots.length === 0;
}

function heading(model) {
  return element("h3", {}, element("a", { href: linkTo(model) }, model.name), " ", element("small", {}, model.version ? `version ${model.version}` : ""));
}

class Card {
  isCard = true;

  constructor(model) {
    this.seen = "";
    this.badge = element("span", { className: "badge" });
    this.reason = element("p", { className: "reason" });
    this.chart = chart("requests a second");
    const { figures, list } = figureList();
    this.figures = figures;
    this.errors = element("p", { className: "alarm" });
    this.serving = element("div", {}, list, this.chart.root, this.errors);
    this.root = element("article", { className: "card" }, element("header", {}, heading(model), this.badge), this.reason, this.serving);
  }

  update(model, history, recent, perDoubling) {
    const { serving } = model;
    const rates = history.rates(keyOf(model));
    const moving = rates.some((value) => value > 0) ? history.latest.time_ns : 0;
    const seen = JSON.stringify([model, { ...recent, seconds: 0 }, moving]);
    // Nothing has come, nothing is drawn: a repository of a thousand models costs the browser no more than those at work.
    if (seen === this.seen) return;
    this.seen = seen;
    const { word, colour, reason } = stateOf(model);
    say(this.badge, word);
    this.badge.className = `badge ${colour}`;
    say(this.reason, reason);
    this.reason.title = reason;
    this.reason.hidden = !reason;
    this.serving.hidden = !serving;
    if (!serving) return;
    showFigures(this.figures, serving, recent, rates, perDoubling);
    this.chart.draw(curve([serving]));
    const failed = Object.entries(recent.failures).map(([reason, value]) => `${count(value)} ${reason}`).join(", ");
    say(this.errors, failed ? `Errors in the last minute: ${failed}` : "");
    this.errors.hidden = !failed;
  }
}

class Line {
  isCard = false;

  constructor(model) {
    this.badge = element("span", { className: "badge" });
    this.text = element("span", { className: "soft" });
    this.root = element("li", {}, heading(model), this.text, this.badge);
  }

  update(model) {
    const { word, colour, reason } = stateOf(model);
    say(this.badge, word);
    this.badge.className = `badge ${colour}`;
    say(this.text, model.serving ? `${runtimeOf(model.serving)}; ${several(model.serving.requests, "request")} since it was loaded${reason ? `; ${reason}` : ""}` : reason);
  }
}
