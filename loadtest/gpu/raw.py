"""The engine alone, as `headrace compare` times it: CUDA graph replay, inputs on the device, by the GPU's own clock."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
from headrace.config.model_folder import read_model_folder
from headrace.config.serving_plan import GpuRuntime, serving_plan
from headrace.pipelines.execution import softmax, top_k
from headrace.repository.gpu_backend import tensorrt_machine
from headrace_engines.targets import choose_target
from headrace_engines.targets.base import BatchTiming

from loadtest.gpu.setup import CLASSES, Setup
from loadtest.gpu.subject import INPUT, LOGITS, MEAN, STD, base_name
from loadtest.protocol import Array


class RawEngine(AbstractContextManager["RawEngine"]):
    """The engine that the server serves too, loaded once more.

    Args:
        setup: which.

    Raises:
        BuildError: it cannot be loaded.
        ConfigError: there is none.
    """

    def __init__(self, setup: Setup) -> None:
        folder = read_model_folder(setup.repository / base_name(setup), setup.repository)
        chosen = serving_plan(folder, 1, GpuRuntime(tensorrt_machine))
        self.file = chosen.file
        self._engine = choose_target(setup.backend).open(chosen.file)
        shape = (setup.max_rows, 3, setup.side, setup.side)
        self._inputs = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)

    def __exit__(self, *error: object) -> None:
        self._engine.close()

    def time(self, rows: int, seconds: float) -> BatchTiming:
        """Batches of so many rows, for about so long."""
        return self._engine.time({INPUT: self._inputs[:rows]}, seconds)

    def classes(self, pixels: Array) -> tuple[Array, Array]:
        """The right answer for uint8 pictures, prepared and ranked on the CPU: scores and classes, (rows, 5) each."""
        prepared = (pixels.astype(np.float32) - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
        logits = self._engine.run({INPUT: np.ascontiguousarray(prepared.transpose(0, 3, 1, 2))})[LOGITS]
        logits = logits.astype(np.float32)
        best = top_k(logits, CLASSES)
        return np.take_along_axis(softmax(logits), best, axis=1), best


def agreement(found: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[float, float]:
    """Share of pictures with the same best class, and the largest difference of a best class's probability."""
    same = float(np.mean(found[1][:, 0] == right[1][:, 0]))
    return same, float(np.abs(found[0][:, 0] - right[0][:, 0]).max())
