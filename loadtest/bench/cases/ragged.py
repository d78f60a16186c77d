"""Texts of different length: a text encoder with and without padding, on the same two cores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from loadtest.bench.inprocess import Oracle
from loadtest.bench.results import CaseResult, Comparison, Figure, Target, at_least, at_most
from loadtest.bench.session import Bench, Case, answer, interleave
from loadtest.bench.spread import Spread
from loadtest.bench.wrk import Load
from loadtest.onnx_models import transformer
from loadtest.protocol import Array, HttpRequest, binary_request, decode_answer
from loadtest.servers import Running, cpu_seconds

_WORDS = 1000
_TEXTS = 64
_CONFIG = """
max_batch_size: 32
dynamic_batching: {}
"""
_PAD = "pad: {ids: 0, mask: 0, multiple_of: 16}\n"


def text_lengths(count: int, shortest: int = 8, longest: int = 128) -> list[int]:
    """Return log-normal lengths of texts in tokens, median 32, from a fixed seed."""
    lengths = np.random.default_rng(0).lognormal(np.log(32), 0.6, count)
    return [int(length) for length in lengths.clip(shortest, longest)]


def texts(lengths: list[int]) -> list[dict[str, Array]]:
    """Return the inputs of one text of each length."""
    random = np.random.default_rng(1)
    ids = [random.integers(1, _WORDS, (1, length)) for length in lengths]
    return [{"ids": each, "mask": np.ones_like(each)} for each in ids]


@dataclass(frozen=True, slots=True)
class TextSample:
    """One sample.

    Attributes:
        rate: texts a second.
        cpu_us: processor time of the server for each text, in microseconds.
    """

    rate: float
    cpu_us: float


def _measure(bench: Bench, server: Running, load: Load) -> TextSample:
    begun_s = cpu_seconds(server.pid)
    sample = bench.measure(server, load)
    return TextSample(sample.requests_per_s, (cpu_seconds(server.pid) - begun_s) / max(sample.requests, 1) * 1e6)


@dataclass(frozen=True, slots=True)
class Texts(Case):
    """Texts of 8 to 128 tokens to a small transformer, padded where that is faster, and never padded.

    Attributes:
        ratio: target of texts a second with `pad` over those without.
    """

    ratio: Target

    contenders = 2
    # Many short pairs: the ratio of two samples is only as good as the machine is steady from the first to the second.
    sample_s = 3
    pairs_a_round = 4

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"texts of 8 to 128 tokens, transformer of 4 layers, {self.connections} connections, everything on both cores"

    def load(self, bench: Bench, *requests: HttpRequest) -> Load:
        """The load of one sample: every text in turn."""
        return replace(Case.load(self, bench, *requests), cpus=bench.cores.both)

    def run(self, bench: Bench) -> CaseResult:
        """Check the answers to all texts, then measure in interleaved rounds."""
        file = self._add_model(bench, "unpadded", "")
        self._add_model(bench, "padded", _PAD)
        inputs = texts(text_lengths(_TEXTS))
        own = replace(bench, repository=file.parents[2])
        paired = replace(bench, rounds=self.pairs_a_round * bench.rounds)
        padded = self.load(bench, *[binary_request("padded", each) for each in inputs])
        unpadded = self.load(bench, *[binary_request("unpadded", each) for each in inputs])
        with (
            own.headrace("padded", cpus=bench.cores.both, name="padded") as first,
            own.headrace("unpadded", cpus=bench.cores.both, name="unpadded") as second,
        ):
            oracle = Oracle(file)
            for each, request in zip(inputs, padded.requests, strict=True):
                headers, body = answer(first, request)
                oracle.check(each, decode_answer(headers, body))
            loads = {first: padded, second: unpadded}
            for server, load in loads.items():
                bench.warm_up(server, load)
            samples = interleave(
                {server.name: partial(_measure, paired, server, load) for server, load in loads.items()},
                self.rounds(paired),
            )
        figures = [
            Figure(name, unit, Spread.of([getattr(each, field) for each in runs]))
            for field, unit in (("rate", "texts/s"), ("cpu_us", "CPU us/text"))
            for name, runs in samples.items()
        ]
        ours, theirs = samples["padded"], samples["unpadded"]
        comparisons = (
            Comparison.ratio("pad / no pad, texts/s", "rate", ours, theirs, self.ratio),
            # The same bound, which other work on the machine hardly moves.
            Comparison.ratio("pad / no pad, CPU time a text", "cpu_us", ours, theirs, at_most(1 / self.ratio.bound)),
        )
        return CaseResult(self.name, self.title, tuple(figures), comparisons, ("median length 32 tokens",))

    def _add_model(self, bench: Bench, name: str, pad: str) -> Path:
        folder = bench.scratch / self.name / name
        (folder / "1").mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(_CONFIG + pad)
        file = folder / "1" / "model.onnx"
        file.write_bytes(transformer(words=_WORDS).SerializeToString())
        return file


CASES: tuple[Case, ...] = (Texts("texts-cpu", 32, ratio=at_least(0.98)),)
