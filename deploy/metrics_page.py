"""Writes `docs/metrics.md` from the table of metrics.

python -m deploy.metrics_page docs
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from headrace.observability.histograms import BUCKETS_S
from headrace.observability.metrics_table import FAMILIES, Family

NAME = "metrics.md"
_BUCKETS = ", ".join(f"{bound:g}" for bound in BUCKETS_S)
_HEAD = f"""# Metrics

Generated from `server/headrace/observability/metrics.toml` (`make docs`); a test compares it with a running server's
page.

`GET /metrics` on the HTTP port serves every metric below. `--metrics-port N` selects another port, `--no-metrics` switches it
off.

    curl -s http://127.0.0.1:8000/metrics

The `Accept` header selects the format: Prometheus' text, OpenMetrics (with exemplars) or protobuf (with native histograms).
`deploy/prometheus` has a scrape configuration, recording rules and alerts; `deploy/grafana` has dashboards.

- **Labels**: every metric of a model has `model` and `version`. Counters start at 0 when a version is loaded or reloaded;
  `rate()` and `increase()` treat that as a restart.
- **Buckets**: all histograms of time have the same buckets, so they can be summed over replicas:
  {_BUCKETS} s.
- **Native histograms** (marked below) have buckets 9 % wide. Prometheus 2.40 and later reads them with
  `--enable-feature=native-histograms`. It then drops the classic buckets of the same name unless the scrape configuration has
  `scrape_classic_histograms: true` (from 2.45 on; `always_scrape_classic_histograms` in 3.x). The dashboards and alerts in
  `deploy` use the classic buckets. A query on a native histogram has no `_bucket` and no `le`:
  `histogram_quantile(0.99, sum by (model) (rate(headrace_total_seconds[5m])))`.
- **Exemplars**: a bucket of `headrace_total_seconds` has the `trace_id` of its last traced request. Prometheus needs
  `--enable-feature=exemplar-storage`.
- **`--metrics-config preset=lean`** exports one histogram of each model, `headrace_total_seconds`, with its counters and
  gauges. It leaves out the times of phases, rows of batches, the latency table, times of steps and responses, and Triton's
  names of models. All of that page passes `promtool check metrics`; of the full one Triton's names do not.
- **Triton's metric names** (last section but one) have Triton's types, labels and units, and are computed at the scrape.
  `--metrics-config NAME=VALUE` (repeatable, or `HEADRACE_METRICS_CONFIG` separated by spaces) has Triton's settings:
  `summary_latencies`, `histogram_latencies` and `counter_latencies` (`true` or `false`; all are on), `summary_quantiles`
  (`0.5,0.9,0.95,0.99,0.999`). [from-triton.md](from-triton.md#metrics) lists the differences.
"""


def page() -> str:
    """Return docs/metrics.md."""
    parts = [_HEAD]
    for section, members in groupby(FAMILIES.values(), lambda family: family.section):
        parts.append(f"\n## {section}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n")
        parts += [_row(family) for family in members]
    return "".join(parts)


def _row(family: Family) -> str:
    kind = f"{family.kind}, native too" if family.native else family.kind
    labels = ", ".join(f"`{label}`" for label in family.labels)
    text = family.text + (f" Only {family.when}." if family.when else "")
    return f"| `{family.name}` | {kind} | {labels} | {text} |\n"


if __name__ == "__main__":
    Path(sys.argv[1], NAME).write_text(page(), encoding="utf-8")
