"""`python -m headrace.observability.metrics_docs docs` writes docs/metrics.md from the table of metrics."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from headrace.observability.histogram import BUCKETS_S
from headrace.observability.metrics_table import Family, families

NAME = "metrics.md"
_BUCKETS = ", ".join(f"{bound:g}" for bound in BUCKETS_S)
_HEAD = f"""# Metrics

Generated from `server/headrace/observability/metrics_table.py` (`make docs`); a test compares it with a running server's page.

`GET /metrics` on the HTTP port, or on a port of its own with `--metrics-port N`; `--no-metrics` switches it off. One registry,
in the form that the client asks for: Prometheus' text, OpenMetrics (with exemplars), or protobuf (with native histograms).
`deploy/prometheus` has a scrape configuration, recording rules and alerts, `deploy/grafana` the dashboards.

- **Model and version** are labels of all that is counted for a model. Counters begin at 0 when a version is loaded, also when it
  is loaded again: `rate()` and `increase()` take that as they take a restart.
- **Histograms of time** have the same buckets everywhere, so that they add up over replicas:
  {_BUCKETS} s.
- **Native histograms** (marked below) have buckets 9 % wide and no bounds to choose. Prometheus 2.40 and later takes them with
  `--enable-feature=native-histograms`, and then drops the classic buckets of the same name unless the scrape configuration
  has `scrape_classic_histograms: true` (from 2.45 on; `always_scrape_classic_histograms` in 3.x). The dashboards and alerts in
  `deploy` read the classic ones. A query on a native histogram has no `_bucket` and no `le`:
  `histogram_quantile(0.99, sum by (model) (rate(headrace_total_seconds[5m])))`.
- **Exemplars**: a bucket of `headrace_total_seconds` names the last traced request in it (`trace_id`), for a Prometheus with
  `--enable-feature=exemplar-storage`.
- **Metrics under Triton's names** (the section below) have its types, labels and units, and are computed when Prometheus scrapes.
  `--metrics-config NAME=VALUE` (repeatable, or `HEADRACE_METRICS_CONFIG` with spaces between) has Triton's settings:
  `summary_latencies`, `histogram_latencies` and `counter_latencies` (`true` or `false`; all are on), `summary_quantiles`
  (`0.5,0.9,0.95,0.99,0.999`). What differs stands in [from-triton.md](from-triton.md#metrics).
"""


def page() -> str:
    """The page in Markdown."""
    parts = [_HEAD]
    for section, found in groupby(families(), lambda family: family.section):
        parts.append(f"\n## {section}\n\n| metric | type | labels | what it says |\n|---|---|---|---|\n")
        parts += [_row(family) for family in found]
    return "".join(parts)


def _row(family: Family) -> str:
    kind = f"{family.kind}, native too" if family.native else family.kind
    labels = ", ".join(f"`{label}`" for label in family.labels)
    text = family.text + (f" Only {family.when}." if family.when else "")
    return f"| `{family.name}` | {kind} | {labels} | {text} |\n"


if __name__ == "__main__":
    Path(sys.argv[1], NAME).write_text(page(), encoding="utf-8")
