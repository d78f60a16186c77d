"""Exchange with the builder: a request, a description of the exported model, and files of inputs and outputs.

Messages to the builder, one JSON object a line:

    {"progress": 0.3, "note": "exports"}     progress of the export
    {"description": {...}}                   model.onnx is complete
    {"done": "case.npz"}                     the outputs of a case are written
    {"fault": {...}}                         an error: "message" and "cure", or "chain", the types and texts of the exceptions
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import IO, Any, Callable

import numpy as np

REQUEST = "request.json"
MODEL = "model.onnx"
_MAX_TEXT = 4000
# An exported file below this size has its weights inside: protobuf's limit is 2 GiB, the graph needs some of it.
MAX_INLINE_BYTES = 1_900_000_000
Report = Callable[[float, str], None]
Json = dict[str, Any]


class ImportFault(Exception):
    """An error with its remedy.

    Args:
        message: what came and what is allowed.
        cure: what to do.
    """

    def __init__(self, message: str, cure: str) -> None:
        super().__init__(message)
        self.cure = cure


class Source(ABC):
    """A model in its framework; base of the programs' classes."""

    @abstractmethod
    def export(self, path: str, report: Report) -> Json:
        """Write the ONNX file and return the description.

        Args:
            path: of the new file.
            report: progress callback.

        Returns:
            "framework": name and version. "inputs": for each input "name", "onnx" (its name in the file, if that differs), "dims"
            (an example's shape with the batch; sizes of free dimensions are those of the example), and if known "low", "high",
            "mean", "std" (of the example's values). "outputs": "name" and "onnx". "labels": names of classes. "preprocess":
            section of the configuration. "notes": sentences for the report.

        Raises:
            ImportFault: the model cannot be exported.
        """

    @abstractmethod
    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the model in evaluation mode and return its outputs by name.

        Args:
            inputs: arrays by the names in the description.
        """


def serve(folder: str) -> int:
    """Run the process: export, then the cases; returns the exit status."""
    # Prints of the user's code must not end up among the messages, and its reads not take the builder's lines.
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        with open(os.path.join(folder, REQUEST), encoding="utf-8") as stream:
            request = json.load(stream)
        program = importlib.import_module(f"{__package__}.{request['program']}")
        report = _reporter(messages)
        source: Source = program.open_source(request, report)
        _send(messages, {"description": source.export(os.path.join(folder, MODEL), report)})
        for line in lines:
            name = line.strip()
            _run(source, os.path.join(folder, name))
            _send(messages, {"done": name})
    except BaseException as error:  # SystemExit of the user's code too
        traceback.print_exc()
        _send(messages, {"fault": describe_fault(error)})
        return 1
    return 0


def _run(source: Source, path: str) -> None:
    write_arrays(path + ".outputs", source.run(read_arrays(path)))


def write_arrays(path: str, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays by name. The names are an array too: as members of the file they would be limited."""
    stored: dict[str, Any] = {f"t{number}": storable(np.asarray(array)) for number, array in enumerate(arrays.values())}
    with open(path, "wb") as stream:
        np.savez(stream, names=np.array(list(arrays), dtype=str), **stored)


def read_arrays(path: str) -> dict[str, np.ndarray]:
    """Read arrays by name."""
    with np.load(path, allow_pickle=False) as file:
        return {str(name): file[f"t{number}"] for number, name in enumerate(file["names"])}


def storable(array: np.ndarray) -> np.ndarray:
    """Return text as an array of bytes: arrays of Python objects cannot be stored without pickle."""
    if array.dtype.kind != "O":
        return array
    texts = [text if isinstance(text, bytes) else str(text).encode() for text in array.ravel()]
    return np.array(texts, dtype=bytes).reshape(array.shape)


def describe_fault(error: BaseException) -> Json:
    """Return an error as JSON: message and cure of an `ImportFault`, else the chain of exceptions, the outermost first."""
    if isinstance(error, ImportFault):
        return {"message": str(error), "cure": error.cure}
    chain: list[list[str]] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < 10:
        chain.append([type(cause).__name__, str(cause)[:_MAX_TEXT]])
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return {"chain": chain}


def users_line(error: BaseException, file: str) -> str:
    """Return the last line of a file in an error's traceback as "line 5: code"; "" if the error is elsewhere."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"line {frames[-1].lineno}: {frames[-1].line}" if frames else ""


def statistics(array: np.ndarray) -> Json:
    """Return the range of an example's values, from which random inputs are drawn; {} for values that give none."""
    if array.dtype.kind not in "iuf" or not array.size or not np.isfinite(array).all():
        return {}
    if array.dtype.kind in "iu":
        return {"low": int(array.min()), "high": int(array.max())}
    values = array.astype(np.float64)
    if values.std() == 0:
        return {}  # zeros and ones are placeholders
    return {
        "low": float(values.min()),
        "high": float(values.max()),
        "mean": float(values.mean()),
        "std": float(values.std()),
    }


def check_names(request: Json, names: Iterable[str]) -> None:
    """Raise an ImportFault if the request has a shape for another input than these."""
    unknown = sorted(set(request["shapes"]) - set(names))
    if unknown:
        fault = f"--input-shape names {', '.join(unknown)}, the inputs are {', '.join(names)}"
        raise ImportFault(fault, "write one of these names")


def fitting_sizes(name: str, given: list[Any], shape: list[int | None], shown: list[Any]) -> list[int]:
    """Return the sizes of a shape in the request.

    Args:
        name: of the input.
        given: name and size of each dimension.
        shape: of the input; None for a free dimension.
        shown: the same for the message.

    Raises:
        ImportFault: they do not fit the input.
    """
    sizes = [int(size) for _, size in given]
    if len(sizes) != len(shape) or any(e not in (None, g) for e, g in zip(shape, sizes)):
        fault = f"--input-shape {name}={','.join(map(str, sizes))} does not fit the input's shape {shown}"
        raise ImportFault(fault, "write a size for each dimension, the batch first")
    return sizes


def load_file(path: str) -> Any:
    """Import a Python file of the user; its folder is first on `sys.path`, as if it were run.

    Raises:
        ImportFault: the file cannot be imported.
    """
    folder = os.path.dirname(os.path.abspath(path))
    sys.path.insert(0, folder)
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportFault(f"{path} is no Python file", "name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        cure = f"install it with --requirement {error.name}, or name an interpreter that has it with --python PATH"
        raise ImportFault(f"{os.path.basename(path)} imports {error.name}, which is not installed", cure) from error
    except BaseException as error:
        place = users_line(error, path)
        where = f" ({place})" if place else ""
        text = f"{os.path.basename(path)} cannot be imported: {type(error).__name__}: {error}{where}"
        raise ImportFault(text, "correct the file; its output is above") from error
    return module


def _reporter(messages: IO[str]) -> Report:
    return lambda done, note: _send(messages, {"progress": done, "note": note})


def _send(messages: IO[str], message: Json) -> None:
    messages.write(json.dumps(message) + "\n")
    messages.flush()
