"""ONNX Runtime's CUDA provider in tests, on a GPU and on one that is not there.

Where there is none, sessions run on the CPU, and their memory is that of the fake GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from headrace.core.tensor import Array
from headrace.runtimes import onnxruntime_cuda as backend
from headrace.runtimes.tensorrt.backend import MAX_BATCH_SIZE


class FakeProvider:
    """Records the sessions that the backend opens.

    Attributes:
        options: options of the provider of each session, in order.
        failure: raised when a session is opened, None for none.
    """

    def __init__(self) -> None:
        self.options: list[dict[str, str]] = []
        self.failure: Exception | None = None

    def open(self, file: Path, options: ort.SessionOptions, provider: Mapping[str, str]) -> Any:
        """As `headrace.runtimes.onnxruntime_cuda.open_session`."""
        self.options.append(dict(provider))
        if self.failure is not None:
            raise self.failure
        return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"], enable_fallback=0)


def install_provider(patch: pytest.MonkeyPatch) -> FakeProvider:
    """Let the backend find the fake; the fake GPU must be installed."""
    provider = FakeProvider()
    patch.setattr(backend, "provider_problem", lambda: "")
    patch.setattr(backend, "open_session", provider.open)
    patch.setattr(backend, "_DEVICE_TYPE", "cpu")
    return provider


def saved(folder: Path, model: onnx.ModelProto) -> Path:
    """Save a model as version 1 of a folder `m`; returns the file."""
    path = folder / "m" / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


@contextmanager
def opened(path: Path, max_rows: int = 8, **parameters: str) -> Iterator[Any]:
    """The only execution of a model on the CUDA provider.

    Args:
        path: an ONNX file.
        max_rows: rows of the largest batch.
        parameters: of the model's configuration.
    """
    options = {MAX_BATCH_SIZE: str(max_rows), **parameters}
    model = backend.OnnxRuntimeCudaBackend().load(path, 1, options)
    with closing(model), closing(model.execution(0)) as execution:
        yield execution


def answers(path: Path, inputs: dict[str, Array]) -> dict[str, Array]:
    """All outputs as ONNX Runtime computes them on the CPU."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def launched(execution: Any, inputs: dict[str, Array], rows: int) -> Any:
    """A batch in flight with the inputs."""
    batch = execution.begin(inputs, rows)
    for name, array in inputs.items():
        np.copyto(batch.inputs[name], array)
    execution.launch(batch)
    return batch


def features(rows: int, seed: int = 0) -> dict[str, Array]:
    """Random input of `affine`."""
    return {"X": np.random.default_rng(seed).random((rows, 16), np.float32)}
