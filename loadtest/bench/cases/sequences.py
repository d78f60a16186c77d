"""Sequences beside stateless requests, and many live sequences."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from loadtest.bench import live_sequences
from loadtest.bench.results import CaseResult, Comparison, Figure, Target, at_least, at_most
from loadtest.bench.sequence_calls import SLOTS, in_fresh_process
from loadtest.bench.session import Bench, Case
from loadtest.bench.spread import Spread, ratios
from loadtest.servers import resident_bytes

_MEBIBYTE = 1 << 20
_NAMES = ("stateless", "sequences")


@dataclass(frozen=True, slots=True)
class SequenceCost(Case):
    """One kind of `loadtest.bench.sequence_calls`, in processes of their own; nothing goes over a network.

    Attributes:
        kind: of `sequence_calls`.
        ratio: target: of the processor time of a request for "processor", of requests a second for "throughput".
    """

    kind: str
    ratio: Target

    contenders = 1
    sample_s = 12

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        model = "a model that sleeps" if self.kind == "processor" else "ONNX Runtime, 6 matrices of 768 x 768"
        return f"{SLOTS} sequences in {SLOTS} slots (direct) beside stateless requests, {model}, in process"

    def run(self, bench: Bench) -> CaseResult:
        """Measure both in every round."""
        rounds = []
        for _ in range(bench.rounds):
            bench.progress(f"{self.name} in process", bench.seconds(self.sample_s))
            rounds.append(in_fresh_process(self.kind, bench.seconds(self.sample_s), bench.cores.both))
        figures = [
            Figure(name, unit, Spread.of([each[f"{name}_{key}"] for each in rounds]))
            for key, unit in (("hz", "requests/s"), ("us", "CPU us/request"), ("rows", "rows a batch"))
            for name in _NAMES
        ]
        is_time = self.kind == "processor"
        processor = Spread.of([each["processor_ratio"] for each in rounds])
        rate = Spread.of([each["rate_ratio"] for each in rounds])
        # The bound of the rate holds for the processor time too, which other work on the machine hardly moves.
        bound = self.ratio if is_time else at_most(1 / self.ratio.bound)
        comparisons = (
            Comparison("sequences / stateless, processor time", "", processor, bound),
            Comparison("sequences / stateless, requests/s", "", rate, None if is_time else self.ratio),
        )
        return CaseResult(self.name, self.title, tuple(figures), comparisons)


@dataclass(frozen=True, slots=True)
class LiveSequences(Case):
    """Many live sequences with implicit state, all responses checked, and the server's memory after they have ended.

    Attributes:
        sequences: live at a time.
        growth: target of the resident memory after the last wave over that after the first.
    """

    sequences: int
    growth: Target

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"{self.sequences:,} live sequences over {self.connections} HTTP connections, every response compared with a sum"

    def planned_s(self, bench: Bench) -> float:
        """A guess: it counts requests, not seconds."""
        return bench.seconds(40)

    def run(self, bench: Bench) -> CaseResult:
        """Run waves of sequences; a wrong response fails the case."""
        count = self.sequences // (20 if bench.quick else 1)
        repository = bench.scratch / self.name
        live_sequences.write_model(repository)
        live, ended = [], []
        with replace(bench, repository=repository).headrace(live_sequences.MODEL) as server:
            start = resident_bytes(server.pid) / _MEBIBYTE
            for wave in range(1 + bench.rounds):
                bench.progress(f"wave {wave} of {count:,} sequences", 0.0)
                sums = asyncio.run(live_sequences.begin(server.port, count, self.connections, 100 * wave))
                live.append(resident_bytes(server.pid) / _MEBIBYTE)
                asyncio.run(live_sequences.finish(server.port, self.connections, sums, wave))
                ended.append(resident_bytes(server.pid) / _MEBIBYTE)
        figures = (
            Figure("before", "MiB", Spread.of([start])),
            Figure("while all are live", "MiB", Spread.of(live)),
            Figure("after the first wave", "MiB", Spread.of(ended[:1])),
            Figure("after the last wave", "MiB", Spread.of(ended[-1:])),
        )
        growth = Comparison(
            "resident memory, after the last wave / after the first", "", ratios(ended[-1:], ended[:1]), self.growth
        )
        checked = count * live_sequences.REQUESTS * (1 + bench.rounds)
        return CaseResult(self.name, self.title, figures, (growth,), (f"{checked:,} responses, none wrong",))


CASES: tuple[Case, ...] = (
    SequenceCost("sequence-cost", SLOTS, "processor", ratio=at_most(1.5)),
    SequenceCost("sequence-batch", SLOTS, "throughput", ratio=at_least(0.9)),
    LiveSequences("live-sequences", 64, 10_000, growth=at_most(1.05)),
)
