"""How many instances, and batches of how many rows: every pair is run for a while, and the best is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from server.config.config_reader import ModelFolder, served_versions
from server.control.loader import Loader, handle_policy
from server.control.measuring import feeds, sizes, unmeasurable
from server.core.clock import NS_PER_S, monotonic_ns
from server.core.completion import Mailbox
from server.core.errors import ConfigError, Finding
from server.core.model_config import ModelConfig
from server.core.request import InferRequest
from server.core.scheduling_config import InstanceGroup
from server.dataplane.handle import ModelHandle

# Callers for each instance: while one batch runs, the next one waits.
_CALLERS = 2
# What gives so much of the best throughput is as good, and its answers come sooner.
_NEARLY = 0.97
_CLOSE_S = 30.0


@dataclass(frozen=True, slots=True)
class Point:
    """What so many instances do with batches of so many rows.

    Attributes:
        instances, rows: as they say.
        rows_hz: rows a second, all instances together.
        median_ns, p95_ns: of a batch's compute time, all instances at work.
    """

    instances: int
    rows: int
    rows_hz: float
    median_ns: int
    p95_ns: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """All pairs that were run, and those that matter.

    Attributes:
        points: in the order in which they were run.
        group: of the instances, as the configuration would have it.
        now: the one that the configuration stands for.
        best: the one to take.
    """

    points: Sequence[Point]
    group: InstanceGroup
    now: Point | None
    best: Point | None


def sweep(
    folder: ModelFolder,
    counts: Sequence[int],
    seconds: float,
    slo_ns: int = 0,
    told: Callable[[Point], object] = lambda _point: None,
) -> Sweep:
    """Run a model with each number of instances on batches of each size.

    Args:
        folder: of the model; its latest version is run.
        counts: numbers of instances.
        seconds: how long each pair is run.
        slo_ns: what answers may take; 0: as long as they like.
        told: called with each point as it is found.

    Raises:
        ConfigError: the model cannot be loaded, or no inputs can be made up for it.
    """
    config, version = folder.config, served_versions(folder.config, folder.versions)[-1]
    problem = unmeasurable(config)
    if problem:
        cure = "tune it under its own load, with the help of `headrace explain`"
        raise ConfigError([Finding(folder.name, None, f"no inputs can be made up: {problem}", cure)])
    points: list[Point] = []
    for count in counts:
        with _loaded(replace(folder, config=_with_instances(config, count)), version) as handle:
            for rows in sizes(config):
                points.append(_measured(handle, config, count, rows, seconds))
                told(points[-1])
    policy = handle_policy(config)
    wanted = (policy.instances, policy.batch.max_rows if policy.batch.merge else 1)
    now = next((point for point in points if (point.instances, point.rows) == wanted), None)
    best = choose(points, slo_ns)
    return Sweep(points, _group(config, best.instances if best is not None else 1), now, best)


def choose(points: Sequence[Point], slo_ns: int = 0) -> Point | None:
    """Of those that give (nearly) the best throughput, the one whose answers come soonest; None if all take too long.

    Who comes just after a batch was taken waits until one of n instances is free, and for a batch of its own: with n that work in
    turn, (n + 1) / n of a batch's time.

    Args:
        points: to choose from.
        slo_ns: what answers may take; 0: as long as they like.
    """
    fit = [point for point in points if not slo_ns or point.p95_ns * (point.instances + 1) <= slo_ns * point.instances]
    most = max((point.rows_hz for point in fit), default=0.0)
    good = [point for point in fit if point.rows_hz >= _NEARLY * most]
    return min(good, key=lambda point: (point.p95_ns, point.instances), default=None)


def default_counts(config: ModelConfig, cores: int) -> list[int]:
    """1, 2, 4 ... instances up to the number of cores, and as many as the configuration has."""
    return sorted({handle_policy(config).instances, *(1 << power for power in range(min(cores, 16).bit_length()))})


def _with_instances(config: ModelConfig, count: int) -> ModelConfig:
    """The same with so many instances (on each GPU that it names), each request a batch of its own, as it comes."""
    update = {"instance_group": (_group(config, count),), "dynamic_batching": None, "rate_limits": None}
    return config.model_copy(update=update)


def _group(config: ModelConfig, count: int) -> InstanceGroup:
    first = config.instance_group[0] if config.instance_group else InstanceGroup()
    return first.model_copy(update={"count": count})


@contextmanager
def _loaded(folder: ModelFolder, version: int) -> Iterator[ModelHandle]:
    loop = asyncio.new_event_loop()  # it never runs: callers wait on threads of their own
    try:
        loader = Loader(Mailbox(loop), histograms=False)
        handle = loader.load(folder, version, loader.plan(folder, version))
        try:
            yield handle
        finally:
            handle.close(_CLOSE_S)
    finally:
        loop.close()


def _measured(handle: ModelHandle, config: ModelConfig, count: int, rows: int, seconds: float) -> Point:
    feed = feeds(config)
    inputs, done = feed(rows), threading.Event()
    instances = handle.alive

    def ask() -> None:
        request = InferRequest(inputs=inputs, rows=rows, shape_key=None, received_ns=monotonic_ns())
        handle.infer_blocking(request)

    def call(_caller: int) -> int:
        batches = 0
        while not done.is_set():
            ask()
            batches += 1
        return batches

    for _ in range(instances):
        ask()
    with ThreadPoolExecutor(instances * _CALLERS) as callers:
        begun_ns = monotonic_ns()
        called = [callers.submit(call, number) for number in range(instances * _CALLERS)]
        done.wait(seconds)
        done.set()
        batches = sum(each.result() for each in called)
        took_s = (monotonic_ns() - begun_ns) / NS_PER_S
    profile = handle.profile
    return Point(
        count, rows, batches * rows / took_s, profile.estimate_ns(rows, instances), profile.promise_ns(rows, instances)
    )
