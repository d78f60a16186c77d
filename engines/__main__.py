"""`python -m engines`: the builders' command line."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from engines.demo.build import State, build_model, choose, state_of
from engines.demo.weights_file import RESNET50_IMAGENET, WeightsFile
from engines.errors import BuildError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1 if a model could not be built, 2 if the call was wrong."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return _build(options)
    except BuildError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engines", description="Headrace's model builders.")
    models = parser.add_subparsers(dest="command", required=True).add_parser("models", help="the demo models")
    build = models.add_subparsers(dest="action", required=True).add_parser(
        "build", help="build the demo models that are missing or out of date"
    )
    build.add_argument("--output", type=Path, default=Path("model_repository"), help="the model repository")
    build.add_argument("--only", nargs="+", action="extend", default=[], metavar="NAME", help="only these models")
    build.add_argument("--force", action="store_true", help="build also what is up to date or was not built here")
    build.add_argument(
        "--pretrained", action="store_true", help="fetch published weights for resnet50 (needs a network)"
    )
    build.add_argument(
        "--weights-url", metavar="URL", help="take resnet50's weights from here (.pth or .onnx; a path will do)"
    )
    build.add_argument("--weights-sha256", metavar="HEX", help="the checksum those weights must have")
    return parser


def _fetched(options: argparse.Namespace) -> WeightsFile | None:
    if bool(options.weights_url) != bool(options.weights_sha256):
        raise BuildError("--weights-url and --weights-sha256 belong together: weights are not used unchecked")
    if options.weights_url:
        return WeightsFile(options.weights_url, options.weights_sha256.lower())
    return RESNET50_IMAGENET if options.pretrained else None


def _build(options: argparse.Namespace) -> int:
    fetched = _fetched(options)
    models = choose(options.only, fetched)
    signal.signal(signal.SIGTERM, _stop)

    # Only now: finding out that nothing is to be done should not cost the time to import what draws bars.
    from rich.console import Console

    from engines.demo.terminal import BuildDisplay, show_outcomes

    console = Console()
    waiting = [m for m in models if options.force or state_of(m, options.output, fetched) is not State.UP_TO_DATE]
    with BuildDisplay(console, [model.name for model in waiting]) as display:
        outcomes = []
        for model in models:
            outcome = build_model(model, options.output, fetched, options.force, display.update)
            outcomes.append(outcome)
            if model in waiting:
                display.finish(outcome)
    show_outcomes(console, outcomes, options.output)
    return 1 if any(outcome.error for outcome in outcomes) else 0


def _stop(_number: int, _frame: object) -> NoReturn:
    # Leaves through `finally`, so that no half-written folder stays behind.
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
