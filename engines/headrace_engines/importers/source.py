"""The process with a framework, and the errors of the frameworks in plain words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy.typing as npt

from headrace_engines.errors import BuildError
from headrace_engines.importers.faults import explain
from headrace_engines.importers.programs.exchange import REQUEST, read_arrays, write_arrays
from headrace_engines.progress import Report, silent

Array = npt.NDArray[Any]
PROGRAM = Path(__file__).with_name("programs") / "__main__.py"
_LOG_LINES = 12
# A dimension: the name of a free one or "", and the size of the example.
Dimension = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """Request to the process with a framework, written as JSON.

    Attributes:
        program: module of `importers.programs`: "torch_program", "keras_program" or "savedmodel_program".
        form: "factory", "program" or "torchvision" for PyTorch; else "".
        path: absolute path of the model, or of the file with the factory.
        function: name of the factory.
        model: name of torchvision's model.
        weights: name of torchvision's weights; "none" for random ones, "" for the default ones if they can be fetched.
        dynamic_batch: the first dimension of each tensor is a free batch.
        shapes: dimensions of inputs by name, the batch included.
        dtypes: element types of inputs by name, as in NumPy.
        input_names: new names of the inputs in order; () keeps them.
        output_names: new names of the outputs in order; () keeps them.
        opset: version of the operators; None for the exporter's.
        signature: signature of a SavedModel; "" for the default one.
        custom_objects: absolute path of a Python file with a Keras model's own classes; "" without one.
        allow_code: a Keras model may have Python code in its file (Lambda layers).
    """

    program: str
    form: str = ""
    path: str = ""
    function: str = ""
    model: str = ""
    weights: str = ""
    dynamic_batch: bool = True
    shapes: Mapping[str, tuple[Dimension, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    opset: int | None = None
    signature: str = ""
    custom_objects: str = ""
    allow_code: bool = False


class SourceProcess:
    """A process of `importers.programs` with one model. Files carry the tensors, lines of JSON on pipes the rest.

    Args:
        python: interpreter with the framework.
        request: the request.
        folder: folder of the exchange; it receives model.onnx.
        program: the program, by path.
    """

    def __init__(self, python: Path, request: ImportRequest, folder: Path, program: Path = PROGRAM) -> None:
        self._python = python
        self._request = request
        self._folder = folder
        self._program = program
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by __exit__
        self._cases = 0

    def __enter__(self) -> SourceProcess:
        (self._folder / REQUEST).write_text(json.dumps(asdict(self._request)), encoding="utf-8")
        command = [str(self._python), str(self._program), str(self._folder)]
        try:
            # Its own process group: Ctrl-C ends it by `__exit__`, without its traceback on the terminal.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
                process_group=0,
            )
        except OSError as error:
            self._log.close()
            raise BuildError(
                f"{self._python} cannot be started: {error.strerror}: name another with --python"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is not None:
            # Its process group, with what the user's code has started. The files that were announced are complete.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        self._log.close()

    def export(self, report: Report = silent) -> dict[str, Any]:
        """Wait for model.onnx; return its description (`programs.exchange.Source.export`).

        Raises:
            BuildError: the export failed; names the operator and the remedy where they are known.
        """
        while True:
            message = self._read()
            if "description" in message:
                return dict(message["description"])
            report(float(message.get("progress", 0.0)), str(message.get("note", "")))

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model in its framework and return its outputs by name.

        Args:
            inputs: arrays by the names in the description; text as bytes.

        Raises:
            BuildError: the model fails on these inputs.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        self._cases += 1
        path = self._folder / f"case-{self._cases}.npz"
        write_arrays(str(path), dict(inputs))
        try:
            self._process.stdin.write(f"{path.name}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `_read` has the reason
        self._read()
        results = path.with_name(f"{path.name}.outputs")
        outputs = read_arrays(str(results))
        path.unlink()
        results.unlink()
        return outputs

    @property
    def log(self) -> list[str]:
        """Last lines of the process's output."""
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()
        return [line.rstrip() for line in lines if line.strip()][-_LOG_LINES:]

    def _read(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.endswith("\n"):
            message: dict[str, Any] = json.loads(line)
            if "fault" in message:
                raise BuildError(explain(self._request.program, message["fault"]))
            return message
        status = self._process.wait()
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        memory = ": the machine may lack memory" if status == -signal.SIGKILL else ""
        last = " | ".join(self.log[-3:]) or "no output"
        cure = f"run it by hand: {self._python} {self._program}"
        raise BuildError(f"the process with the framework ended with {name}{memory} ({last}): {cure}")
