"""`python -m loadtest.gpu.cuda_provider`: ONNX Runtime's CUDA provider as served, beside its bare session and TensorRT.

For each number of rows, rows/s of

- bare: a session with I/O binding, inputs and outputs at fixed addresses on the GPU, one run after the other;
- resident: an instance of the server's backend whose rows are on the GPU;
- host: the same with rows that are copied from the host's memory, as those of requests;
- two: two such instances beside each other;
- TensorRT (with --tensorrt): an instance of its backend in FP32 (TF32), with rows from the host's memory.

Also the median time of one batch of one row. Exit status: 0 if the backend reaches 0.9 of the bare session with resident rows
at the largest batch, else 1.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import onnx
from headrace.backends.base import InFlightBatch, PipelinedExecution
from headrace.backends.onnxruntime import session_options
from headrace.backends.onnxruntime_cuda import OnnxRuntimeCudaBackend, open_session, provider_options, provider_problem
from headrace.backends.tensorrt.backend import MAX_BATCH_SIZE, TensorRtBackend
from headrace.core.tensor import BY_ORT_NAME, Array, ResidentRows
from headrace.cuda.driver import CudaStream, current, loaded
from headrace.cuda.memory import DeviceBuffer
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

_TARGET = 0.9
_WARM_UP_RUNS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="an ONNX file with one input (the demo model resnet50)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256], help="batches (%(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a measurement (%(default)g)")
    parser.add_argument("--tensorrt", action="store_true", help="also build and measure an engine of TensorRT")
    options = parser.parse_args(arguments)
    problem = provider_problem()
    if problem:
        print(problem, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or _demo_model(Path(scratch))
        bench = Bench(model, sorted(options.rows), options.seconds)
        bench.run(options.tensorrt, Path(scratch))
        return 0 if bench.is_near_bare else 1


def _demo_model(folder: Path) -> Path:
    command = [sys.executable, "-m", "headrace", "models", "build", "--output", str(folder), "--only", "resnet50"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "resnet50" / "1" / "model.onnx"


class Bench:
    """Measurements of one model.

    Args:
        file: an ONNX model with one input, whose first dimension is the batch.
        rows: rows of the batches, ascending.
        seconds: length of a measurement.

    Attributes:
        is_near_bare: the backend reached `_TARGET` of the bare session at the largest batch.
    """

    def __init__(self, file: Path, rows: list[int], seconds: float) -> None:
        self._file, self._rows, self._seconds = file, rows, seconds
        (value,) = onnx.load(file, load_external_data=False).graph.input
        self._name = value.name
        self._row = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)[1:]
        self._inputs = np.random.default_rng(0).standard_normal((rows[-1], *self._row), dtype=np.float32)
        self._parameters = {MAX_BATCH_SIZE: str(rows[-1])}
        self.is_near_bare = False

    def run(self, with_tensorrt: bool, folder: Path) -> None:
        """Measure and print.

        Args:
            with_tensorrt: also build and measure an engine of TensorRT.
            folder: for the engine.
        """
        print(f"{'rows':>5} {'bare':>9} {'resident':>9} {'host':>9} {'two':>9} {'TensorRT':>9}  rows/s", flush=True)
        with (
            closing(OnnxRuntimeCudaBackend().load(self._file, 2, self._parameters)) as model,
            closing(model.execution(0)) as first,
            closing(model.execution(1)) as second,
        ):
            figures = {rows: self._measure(first, second, rows) for rows in self._rows}
            alone_us = self._alone_us(first)
        engine = self._tensorrt(folder) if with_tensorrt else {}
        for rows, (bare, resident, host, two) in figures.items():
            texts = [f"{figure:9,.0f}" for figure in (bare, resident, host, two)]
            print(f"{rows:5} {' '.join(texts)} {engine.get(rows, 0.0):9,.0f}", flush=True)
        print(f"one batch of one row from the host's memory: {alone_us:,.0f} us (median)", flush=True)
        bare, resident, *_ = figures[self._rows[-1]]
        self.is_near_bare = resident >= _TARGET * bare

    def _measure(self, first: Any, second: Any, rows: int) -> tuple[float, float, float, float]:
        with current(0):
            memory = DeviceBuffer(self._inputs[:rows].nbytes)
            loaded().memcpy_htod(memory.address, self._inputs[:rows])
        try:
            resident = ResidentRows(memory.address, 0, self._inputs.dtype, (rows, *self._row), memory, _no_copy)
            return (
                self._bare(memory.address, rows),
                self._rate([first], rows, lambda batch: batch.resident_inputs.append((self._name, 0, resident))),
                self._rate([first], rows, self._fill),
                self._rate([first, second], rows, self._fill),
            )
        finally:
            with current(0):
                memory.free()

    def _bare(self, address: int, rows: int) -> float:
        """Rows/s of a session with everything on the GPU."""
        with current(0):
            stream = CudaStream()
            options = {"device_id": "0", "user_compute_stream": str(stream.handle), **provider_options({}, self._file)}
            session = open_session(self._file, session_options(1, {}, self._file), options)
            node = session.get_inputs()[0]
            number = BY_ORT_NAME[node.type].onnx_number
            binding = session.io_binding()
            binding.bind_input(self._name, "cuda", 0, number, (rows, *self._row), address)
            for output in session.get_outputs():
                binding.bind_output(output.name, "cuda", 0)
            for _ in range(_WARM_UP_RUNS):
                session.run_with_iobinding(binding)
            began_s, runs = time.perf_counter(), 0
            while time.perf_counter() - began_s < self._seconds:
                session.run_with_iobinding(binding)
                runs += 1
            rate = runs * rows / (time.perf_counter() - began_s)
            del binding, session
            stream.synchronize()
            del stream
        return rate

    def _fill(self, batch: InFlightBatch) -> None:
        np.copyto(batch.inputs[self._name], self._inputs[: batch.rows])

    def _rate(
        self, executions: Sequence[PipelinedExecution], rows: int, fill: Callable[[InFlightBatch], None]
    ) -> float:
        """Rows/s of instances beside each other, each with a thread that launches and one that finishes."""
        runners = [_Runner(each, {self._name: self._inputs[:rows]}, rows, fill) for each in executions]
        threads = [threading.Thread(target=runner.run, args=(self._seconds,)) for runner in runners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(runner.rate for runner in runners)

    def _alone_us(self, execution: Any) -> float:
        times = []
        for _ in range(200):
            began_s = time.perf_counter()
            execution.run({self._name: self._inputs[:1]})
            times.append(1e6 * (time.perf_counter() - began_s))
        return statistics.median(times)

    def _tensorrt(self, folder: Path) -> dict[int, float]:
        shape = {self._name: tuple((rows, *self._row) for rows in (1, self._rows[-1], self._rows[-1]))}
        plan = folder / "model.plan"
        order = TargetSpec("fp32", (ShapeRange(shape),))  # type: ignore[arg-type]
        TensorRtTarget(optimization_level=2).build(onnx.load(self._file), order, plan, silent)
        with (
            closing(TensorRtBackend().load(plan, 1, self._parameters)) as model,
            closing(model.execution(0)) as execution,
        ):
            return {rows: self._rate([execution], rows, self._fill) for rows in self._rows}


class _Runner:
    """Keeps an instance busy; `rate` is its rows/s."""

    def __init__(
        self, execution: PipelinedExecution, like: dict[str, Array], rows: int, fill: Callable[[InFlightBatch], None]
    ) -> None:
        self._execution, self._like, self._rows, self._fill = execution, like, rows, fill
        self._launched: SimpleQueue[InFlightBatch | None] = SimpleQueue()
        self._slots = threading.Semaphore(execution.depth)
        self.rate = 0.0

    def run(self, seconds: float) -> None:
        finisher = threading.Thread(target=self._finish)
        for _ in range(_WARM_UP_RUNS):
            self._launch()
            batch = self._launched.get()
            assert batch is not None
            self._execution.finish(batch)
            self._slots.release()
        finisher.start()
        began_s, batches = time.perf_counter(), 0
        while time.perf_counter() - began_s < seconds:
            self._launch()
            batches += 1
        self._launched.put(None)
        finisher.join()
        self.rate = batches * self._rows / (time.perf_counter() - began_s)

    def _launch(self) -> None:
        self._slots.acquire()
        batch = self._execution.begin(self._like, self._rows)
        self._fill(batch)
        self._execution.launch(batch)
        self._launched.put(batch)

    def _finish(self) -> None:
        while (batch := self._launched.get()) is not None:
            self._execution.finish(batch)
            self._slots.release()


def _no_copy(address: int, size_bytes: int) -> Array:
    raise AssertionError("nothing is copied by the host")


if __name__ == "__main__":
    sys.exit(main())
