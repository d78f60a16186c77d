"""Runs jobs of `pruning_program` as a process on an interpreter with PyTorch, and checks the ONNX files that they write."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import onnx

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import Array, OnnxRunner, read_onnx
from headrace_engines.optimize.pruning_program import jobs
from headrace_engines.optimize.pruning_program.jobs import Job, PrunedNetwork
from headrace_engines.progress import Report

_ROOT = Path(__file__).parents[2]
_LINES = 20
# Largest difference of the ONNX file from the PyTorch network, relative to the largest output.
EXPORT_BOUND = 1e-3
_ROWS = 64


@dataclass(frozen=True, slots=True)
class TorchInputs:
    """Arrays of a job.

    Attributes:
        check: FP32 [n, ...]: samples for the comparison of the written ONNX file with the PyTorch network.
        reference: outputs of the source ONNX file for `check`; None for a network that is given as code.
        train: FP32 [N, ...]: samples of the training; None for a job without training. A .npy file is not copied.
        labels: INT64 [N]; None without labels.
    """

    check: Array
    reference: Array | None = None
    train: Array | Path | None = None
    labels: Array | None = None


@dataclass(frozen=True, slots=True)
class TorchResult:
    """Result of a job.

    Attributes:
        model: the written ONNX model, checked against the PyTorch network.
        network: figures of the network.
        difference: largest difference of the ONNX model from the PyTorch network, relative to the largest output.
    """

    model: onnx.ModelProto
    network: PrunedNetwork
    difference: float


def run_torch_job(python: Path, job: Job, inputs: TorchInputs, report: Report) -> TorchResult:
    """Run a job in a folder of its own and check its ONNX file.

    Args:
        python: interpreter with PyTorch.
        job: the job.
        inputs: its arrays.
        report: progress callback.

    Raises:
        BuildError: the job failed, or ONNX Runtime's outputs differ from PyTorch's.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-torch-") as name:
        folder = Path(name)
        _write_inputs(folder, inputs)
        job.write(folder)
        _run(python, folder, report)
        try:
            network = PrunedNetwork.read(folder)
            model = read_onnx(folder / jobs.MODEL_FILE)
            answers = np.load(folder / jobs.ANSWERS_FILE)
        except (OSError, ValueError, TypeError) as error:
            raise BuildError(
                f"the PyTorch program wrote no result ({error}): check the interpreter {python}"
            ) from error
    return TorchResult(model, network, _check(model, job, inputs.check, answers))


def _write_inputs(folder: Path, inputs: TorchInputs) -> None:
    arrays = {
        jobs.CHECK_FILE: inputs.check,
        jobs.REFERENCE_FILE: inputs.reference,
        jobs.INPUTS_FILE: inputs.train,
        jobs.LABELS_FILE: inputs.labels,
    }
    for name, array in arrays.items():
        if isinstance(array, Path):
            (folder / name).symlink_to(array.resolve())
        elif array is not None:
            np.save(folder / name, array)


def _run(python: Path, folder: Path, report: Report) -> None:
    command = [str(python), "-c", jobs.START, str(_ROOT), str(folder)]
    with _process(command) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        tail: deque[str] = deque(maxlen=_LINES)
        reader = threading.Thread(target=_collect, args=(process.stderr, tail), daemon=True)
        reader.start()
        for line in process.stdout:
            word, _, rest = line.rstrip("\n").partition(" ")
            share, _, note = rest.partition(" ")
            if word == "progress":
                with contextlib.suppress(ValueError):
                    report(float(share), note)
        status = process.wait()
        reader.join()
    if status:
        raise BuildError(_failure(folder, status, tail, python))


@contextlib.contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process; it and the processes that it starts end with the block."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise BuildError(
            f"{command[0]} cannot be started ({error.strerror}): name an interpreter with --python"
        ) from error
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                # The program ends its data-parallel processes.
                process.terminate()


def _collect(stream: IO[str], tail: deque[str]) -> None:
    tail.extend(line.rstrip() for line in stream)


def _failure(folder: Path, status: int, tail: deque[str], python: Path) -> str:
    try:
        return str(json.loads((folder / jobs.ERROR_FILE).read_text(encoding="utf-8"))["message"])
    except (OSError, ValueError, KeyError, TypeError):
        last = next((line for line in reversed(tail) if line.strip()), "it printed no error")
        if status < 0:
            return f"the PyTorch program was ended by signal {-status} ({last}): it may lack memory, lower --batch-size"
        return f"the PyTorch program on {python} failed with status {status}: {last}: check its packages"


def _check(model: onnx.ModelProto, job: Job, check: Array, answers: Array) -> float:
    """Return the largest difference of ONNX Runtime's outputs from PyTorch's, relative to the largest output.

    Raises:
        BuildError: it exceeds the bound, or the shapes differ.
    """
    runner = OnnxRunner(model)
    # A batch of one row, and larger ones: a batch dimension that is not free fails here.
    starts = [0, *range(1, len(check), _ROWS)]
    ends = [*starts[1:], len(check)]
    parts = [runner.run({job.input_name: check[a:b]})[job.output_name] for a, b in zip(starts, ends, strict=True)]
    actual = np.concatenate(parts)
    cure = "export another form of the network, or another version of PyTorch with --python"
    if actual.shape != answers.shape:
        raise BuildError(
            f"the ONNX file returns {list(actual.shape)}, the PyTorch network {list(answers.shape)}: {cure}"
        )
    scale = float(np.abs(answers).max(initial=0.0)) or 1.0
    difference = float(np.abs(actual - answers).max(initial=0.0)) / scale
    if not difference <= EXPORT_BOUND:  # true for NaN, too
        raise BuildError(
            f"the outputs of the ONNX file differ from PyTorch's by {difference:.2g} of the largest output, {EXPORT_BOUND:g} is "
            f"allowed: {cure}"
        )
    return difference
