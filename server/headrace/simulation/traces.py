"""Arrivals: made by seeded random processes, or read from a file."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.core.request import InferRequest

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Points of the curve from which the arrivals of a day are drawn.
_CURVE_POINTS = 2001
_COLUMNS = ("seconds", "model", "rows", "priority", "timeout_ms", "shape", "client")


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        times_ns: when each arrives, ascending, from 0.
        models: number of the model that each asks.
        rows: of each, at least 1.
        priorities: level that each asks for, 0 for the model's default.
        timeouts_ns: how long each may take before its deadline passes, 0 for ever.
        duration_ns: how long the trace is.
        names: of the models, by number.
        shapes: number of each one's shape: only those of one shape share a batch; None: all have the same.
        clients: number of who asks; None: nobody in particular.
        client_names: by number.
    """

    times_ns: Integers
    models: Integers
    rows: Integers
    priorities: Integers
    timeouts_ns: Integers
    duration_ns: int
    names: tuple[str, ...]
    shapes: Integers | None = None
    clients: Integers | None = None
    client_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.times_ns)

    def of(self, selected: npt.NDArray[np.bool_]) -> Trace:
        """The requests chosen, at the times at which they come here."""
        return replace(
            self,
            times_ns=self.times_ns[selected],
            models=self.models[selected],
            rows=self.rows[selected],
            priorities=self.priorities[selected],
            timeouts_ns=self.timeouts_ns[selected],
            shapes=None if self.shapes is None else self.shapes[selected],
            clients=None if self.clients is None else self.clients[selected],
        )

    def requests(self) -> Iterator[tuple[int, int, InferRequest]]:
        """Arrival, number of the model and request of each; without tensors."""
        count = len(self)
        shapes: Iterable[object] = repeat(None, count) if self.shapes is None else self.shapes.tolist()
        clients: Iterable[str] = repeat("", count)
        if self.clients is not None:
            clients = (self.client_names[client] for client in self.clients.tolist())
        columns = (self.times_ns, self.models, self.rows, self.priorities, self.timeouts_ns)
        values = (column.tolist() for column in columns)
        for time_ns, model, rows, priority, timeout_ns, shape, client in zip(*values, shapes, clients, strict=True):
            yield (
                time_ns,
                model,
                InferRequest(
                    inputs={},
                    rows=rows,
                    shape_key=shape,
                    received_ns=time_ns,
                    priority=priority,
                    deadline_ns=time_ns + timeout_ns if timeout_ns else 0,
                    client=client,
                ),
            )


@dataclass(frozen=True, slots=True)
class ArrivalPattern:
    """How the rate of arrivals changes.

    Attributes:
        kind: `poisson`: it does not; `bursty`: calm and bursts in turn, of exponentially distributed length, for each model by
            itself (a Markov-modulated Poisson process); `diurnal`: as a sine, for all models together.
        burst_factor: how much higher the rate of a burst is than that of the calm.
        burst_s, calm_s: mean length of a burst, and of the calm between two.
        period_s: of the sine; 0: as long as the trace.
        swing: its height over the mean rate, from 0 to 1.
    """

    kind: str = "poisson"
    burst_factor: float = 10.0
    burst_s: float = 0.5
    calm_s: float = 4.5
    period_s: float = 0.0
    swing: float = 0.8


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked.

    Attributes:
        rate_hz: requests a second of all models together, on average.
        seconds: how long.
        shape: how the rate changes.
        rows: weights by rows of a request.
        skew: the k-th model is asked k**-skew times as often as the first; 0: all as often.
        timeout_ns: how long a request may take before its deadline passes, 0 for ever.
        clients: weights by name of who asks; empty: nobody in particular.
    """

    rate_hz: float
    seconds: float
    shape: ArrivalPattern = ArrivalPattern()
    rows: tuple[tuple[int, float], ...] = ((1, 1.0),)
    skew: float = 0.0
    timeout_ns: int = 0
    clients: tuple[tuple[str, float], ...] = ()


def make_trace(load: Workload, names: Sequence[str], generator: np.random.Generator) -> Trace:
    """Arrivals drawn at random.

    Args:
        load: what is asked.
        names: of the models.
        generator: where everything is drawn.
    """
    weights = np.arange(1, len(names) + 1, dtype=np.float64) ** -load.skew
    rates_hz = load.rate_hz * weights / weights.sum()
    if load.shape.kind == "bursty":
        per_model = [_draw(*_bursts(rate, load, generator), generator) for rate in rates_hz.tolist()]
    else:
        seconds, expected = _diurnal(load) if load.shape.kind == "diurnal" else _even(load)
        times = _draw(seconds, expected, generator)
        selected = generator.choice(len(names), len(times), p=weights / weights.sum()) if len(names) > 1 else None
        per_model = [times if selected is None else times[selected == number] for number in range(len(names))]
    times = np.concatenate(per_model)
    models = np.repeat(np.arange(len(names)), [len(each) for each in per_model])
    order = np.argsort(times, kind="stable")
    sizes = np.array([rows for rows, _ in load.rows], dtype=np.int64)
    rows = sizes[_drawn([weight for _, weight in load.rows], len(times), generator)]
    clients = _drawn([weight for _, weight in load.clients], len(times), generator) if load.clients else None
    return Trace(
        times_ns=(times[order] * NS_PER_S).astype(np.int64),
        models=models[order].astype(np.int64),
        rows=rows,
        priorities=np.zeros(len(times), np.int64),
        timeouts_ns=np.full(len(times), load.timeout_ns, np.int64),
        duration_ns=round(load.seconds * NS_PER_S),
        names=tuple(names),
        clients=clients,
        client_names=tuple(name for name, _ in load.clients),
    )


def _drawn(weights: Sequence[float], count: int, generator: np.random.Generator) -> Integers:
    """Numbers by their weights; without a draw where there is no choice."""
    if len(weights) == 1:
        return np.zeros(count, np.int64)
    shares = np.array(weights, dtype=np.float64)
    return generator.choice(len(shares), count, p=shares / shares.sum()).astype(np.int64)


def _draw(seconds: Floats, expected: Floats, generator: np.random.Generator) -> Floats:
    """Arrivals of a Poisson process by the inverse of its expected count, which is linear between the points given."""
    count = generator.poisson(expected[-1])
    times: Floats = np.interp(np.sort(generator.uniform(0.0, expected[-1], count)), expected, seconds)
    return times


def _even(load: Workload) -> tuple[Floats, Floats]:
    return np.array([0.0, load.seconds]), np.array([0.0, load.seconds * load.rate_hz])


def _diurnal(load: Workload) -> tuple[Floats, Floats]:
    seconds = np.linspace(0.0, load.seconds, _CURVE_POINTS)
    turn = 2 * math.pi / (load.shape.period_s or load.seconds)
    # From the lowest rate on: the integral of 1 - swing * cos(turn * t).
    return seconds, load.rate_hz * (seconds - load.shape.swing * np.sin(turn * seconds) / turn)


def _bursts(rate_hz: float, load: Workload, generator: np.random.Generator) -> tuple[Floats, Floats]:
    shape = load.shape
    share = shape.burst_s / (shape.burst_s + shape.calm_s)
    calm_hz = rate_hz / (1 + share * (shape.burst_factor - 1))
    bursts_first = bool(generator.random() < share)
    # Enough phases for the time, however they fall: more are drawn if not.
    lengths = np.empty(0)
    while lengths.sum() < load.seconds:
        pairs = generator.exponential(1.0, (16 + int(load.seconds / (shape.burst_s + shape.calm_s)), 2))
        means = (shape.burst_s, shape.calm_s) if bursts_first else (shape.calm_s, shape.burst_s)
        lengths = np.concatenate([lengths, (pairs * means).ravel()])
    edges = np.concatenate([[0.0], np.cumsum(lengths)])
    edges = np.append(edges[edges < load.seconds], load.seconds)
    rates = np.where((np.arange(len(edges) - 1) % 2 == 0) == bursts_first, calm_hz * shape.burst_factor, calm_hz)
    return edges, np.concatenate([[0.0], np.cumsum(np.diff(edges) * rates)])


def read_trace(path: Path, names: Sequence[str], timeout_ns: int = 0) -> Trace:
    """Arrivals that were recorded.

    Args:
        path: comma-separated values under a line with the columns' names: `seconds` (when a request arrived), and if need be
            `model` (its name; else all ask the first one), `rows`, `priority`, `timeout_ms`, `shape` (any text: requests whose
            texts differ do not share a batch), `client` (its name). The first arrives at 0.
        names: of the models that there are.
        timeout_ns: of a request that has none of its own.

    Raises:
        ValueError: it holds something else; says in which line.
        OSError: it cannot be read.
    """
    numbers = {name: number for number, name in enumerate(names)}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or []
        if "seconds" not in columns or not set(columns) <= set(_COLUMNS):
            raise ValueError(f"{path}: the first line names the columns: seconds, and any of {', '.join(_COLUMNS[1:])}")
        lines = []
        for line in reader:
            try:
                if len(line) > len(columns):
                    raise ValueError("there are more values than columns")
                lines.append(_read_line(line, numbers, timeout_ns))
            except ValueError as error:
                raise ValueError(f"{path}:{reader.line_num}: {error}") from None
    if not lines:
        raise ValueError(f"{path}: no request is in it")
    lines.sort(key=lambda each: each[0])
    seconds = np.array([each[0] for each in lines])
    times_ns = np.round((seconds - seconds[0]) * NS_PER_S).astype(np.int64)
    models, rows, priorities, timeouts_ns = np.array([each[1:5] for each in lines], dtype=np.int64).T
    shapes, _ = _numbered([each[5] for each in lines]) if "shape" in columns else (None, ())
    clients, client_names = _numbered([each[6] for each in lines]) if "client" in columns else (None, ())
    return Trace(
        times_ns,
        models,
        rows,
        priorities,
        timeouts_ns,
        duration_ns=max(int(times_ns[-1]), 1),
        names=tuple(names),
        shapes=shapes,
        clients=clients,
        client_names=client_names,
    )


def _numbered(texts: Sequence[str]) -> tuple[Integers, tuple[str, ...]]:
    """Numbers in the place of texts, and the texts by number."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return np.array([numbers[text] for text in texts], dtype=np.int64), tuple(numbers)


def _read_line(
    line: Mapping[str, str | None], numbers: Mapping[str, int], timeout_ns: int
) -> tuple[float, int, int, int, int, str, str]:
    name = line.get("model")
    if name and name not in numbers:
        raise ValueError(f"no model '{name}' is simulated, only {', '.join(list(numbers)[:5])}")
    seconds, timeout_ms = float(line["seconds"] or "nan"), float(line.get("timeout_ms") or 0)
    rows, priority = int(line.get("rows") or 1), int(line.get("priority") or 0)
    if not (math.isfinite(seconds) and math.isfinite(timeout_ms)) or rows < 1 or priority < 0 or timeout_ms < 0:
        raise ValueError("seconds is a number, rows is at least 1, priority and timeout_ms are at least 0")
    timeout_ns = round(timeout_ms * NS_PER_MS) or timeout_ns
    model, shape, client = numbers[name] if name else 0, line.get("shape") or "", line.get("client") or ""
    return seconds, model, rows, priority, timeout_ns, shape, client
