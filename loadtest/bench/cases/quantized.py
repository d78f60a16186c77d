"""Gain of INT8 on a CPU, raw and served: the original model against the artefact of `headrace build`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.bench.inprocess import Oracle, rows_per_s_in_fresh_process
from loadtest.bench.results import CaseResult, Comparison, Figure, Target
from loadtest.bench.session import Bench, interleave
from loadtest.bench.spread import Spread, completion_rate, ratios
from loadtest.bench.wrk import Load
from loadtest.protocol import binary_request
from loadtest.servers import ROOT, Running

BATCH = 4
BUILD_S = 60


@dataclass(frozen=True, slots=True)
class Quantized:
    """Two servers with the same settings, one of them with an INT8 artefact; loaded in turn, on the same two cores.

    Attributes:
        name: as `--only` takes it.
        model: which one.
        connections: one image in flight on each.
        raw: what ONNX Runtime in process has to gain.
        served: what the server has to gain.
    """

    name: str
    model: str
    connections: int
    raw: Target
    served: Target

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"{self.model}, INT8 against FP32, in process and served to {self.connections} connections"

    def planned_s(self, bench: Bench) -> float:
        """The build, then four contenders a round."""
        return BUILD_S + 4.0 * bench.rounds * bench.seconds(12)

    def run(self, bench: Bench) -> CaseResult:
        """Build, then measure in interleaved rounds."""
        plain, quantized = self._repository(bench, "fp32"), self._repository(bench, "int8")
        bench.progress(f"build {self.model} in INT8", BUILD_S)
        artefact = self._build(bench, quantized)
        oracle = Oracle(bench.model_path(self.model))
        request = binary_request(self.model, oracle.example(rows=1))
        del oracle
        load = Load((request,), self.connections, bench.seconds(12), cpus=bench.cores.both, record_completions=True)
        files = {"FP32 in process": bench.model_path(self.model), "INT8 in process": artefact}
        contenders = {
            name: lambda name=name, file=file: self._in_process(bench, name, file) for name, file in files.items()
        }
        with (
            self._serve(bench, "FP32 served", plain, load) as fp32,
            self._serve(bench, "INT8 served", quantized, load) as int8,
        ):
            contenders |= {
                server.name: lambda server=server: self._served(bench, server, load) for server in (fp32, int8)
            }
            rates = interleave(contenders, bench.rounds)
        figures = tuple(Figure(name, "images/s", Spread.of(values)) for name, values in rates.items())
        comparisons = (
            Comparison(
                "INT8 / FP32 in process", "", ratios(rates["INT8 in process"], rates["FP32 in process"]), self.raw
            ),
            Comparison("INT8 / FP32 served", "", ratios(rates["INT8 served"], rates["FP32 served"]), self.served),
        )
        return CaseResult(self.name, self.title, figures, comparisons, (f"in process: batches of {BATCH}",))

    def _repository(self, bench: Bench, name: str) -> Path:
        repository = bench.scratch / f"{self.name}-{name}"
        shutil.copytree(bench.repository / self.model, repository / self.model)
        for stale in (repository / self.model).glob("*/build.json"):
            stale.unlink()
        return repository

    def _build(self, bench: Bench, repository: Path) -> Path:
        command = [
            sys.executable,
            "-m",
            "headrace_engines",
            "build",
            str(repository / self.model),
            "--precision",
            "int8",
        ]
        # What is timed here is speed; whether the accuracy holds is the tests' business, and random weights have none.
        command += ["--force", "--target", "onnxruntime", "--cache", str(bench.scratch / "engines")]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        stamp = next((repository / self.model).glob("*/build.json"))
        return stamp.parent / str(json.loads(stamp.read_text())["builds"][0]["artefact"])

    @contextmanager
    def _serve(self, bench: Bench, name: str, repository: Path, load: Load) -> Iterator[Running]:
        own = replace(bench, repository=repository)
        with own.headrace(self.model, cpus=bench.cores.both, name=name) as server:
            bench.warm_up(server, load)
            yield server

    def _in_process(self, bench: Bench, name: str, file: Path) -> float:
        bench.progress(name, bench.seconds(12))
        cpus = bench.cores.both
        return rows_per_s_in_fresh_process(file, BATCH, len(cpus), bench.seconds(12), cpus)

    def _served(self, bench: Bench, server: Running, load: Load) -> float:
        return completion_rate(bench.measure(server, load).completions_s[self.connections :])
