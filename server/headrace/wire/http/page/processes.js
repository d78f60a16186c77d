// The processes of a server with front ends: CPU time, memory, connections and restarts of each.

import { element, say } from "./dom.js";
import { count, several, share } from "./format.js";

const MIB = 1024 * 1024;

/** Text of one process; `before` is its row in an earlier answer, `seconds` the time since, null for none. */
export function describe(row, before, seconds) {
  const name = row.name.replaceAll("_", " ");
  if (!row.pid) return `${name}: not running, ${several(row.starts, "start")}`;
  const parts = [];
  if (before && seconds > 0) parts.push(`${share(Math.max(row.cpu_s - before.cpu_s, 0) / seconds)} of a core`);
  parts.push(`${count(row.memory_bytes / MIB)} MiB`);
  if (row.name !== "supervisor") parts.push(several(row.connections, "connection"));
  if (row.moved) parts.push(`${several(row.moved, "connection")} given up`);
  if (row.starts > 1) parts.push(`restarted ${several(row.starts - 1, "time")}`);
  return `${name} (${row.pid}): ${parts.join(", ")}`;
}

export class ProcessList {
  constructor(root) {
    this.root = root;
    this.rows = new Map();
    this.before = null;
  }

  /** Show the processes of an answer; one process has no list. */
  update(status) {
    const processes = status.processes ?? [];
    this.root.hidden = processes.length === 0;
    const seconds = this.before ? (status.time_ns - this.before.time_ns) / 1e9 : 0;
    const earlier = new Map((this.before?.processes ?? []).map((row) => [row.name, row]));
    for (const row of processes) {
      let line = this.rows.get(row.name);
      if (!line) {
        line = element("li");
        this.rows.set(row.name, line);
        this.root.append(line);
      }
      line.hidden = !row.pid && !row.expected;
      say(line, describe(row, earlier.get(row.name), seconds));
      line.classList.toggle("alarm", !row.pid);
    }
    this.before = status;
  }
}
