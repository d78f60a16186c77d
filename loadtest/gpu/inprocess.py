"""The scheduler without a network: `ModelHandle` in this process, with callers in a closed loop; pictures in pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import uvloop
from headrace.config.model_folder import read_model_folder
from headrace.config.serving_plan import GpuRuntime, serving_plan
from headrace.core.clock import monotonic_ns
from headrace.core.completion import Mailbox
from headrace.core.request import InferRequest
from headrace.core.tensor import PINNED, ResidentRows, as_input
from headrace.inference.pipelines.execution import softmax, top_k
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.models.gpu_backend import tensorrt_machine
from headrace.models.loader import Loader
from headrace_engines.targets import choose_target
from headrace_engines.targets.base import BatchTiming

from loadtest.callers import Answered, Callers
from loadtest.gpu.setup import CLASSES, Setup
from loadtest.gpu.subject import BEST, INPUT, LOGITS, MEAN, SCORES, STD, base_name
from loadtest.protocol import Array

_CLOSE_S = 10.0
# Length of the warm-up, as a share of the sample.
_WARM_UP = 0.3


class InProcess(AbstractContextManager["InProcess"]):
    """An event loop with models on it, as a server has them, and callers beside.

    Args:
        setup: which models.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._loop = uvloop.new_event_loop()
        self._loader = Loader(Mailbox(self._loop))
        self._handles: list[ModelHandle] = []

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.close(_CLOSE_S)
        self._loop.close()

    def open(self, name: str) -> ModelHandle:
        """Load a model of the bench's repository.

        Raises:
            ConfigError: it cannot be served.
        """
        folder = read_model_folder(self._setup.repository / name, self._setup.repository)
        handle = self._loader.load(folder, 1, self._loader.plan(folder, 1))
        self._handles.append(handle)
        return handle

    def measure(
        self, handle: ModelHandle, requests: Sequence[Array], callers: int, seconds: float, *, blocking: bool = False
    ) -> Answered:
        """Keep `callers` requests under way for `seconds`, after a warm-up.

        Args:
            handle: the model.
            requests: uint8 pictures with the rows in front, as many rows in each; callers take them in turns.
            callers: requests under way.
            seconds: length of the sample.
            blocking: the only caller waits for each answer on a thread of its own.

        Raises:
            CallersFailed: some got an error, or no answer.
        """
        inputs = [{INPUT: requests[number % len(requests)]} for number in range(callers)]
        output = (BEST, (len(requests[0]), CLASSES))
        run = Callers(handle, inputs, output).run(_WARM_UP * seconds, seconds, blocking=blocking)
        return self._loop.run_until_complete(run)

    def ask(self, handle: ModelHandle, pixels: Array) -> tuple[Array, Array]:
        """One request: its scores and classes."""
        request = InferRequest(inputs={INPUT: pixels}, rows=len(pixels), shape_key=None, received_ns=monotonic_ns())
        outputs = handle.infer_blocking(request).outputs
        return np.asarray(outputs[SCORES]), np.asarray(outputs[BEST])


def requests_of(setup: Setup, pixels: Array, rows: int, *, in_pinned_memory: bool) -> list[Array]:
    """Images as requests of `rows` rows each; pinned on a GPU if requested."""
    source = pinned(pixels, setup.on_gpu) if in_pinned_memory else pixels
    return [source[at : at + rows] for at in range(0, len(pixels) - rows + 1, rows)]


def pinned(pixels: Array, on_gpu: bool) -> Array:
    """A copy of the pictures that every GPU reads by itself, kept as long as any of its rows are.

    Args:
        pixels: uint8, with the rows in front.
        on_gpu: False: `ResidentRows` all the same, over ordinary memory, which a model on the CPU copies.
    """
    if on_gpu:
        from headrace.runtimes.cuda.memory import pinned_empty, pinned_rows

        buffer = pinned_empty(pixels.shape, pixels.dtype)
        buffer[:] = pixels
        return as_input(pinned_rows(buffer))
    flat = pixels.copy().reshape(-1)
    start = int(flat.ctypes.data)

    def copy(address: int, size_bytes: int) -> Array:
        copied: Array = flat[address - start : address - start + size_bytes].copy()
        return copied

    return as_input(ResidentRows(start, PINNED, pixels.dtype, pixels.shape, flat, copy))


# The engine alone, as `headrace compare` times it: CUDA graph replay, inputs on the device, by the GPU's own clock.


class RawEngine(AbstractContextManager["RawEngine"]):
    """The engine that the server serves too, loaded once more.

    Args:
        setup: which.
        name: of the model; "" for the one that others are variants of.

    Raises:
        BuildError: it cannot be loaded.
        ConfigError: there is none.
    """

    def __init__(self, setup: Setup, name: str = "") -> None:
        folder = read_model_folder(setup.repository / (name or base_name(setup)), setup.repository)
        chosen = serving_plan(folder, 1, GpuRuntime(tensorrt_machine))
        self.file = chosen.file
        self._engine = choose_target(setup.backend).open(chosen.file)
        shape = (setup.max_rows, *setup.dims)
        self._inputs = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)

    def __exit__(self, *error: object) -> None:
        self._engine.close()

    def time(self, rows: int, seconds: float) -> BatchTiming:
        """Batches of so many rows, for about so long."""
        return self._engine.time({INPUT: self._inputs[:rows]}, seconds)

    def run(self, inputs: Array) -> Array:
        """Outputs of FP32 rows in one batch, (rows, classes) FP32."""
        return self._engine.run({INPUT: inputs})[LOGITS].astype(np.float32)

    def classes(self, pixels: Array) -> tuple[Array, Array]:
        """The right answer for uint8 pictures, prepared and ranked on the CPU: scores and classes, (rows, 5) each."""
        prepared = (pixels.astype(np.float32) - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
        logits = self.run(np.ascontiguousarray(prepared.transpose(0, 3, 1, 2)))
        best = top_k(logits, CLASSES)
        return np.take_along_axis(softmax(logits), best, axis=1), best


def agreement(found: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[float, float]:
    """Share of pictures with the same best class, and the largest difference of a best class's probability."""
    same = float(np.mean(found[1][:, 0] == right[1][:, 0]))
    return same, float(np.abs(found[0][:, 0] - right[0][:, 0]).max())
