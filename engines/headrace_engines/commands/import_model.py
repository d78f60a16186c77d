"""`headrace import torch | keras | savedmodel`: imports a model of another framework and compares it with that framework."""

from __future__ import annotations

import argparse
import os
import platform
import re
from pathlib import Path

from headrace_reports.command_line import pickup_text
from rich.console import Console
from rich.text import Text

from headrace_engines.commands import add_installation, add_repository, confirm_installation
from headrace_engines.errors import CallError
from headrace_engines.importers.check import ImportCheck, OutputErrors
from headrace_engines.importers.environment import DEFAULT_ENVIRONMENTS
from headrace_engines.importers.model_import import (
    DEFAULT_ROWS,
    ImportOptions,
    ImportOutcome,
    import_model,
    summary,
)
from headrace_engines.importers.source import Dimension, ImportRequest
from headrace_engines.report import BuildDisplay, Heading, narrow_table, print_text

_DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
_WORD = re.compile(r"[A-Za-z_]\w*")
_TENSORFLOW = ("tensorflow", "tensorflow-cpu")
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "torch": ("torch>=2.6", "onnx>=1.18", "onnxscript>=0.5"),
    "keras": ("keras>=3.8", "tf2onnx>=1.16", "onnx>=1.17"),
    "savedmodel": ("tf2onnx>=1.16", "onnx>=1.17"),
}


def add_arguments(parser: argparse.ArgumentParser, framework: str) -> None:
    """Add the options of one framework.

    Args:
        parser: parser of the command.
        framework: "torch", "keras" or "savedmodel".
    """
    if framework == "torch":
        text = "FILE.py:factory, a function that returns the model or (model, example inputs); or an exported program (.pt2)"
        parser.add_argument("model", nargs="?", metavar="MODEL", help=text)
        parser.add_argument("--torchvision", metavar="NAME", help="a model of torchvision, e.g. resnet50")
        text = "weights of torchvision, e.g. DEFAULT; none: random ones (default: DEFAULT, random if they cannot be fetched)"
        parser.add_argument("--weights", default="", metavar="NAME", help=text)
        for kind in ("input", "output"):
            text = f"names of the {kind}s in order, separated by commas"
            parser.add_argument(f"--{kind}-names", default="", metavar="A,B", help=text)
        text = f"element type of an input of --input-shape: {', '.join(_DTYPES)}"
        parser.add_argument("--input-dtype", action="append", default=[], metavar="NAME=TYPE", help=text)
    elif framework == "keras":
        parser.add_argument("model", metavar="FILE", help="a model that Keras saved (.keras, .h5)")
        text = "Python file with the model's own layers; it is run"
        parser.add_argument("--custom-objects", type=Path, metavar="FILE.py", help=text)
        text = "load Python code in the model's file (Lambda layers); it is run: only for files that you trust"
        parser.add_argument("--allow-code", action="store_true", help=text)
    else:
        parser.add_argument("model", metavar="DIR", help="folder with saved_model.pb")
        parser.add_argument("--signature", default="", metavar="NAME", help="signature (default: serving_default)")
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_repository(parser)
    parser.add_argument("--name", default="", metavar="NAME", help="name of the model (default: that of the source)")
    parser.add_argument("--replace", action="store_true", help="replace a model of this name")
    text = "shape of an example, the batch first; H:224 is a free dimension of 224 in the example"
    parser.add_argument("--input-shape", action="append", default=[], metavar="NAME=1,3,224,224", help=text)
    parser.add_argument("--static-batch", action="store_true", help="keep the batch of the example: no batching")
    text = f"rows of a batch in the configuration (default: {DEFAULT_ROWS})"
    parser.add_argument("--max-batch-size", type=int, default=DEFAULT_ROWS, metavar="N", help=text)
    text = "inputs to compare with beside random ones: .npz, folder of pictures, or FILE.py:function"
    parser.add_argument("--samples", default="", metavar="PATH", help=text)
    parser.add_argument("--labels", type=Path, metavar="FILE", help="names of the classes, one a line")
    parser.add_argument(
        "--opset", type=int, metavar="N", help="version of the ONNX operators (default: the exporter's)"
    )
    text = "interpreter that has the framework (default: this one, else an environment is made)"
    parser.add_argument("--python", type=Path, metavar="PATH", help=text)
    add_installation(parser)
    text = "further package that the model's code needs, e.g. timm>=1.0"
    parser.add_argument("--requirement", action="append", default=[], metavar="PACKAGE", help=text)
    text = "folder of the environments (`headrace environments list`)"
    parser.add_argument("--environments-dir", type=Path, default=DEFAULT_ENVIRONMENTS, metavar="DIR", help=text)


def run(options: argparse.Namespace, console: Console) -> int:
    """Import one model; returns 0, or 1 if the comparison with the framework fails.

    Raises:
        BuildError: options contradict each other, or the model cannot be imported.
    """
    framework = options.words[1]
    request, name = {"torch": _torch, "keras": _keras, "savedmodel": _savedmodel}[framework](options)
    requirements = [*REQUIREMENTS[framework], *options.requirement]
    if framework != "torch":
        # tensorflow-cpu is a third of the size; other platforms than x86-64 have tensorflow only.
        first, second = reversed(_TENSORFLOW) if platform.machine() == "x86_64" else _TENSORFLOW
        requirements.append(f"{first}>=2.18 | {second}>=2.18")
    elif request.form == "torchvision":
        requirements.append("torchvision>=0.21")
    if options.max_batch_size < 1:
        raise CallError(f"--max-batch-size is {options.max_batch_size}: write 1 or more, or --static-batch")
    plan = ImportOptions(
        repository=options.model_repository,
        name=options.name or name,
        requirements=tuple(requirements),
        max_batch_size=options.max_batch_size,
        labels=options.labels,
        samples=options.samples,
        replace=options.replace,
        python=options.python,
        environments=options.environments_dir,
    )
    confirm_installation(options, console, requirements, options.environments_dir)
    with BuildDisplay(console, [plan.name]) as display:
        outcome = import_model(request, plan, display.report(plan.name))
        display.finish(plan.name, "imported" if outcome.check.has_passed else "refused")
    show_outcome(console, outcome)
    if outcome.check.has_passed:
        print_text(console, pickup_text(plan.name, str(options.model_repository)))
    return 0 if outcome.check.has_passed else 1


def show_outcome(console: Console, outcome: ImportOutcome) -> None:
    """Print the table of the comparison, notes and faults."""
    headings = [
        Heading("output"),
        Heading("type"),
        Heading("largest error", number=True),
        Heading("mean error", number=True),
        Heading("bound", number=True),
        Heading("batch against single rows", number=True, rank=2),
        Heading("result"),
    ]
    rows: list[list[Text | str]] = [
        [
            output.name,
            output.dtype,
            f"{output.largest:.1e}",
            f"{output.mean:.1e}",
            f"{output.bound.largest:g} / {output.bound.mean:g}",
            f"{output.rows_largest:.1e}",
            _verdict(output, outcome.check),
        ]
        for output in outcome.check.outputs.values()
    ]
    title = f"{outcome.folder.name}: ONNX Runtime against {outcome.framework}, relative to each output's largest value"
    console.print(narrow_table(title, headings, rows, console.width))
    for note in (*outcome.notes, *outcome.check.skipped, *outcome.check.warnings, *outcome.remarks):
        print_text(console, f"Note: {note}")
    for fault in outcome.check.faults:
        print_text(console, fault, "red")
    print_text(console, summary(outcome))


def _verdict(output: OutputErrors, check: ImportCheck) -> Text:
    is_equal = output.is_close and output.has_own_rows and output.name not in check.refused_outputs
    return Text("equal") if is_equal else Text("differs", "red")


def _torch(options: argparse.Namespace) -> tuple[ImportRequest, str]:
    if (options.model is None) == (options.torchvision is None):
        raise CallError("name one model: FILE.py:factory, an exported program (.pt2), or --torchvision NAME")
    common = _common(options, "torch_program")
    if options.torchvision is not None:
        return _request(
            common, form="torchvision", model=options.torchvision, weights=options.weights
        ), options.torchvision
    if options.weights:
        raise CallError("--weights is for --torchvision: load weights in your function, and leave --weights out")
    text = options.model
    if ".py:" in text:
        file, _, function = text.rpartition(":")
        path = _file(file, "a Python file")
        return _request(common, form="factory", path=str(path), function=function), path.stem
    path = _file(text, "FILE.py:factory or an exported program (.pt2)")
    if path.suffix == ".py":
        raise CallError(f"{text} has no function: write {text}:FUNCTION with the function that returns the model")
    if path.suffix in (".pt", ".pth"):
        cure = "write FILE.py:factory with a function that builds the model and loads these weights"
        raise CallError(f"{text} has weights or TorchScript, not an exported program (.pt2): {cure}")
    return _request(common, form="program", path=str(path)), path.stem


def _keras(options: argparse.Namespace) -> tuple[ImportRequest, str]:
    path = _file(options.model, "a model that Keras saved (.keras, .h5)")
    if path.suffix not in (".keras", ".h5", ".hdf5"):
        raise CallError(
            f"{options.model} is no file of Keras: name a .keras or .h5 file, or use `headrace import savedmodel`"
        )
    custom = str(_file(str(options.custom_objects), "a Python file")) if options.custom_objects else ""
    common = _common(options, "keras_program")
    return _request(common, path=str(path), custom_objects=custom, allow_code=options.allow_code), path.stem


def _savedmodel(options: argparse.Namespace) -> tuple[ImportRequest, str]:
    path = Path(os.path.abspath(os.path.expanduser(options.model)))
    if not path.is_dir():
        raise CallError(f"there is no folder {options.model}: name the folder with saved_model.pb")
    return _request(_common(options, "savedmodel_program"), path=str(path), signature=options.signature), path.name


def _common(options: argparse.Namespace, program: str) -> dict[str, object]:
    shapes = dict(_shape(text) for text in options.input_shape)
    dtypes = dict(_dtype(text, shapes) for text in getattr(options, "input_dtype", []))
    return {
        "program": program,
        "dynamic_batch": not options.static_batch,
        "shapes": shapes,
        "dtypes": dtypes,
        "opset": options.opset,
        "input_names": _names(getattr(options, "input_names", "")),
        "output_names": _names(getattr(options, "output_names", "")),
    }


def _request(common: dict[str, object], **values: object) -> ImportRequest:
    return ImportRequest(**{**common, **values})  # type: ignore[arg-type]


def _file(text: str, expected: str) -> Path:
    path = Path(os.path.abspath(os.path.expanduser(text)))
    if not path.is_file():
        raise CallError(f"there is no file {text}: name {expected}")
    return path


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    if not all(names) or len(set(names)) != len(names):
        raise CallError(f"'{text}' has an empty name or a name twice: write different names, separated by commas")
    return names


def _shape(text: str) -> tuple[str, tuple[Dimension, ...]]:
    """Read "NAME=1,3,H:224,224"."""
    name, equals, sizes = text.partition("=")
    dimensions = []
    for word in sizes.split(","):
        free, colon, number = word.strip().rpartition(":")
        if not number.isdecimal() or not int(number) or (colon and not _WORD.fullmatch(free)):
            equals = ""
            break
        dimensions.append((free, int(number)))
    if not name or not equals:
        raise CallError(
            f"--input-shape is '{text}': write NAME=1,3,224,224, the batch first; H:224 is a free dimension"
        )
    small = [free for free, number in dimensions if free and number < 2]
    if small:
        raise CallError(
            f"--input-shape is '{text}', the free dimension {small[0]} is 1 in it: write an example of 2 or more"
        )
    return name, tuple(dimensions)


def _dtype(text: str, shapes: dict[str, tuple[Dimension, ...]]) -> tuple[str, str]:
    name, _, word = text.partition("=")
    if word not in _DTYPES or name not in shapes:
        raise CallError(
            f"--input-dtype is '{text}': write NAME=TYPE for an input of --input-shape, TYPE one of {', '.join(_DTYPES)}"
        )
    return name, word
