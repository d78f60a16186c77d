"""Image files to classes through a pipeline, beside the same work in process."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest import servers
from loadtest.bench import images
from loadtest.bench.images import PIPELINE, InProcessRate
from loadtest.bench.inprocess import WrongAnswer
from loadtest.bench.results import CaseResult, Comparison, Figure, Target, at_least
from loadtest.bench.session import Bench, Case, answer, interleave
from loadtest.bench.spread import Spread, completion_rate, ratios
from loadtest.bench.wrk import Load
from loadtest.protocol import HttpRequest
from loadtest.servers import Running, cpu_seconds, descendants

MODEL = "efficientnet_lite0"
BATCHES = (1, 2, 4)
QUICK_BATCHES = (1, 2)


@dataclass(frozen=True, slots=True)
class ServedRate:
    """One sample of the server.

    Processor times in milliseconds an image: of the server's process, of its decoders, and of wrk.
    """

    images_per_s: float
    server_ms: float
    decoder_ms: float
    client_ms: float


@dataclass(frozen=True, slots=True)
class JpegPipeline(Case):
    """Decode, resize, classify, rank. Server, decoders, client and the workers in process all have the same two cores.

    Attributes:
        ratio: target of images a second over those in process.
    """

    ratio: Target

    contenders = 2
    sample_s = 10

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return (
            f"JPEG {images.WIDTH} x {images.HEIGHT} as the body, {MODEL}, best {images.TOP} classes, {self.connections} "
            "connections, everything on both cores"
        )

    def planned_s(self, bench: Bench) -> float:
        """The sweep, then two contenders a round."""
        return len(self._batches(bench)) * bench.seconds(6) + Case.planned_s(self, bench)

    def load(self, bench: Bench, *requests: HttpRequest) -> Load:
        """The load of one sample, with the time of every answer."""
        load = Case.load(self, bench, *requests)
        return replace(load, cpus=bench.cores.both, record_completions=True)

    def run(self, bench: Bench) -> CaseResult:
        """Check an answer, find the best batch size in process, then measure in interleaved rounds."""
        file, photograph = bench.model_path(MODEL), images.photograph()
        sweep = {batch: self._alone(bench, file, batch, bench.seconds(6)) for batch in self._batches(bench)}
        best = max(sweep, key=lambda batch: sweep[batch].images_per_s)
        load = self.load(bench, images.image_request(photograph))
        with bench.start(self._command(bench, file)) as server:
            _check(server, load.requests[0], images.expected_classes(file, photograph))
            bench.warm_up(server, load)
            served: list[ServedRate] = []
            alone: list[InProcessRate] = []
            seconds = bench.seconds(self.sample_s)
            interleave(
                {
                    "headrace": lambda: served.append(self._served(bench, server, load)),
                    "in process": lambda: alone.append(self._alone(bench, file, best, seconds)),
                },
                bench.rounds,
            )
        ours, theirs = [each.images_per_s for each in served], [each.images_per_s for each in alone]
        times = {
            "headrace, without its decoders": [each.server_ms for each in served],
            "its decoders": [each.decoder_ms for each in served],
            "its client (wrk)": [each.client_ms for each in served],
            "in process": [each.cpu_ms for each in alone],
        }
        figures = (
            Figure("headrace", "images/s", Spread.of(ours)),
            Figure(f"in process, a worker a core, batches of {best}", "images/s", Spread.of(theirs)),
            *[Figure(name, "CPU ms/image", Spread.of(values)) for name, values in times.items()],
        )
        # The kernel's processor time, which a busy neighbour disturbs less.
        all_ms = [each.server_ms + each.decoder_ms for each in served]
        comparisons = (
            Comparison("headrace / in process, images/s", "", ratios(ours, theirs), self.ratio),
            Comparison("in process / headrace, CPU time an image", "", ratios(times["in process"], all_ms)),
        )
        swept = ", ".join(f"{batch}: {rate.images_per_s:.1f}" for batch, rate in sweep.items())
        notes = (f"in process, images/s by batch size: {swept}", f"image file of {len(photograph)} bytes")
        return CaseResult(self.name, self.title, figures, comparisons, notes)

    def _batches(self, bench: Bench) -> tuple[int, ...]:
        return QUICK_BATCHES if bench.quick else BATCHES

    def _command(self, bench: Bench, file: Path) -> servers.ServerCommand:
        repository = bench.scratch / self.name
        shutil.copytree(bench.repository / MODEL, repository / MODEL)
        images.write_pipeline(repository, MODEL, file)
        return servers.headrace(repository, command=bench.command, models=(PIPELINE,), cpus=bench.cores.both)

    def _alone(self, bench: Bench, file: Path, batch: int, seconds: float) -> InProcessRate:
        bench.progress(f"in process, batches of {batch}", seconds)
        return images.in_process(file, len(bench.cores.both), batch, seconds, bench.cores.both)

    def _served(self, bench: Bench, server: Running, load: Load) -> ServedRate:
        """Images a second, from the first answers after the ramp (one on each connection) to the last."""
        decoders = descendants(server.pid)
        before_s, decoders_before_s = cpu_seconds(server.pid), sum(map(cpu_seconds, decoders))
        sample = bench.measure(server, load)
        count = sample.requests / 1e3
        return ServedRate(
            images_per_s=completion_rate(sample.completions_s[self.connections :]),
            server_ms=(cpu_seconds(server.pid) - before_s) / count,
            decoder_ms=(sum(map(cpu_seconds, decoders)) - decoders_before_s) / count,
            client_ms=sample.client_cpu_s / count,
        )


def _check(server: Running, request: HttpRequest, expected: list[int]) -> None:
    """Compare the best class of an answer; WrongAnswer if it differs."""
    _, body = answer(server, request)
    outputs = {output["name"]: output["data"] for output in json.loads(body)["outputs"]}
    if outputs["classes"][0] != expected[0] or set(outputs["classes"]) != set(expected):
        raise WrongAnswer(f"the classes are {outputs['classes']}, expected {expected}")


CASES: tuple[Case, ...] = (JpegPipeline("jpeg", 8, ratio=at_least(0.9)),)
