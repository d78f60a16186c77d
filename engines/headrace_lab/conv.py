"""The map: measures every candidate on every layer, batch size and precision of a list."""

from __future__ import annotations

import math
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from headrace.core.errors import HeadraceError
from headrace.core.telemetry import GpuReading
from headrace.core.tensor import Array
from headrace.runtimes.cuda.devices import Nvml, describe, driver_version
from headrace.runtimes.cuda.driver import CudaStream, check, is_context_usable, loaded
from headrace.runtimes.cuda.kernels.loading import Kernels, is_half
from headrace.runtimes.cuda.memory import DeviceBuffer, copy_address, read_gpu
from headrace_engines.errors import BuildError

from headrace_lab.candidates import Compilation, OwnAlgorithms, estimate_us, families
from headrace_lab.check import Errors, ExactSums, SampledReference, sample
from headrace_lab.cudnn import Torch, cudnn_candidates, load_torch
from headrace_lab.inputs import DeviceOperands, HostOperands, host_operands, l2_bytes
from headrace_lab.kernels.base import Epilogue
from headrace_lab.kernels.resources import FOLDER, Algorithm
from headrace_lab.layers import PLAIN, ConvLayer
from headrace_lab.measure import Candidate, Timing, time_rounds, trial_us
from headrace_lab.results import DTYPES, CandidateResult, Cell, ConvMap
from headrace_lab.roofline import measure_roofline
from headrace_lab.tensorrt import TensorRt, load_tensorrt

_SEED = 2015
_CHECKPOINT_S = 10.0


@dataclass(frozen=True, slots=True)
class MapOptions:
    """Extent of the map.

    Attributes:
        batches: batch sizes.
        precisions: "fp16", "fp32".
        algorithms: our algorithms.
        baselines: "cudnn", "tensorrt".
        work: "conv" for the convolution alone, "layer" for that with its epilogue.
        rounds: samples of each candidate at most.
        prune: algorithms with a predicted time above this many times the roofline's are not measured; 0 measures all.
        budget_s: duration after which no other cell is measured; None without a limit.
        threads: threads that compile kernels.
        tensorrt_level: effort of TensorRT's builder, 0 to 5; None for its default.
        device: number of the GPU.
    """

    batches: tuple[int, ...]
    precisions: tuple[str, ...]
    algorithms: tuple[Algorithm, ...]
    baselines: tuple[str, ...]
    work: tuple[str, ...]
    rounds: int
    budget_s: float | None
    threads: int
    tensorrt_level: int | None = None
    device: int = 0
    prune: float = 0.0


class _Phases:
    """Durations of the parts of a cell, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # by name
        self._last_s = time.monotonic()

    def end(self, name: str) -> None:
        """Add the time since the last call to a part."""
        now_s = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s


class ConvLab:
    """Measures the map on one GPU, whose context must be current.

    Args:
        options: extent of the map.
        report: is called with a line of text for each step.
        checkpoint: is called with the map so far, at most every 10 s.
    """

    def __init__(
        self,
        options: MapOptions,
        report: Callable[[str], None],
        checkpoint: Callable[[ConvMap], object] = lambda _: None,
    ) -> None:
        self._options = options
        self._report = report
        self._checkpoint = checkpoint
        self._groups = families(options.algorithms)
        self._notes: list[str] = []
        self._versions: dict[str, str] = {}
        self._nvml = Nvml()
        self._best: dict[tuple[str, int, str, str], str] = {}
        self._host: dict[tuple[str, str], HostOperands] = {}

    def measure(self, title: str, layers: Sequence[ConvLayer]) -> ConvMap:
        """Measure the layers.

        Args:
            title: name of the layers, for reports.
            layers: distinct convolutions.

        Raises:
            BuildError: nothing could be measured.
            DeviceError: the GPU failed before the first cell.
        """
        self._started_s = time.monotonic()
        options = self._options
        self._title, self._gpu = title, describe(options.device)
        self._stream = CudaStream()
        self._cache_bytes = l2_bytes(options.device)
        capability = tuple(map(int, self._gpu.capability.split(".")))
        own = OwnAlgorithms(options.device, (capability[0], capability[1]), self._stream, options.threads)
        with tempfile.TemporaryDirectory(prefix="headrace-lab.") as folder:
            try:
                self._load_baselines(Path(folder))
                memory_bytes = self._gpu.memory_bytes // 16
                self._roofline = measure_roofline(self._torch, options.precisions, self._stream, memory_bytes)
                self._compilation = self._compile(own, layers)
                self._before = self._reading()
                cells = self._cells(own, layers)
            finally:
                own.close()
        if not cells:
            raise BuildError(f"no cell of the map was measured: {'; '.join(self._notes) or 'the list is empty'}")
        return self._map(cells)

    def _load_baselines(self, folder: Path) -> None:
        """Load cuDNN and TensorRT, or note why they are not measured."""
        options = self._options
        torch = load_torch(options.device, self._stream) if "cudnn" in options.baselines else ""
        self._torch = torch if isinstance(torch, Torch) else None
        if self._torch is not None:
            self._versions["cuDNN"] = self._torch.description
        elif torch:
            self._notes.append(f"cuDNN is not measured: {torch}")
        tensorrt: TensorRt | str = ""
        if "tensorrt" in options.baselines:
            tensorrt = load_tensorrt(self._gpu, options.device, self._stream, folder, options.tensorrt_level)
        self._tensorrt = tensorrt if isinstance(tensorrt, TensorRt) else None
        if self._tensorrt is not None:
            self._versions["TensorRT"] = self._tensorrt.description
        elif tensorrt:
            self._notes.append(f"TensorRT is not measured: {tensorrt}")

    def _map(self, cells: Sequence[Cell]) -> ConvMap:
        """Return the map of the cells so far."""
        return ConvMap(
            title=self._title,
            gpu=self._gpu.name,
            capability=self._gpu.capability,
            driver=driver_version(),
            versions=self._versions,
            notes=tuple(self._notes),
            roofline=self._roofline,
            cells=tuple(cells),
            before=self._before,
            after=self._reading(),
            rounds=self._options.rounds,
            seconds=time.monotonic() - self._started_s,
            compile_seconds=self._compilation.seconds,
        )

    def _reading(self) -> GpuReading | None:
        readings = self._nvml.readings()
        return next((reading for reading in readings if reading.gpu == self._options.device), None)

    def _compile(self, own: OwnAlgorithms, layers: Sequence[ConvLayer]) -> Compilation:
        """Start to compile what the cells of the map need, in their order, as far as cost models do not leave it out."""
        work = (
            (variants, replace(host, epilogue=epilogue))
            for precision, n, layer in self._order(layers)
            for host in (self._operands(layer, n, precision),)
            for variants in self._groups.values()
            if not self._pruned(own, variants, host, precision)
            for epilogue in self._epilogues(layer)
        )
        compilation = own.compile_ahead(work)
        self._report(f"compiling {compilation.variants} variants for {len(layers)} layers while they are measured")
        return compilation

    def _operands(self, layer: ConvLayer, n: int, precision: str) -> HostOperands:
        """Operands of a layer in host memory, without an epilogue: one set of values for all batch sizes."""
        key = layer.name, precision
        if key not in self._host:
            shape = layer.at(max(self._options.batches))
            self._host[key] = host_operands(shape, DTYPES[precision], PLAIN, _SEED + len(self._host))
        return replace(self._host[key], shape=layer.at(n))

    def _pruned(self, own: OwnAlgorithms, variants: Sequence[Algorithm], host: HostOperands, precision: str) -> str:
        """Return the reason why an algorithm is not worth measuring by its cost model; "" if it is."""
        prune = self._options.prune
        if not prune or precision not in self._roofline.flops_per_s:
            return ""
        usable = [
            variant
            for variant, reason in zip(variants, own.refusals(variants, host.shape, host.dtype), strict=True)
            if not reason
        ]
        time_us = estimate_us(usable, host.shape) if usable else None
        floor_us = self._roofline.floor_us(host.shape, precision, host.dtype.itemsize, False)
        if time_us is None or time_us <= prune * floor_us:
            return ""
        return (
            f"left out: its cost model predicts {time_us:.0f} us, more than {prune:g} times the {floor_us:.1f} us of the "
            "roofline; --prune 0 measures it"
        )

    def _epilogues(self, layer: ConvLayer) -> list[Epilogue]:
        epilogues = {"conv": PLAIN, "layer": layer.epilogue}
        return list(dict.fromkeys(epilogues[work] for work in self._options.work))

    def _order(self, layers: Sequence[ConvLayer]) -> Iterator[tuple[str, int, ConvLayer]]:
        for precision in self._options.precisions:
            for n in self._options.batches:
                for layer in layers:
                    yield precision, n, layer

    def _work(self, layers: Sequence[ConvLayer]) -> Iterator[tuple[str, ConvLayer, HostOperands, ExactSums]]:
        """Yield the cells with their operands and exact sums; the next cell's sums are computed while one is measured."""
        work = list(self._order(layers))
        with ThreadPoolExecutor(1, "lab-sums") as thread:

            def prepare(number: int) -> tuple[HostOperands, Future[ExactSums]]:
                precision, n, layer = work[number]
                host = self._operands(layer, n, precision)
                return host, thread.submit(sample, host, _SEED + number + 1)

            following = prepare(0) if work else None
            for number, (precision, _, layer) in enumerate(work):
                assert following is not None, "each cell prepares the next one"
                host, sums = following
                samples = sums.result()
                following = prepare(number + 1) if number + 1 < len(work) else None
                yield precision, layer, host, samples

    def _cells(self, own: OwnAlgorithms, layers: Sequence[ConvLayer]) -> list[Cell]:
        options = self._options
        cells: list[Cell] = []
        saved_s = time.monotonic()
        total = len(layers) * len(options.batches) * len(options.precisions)
        for number, (precision, layer, host, samples) in enumerate(self._work(layers), 1):
            if options.budget_s is not None and time.monotonic() - self._started_s > options.budget_s:
                self._notes.append(
                    f"{total - number + 1} of {total} layers and batch sizes are not measured: the budget of "
                    f"{options.budget_s:g} s is spent"
                )
                break
            try:
                cells += [
                    self._cell(own, layer, replace(host, epilogue=epilogue), precision, samples)
                    for epilogue in self._epilogues(layer)
                ]
            except HeadraceError as error:
                self._notes.append(f"{layer.name} n {host.shape.n} {precision} is not measured: {error}")
                if not is_context_usable():
                    self._notes.append("the GPU refuses all further work: the other layers are not measured")
                    break
                continue
            self._report(f"[{number}/{total}] {_progress(cells[-1])}")
            if time.monotonic() - saved_s > _CHECKPOINT_S:
                self._checkpoint(self._map(cells))
                saved_s = time.monotonic()
        return cells

    def _cell(
        self, own: OwnAlgorithms, layer: ConvLayer, host: HostOperands, precision: str, samples: ExactSums
    ) -> Cell:
        phases = _Phases()
        with ExitStack() as stack:
            operands = DeviceOperands(host, self._cache_bytes, self._stream)
            stack.callback(operands.close)
            phases.end("operands")
            refused, candidates, tried = self._open(own, layer, host, operands, precision, stack, phases)
            results = self._check_and_time(host, samples, candidates, tried, phases)
        reading = self._reading()
        floor_us = self._roofline.floor_us(host.shape, precision, host.dtype.itemsize, host.epilogue.residual)
        return Cell(
            layer.name,
            host.shape,
            precision,
            host.epilogue,
            floor_us,
            (*results, *refused),
            sum(phases.seconds.values()),
            reading.clocks_hz.get("sm") if reading else None,
            tuple(name for name, active in reading.slowed.items() if active) if reading else (),
            phases.seconds,
        )

    def _open(
        self,
        own: OwnAlgorithms,
        layer: ConvLayer,
        host: HostOperands,
        operands: DeviceOperands,
        precision: str,
        stack: ExitStack,
        phases: _Phases,
    ) -> tuple[list[CandidateResult], list[Candidate], dict[str, int]]:
        """Open all candidates; returns results without a time, candidates, and the number of tried variants by name."""
        refused: list[CandidateResult] = []
        candidates: list[Candidate] = []
        tried: dict[str, int] = {}
        for name, variants in self._groups.items():
            key = layer.name, host.shape.n, precision, name
            pruned = self._pruned(own, variants, host, precision)
            if pruned:
                refused.append(CandidateResult(name, reason=pruned))
                continue
            opened = own.open(variants, host, operands, self._best.get(key))
            phases.end(f"open {name}")
            if opened.candidate is None:
                refused.append(CandidateResult(name, reason=opened.reason))
                continue
            stack.callback(opened.candidate.close)
            self._best[key] = opened.candidate.variant
            candidates.append(opened.candidate)
            tried[name] = opened.tried
        if self._torch is not None:
            for candidate in cudnn_candidates(self._torch, host, operands, self._stream):
                if isinstance(candidate, str):
                    name, _, reason = candidate.partition(": ")
                    refused.append(CandidateResult(name, reason=reason))
                else:
                    stack.callback(candidate.close)
                    candidates.append(candidate)
            phases.end("open cudnn")
        # The convolution alone is no network of its own: TensorRT's work is compared with the whole layer's.
        if self._tensorrt is not None and (host.epilogue != PLAIN or layer.epilogue == PLAIN):
            try:
                engine = self._tensorrt.open(host, operands)
                stack.callback(engine.close)
                candidates.append(engine)
            except HeadraceError as error:
                refused.append(CandidateResult("tensorrt", reason=str(error)))
            phases.end("open tensorrt")
        return refused, candidates, tried

    def _check_and_time(
        self,
        host: HostOperands,
        samples: ExactSums,
        candidates: Sequence[Candidate],
        tried: dict[str, int],
        phases: _Phases,
    ) -> list[CandidateResult]:
        reference = SampledReference(host, samples)
        comparison = ResultComparison(self._options.device, host.dtype, self._stream)
        results: list[CandidateResult] = []
        timed: list[tuple[Candidate, Errors]] = []
        estimates_us: list[float] = []
        try:
            has_saved = False
            # The cuDNN result first: the others are compared with all of it.
            for candidate in sorted(candidates, key=lambda one: not one.name.startswith("cudnn")):
                try:
                    errors, has_saved = self._errors(candidate, host, reference, comparison, has_saved)
                    estimates_us.append(trial_us(self._stream, candidate))
                except HeadraceError as error:
                    results.append(CandidateResult(candidate.name, candidate.variant, reason=str(error)))
                    if not is_context_usable():
                        raise
                    continue
                timed.append((candidate, errors))
        finally:
            comparison.close()
        phases.end("check")
        timings = time_rounds(self._stream, [candidate for candidate, _ in timed], estimates_us, self._options.rounds)
        phases.end("rounds")
        return [*(_result(*pair, timing, tried) for pair, timing in zip(timed, timings, strict=True)), *results]

    def _errors(
        self,
        candidate: Candidate,
        host: HostOperands,
        reference: SampledReference,
        comparison: ResultComparison,
        has_saved: bool,
    ) -> tuple[Errors, bool]:
        """Return the errors of a candidate, and True once a result is saved for the comparison of all elements."""
        address = candidate.run()
        shape = host.shape
        elements = math.prod(shape.y_shape)
        errors = reference.errors(
            candidate.name,
            lambda pixels: read_pixels(address, shape.y_shape, host.dtype, pixels),
            half_sums=candidate.half_sums,
        )
        if not has_saved:
            # Compared with itself, only elements that are not finite are wrong.
            wrong = comparison.wrong(address, elements, math.inf, address)
            if errors.worst_share <= 1 and not wrong:
                comparison.save(address, elements * host.dtype.itemsize)
                has_saved = True
        else:
            wrong = comparison.wrong(address, elements, reference.limit(candidate.name, candidate.half_sums))
        return replace(errors, wrong=wrong), has_saved


def _result(candidate: Candidate, errors: Errors, timing: Timing, tried: dict[str, int]) -> CandidateResult:
    return CandidateResult(
        candidate.name,
        candidate.variant,
        errors.verdict if not errors.is_right or errors.needs_half_bound else "",
        timing,
        errors,
        candidate.workspace_bytes,
        tried.get(candidate.name, 1),
    )


def _progress(cell: Cell) -> str:
    winner = cell.winner()
    wrong = [result.name for result in cell.results if result.errors is not None and not result.errors.is_right]
    times = ", ".join(
        f"{result.name} {result.timing.median_us:.1f}" for result in cell.results if result.timing is not None
    )
    text = f"{cell.layer} n {cell.shape.n} {cell.precision}: {winner.name if winner else 'none'} ({times} us)"
    return f"{text}; WRONG: {', '.join(wrong)}" if wrong else text


# Comparison of all elements of a result with another candidate's on the GPU.

_BLOCKS = 1056
_THREADS = 256


class ResultComparison:
    """Compares results of one dtype on one GPU; the device must be current.

    Args:
        device: number of the GPU.
        dtype: float16 or float32.
        stream: stream of the kernel.
    """

    def __init__(self, device: int, dtype: npt.DTypeLike, stream: CudaStream) -> None:
        self._device = device
        self._stream = stream
        self._kernels = Kernels(device, f"{FOLDER}/compare.cu", {"HALF": is_half(dtype)}, {"compare": "PPPiPP"})
        self._counts = DeviceBuffer(_BLOCKS * 8)
        self._saved = DeviceBuffer()

    def save(self, address: int, size_bytes: int) -> None:
        """Copy a result: later ones are compared with it."""
        self._saved.reserve(size_bytes)
        copy_address(self._saved.address, address, size_bytes, self._stream)
        self._stream.synchronize()

    def wrong(self, address: int, elements: int, limit: float, reference: int = 0) -> int:
        """Return the number of elements that are not finite or differ by more than `limit` from the reference.

        Args:
            address: of the result.
            elements: number of elements.
            limit: largest allowed difference.
            reference: address of the other result; 0 for the saved one.
        """
        bits = struct.unpack("<i", struct.pack("<f", limit))[0]
        counts = self._counts.address
        arguments = (address, reference or self._saved.address, elements, bits, counts, counts + 4 * _BLOCKS)
        self._kernels.launch("compare", (_BLOCKS, 1), _THREADS, self._stream, *arguments)
        self._stream.synchronize()
        return int(read_gpu(self._device, counts, 4 * _BLOCKS).view(np.int32).sum())

    def close(self) -> None:
        """Free the memory."""
        self._counts.free()
        self._saved.free()
        self._kernels.close()


def read_pixels(
    address: int,
    shape: tuple[int, int, int, int],
    dtype: np.dtype[np.generic],
    pixels: npt.NDArray[np.int64],
) -> Array:
    """Return all channels of an output in memory of the current GPU at (p, 3) pixels: picture, row, column.

    Args:
        address: of the output.
        shape: (n, out_h, out_w, k).
        dtype: of the elements.
        pixels: int64 (p, 3).

    Returns:
        (p, k) of `dtype`.
    """
    _, height, width, channels = shape
    size_bytes = channels * dtype.itemsize
    rows = np.empty((len(pixels), channels), dtype)
    numbers = (pixels[:, 0] * height + pixels[:, 1]) * width + pixels[:, 2]
    with check("copying from the GPU"):
        for row, number in zip(rows, numbers.tolist(), strict=True):
            loaded().memcpy_dtoh(row, address + number * size_bytes)
    return rows
