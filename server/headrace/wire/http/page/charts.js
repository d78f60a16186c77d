// Small pictures of numbers, as SVG and as bars of HTML. Colours come from the style sheet, by class.

import { drawn, element, say } from "./dom.js";
import { count, rate, share } from "./format.js";
import { POINTS } from "./history.js";

const WIDTH = 600;
const HEIGHT = 60;

/** A curve of the last ten minutes with its axes, drawn anew with each `draw(values)`; the latest value is last. */
export function chart(label) {
  const area = drawn("path", { class: "area" });
  const line = drawn("path", { class: "line" });
  const title = drawn("title");
  const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", class: "curve" }, title, area, line);
  const top = element("span", { className: "top-mark" });
  const maximum = element("span", { className: "maximum" });
  const root = element("div", { className: "chart" }, top, maximum, element("span", { className: "zero-mark" }, "0"), svg,
    element("div", { className: "times" }, ...["10 min ago", "5 min", "now"].map((text) => element("span", {}, text))));
  const draw = (values) => {
    const shown = values.slice(-POINTS);
    const most = Math.max(...shown, 0);
    const scale = roundedUp(most);
    const step = WIDTH / (POINTS - 1);
    const left = WIDTH - (shown.length - 1) * step;
    const places = shown.map((value, place) => `${(left + place * step).toFixed(1)},${(HEIGHT - (HEIGHT - 1) * (value / scale)).toFixed(1)}`);
    line.setAttribute("d", places.length > 1 ? `M${places.join("L")}` : "");
    area.setAttribute("d", places.length > 1 ? `M${left.toFixed(1)},${HEIGHT}L${places.join("L")}L${WIDTH},${HEIGHT}Z` : "");
    say(top, `${Number(scale.toPrecision(1))}/s`);
    say(maximum, most > 0 ? `maximum ${rate(most)}/s` : "");
    say(title, `${label}, ten minutes: at most ${rate(most)}/s, now ${rate(shown.at(-1) ?? 0)}/s`);
  };
  draw([]);
  return { root, draw };
}

/** The next number with one digit out of 1, 2 and 5, so that the axis ends at a round one. */
function roundedUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((digit) => digit * power).find((bound) => bound >= value * 0.999) ?? value;
}

/** A row of columns, one a label; `entries` are [label, count]. */
export function columns(entries) {
  const top = Math.max(...entries.map(([, value]) => value), 1);
  const sum = entries.reduce((total, [, value]) => total + value, 0) || 1;
  return element("div", { className: "columns", role: "img", "aria-label": describe(entries, sum) }, ...entries.map(([label, value]) => {
    const bar = element("i");
    bar.style.height = `${Math.max((100 * value) / top, value ? 3 : 0)}%`;
    return element("div", { title: `${label}: ${count(value)}, ${share(value / sum)}` }, element("span", { className: "column" }, bar), element("small", {}, label));
  }));
}

/** One bar that is cut in parts, with what they are below; `entries` are [label, value, written]. */
export function stack(entries) {
  const sum = entries.reduce((total, [, value]) => total + value, 0) || 1;
  const parts = entries.map(([label, value, , number], place) => {
    const part = element("span", { className: `tone${(number ?? place) % 8}`, title: `${label}: ${share(value / sum)}` });
    part.style.width = `${(100 * value) / sum}%`;
    return part;
  });
  const legend = entries.map(([label, value, written, number], place) =>
    element("li", {}, element("i", { className: `tone${(number ?? place) % 8}` }), `${label} `, element("b", {}, written ?? share(value / sum))));
  return [element("div", { className: "stack", role: "img", "aria-label": describe(entries, sum) }, ...parts), element("ul", { className: "legend" }, ...legend)];
}

/** A list of bars, each with its name before and its value behind; `entries` are [label, share of the longest, written]. */
export function ranking(entries) {
  return element("ol", { className: "ranking" }, ...entries.map(([label, part, written]) => {
    const bar = element("i");
    bar.style.width = `${Math.max(0, Math.min(100, 100 * part))}%`;
    return element("li", {}, element("span", { className: "name" }, label), element("b", {}, written), element("span", { className: "bar" }, bar));
  }));
}

function describe(entries, sum) {
  return entries.map(([label, value]) => `${label} ${share(value / sum)}`).join(", ");
}
