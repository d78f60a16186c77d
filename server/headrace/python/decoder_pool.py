"""The processes that decode images for the pipelines of a server: one pool for all of them.

Image files are untrusted, so each process decodes one image at a time: a file that crashes or hangs the decoder fails its own
request, and the process is replaced while the others go on. See docs/decisions/0018-images-on-the-server.md.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config.machine import usable_cores
from headrace.core.tensor import Array
from headrace.runtimes.base import Execution, LoadedModel, ProcessStatus
from headrace.runtimes.isolated.backend import IsolatedBackend, IsolatedExecution, IsolatedModel

# 50 megapixels take 550 MB while they are decoded, converted and resized.
_MEMORY_BYTES = 1 << 30
# Tensors of one process that wait in shared memory for the next step; further ones are copied.
_LENT_IMAGES = 8
# The limit of a run is that of its step.
_DEFAULT_LIMIT_S = 10.0
_NAME = "decode_image"
# The module is imported by the processes only: servers without such pipelines do not load Pillow.
_FACTORY = "headrace.inference.pipelines.steps.execution:DecoderBackend"
# Seconds between two looks for a process that serves, while all that serve are busy.
_LOOK_S = 0.05


class DecoderPool:
    """Processes that decode images: started by the first steps that need them, ended with the last step.

    The pool has as many processes as the step that wants most of them. Each is supervised, and replaced when it dies.

    Ownership: `_lifecycle_lock` is held while processes start and end; `_steps` is written under it. `_changed` guards `_idle`
    and `_decoders`.
    """

    def __init__(self) -> None:
        self._lifecycle_lock = threading.Lock()
        self._steps: list[int] = []  # processes that each open step wants
        self._changed = threading.Condition()
        self._decoders: list[_Decoder] = []
        self._idle: list[_Decoder] = []

    def open(self, processes: int) -> None:
        """Start the processes that a step needs and that do not run yet.

        Args:
            processes: number of images of the step that are decoded at once.

        Raises:
            ConfigError: a process cannot be started; nothing is changed.
        """
        with self._lifecycle_lock:
            missing = processes - len(self._decoders)
            started = _start(missing) if missing > 0 else []
            self._steps.append(processes)
            with self._changed:
                self._decoders += started
                self._idle += started
                self._changed.notify_all()

    def close(self, processes: int) -> None:
        """End the processes if this was the last step; its images have all been decoded."""
        with self._lifecycle_lock:
            self._steps.remove(processes)
            if self._steps:
                return
            with self._changed:
                ended, self._decoders, self._idle = self._decoders, [], []
            for decoder in ended:
                decoder.model.close()

    def run(self, inputs: dict[str, Array], limit_s: float) -> dict[str, Array]:
        """Decode the images of a request in the first process that is free.

        Args:
            inputs: as `headrace.inference.pipelines.steps.execution.DecoderExecution` takes them.
            limit_s: seconds after which the process counts as hanging and is killed.

        Returns:
            Arrays that may lie in memory of the process, which is free for another image when they are deleted.
        """
        decoder = self._take()
        try:
            decoder.execution.limit_s = limit_s
            return decoder.execution.run(inputs)
        finally:
            with self._changed:
                self._idle.append(decoder)
                self._changed.notify()

    @property
    def process_status(self) -> ProcessStatus:
        """Whether a process serves, and the restarts of all."""
        statuses = [decoder.model.process_status for decoder in self._decoders]
        is_up = any(status.up for status in statuses)
        refusal = "" if is_up else next((status.refusal for status in statuses if status.refusal), "")
        return ProcessStatus(is_up, refusal, sum(status.restarts for status in statuses))

    def _take(self) -> _Decoder:
        """Take a process that serves, the one that was used last; one that is being replaced if none serves."""
        with self._changed:
            while True:
                for index in range(len(self._idle) - 1, -1, -1):
                    if self._idle[index].model.process_status.up:
                        return self._idle.pop(index)
                if self._idle and not any(decoder.model.process_status.up for decoder in self._decoders):
                    return self._idle.pop(0)
                self._changed.wait(_LOOK_S if self._idle else None)


class _Decoder:
    """One process of the pool."""

    def __init__(self, model: IsolatedModel) -> None:
        self.model = model
        self.execution: IsolatedExecution = model.execution(0)


def _start(count: int) -> list[_Decoder]:
    """Start processes at once; raises ConfigError if one of them does not start, and ends the others."""
    backend = IsolatedBackend(_NAME, _FACTORY, _DEFAULT_LIMIT_S, memory_bytes=_MEMORY_BYTES, lent_batches=_LENT_IMAGES)
    with ThreadPoolExecutor(min(count, 2 * usable_cores())) as threads:
        loads = [threads.submit(backend.load, Path(_NAME), 1, {}) for _ in range(count)]
    errors = [error for load in loads if (error := load.exception()) is not None]
    models = [load.result() for load in loads if load.exception() is None]
    if errors:
        for model in models:
            model.close()
        raise errors[0]
    return [_Decoder(model) for model in models]


class PooledDecoder(LoadedModel):
    """The `decode_image` step of one pipeline; see `headrace.runtimes.base.LoadedModel`.

    Args:
        pool: runs the images.
        options: checked options of the step.
        batched: True if its tensors have a batch dimension.
        processes: number of images that are decoded at once.
        limit_s: seconds after which a process that decodes one image counts as hanging.

    Raises:
        ConfigError: a process cannot be started.
    """

    def __init__(
        self, pool: DecoderPool, options: Mapping[str, Any], batched: bool, processes: int, limit_s: float
    ) -> None:
        self._pool, self._batched, self._processes, self._limit_s = pool, batched, processes, limit_s
        self._options: Array = np.array([json.dumps(options).encode()], object)
        pool.open(processes)

    def execution(self, index: int) -> Execution:
        """Create an execution; all use the same pool."""
        return _PooledExecution(self._pool, self._options, self._batched, self._limit_s)

    @property
    def process(self) -> DecoderPool:
        """The pool."""
        return self._pool

    def close(self) -> None:
        """Leave the pool, which ends its processes with the last step."""
        self._pool.close(self._processes)


class _PooledExecution(Execution):
    """Runs the images of one step; see `headrace.runtimes.base.Execution`."""

    def __init__(self, pool: DecoderPool, options: Array, batched: bool, limit_s: float) -> None:
        self._pool, self._options, self._batched, self._limit_s = pool, options, batched, limit_s

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Decode the images of one request."""
        outputs = self._pool.run({"image": inputs["image"], "options": self._options}, self._limit_s)
        return outputs if self._batched else {name: array[0] for name, array in outputs.items()}
