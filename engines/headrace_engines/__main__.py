"""Command line of the builder: `python -m headrace_engines`, executed by the command `headrace`.

Each command is a module with `add_arguments(parser)` and `run(options, console) -> exit status`, imported when it is called.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from headrace_reports.command_line import Parser

from headrace_engines.errors import BuildError, CallError

# Words of the command line -> module of the command, with a dot one of this package, and help text.
COMMANDS: dict[tuple[str, ...], tuple[str, str]] = {
    ("build",): (".commands.build", "build engines for this machine, compare them with FP32, publish them"),
    ("inspect",): (".commands.inspect", "list the layers of a built engine with precision, kernel and time"),
    ("compare",): (".commands.compare", "compare a model in several precisions: accuracy, speed, size"),
    ("bisect",): (".commands.bisect", "find the first layer of a lower precision that deviates from FP32"),
    ("optimize",): (".commands.optimize", "make a model smaller: channel pruning with distillation"),
    ("split",): (".commands.split", "cut a model into parts, each on its own GPU, and the pipeline that joins them"),
    ("engines", "ls"): (".commands.engines", "list stored and published engines"),
    ("engines", "gc"): (".commands.engines", "remove stored engines that no model publishes"),
    ("engines", "verify"): (".commands.engines", "check stored and published engines against their stamps"),
    ("import", "torch"): (".commands.import_model", "import a PyTorch model, compared with PyTorch"),
    ("import", "keras"): (".commands.import_model", "import a Keras model, compared with Keras"),
    ("import", "savedmodel"): (".commands.import_model", "import a TensorFlow SavedModel, compared with TensorFlow"),
    ("import", "onnx"): (".commands.import_onnx", "bring an ONNX file in, and free its batch dimension"),
    ("lab", "conv"): (
        "headrace_lab.command",
        "measure convolution algorithms on each layer, against cuDNN and TensorRT",
    ),
    ("models", "build"): (".demo.command", "build missing and outdated demo models"),
}
_GROUPS = {
    "engines": "the store of built engines",
    "import": "models of other frameworks, and ONNX files",
    "lab": "the operator lab: measurements of kernels",
    "models": "the demo models",
}
# Commands of Headrace 0.1 that are gone -> what replaces them.
REMOVED: dict[tuple[str, ...], str] = {
    ("lab", "memory"): "headrace tune measures numbers of instances of a served model, headrace bench its requests",
    (
        "lab",
        "overlap",
    ): "headrace explain names the longest stage of a served model, headrace tune measures its instances",
}
# One module has the commands of such a group, which differ in their options.
_SHARED_MODULES = (".commands.engines", ".commands.import_model")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: words of the command line; `sys.argv[1:]` if None.

    Returns:
        Exit status: 0, or 1 if a build failed, 2 if the command line is wrong, or 3 if an engine is slower than
            what serves now.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    Parser.words = words
    parser, command = _parser(words)
    options = parser.parse_args(words)
    signal.signal(signal.SIGTERM, _stop)
    # Logging is not configured: warnings then go to the current standard error, which a progress bar redirects.

    from headrace_reports.command_line import open_console

    try:
        return int(command.run(options, open_console()))
    except BuildError as error:
        errors = open_console(stderr=True, highlight=False)
        errors.print(f"{parser.prog} {' '.join(options.words)}: {error}", style="red", markup=False, soft_wrap=True)
        return 2 if isinstance(error, CallError) or options.words[0] == "models" else 1


def _parser(arguments: list[str]) -> tuple[argparse.ArgumentParser, Any]:
    """Return the parser and the module of the called command; no other command is imported."""
    parser = Parser(prog="headrace", description="Headrace's model and engine builders.")
    if text := REMOVED.get(tuple(arguments[:2])):
        parser.error(f"{' '.join(arguments[:2])} of Headrace 0.1 is gone: {text}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    groups = {
        name: commands.add_parser(name, help=text).add_subparsers(dest="action", required=True, metavar="COMMAND")
        for name, text in _GROUPS.items()
    }
    called: Any = None
    for words, (module_name, text) in COMMANDS.items():
        group = groups[words[0]] if len(words) > 1 else commands
        child = group.add_parser(words[-1], help=text, description=text)
        child.set_defaults(words=words)
        if tuple(arguments[: len(words)]) == words:
            called = import_module(module_name, "headrace_engines")
            called.add_arguments(child, *(words[1:] if module_name in _SHARED_MODULES else ()))
    return parser, called


def _stop(_number: int, _frame: object) -> NoReturn:
    # SystemExit runs `finally` blocks, so no half-written folder stays behind.
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
