// Small pictures of numbers, as SVG and as bars of HTML. Colours come from the style sheet, by class.

import { drawn, element } from "./dom.js";
import { count, share } from "./format.js";

const WIDTH = 240;
const HEIGHT = 44;
const FEWEST = 30;

/** A curve that is drawn anew with each `draw(values)`; its scale begins at zero. */
export function sparkline(label) {
  const area = drawn("path", { class: "area" });
  const line = drawn("path", { class: "line" });
  const title = drawn("title");
  const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", class: "spark" }, title, area, line);
  const draw = (values) => {
    // A curve that has just begun is not squeezed into the last corner.
    const points = Math.max(values.length, FEWEST);
    const top = Math.max(...values, 1e-9);
    const step = WIDTH / (points - 1);
    const left = WIDTH - (values.length - 1) * step;
    const places = values.map((value, place) => `${(left + place * step).toFixed(1)},${(HEIGHT - 2 - (HEIGHT - 4) * (value / top)).toFixed(1)}`);
    line.setAttribute("d", places.length > 1 ? `M${places.join("L")}` : "");
    area.setAttribute("d", places.length > 1 ? `M${left.toFixed(1)},${HEIGHT}L${places.join("L")}L${WIDTH},${HEIGHT}Z` : "");
    title.textContent = `${label}: at most ${count(top)}, now ${count(values.at(-1) ?? 0)}`;
  };
  return { svg, draw };
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
