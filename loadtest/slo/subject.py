"""Who is measured: a device of a given speed, policies, and a trace replayed by the clock or in virtual time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from loadtest.bench.clocked import play
from loadtest.bench.dataplane import Device
from server.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from server.dataplane.batching import BatchPolicy
from server.dataplane.policy import HandlePolicy, Sharing
from server.dataplane.scheduler import QueueLimits
from server.simulation.profiles import Latency, Profile
from server.simulation.replay import ANSWERED, Replay, SimulatedModel, replay
from server.simulation.traces import Load, Shape, Trace, make_trace

BATCH_US, ROW_US, ROWS = 4000, 250, 32
CAPACITY_HZ = ROWS / (BATCH_US + ROW_US * ROWS) * 1e6
DEVICE_TOLD = f"a device that takes {BATCH_US / 1000:g} ms a batch and {ROW_US / 1000:g} ms a row, {ROWS} rows at most"
DEVICE = Device(BATCH_US * NS_PER_US, ROW_US * NS_PER_US, depth=1)
# What Triton's queues have; our own default of 4,096 would stop a queue that grows for longer than a test.
_UNBOUNDED = QueueLimits(max_count=1 << 20)


@dataclass(frozen=True, slots=True)
class Setting:
    """A policy that has a name.

    Attributes:
        name: in tables.
        policy: how requests are treated.
        depth: batches that may be under way.
    """

    name: str
    policy: HandlePolicy
    depth: int = 1


def fixed(max_rows: int = ROWS, delay_ms: float = 0.0) -> Setting:
    """Size and delay, no promise: as Triton's `dynamic_batching { }` with these two."""
    name = f"fixed, {max_rows} rows, {delay_ms:g} ms"
    return Setting(name, HandlePolicy(BatchPolicy(max_rows, max_delay_ns=round(delay_ms * NS_PER_MS)), _UNBOUNDED))


def promising(slo_ms: float, sharing: Sharing | None = None) -> Setting:
    """The configuration's `slo { p99_ms: ... }`, and nothing else."""
    batch = BatchPolicy(ROWS, objective_ns=round(slo_ms * NS_PER_MS))
    return Setting(f"slo {slo_ms:g} ms", HandlePolicy(batch, _UNBOUNDED, sharing=sharing))


def arrivals(
    share: float, seconds: float, seed: int, shape: Shape | None = None, clients: tuple[tuple[str, float], ...] = ()
) -> Trace:
    """Requests of one row each.

    Args:
        share: of the device's capacity, on average.
        seconds: how long.
        seed: of what is drawn.
        shape: how the rate changes; Poisson arrivals if absent.
        clients: who asks, with weights.
    """
    load = Load(share * CAPACITY_HZ, seconds, shape or Shape(), clients=clients)
    return make_trace(load, ["sleeper"], np.random.default_rng(seed))


@dataclass(frozen=True, slots=True)
class Told:
    """What became of a trace, or of one client's part of it.

    Attributes:
        goodput_hz: requests answered within the SLO, a second.
        throughput_hz: requests answered, a second.
        p50_ms, p99_ms: of those answered, not a number if none was.
        refused: share of the requests that were not answered.
        rows: in a batch, on average.
        busy: share of the time in which the device computed.
    """

    goodput_hz: float
    throughput_hz: float
    p50_ms: float
    p99_ms: float
    refused: float
    rows: float
    busy: float


def judged(done: Replay, slo_ms: float, client: str = "", warm_up_s: float = 0.5) -> Told:
    """Count what came after the warm-up, and was answered before the trace was over."""
    trace, begin_ns = done.trace, warm_up_s * NS_PER_S
    latency_ns = np.array(done.latency_ns, dtype=np.int64)
    chosen: npt.NDArray[np.bool_] = trace.times_ns >= begin_ns
    if client and trace.clients is not None:
        chosen &= trace.clients == trace.client_names.index(client)
    answered = chosen & np.array([outcome == ANSWERED for outcome in done.outcomes])
    window_s = (trace.duration_ns - begin_ns) / NS_PER_S
    within = answered & (trace.times_ns + latency_ns < trace.duration_ns)
    served_ms = latency_ns[answered] / NS_PER_MS
    p50_ms, p99_ms = np.percentile(served_ms, (50, 99)) if len(served_ms) else (np.nan, np.nan)
    rows = np.array(done.batches[0].rows)
    compute_ns = (BATCH_US * len(rows) + ROW_US * rows.sum()) * NS_PER_US
    return Told(
        goodput_hz=float((within & (latency_ns <= slo_ms * NS_PER_MS)).sum() / window_s),
        throughput_hz=float(within.sum() / window_s),
        p50_ms=float(p50_ms),
        p99_ms=float(p99_ms),
        refused=float(1 - answered.sum() / max(chosen.sum(), 1)),
        rows=float(rows.mean()) if len(rows) else float("nan"),
        busy=float(compute_ns / max(done.end_ns, trace.duration_ns)),
    )


Way = Callable[[Trace, Setting], Replay]
"""Replays a trace with a setting."""


def by_the_clock(trace: Trace, setting: Setting) -> Replay:
    """Threads, locks, a device that sleeps."""
    return play(trace, setting.policy, replace(DEVICE, depth=setting.depth)).replay


def simulated(trace: Trace, setting: Setting, added_us: float = 0.0) -> Replay:
    """Virtual time.

    Args:
        trace: what is asked.
        setting: of whom.
        added_us: what a batch takes besides its time on the device.
    """
    profile = Profile(Latency.line(BATCH_US, ROW_US), fill=Latency.line(added_us))
    return replay(trace, [SimulatedModel(setting.policy, profile, setting.depth)])


def added_us(seconds: float = 2.0) -> float:
    """What a batch takes longer on this machine than its device, on average: threads that wake, Python."""
    return statistics.fmean(play(arrivals(0.5, seconds, seed=99), fixed().policy, DEVICE).added_ns) / NS_PER_US
