"""Cost of a large tensor in system shared memory, one caller at a time."""

from __future__ import annotations

import io
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from loadtest.bench.inprocess import Oracle
from loadtest.bench.results import CaseResult, Comparison, Figure, Target
from loadtest.bench.session import Bench, interleave
from loadtest.bench.spread import Spread, ratios
from loadtest.bench.wrk import Load
from loadtest.protocol import NAMES, Array, HttpRequest, binary_request, send_json
from loadtest.servers import HOST, Running

# 64 bytes, and one picture of 3 x 224 x 224 as FP32.
SMALL, LARGE = 16, 3 * 224 * 224
PICKED = 16
SHARED, BODY, ITSELF = "in shared memory", "in the body", "session.run in process"
KERNEL_COPY, MAPPED_COPY = "one copy by the kernel", "one copy of mapped memory"
LOOPS = 400
# Between two copies of a server that one caller keeps busy passes about so much time, in which the core sleeps and the caches
# serve others; a loop without it would measure a copy that no server ever makes.
PAUSE_S = 100e-6


@dataclass(frozen=True, slots=True)
class SharedMemoryInputs:
    """Two models that read sixteen values each, one out of 64 bytes, one out of 602,112: what differs is the way there.

    Attributes:
        name: as `--only` takes it.
        copies: what the p50 of the large tensor may be above that of the small one, in copies of the large one.
    """

    name: str
    copies: Target

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return (
            f"{_bytes(LARGE)} against {_bytes(SMALL)} as input, in system shared memory and in the body, 1 connection"
        )

    def planned_s(self, bench: Bench) -> float:
        """Four contenders a round; the copies and the models themselves take no time worth counting."""
        return 4.0 * bench.rounds * self._sample_s(bench)

    def run(self, bench: Bench) -> CaseResult:
        """Write the models, register the regions, check all answers, then measure in interleaved rounds."""
        ours = replace(bench, repository=bench.scratch / "pick")
        for width in (SMALL, LARGE):
            write_model(ours.repository, width)
        measures: dict[str, Callable[[], float]] = {}
        with ExitStack() as stack:
            models = [_model(width) for width in (SMALL, LARGE)]
            server = stack.enter_context(
                ours.headrace(*models, cpus=bench.cores.server, options=("--allow-client-shm",))
            )
            for width in (SMALL, LARGE):
                oracle = Oracle(ours.model_path(_model(width)))
                inputs = oracle.example(rows=1)
                memory = stack.enter_context(registered(server, _model(width), inputs["x"].tobytes()))
                for way, request in (
                    (SHARED, shared_memory_request(_model(width), inputs, region=_model(width))),
                    (BODY, binary_request(_model(width), inputs)),
                ):
                    bench.check(server, request, oracle, inputs)
                    load = Load((request,), 1, self._sample_s(bench), cpus=bench.cores.client)
                    bench.warm_up(server, load)
                    measures[_label(width, way)] = partial(_p50_us, bench, server, load)
                measures[_label(width, ITSELF)] = _timed(bench, partial(oracle.run, inputs))
                if width == LARGE:
                    file = stack.enter_context(io.FileIO(f"/dev/shm/{memory.name}"))
                    measures[KERNEL_COPY] = _timed(bench, partial(kernel_copy, file, memory.size))
                    measures[MAPPED_COPY] = _timed(bench, partial(mapped_copy, memory))
            times = interleave(measures, bench.rounds)
        return self._result(times)

    def _sample_s(self, bench: Bench) -> int:
        return bench.seconds(4)

    def _result(self, times: Mapping[str, list[float]]) -> CaseResult:
        figures = [
            Figure(_label(width, way), "p50 us", Spread.of(times[_label(width, way)]))
            for way in (SHARED, BODY, ITSELF)
            for width in (SMALL, LARGE)
        ]
        figures += [Figure(name, "p50 us", Spread.of(times[name])) for name in (KERNEL_COPY, MAPPED_COPY)]
        above = {
            way: [a - b for a, b in zip(times[_label(LARGE, way)], times[_label(SMALL, way)], strict=True)]
            for way in (SHARED, BODY, ITSELF)
        }
        what = f"{_bytes(LARGE)} - {_bytes(SMALL)}"
        comparisons = (
            Comparison(f"{what}, {SHARED}, p50", "us", Spread.of(above[SHARED])),
            Comparison(f"{what}, {BODY}, p50", "us", Spread.of(above[BODY])),
            Comparison(
                f"({what}, {SHARED}) / {KERNEL_COPY}", "", ratios(above[SHARED], times[KERNEL_COPY]), self.copies
            ),
            Comparison(f"({what}, {SHARED}) / {MAPPED_COPY}", "", ratios(above[SHARED], times[MAPPED_COPY])),
        )
        notes = (
            f"both models read {PICKED} values: in process their runs differ by {Spread.of(above[ITSELF]).median:.1f} us, "
            "which is not subtracted",
            f"copies of {_bytes(LARGE)} into a fresh array, on the server's core, {PAUSE_S * 1e6:.0f} us apart",
        )
        return CaseResult(self.name, self.title, tuple(figures), comparisons, notes)


def write_model(repository: Path, width: int) -> None:
    """A model that gives sixteen values of a row `x` of FP32, spread from its first to its last, as `y`."""
    indices = np.linspace(0, width - 1, PICKED).round().astype(np.int64)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", width])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", PICKED])
    node = helper.make_node("Gather", ["x", "indices"], ["y"], axis=1)
    graph = helper.make_graph([node], "pick", [x], [y], [numpy_helper.from_array(indices, "indices")])
    folder = repository / _model(width)
    (folder / "1").mkdir(parents=True)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "1" / "model.onnx"
    )
    (folder / "config.pbtxt").write_text(
        f'name: "{_model(width)}"\nbackend: "onnxruntime"\nmax_batch_size: 8\n'
        f'input [ {{ name: "x", data_type: TYPE_FP32, dims: [ {width} ] }} ]\n'
        f'output [ {{ name: "y", data_type: TYPE_FP32, dims: [ {PICKED} ] }} ]\n'
        "instance_group [ { kind: KIND_CPU } ]\n"
    )


def shared_memory_request(model: str, inputs: Mapping[str, Array], region: str) -> HttpRequest:
    """An infer request whose only input lies at the beginning of a region, and whose answer is binary."""
    ((name, array),) = inputs.items()
    parameters = {"shared_memory_region": region, "shared_memory_byte_size": array.nbytes}
    described = {"name": name, "shape": list(array.shape), "datatype": NAMES[array.dtype], "parameters": parameters}
    body = json.dumps({"inputs": [described], "parameters": {"binary_data_output": True}}).encode()
    return HttpRequest(f"/v2/models/{model}/infer", body, {"Content-Type": "application/json"})


@contextmanager
def registered(server: Running, region: str, content: bytes) -> Iterator[SharedMemory]:
    """Shared memory with this content, registered with the server under a name."""
    path = f"/v2/systemsharedmemory/region/{region}"
    memory = SharedMemory(create=True, size=len(content))
    try:
        _mapped(memory)[:] = np.frombuffer(content, dtype=np.uint8)
        body = {"key": f"/{memory.name}", "offset": 0, "byte_size": len(content)}
        send_json(HOST, server.port, f"{path}/register", body)
        yield memory
        send_json(HOST, server.port, f"{path}/unregister", {})
    finally:
        memory.close()
        memory.unlink()


def kernel_copy(file: io.FileIO, size_bytes: int) -> Array:
    """A file's content, read and not mapped: so a server copies it that a client's truncation shall not kill by SIGBUS."""
    copied = np.empty(size_bytes, dtype=np.uint8)
    os.preadv(file.fileno(), [copied.data], 0)
    return copied


def mapped_copy(memory: SharedMemory) -> Array:
    """The same content by an ordinary copy out of the mapping."""
    return _mapped(memory).copy()


def median_us(action: Callable[[], object], cpus: tuple[int, ...]) -> float:
    """The median time of an action on these cores, with a pause before each; what it gives is freed outside the clock."""
    before, times_ns = os.sched_getaffinity(0), []
    os.sched_setaffinity(0, cpus)
    try:
        for _ in range(LOOPS):
            time.sleep(PAUSE_S)
            start_ns = time.perf_counter_ns()
            given = action()
            times_ns.append(time.perf_counter_ns() - start_ns)
            del given
    finally:
        os.sched_setaffinity(0, before)
    return statistics.median(times_ns) / 1e3


def _mapped(memory: SharedMemory) -> Array:
    return np.ndarray(memory.size, dtype=np.uint8, buffer=memory.buf)


def _timed(bench: Bench, action: Callable[[], object]) -> Callable[[], float]:
    return partial(median_us, action, bench.cores.server)


def _p50_us(bench: Bench, server: Running, load: Load) -> float:
    return bench.measure(server, load).p50_us


def _model(width: int) -> str:
    return f"pick_from_{4 * width}_bytes"


def _bytes(width: int) -> str:
    return f"{4 * width:,} bytes"


def _label(width: int, way: str) -> str:
    return f"{_bytes(width)} {way}" if way != ITSELF else f"{way}, {_bytes(width)}"
