// From counts to rates: what happened between two answers of the server. No element of the page is known here.

const WINDOW_NS = 60e9;
const RATE_NS = 5.5e9;
const KEPT = 121;
/** Points of a curve: the periods of the server's ring. */
export const POINTS = 120;

/** The last two minutes of answers to /v2/status. */
export class History {
  constructor() {
    this.answers = [];
  }

  /** Take in an answer; false if it is one that is here already. */
  add(status) {
    const last = this.answers.at(-1);
    if (last && status.time_ns === last.time_ns) return false;
    // A server that was started anew counts from zero, by a clock of its own.
    if (last && status.uptime_ns < last.uptime_ns) this.answers = [];
    const versions = new Map(status.models.map((model) => [keyOf(model), model]));
    this.answers.push({ time_ns: status.time_ns, uptime_ns: status.uptime_ns, versions, status });
    if (this.answers.length > KEPT) this.answers.shift();
    return true;
  }

  get latest() {
    return this.answers.at(-1);
  }

  /** What one version did in the last minute, or since the page was opened if that is less. */
  recent(key) {
    const now = this.latest;
    const then = this.answers.find((answer) => now.time_ns - answer.time_ns <= WINDOW_NS);
    const serving = now.versions.get(key)?.serving;
    if (!serving) return null;
    const before = then.versions.get(key)?.serving;
    return { seconds: (now.time_ns - then.time_ns) / 1e9, ...since(then === now ? serving : before, serving) };
  }

  /** What each step of a pipeline did in the last minute, in the order of the steps; `rate` is of the last five seconds. */
  steps(key) {
    const now = this.latest;
    const stepsOf = (answer) => answer.versions.get(key)?.serving?.pipeline?.steps ?? [];
    const [minute, lately] = [WINDOW_NS, RATE_NS].map((window) => this.answers.find((answer) => now.time_ns - answer.time_ns <= window));
    return stepsOf(now).map((step, place) => {
      const change = (then) => since(then === now ? step : stepsOf(then)[place], step, STEP_NUMBERS, STEP_TABLES);
      return { ...change(minute), rate: lately === now ? 0 : change(lately).requests / ((now.time_ns - lately.time_ns) / 1e9) };
    });
  }

  /** Requests a second between each two answers, of one version or of all; the oldest first. */
  rates(key = null) {
    return this.answers.slice(1).map((answer, place) => {
      const before = this.answers[place];
      const keys = key === null ? [...answer.versions.keys()] : [key];
      const requests = keys.map((each) => since(before.versions.get(each)?.serving, answer.versions.get(each)?.serving).requests);
      return requests.reduce((sum, count) => sum + count, 0) / ((answer.time_ns - before.time_ns) / 1e9);
    });
  }
}

/** Requests and failures a second in each period of the last ten minutes, of one version or of several together. */
export function curve(servings) {
  const sum = Array(POINTS).fill(0);
  for (const serving of servings) {
    for (const series of [serving.requests_per_s, serving.failures_per_s]) {
      series.forEach((value, place) => {
        const at = POINTS - series.length + place;
        if (at >= 0) sum[at] += value;
      });
    }
  }
  return sum;
}

export function keyOf(model) {
  return `${model.name}\n${model.version}`;
}

const NUMBERS = ["requests", "rows", "late", "queue_ns", "assemble_ns", "compute_ns", "split_ns", "total_ns"];
const TABLES = ["failures", "batches", "sizes", "latency"];
const STEP_NUMBERS = ["requests", "fallbacks", "skipped", "failures"];
const STEP_TABLES = ["latency"];

/** The difference of two sets of counts. A version that was loaded anew counts from zero, and so does one that was not there. */
export function since(before, now, numbers = NUMBERS, tables = TABLES) {
  if (!now) return { requests: 0 };
  const anew = !before || numbers.some((name) => now[name] < before[name]);
  const found = {};
  for (const name of numbers) found[name] = now[name] - (anew ? 0 : before[name]);
  for (const name of tables) {
    const counts = Object.entries(now[name]).map(([label, count]) => [label, count - (anew ? 0 : (before[name][label] ?? 0))]);
    found[name] = Object.fromEntries(counts.filter(([, count]) => count > 0));
  }
  return found;
}

/** Milliseconds that the share `quantile` of the requests kept to, null if there were none. */
export function percentile(latency, quantile, perDoubling) {
  const buckets = Object.entries(latency).map(([number, count]) => [Number(number), count]).sort((a, b) => a[0] - b[0]);
  const rank = quantile * buckets.reduce((sum, [, count]) => sum + count, 0);
  let counted = 0;
  for (const [number, count] of buckets) {
    if (counted + count >= rank) {
      // Bounds grow by a factor, so within a bucket too it is the exponent that is taken to grow evenly.
      return 1e3 * 2 ** ((number - 1 + (rank - counted) / count) / perDoubling);
    }
    counted += count;
  }
  return null;
}

/** Counts of several tables together. */
export function together(tables) {
  const sum = {};
  for (const table of tables) {
    for (const [label, count] of Object.entries(table)) sum[label] = (sum[label] ?? 0) + count;
  }
  return sum;
}
