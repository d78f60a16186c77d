"""Callers of models in this process, each with one request in flight, and the samples of two models beside each other."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from headrace.embedding import Model

from loadtest.bench.report import COMPARISON_COLUMNS, FIGURE_COLUMNS, comparison_row, figure_row, markdown_table
from loadtest.bench.results import Comparison, Figure, Target
from loadtest.bench.spread import Spread, ratios
from loadtest.protocol import Array


@dataclass(frozen=True, slots=True)
class Load:
    """Callers in a closed loop.

    Attributes:
        in_flight: requests in flight.
        seconds: length of a sample.
        rounds: samples of each model.
    """

    in_flight: int
    seconds: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample.

    Attributes:
        rate: requests a second.
        p50_us: median latency in microseconds.
    """

    rate: float
    p50_us: float


async def alternate(
    models: Mapping[str, Model], inputs: Sequence[Mapping[str, Array]], load: Load
) -> dict[str, list[Sample]]:
    """Return the samples of the models by name; each round measures all of them, in turns in the reverse order.

    Args:
        models: by name.
        inputs: of the requests, in turn.
        load: of each model while it is measured.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in models}
    for number in range(-1, load.rounds):  # the first round warms up
        for name in list(models) if number % 2 else list(reversed(models)):
            sample = await _sample(models[name], inputs, load)
            if number >= 0:
                samples[name].append(sample)
    return samples


async def _sample(model: Model, inputs: Sequence[Mapping[str, Array]], load: Load) -> Sample:
    latencies: list[float] = []
    begun_s = time.monotonic()
    end_s, number = begun_s + load.seconds, 0

    async def caller() -> None:
        nonlocal number
        while (sent_s := time.monotonic()) < end_s:
            number += 1
            await model.infer_async(inputs[number % len(inputs)])
            latencies.append(time.monotonic() - sent_s)

    await asyncio.gather(*[caller() for _ in range(load.in_flight)])
    return Sample(len(latencies) / (time.monotonic() - begun_s), float(np.median(latencies)) * 1e6)


def report(samples: Mapping[str, Sequence[Sample]], unit: str, target: Target | None, json_file: Path | None) -> str:
    """Print the rates, the latencies, and the rate of the first model over that of the second; return the verdict.

    Args:
        samples: of two models.
        unit: of the rates.
        target: of the ratio.
        json_file: gets the same figures.
    """
    rates = {name: [sample.rate for sample in runs] for name, runs in samples.items()}
    figures = [Figure(name, unit, Spread.of(values)) for name, values in rates.items()]
    figures += [Figure(name, "p50 us", Spread.of([run.p50_us for run in runs])) for name, runs in samples.items()]
    (first, ours), (second, theirs) = rates.items()
    comparison = Comparison(f"{first} / {second}, {unit}", "", ratios(ours, theirs), target)
    for line in markdown_table(FIGURE_COLUMNS, map(figure_row, figures)):
        print(line)
    for line in markdown_table(COMPARISON_COLUMNS, [comparison_row(comparison)]):
        print(line)
    if json_file is not None:
        latencies = {name: [run.p50_us for run in runs] for name, runs in samples.items()}
        bound = target.bound if target is not None else None
        values = {
            "rates": rates,
            "p50_us": latencies,
            "ratio": comparison.spread.median,
            "target": bound,
            "verdict": comparison.verdict,
        }
        json_file.write_text(json.dumps(values, indent=1))
    return comparison.verdict
