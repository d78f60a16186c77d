// How numbers are written: three digits are enough for eyes.

export function count(value) {
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  return Math.round(value).toLocaleString("en");
}

export function several(value, what) {
  return `${count(value)} ${what}${value === 1 ? "" : "s"}`;
}

export function rate(value) {
  return value >= 100 || value === 0 ? count(value) : value.toPrecision(value >= 1 ? 3 : 2);
}

export function milliseconds(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} s`;
  if (value < 1) return `${value === 0 ? 0 : Math.max(1, Math.round(value * 1e3))} µs`;
  return `${value >= 100 ? Math.round(value) : value.toPrecision(3)} ms`;
}

export function share(value) {
  return `${value > 0 && value < 0.0995 ? (100 * value).toFixed(1) : Math.round(100 * value)} %`;
}

export function duration(seconds) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => seconds >= size);
  if (first < 0) return "0 s";
  const [unit, size] = units[first];
  const [next, part] = units[first + 1] ?? ["", 0];
  const rest = part ? Math.floor((seconds % size) / part) : 0;
  return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest} ${next}` : ""}`;
}
