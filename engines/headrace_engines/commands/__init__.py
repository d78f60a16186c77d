"""Commands of the builder, and the options that several of them share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from headrace_engines.errors import CallError
from headrace_engines.report import print_text
from headrace_engines.store import DEFAULT_ROOT, DEFAULT_STATE
from headrace_engines.targets import NAMES


def folder_path(text: str) -> Path:
    """Return the path of a folder whose `~` can be expanded; for the `type` of an argument."""
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} has no home folder here: write the whole path") from None
    return Path(text)


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add `--version N`."""
    parser.add_argument("--version", type=int, metavar="N", help="version of the model (default: newest served one)")


def add_repository(parser: argparse.ArgumentParser, text: str = "the model repository") -> None:
    """Add `--model-repository DIR`."""
    folder = Path("model_repository")
    parser.add_argument("--model-repository", type=Path, default=folder, metavar="DIR", help=text)


def add_repository_and_target(parser: argparse.ArgumentParser) -> None:
    """Add `--model-repository DIR` and `--target NAME`."""
    add_repository(parser, "folder of the model repository")
    text = "target; auto: TensorRT if it and a GPU are available, else ONNX Runtime"
    parser.add_argument("--target", choices=NAMES, default="auto", help=text)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add `MODEL`, `--version`, `--model-repository` and `--target`."""
    parser.add_argument("model", metavar="MODEL", help="name of a model in the repository, or its folder")
    add_version(parser)
    add_repository_and_target(parser)


def add_installation(parser: argparse.ArgumentParser) -> None:
    """Add `--yes`, see `confirm_installation`."""
    text = "install the framework without a question, if no interpreter has it"
    parser.add_argument("--yes", action="store_true", help=text)


def confirm_installation(
    options: argparse.Namespace, console: Console, requirements: Sequence[str], root: Path | None = None
) -> None:
    """Print what would be installed, with a question on a terminal; returns after a yes, and if nothing is to be installed.

    Raises:
        CallError: the answer is no, or there is no terminal and no --yes.
    """
    from headrace_engines.importers.environment import DEFAULT_ENVIRONMENTS, installation_text

    text = installation_text(requirements, python=options.python, root=root or DEFAULT_ENVIRONMENTS)
    if not text:
        return
    print_text(console, text)
    if options.yes:
        return
    if not sys.stdin.isatty():
        raise CallError("nothing is installed without a question: add --yes, or name an interpreter with --python PATH")
    if input("Install? [y/N] ").strip().lower() not in ("y", "yes"):
        raise CallError("nothing is installed: name an interpreter that has the packages with --python PATH")


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Add `--cache DIR`."""
    parser.add_argument(
        "--cache", type=folder_path, default=DEFAULT_ROOT, metavar="DIR", help="the store of built engines"
    )


def add_state(parser: argparse.ArgumentParser) -> None:
    """Add `--state-dir DIR`, the same as the server's option."""
    text = "folder for engines of read-only models; the same as the server's --state-dir"
    parser.add_argument("--state-dir", type=folder_path, default=DEFAULT_STATE, metavar="DIR", help=text)
