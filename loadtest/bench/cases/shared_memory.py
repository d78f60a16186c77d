"""Cost of a large tensor in system shared memory, one caller at a time."""

from __future__ import annotations

import io
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from loadtest.bench.results import CaseResult, Comparison, Figure, Target
from loadtest.bench.session import Bench, Case, interleave
from loadtest.bench.spread import Spread, differences, ratios
from loadtest.bench.wrk import Load
from loadtest.onnx_models import onnx_model
from loadtest.protocol import Array, shared_memory_request
from loadtest.regions import SystemRegion
from loadtest.servers import Running

# 64 bytes, and one picture of 3 x 224 x 224 as FP32.
SMALL, LARGE = 16, 3 * 224 * 224
PICKED = 16
SHARED, BODY, ITSELF = "in shared memory", "in the body", "session.run in process"
KERNEL_COPY, MAPPED_COPY = "one copy by the kernel", "one copy of mapped memory"
LOOPS = 400
# A server that one caller keeps busy sleeps about so long between two copies, and other code uses the caches meanwhile. A loop
# without a pause would measure a copy that no server makes.
PAUSE_S = 100e-6


@dataclass(frozen=True, slots=True)
class SharedMemoryInputs(Case):
    """Two models that read sixteen values each, one out of 64 bytes, one out of 602,112: only the transport differs.

    Attributes:
        copies: target of the p50 of the large tensor above that of the small one, in copies of the large one.
    """

    copies: Target

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return (
            f"{_bytes(LARGE)} against {_bytes(SMALL)} as input, in system shared memory and in the body, 1 connection"
        )

    def run(self, bench: Bench) -> CaseResult:
        """Write the models, register the regions, check all answers, then measure in interleaved rounds."""
        ours = replace(bench, repository=bench.scratch / "pick")
        for width in (SMALL, LARGE):
            write_model(ours.repository, width)
        measures: dict[str, Callable[[], float]] = {}
        with ExitStack() as stack:
            models = [_model(width) for width in (SMALL, LARGE)]
            server = stack.enter_context(ours.headrace(*models, options=("--allow-client-shm",)))
            for width in (SMALL, LARGE):
                question = ours.question(_model(width))
                x = question.inputs["x"]
                region = stack.enter_context(closing(SystemRegion(server.port, f"{_model(width)}_{os.getpid()}", x)))
                for where, request in (
                    (SHARED, shared_memory_request(question.model, question.inputs, region.name)),
                    (BODY, question.request),
                ):
                    bench.check(server, question, request)
                    load = self.load(bench, request)
                    bench.warm_up(server, load)
                    measures[_label(width, where)] = partial(_p50_us, bench, server, load)
                measures[_label(width, ITSELF)] = _timed(bench, partial(question.oracle.run, question.inputs))
                if width == LARGE:
                    file = stack.enter_context(io.FileIO(region.path))
                    measures[KERNEL_COPY] = _timed(bench, partial(kernel_copy, file, x.nbytes))
                    measures[MAPPED_COPY] = _timed(bench, mapped(region.path).copy)
            times = interleave(measures, bench.rounds)
        return self._result(times)

    def _result(self, times: Mapping[str, list[float]]) -> CaseResult:
        labels = [_label(width, where) for where in (SHARED, BODY, ITSELF) for width in (SMALL, LARGE)]
        figures = [Figure(name, "p50 us", Spread.of(times[name])) for name in (*labels, KERNEL_COPY, MAPPED_COPY)]
        pairs = {where: (times[_label(LARGE, where)], times[_label(SMALL, where)]) for where in (SHARED, BODY, ITSELF)}
        above = [large - small for large, small in zip(*pairs[SHARED], strict=True)]
        what = f"{_bytes(LARGE)} - {_bytes(SMALL)}"
        comparisons = (
            *(Comparison(f"{what}, {where}, p50", "us", differences(*pairs[where])) for where in (SHARED, BODY)),
            Comparison(f"({what}, {SHARED}) / {KERNEL_COPY}", "", ratios(above, times[KERNEL_COPY]), self.copies),
            Comparison(f"({what}, {SHARED}) / {MAPPED_COPY}", "", ratios(above, times[MAPPED_COPY])),
        )
        notes = (
            f"both models read {PICKED} values: in process their runs differ by {differences(*pairs[ITSELF]).median:.1f} us, "
            "which is not subtracted",
            f"copies of {_bytes(LARGE)} into a fresh array, on the server's core, {PAUSE_S * 1e6:.0f} us apart",
        )
        return CaseResult(self.name, self.title, figures, comparisons, notes)


def write_model(repository: Path, width: int) -> None:
    """A model that returns sixteen values of a row `x` of FP32, spread from its first to its last, as `y`."""
    indices = np.linspace(0, width - 1, PICKED).round().astype(np.int64)
    node = helper.make_node("Gather", ["x", "indices"], ["y"], axis=1)
    x, y = ((TensorProto.FLOAT, ("rows", size)) for size in (width, PICKED))
    folder = repository / _model(width)
    (folder / "1").mkdir(parents=True)
    onnx.save(onnx_model([node], {"x": x}, {"y": y}, {"indices": indices}), folder / "1" / "model.onnx")
    (folder / "config.yaml").write_text("max_batch_size: 8\ninstance_group: [{kind: KIND_CPU}]\n")


def kernel_copy(file: io.FileIO, size_bytes: int) -> Array:
    """A file's content, read and not mapped, as a server copies it: truncation of a mapped file would kill it by SIGBUS."""
    copied = np.empty(size_bytes, dtype=np.uint8)
    os.preadv(file.fileno(), [copied.data], 0)
    return copied


def mapped(path: str) -> Array:
    """The content of a file, mapped into memory."""
    return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)


def median_us(action: Callable[[], object], cpus: tuple[int, ...]) -> float:
    """The median time of an action on these cores, with a pause before each; its result is freed outside the clock."""
    before, times_ns = os.sched_getaffinity(0), []
    os.sched_setaffinity(0, cpus)
    try:
        for _ in range(LOOPS):
            time.sleep(PAUSE_S)
            start_ns = time.perf_counter_ns()
            result = action()
            times_ns.append(time.perf_counter_ns() - start_ns)
            del result
    finally:
        os.sched_setaffinity(0, before)
    return statistics.median(times_ns) / 1e3


def _timed(bench: Bench, action: Callable[[], object]) -> Callable[[], float]:
    return partial(median_us, action, bench.cores.server)


def _p50_us(bench: Bench, server: Running, load: Load) -> float:
    return bench.measure(server, load).p50_us


def _model(width: int) -> str:
    return f"pick_from_{4 * width}_bytes"


def _bytes(width: int) -> str:
    return f"{4 * width:,} bytes"


def _label(width: int, where: str) -> str:
    return f"{_bytes(width)} {where}" if where != ITSELF else f"{where}, {_bytes(width)}"
