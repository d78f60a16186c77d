"""The model to make smaller, with its samples: a version in the repository, or PyTorch code with arrays."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
from headrace.config.model_config import ModelConfig

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import Array, OnnxRunner, read_onnx, write_onnx
from headrace_engines.optimize.pruning_program.jobs import Job
from headrace_engines.optimize.torch_job import TorchInputs, run_torch_job
from headrace_engines.progress import Report
from headrace_engines.project import HELD_OUT_SHARE, SOURCE, Project, open_project
from headrace_engines.quantization.sample_sources import open_samples
from headrace_engines.quantization.samples import Samples, class_output

# Samples for the comparison of a written ONNX file with PyTorch.
CHECK_ROWS = 65
_READ_ROWS = 256


@dataclass(frozen=True, slots=True)
class PyTorchCode:
    """Function in a Python file that returns a network.

    Attributes:
        path: the file.
        factory: name of the function.
    """

    path: Path
    factory: str


@dataclass(frozen=True, slots=True)
class Original:
    """Model before the optimisation.

    Attributes:
        project: version of the model.
        model: its ONNX model.
        train: samples of the training.
        held_out: samples of the loss target; none of them is in `train`.
        output: name of the output with classes; "" to search for it.
        code: the PyTorch code that the model comes from; None for a model of the repository.
    """

    project: Project
    model: onnx.ModelProto
    train: Samples
    held_out: Samples
    output: str
    code: PyTorchCode | None = None


def parse_code(model: str) -> PyTorchCode | None:
    """Return the PyTorch code that `FILE.py:function` names; None for the name of a model.

    Raises:
        BuildError: the file does not exist, or the function has no name.
    """
    path_text, separator, factory = model.rpartition(":")
    if not separator or not path_text.endswith(".py"):
        if model.endswith(".py"):
            raise BuildError(f"{model} names no function: write {model}:factory, a function that returns the network")
        return None
    path = Path(path_text)
    if not path.is_file() or not factory.isidentifier():
        raise BuildError(f"{model}: expected FILE.py:function with an existing file: correct the path or the name")
    return PyTorchCode(path.resolve(), factory)


def open_original(project: Project, data: Path | None, held_out: Path | None, limit: int) -> Original:
    """Open a model of the repository with its samples.

    Args:
        project: version of the model.
        data: samples in place of those of `optimization.calibration`; None for those.
        held_out: samples in place of those of `optimization.accuracy`; None for those.
        limit: largest number of samples of each.

    Raises:
        BuildError: there are no samples, or they do not fit the model.
    """
    config, folder = project.config, project.folder.path
    train = _samples(data, config.optimization.calibration.data, folder, config, limit)
    held = _samples(held_out, config.optimization.accuracy.data, folder, config, limit)
    if train is None and held is None:
        cure = "give them with --data and --held-out, or write optimization.calibration.data and optimization.accuracy.data"
        raise BuildError(f"{project.name} has no samples, which measure the loss: {cure}")
    if train is None or held is None:
        only = train or held
        assert only is not None, "one of both was given"
        train, held = only.split(HELD_OUT_SHARE)
    else:
        held = held.without(train)
    if not len(held):
        raise BuildError(f"{project.name}: the held-out samples are all among those of the training: name others")
    return Original(project, read_onnx(project.source), train, held, class_output(config))


def _samples(path: Path | None, configured: str, folder: Path, config: ModelConfig, limit: int) -> Samples | None:
    if path is not None:
        if not path.exists():
            raise BuildError(f"there are no samples {path}: name a folder of pictures or an .npz file")
        path = path.resolve()
        return open_samples(path.name, path.parent, config, limit)
    return open_samples(configured, folder, config, limit) if configured else None


def check_channels(project: Project) -> None:
    """Check that the channels of a model can be pruned in PyTorch.

    Raises:
        BuildError: the model has several inputs or outputs, another type than FP32, or no batch dimension.
    """
    config = project.config
    names = f"{len(config.input)} inputs and {len(config.output)} outputs"
    if len(config.input) != 1 or len(config.output) != 1:
        raise BuildError(f"{project.name} has {names}: channels are pruned for one of each, export it with one")
    if config.input[0].data_type != "TYPE_FP32":
        cure = "channels are pruned for TYPE_FP32, export it with that type"
        raise BuildError(f"{project.name}: its input is {config.input[0].data_type}: {cure}")
    if not project.batched:
        raise BuildError(f"{project.name} has no batch dimension: export it with one and write max_batch_size")


def import_code(
    code: PyTorchCode, python: Path, name: str, data: Path, max_rows: int, folder: Path, report: Report
) -> Project:
    """Export PyTorch code to ONNX as a model of its own in a folder.

    Args:
        code: the code.
        python: interpreter with PyTorch.
        name: name of the model.
        data: .npz file with one FP32 array besides `labels`; its name is that of the input.
        max_rows: max_batch_size of the configuration.
        folder: parent of the model's folder.
        report: progress callback.

    Raises:
        BuildError: the code fails, the data has another form, or the export differs from PyTorch.
    """
    input_name, rows = read_input(data)
    job = Job("export", "code", str(code.path), code.factory, input_name=input_name, output_name="output")
    exported = run_torch_job(python, job, TorchInputs(rows), report)
    version = folder / name / "1"
    version.mkdir(parents=True)
    write_onnx(exported.model, version / SOURCE)
    write_config(folder / name, {"name": name, "max_batch_size": max_rows, "dynamic_batching": {}})
    return open_project(str(folder / name), folder)


def read_input(data: Path) -> tuple[str, Array]:
    """Return the name of the input in an .npz file and its first samples.

    Raises:
        BuildError: the file is no .npz, or has no single FP32 array besides `labels`.
    """
    form = "an .npz with one FP32 array [N, ...], named like the input, and labels (integers [N]) if there are any"
    try:
        with zipfile.ZipFile(data) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist() if name != "labels.npy"]
            if len(names) != 1:
                raise BuildError(f"{data} has {', '.join(names) or 'no array'}: write {form}")
            with archive.open(f"{names[0]}.npy") as stream:
                shape, dtype, rows = _first_rows(stream)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise BuildError(f"{data} cannot be read ({error}): write {form}") from error
    if dtype != np.float32 or len(shape) < 2 or not len(rows):
        raise BuildError(f"{data} has {dtype} {list(shape)}: write {form}")
    return names[0], rows


def _first_rows(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any], Array]:
    """Return shape, type and first rows of a .npy stream; the rest of a large file is not read."""
    version = np.lib.format.read_magic(stream)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read_header(stream)
    if fortran or dtype.hasobject or not shape:
        raise ValueError("its array is not in C order")
    rows = (min(shape[0], CHECK_ROWS), *shape[1:])
    content = stream.read(int(np.prod(rows)) * dtype.itemsize)
    return shape, dtype, np.frombuffer(content, dtype).reshape(rows)


def write_config(folder: Path, document: Mapping[str, Any]) -> None:
    """Write `config.yaml`; JSON is YAML."""
    lines = [f"{key}: {json.dumps(value)}" for key, value in document.items()]
    (folder / "config.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_training(samples: Samples, path: Path) -> None:
    """Write the samples of a single input to a .npy file, a part at a time.

    Raises:
        BuildError: the samples have different shapes.
    """
    target: np.memmap[Any, Any] | None = None
    start = 0
    for batch in samples.batches(_READ_ROWS):
        (array,) = batch.values()
        if target is None:
            target = np.lib.format.open_memmap(path, "w+", np.float32, (len(samples), *array.shape[1:]))
        if array.shape[1:] != target.shape[1:]:
            raise BuildError(f"{samples.origin} has samples of different shapes: make all of one shape")
        target[start : start + len(array)] = array
        start += len(array)


def torch_inputs(original: Original, train: Path) -> TorchInputs:
    """Return the arrays of a pruning job.

    Args:
        original: the model with its samples.
        train: file of `write_training`.
    """
    ((name, rows),) = next(iter(original.held_out.head(CHECK_ROWS).batches(CHECK_ROWS))).items()
    reference = None
    if original.code is None:
        (reference,) = OnnxRunner(original.model).run({name: rows}).values()
    return TorchInputs(rows, reference, train, original.train.labels)
