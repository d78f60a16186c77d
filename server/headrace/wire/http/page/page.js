// The page at "/": reads the status of all models once a second and shows the changes.

import { get } from "./client.js";
import { chart } from "./charts.js";
import { say } from "./dom.js";
import { anotherKey, askForKey, keyAccepted } from "./key.js";
import { count, duration, milliseconds, rate } from "./format.js";
import { History, curve, keyOf, percentile, together } from "./history.js";
import { ModelList } from "./models.js";
import { ProcessList } from "./processes.js";
import * as trying from "./trying.js";
import { ModelView } from "./view.js";

const PERIOD_MS = 1000;

const at = (id) => document.getElementById(id);
const history = new History();
const whole = chart("requests a second, all models");
const list = new ModelList(at("models"), at("idle"));
const processes = new ProcessList(at("processes"));
let view = null;

/** Show the view of the model that the address names, "#MODEL/VERSION", or the list of all. */
function route() {
  const [name, version] = location.hash.slice(1).split("/").map(decodeURIComponent);
  const model = name ? { name, version: version ?? "" } : null;
  at("overview").hidden = at("all").hidden = Boolean(model);
  at("view").hidden = !model;
  view = model ? new ModelView(model) : null;
  at("view").replaceChildren(...(view ? [view.root] : []));
  trying.choose(null);
  document.title = model ? `${model.name} · Headrace` : "Headrace";
  scrollTo(0, 0);
  if (history.latest) show();
}

/** The number of versions in each group, as far as there are any. */
function grouped(groups) {
  return Object.entries(groups).filter(([, value]) => value > 0).map(([group, value]) => `${value} ${group}`).join(", ");
}

function show() {
  const { status } = history.latest;
  const serving = status.models.filter((model) => model.serving);
  say(at("version"), status.version);
  say(at("uptime"), `up ${duration(status.uptime_ns / 1e9)}`);
  const { models_ready: ready, models_expected: expected } = status;
  const some = ready < expected ? `${ready} of ${expected}` : "";
  say(at("ready"), status.ready ? (some ? `${some} ready` : "ready") : (some ? `not ready: ${some}` : "not ready"));
  at("ready").className = `badge ${!status.ready ? "bad" : some ? "warn" : "good"}`;
  const rates = history.rates();
  const recent = serving.map((model) => history.recent(keyOf(model)));
  const latency = together(recent.map((each) => each.latency));
  const lately = rates.slice(-5);
  const sum = (read) => serving.reduce((total, model) => total + read(model.serving), 0);
  say(at("all-rate"), rate(lately.length ? lately.reduce((total, value) => total + value, 0) / lately.length : 0));
  for (const [id, quantile] of [["all-p50", 0.5], ["all-p99", 0.99]]) say(at(id), milliseconds(percentile(latency, quantile, status.buckets_per_doubling)));
  // The queues of a pipeline are those of its models.
  say(at("all-queued"), count(sum((each) => (each.pipeline ? 0 : each.queued))));
  say(at("all-flight"), count(sum((each) => (each.pipeline ? 0 : each.in_flight))));
  const errors = Object.values(together(recent.map((each) => each.failures))).reduce((total, value) => total + value, 0);
  say(at("all-errors"), count(errors));
  at("all-errors").classList.toggle("alarm", errors > 0);
  whole.draw(curve(serving.map((model) => model.serving)));
  processes.update(status);
  at("filter").hidden = status.models.length <= 6;
  const groups = list.update(history, at("filter").value.trim().toLowerCase());
  say(at("summary"), grouped(groups));
  if (view) {
    view.update(history);
    const served = serving.find((model) => keyOf(model) === keyOf(view.model));
    trying.choose(served ?? null);
  }
}

async function look() {
  try {
    const fresh = history.add(await get("v2/status"));
    at("lost").hidden = true;
    keyAccepted();
    document.body.classList.remove("stale");
    if (fresh) show();
  } catch (error) {
    document.body.classList.add("stale");
    if (error.status === 401 || error.status === 403) {
      at("lost").hidden = true;
      askForKey(error.message);
      await anotherKey();
      return;
    }
    // What stands here is what was last known.
    say(at("lost"), `The server does not answer (${error.message}). This page goes on asking.`);
    at("lost").hidden = false;
  }
}

/** One request at a time, none while the page is hidden. */
async function watch() {
  for (;;) {
    if (document.hidden) await new Promise((resume) => document.addEventListener("visibilitychange", resume, { once: true }));
    await look();
    await new Promise((resume) => setTimeout(resume, PERIOD_MS));
  }
}

at("all-chart").append(whole.root);
at("filter").addEventListener("input", () => history.latest && show());
trying.start();
addEventListener("hashchange", route);
route();
void watch();
