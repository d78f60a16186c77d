"""Files of a job: `job.json` and arrays in, `result.json`, ONNX files and arrays out; progress on standard output.

Standard output has lines of `progress SHARE PHASE`; standard error has the output of libraries and of the user's code. A
failure that the job explains is `error.json` with a message and exit status 3.

The builder reads and writes the same files (`headrace_engines.optimize.torch_job`), so this module imports the standard library
only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TextIO

JOB_FILE = "job.json"
RESULT_FILE = "result.json"
ERROR_FILE = "error.json"
ERROR_STATUS = 3
INPUTS_FILE = "inputs.npy"
LABELS_FILE = "labels.npy"
CHECK_FILE = "check.npy"
REFERENCE_FILE = "reference.npy"
ANSWERS_FILE = "answers.npy"
MODEL_FILE = "model.onnx"
# Program text for `python -c START ROOT FOLDER`. The folder of the packages comes last on the interpreter's path: packages of the
# builder must not hide its own.
START = (
    "import sys; sys.path.append(sys.argv[1]); from headrace_engines.optimize.pruning_program.main import main; "
    "sys.exit(main(sys.argv[2:]))"
)


@dataclass(frozen=True, slots=True)
class Job:
    """One run of the program in a folder.

    Attributes:
        task: "export" writes the network as it is, "prune" a pruned one.
        source: kind of the network: "onnx" or "code".
        path: absolute path of the ONNX file or of the Python file.
        factory: name of the function in the Python file that returns the network; "" for ONNX.
        input_name: name of the input of the written ONNX file.
        output_name: name of its output.
        flops_share: largest share (0..1) of the multiplications that remain.
        importance: "taylor" or "magnitude".
        multiple: numbers of channels are rounded up to a multiple of it.
        devices: data-parallel processes, one for each GPU, or on the CPU.
        device: "cuda", "cpu", or "auto" for a GPU if there is one.
        training: fields of `TrainingOptions`.
    """

    task: str
    source: str
    path: str
    factory: str = ""
    input_name: str = "input"
    output_name: str = "output"
    flops_share: float = 0.5
    importance: str = "taylor"
    multiple: int = 8
    devices: int = 1
    device: str = "auto"
    training: Mapping[str, Any] = field(default_factory=dict)

    def with_share(self, flops_share: float) -> Job:
        """Return the same job for another share of the multiplications."""
        return replace(self, flops_share=flops_share)

    def write(self, folder: Path) -> None:
        """Write `job.json`."""
        write_json(folder / JOB_FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Read `job.json`."""
        document = json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
        return cls(**{name: document[name] for name in (f.name for f in fields(cls)) if name in document})


@dataclass(frozen=True, slots=True)
class PrunedNetwork:
    """Contents of `result.json`.

    Attributes:
        macs: multiplications of one sample in convolutions and linear layers.
        source_macs: those of the network before.
        parameters: number of its parameters.
        source_parameters: number of parameters before.
        device: name of the device of the training.
        precision: "fp32", or that of the mixed precision.
        seconds: duration of the training.
        loss: mean loss of the last epoch; None without training.
        layers: channels before and after by layer.
    """

    macs: int
    source_macs: int
    parameters: int
    source_parameters: int
    device: str = ""
    precision: str = "fp32"
    seconds: float = 0.0
    loss: float | None = None
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write `result.json`."""
        write_json(folder / RESULT_FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> PrunedNetwork:
        """Read `result.json`."""
        document = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
        return cls(**{name: document[name] for name in (f.name for f in fields(cls)) if name in document})


def write_json(path: Path, document: object) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def progress_lines(stream: TextIO = sys.stdout) -> Callable[[float, str], None]:
    """Return a callback that prints a line `progress SHARE PHASE` for each percent and for each phase of a new text."""
    last = ""

    def report(done: float, note: str) -> None:
        nonlocal last
        line = f"progress {min(max(done, 0.0), 1.0):.2f} {note}"
        if line != last:
            last = line
            stream.write(f"{line}\n")
            stream.flush()

    return report
