"""Replays as panels of curves: the share of requests answered within a time, and good answers over the trace."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.core.svg_plot import Curve, Panel
from headrace.simulation.replay import ANSWERED, Replay

_BINS = 60
EMPTY = "nothing was answered"


def panels(
    done: Sequence[tuple[str, Replay]], slos_ms: Sequence[Sequence[float | None]], overhead_ns: int = 0
) -> list[Panel]:
    """What a picture of some settings shows: latencies, and good answers over time.

    Args:
        done: the same trace, replayed by each setting.
        slos_ms: of each setting, by model; without any every answer is good.
        overhead_ns: added to every latency.
    """
    within: list[Curve] = []
    good: list[Curve] = []
    trace = done[0][1].trace
    edges_s = np.linspace(0, trace.duration_ns / NS_PER_S, _BINS + 1)
    wide_s = float(edges_s[1])
    for (name, replay), slo_ms in zip(done, slos_ms, strict=True):
        latency_ms = (np.array(replay.latency_ns) + overhead_ns) / NS_PER_MS
        answered = np.array([outcome == ANSWERED for outcome in replay.outcomes], dtype=bool)
        served = np.sort(latency_ms[answered])
        places = np.unique(np.linspace(0, len(served) - 1, 200).astype(int)) if len(served) else np.empty(0, int)
        within.append(
            Curve(name, served[places].tolist(), (100 * (places + 1) / max(len(trace), 1)).tolist(), step=True)
        )
        limits = np.array([math.inf if slo is None else slo for slo in slo_ms])[trace.models]
        done_s = trace.times_ns / NS_PER_S + latency_ms / 1000
        counts, _ = np.histogram(done_s[answered & (latency_ms <= limits)], edges_s)
        good.append(Curve(name, edges_s.tolist(), [*(counts / wide_s).tolist(), float(counts[-1] / wide_s)], step=True))
    offered, _ = np.histogram(trace.times_ns / NS_PER_S, edges_s)
    good.append(
        Curve("offered", edges_s.tolist(), [*(offered / wide_s).tolist(), float(offered[-1] / wide_s)], step=True)
    )
    marks = sorted({slo for each in slos_ms for slo in each if slo is not None})
    return [
        Panel("answered within", within, "ms", "% of the requests", log_x=True, marks=marks[:5], empty=EMPTY),
        Panel("answered in time", good, "s", "a second", empty=EMPTY),
    ]
