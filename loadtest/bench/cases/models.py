"""Throughput of models that take milliseconds, relative to ONNX Runtime in process; gain of INT8 by `headrace build`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from loadtest.bench.inprocess import rows_per_s_in_fresh_process
from loadtest.bench.results import CaseResult, Comparison, Figure, Target
from loadtest.bench.session import Bench, Case, interleave
from loadtest.bench.spread import Spread, completion_rate, ratios
from loadtest.bench.wrk import Load
from loadtest.protocol import HttpRequest
from loadtest.servers import ROOT, Running, cpu_seconds

BATCHES = (1, 2, 4, 8, 16)
QUICK_BATCHES = (1, 8)
INT8_BATCH = 4
BUILD_S = 60


@dataclass(frozen=True, slots=True)
class ModelCase(Case):
    """One image a request; server, client and ONNX Runtime in process all have the same two cores.

    Attributes:
        model: name of the model.
    """

    model: str

    def load(self, bench: Bench, *requests: HttpRequest) -> Load:
        """The load of one sample, with the time of every answer."""
        load = Case.load(self, bench, *requests)
        return replace(load, cpus=bench.cores.both, record_completions=True)

    def in_process(self, bench: Bench, name: str, file: Path, batch: int, seconds: int) -> float:
        """Images a second of ONNX Runtime alone."""
        bench.progress(name, seconds)
        cpus = bench.cores.both
        return rows_per_s_in_fresh_process(file, batch, len(cpus), seconds, cpus)


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor time for an image, in ms, one value a round: what server and client take of the cores they share."""

    server_ms: list[float] = field(default_factory=list)
    client_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ModelThroughput(ModelCase):
    """A served model beside the same model in process.

    Attributes:
        ratio: target of images a second over those in process.
    """

    ratio: Target

    contenders = 2
    sample_s = 20

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"{self.model}, binary bodies, {self.connections} connections, everything on both cores"

    def planned_s(self, bench: Bench) -> float:
        """The sweep, then two contenders a round."""
        return len(self._batches(bench)) * bench.seconds(6) + Case.planned_s(self, bench)

    def run(self, bench: Bench) -> CaseResult:
        """Find the best batch size in process, then measure in interleaved rounds."""
        sweep = {batch: self._alone(bench, batch, bench.seconds(6)) for batch in self._batches(bench)}
        best = max(sweep, key=lambda batch: sweep[batch])
        question = bench.question(self.model)
        load = self.load(bench, question.request)
        with bench.headrace(self.model, cpus=bench.cores.both) as server:
            bench.check(server, question)
            del question  # its session holds memory
            bench.warm_up(server, load)
            costs = Costs()
            rates = interleave(
                {
                    "headrace": partial(self._served, bench, server, load, costs),
                    "in process": partial(self._alone, bench, best, bench.seconds(self.sample_s)),
                },
                bench.rounds,
            )
        figures = (
            Figure("headrace", "images/s", Spread.of(rates["headrace"])),
            Figure(f"ONNX Runtime in process, batches of {best}", "images/s", Spread.of(rates["in process"])),
            Figure("headrace", "CPU ms/image", Spread.of(costs.server_ms)),
            Figure("its client (wrk)", "CPU ms/image", Spread.of(costs.client_ms)),
        )
        compared = ratios(rates["headrace"], rates["in process"])
        comparison = Comparison("headrace / ONNX Runtime in process, images/s", "", compared, self.ratio)
        swept = ", ".join(f"{batch}: {rate:.1f}" for batch, rate in sweep.items())
        body_bytes = len(load.requests[0].body)
        notes = (f"in process, images/s by batch size: {swept}", f"request body {body_bytes} bytes")
        return CaseResult(self.name, self.title, figures, (comparison,), notes)

    def _batches(self, bench: Bench) -> tuple[int, ...]:
        return QUICK_BATCHES if bench.quick else BATCHES

    def _alone(self, bench: Bench, batch: int, seconds: int) -> float:
        name = f"{self.model} in process, batches of {batch}"
        return self.in_process(bench, name, bench.model_path(self.model), batch, seconds)

    def _served(self, bench: Bench, server: Running, load: Load, costs: Costs) -> float:
        """Images a second, from the first answers after the ramp (one on each connection) to the last."""
        before_s = cpu_seconds(server.pid)
        sample = bench.measure(server, load)
        costs.server_ms.append((cpu_seconds(server.pid) - before_s) * 1e3 / sample.requests)
        costs.client_ms.append(sample.client_cpu_s * 1e3 / sample.requests)
        return completion_rate(sample.completions_s[self.connections :])


@dataclass(frozen=True, slots=True)
class Quantized(ModelCase):
    """Two servers with the same settings, one of them with an INT8 artefact; loaded in turn, on the same two cores.

    Attributes:
        raw: target of the gain of ONNX Runtime in process.
        served: target of the gain of the server.
    """

    raw: Target
    served: Target

    sample_s = 12

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"{self.model}, INT8 against FP32, in process and served to {self.connections} connections"

    def planned_s(self, bench: Bench) -> float:
        """The build, then four contenders a round."""
        return BUILD_S + Case.planned_s(self, bench)

    def run(self, bench: Bench) -> CaseResult:
        """Build, then measure in interleaved rounds."""
        plain, quantized = self._repository(bench, "fp32"), self._repository(bench, "int8")
        bench.progress(f"build {self.model} in INT8", BUILD_S)
        artefact = self._build(bench, quantized)
        load = self.load(bench, bench.question(self.model).request)
        files = {"FP32 in process": bench.model_path(self.model), "INT8 in process": artefact}
        contenders = {
            name: partial(self.in_process, bench, name, file, INT8_BATCH, bench.seconds(self.sample_s))
            for name, file in files.items()
        }
        with (
            self._serve(bench, "FP32 served", plain, load) as fp32,
            self._serve(bench, "INT8 served", quantized, load) as int8,
        ):
            contenders |= {server.name: partial(self._served, bench, server, load) for server in (fp32, int8)}
            rates = interleave(contenders, bench.rounds)
        figures = [Figure(name, "images/s", Spread.of(values)) for name, values in rates.items()]
        comparisons = [
            Comparison(f"INT8 / FP32 {where}", "", ratios(rates[f"INT8 {where}"], rates[f"FP32 {where}"]), target)
            for where, target in (("in process", self.raw), ("served", self.served))
        ]
        return CaseResult(self.name, self.title, figures, comparisons, (f"in process: batches of {INT8_BATCH}",))

    def _repository(self, bench: Bench, name: str) -> Path:
        repository = bench.scratch / f"{self.name}-{name}"
        shutil.copytree(bench.repository / self.model, repository / self.model)
        for stale in (repository / self.model).glob("*/build.json"):
            stale.unlink()
        return repository

    def _build(self, bench: Bench, repository: Path) -> Path:
        command = [sys.executable, "-m", "headrace_engines", "build", str(repository / self.model)]
        # Speed is timed here. Tests check the accuracy, which random weights do not have: hence --force.
        command += ["--precision", "int8", "--force", "--target", "onnxruntime"]
        command += ["--cache", str(bench.scratch / "engines")]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        stamp = next((repository / self.model).glob("*/build.json"))
        return stamp.parent / str(json.loads(stamp.read_text())["builds"][0]["artefact"])

    @contextmanager
    def _serve(self, bench: Bench, name: str, repository: Path, load: Load) -> Iterator[Running]:
        own = replace(bench, repository=repository)
        with own.headrace(self.model, cpus=bench.cores.both, name=name) as server:
            bench.warm_up(server, load)
            yield server

    def _served(self, bench: Bench, server: Running, load: Load) -> float:
        return completion_rate(bench.measure(server, load).completions_s[self.connections :])
