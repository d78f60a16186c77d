"""`headrace models build`: the demo models."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from headrace_engines.demo.build import DemoState, build_model, choose_models, demo_state
from headrace_engines.demo.weights_file import RESNET50_IMAGENET, WeightsFile
from headrace_engines.errors import BuildError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `models build`."""
    parser.add_argument("--output", type=Path, default=Path("model_repository"), help="the model repository")
    parser.add_argument("--only", nargs="+", action="extend", default=[], metavar="NAME", help="only these models")
    parser.add_argument("--force", action="store_true", help="build also what is up to date or was not built here")
    parser.add_argument(
        "--pretrained", action="store_true", help="fetch published weights for resnet50 (needs a network)"
    )
    parser.add_argument(
        "--weights-url", metavar="URL", help="take resnet50's weights from here (.pth or .onnx; a path will do)"
    )
    parser.add_argument("--weights-sha256", metavar="HEX", help="the checksum those weights must have")


def run(options: argparse.Namespace, console: Console) -> int:
    """Build what is missing; 1 if a model could not be built.

    Raises:
        BuildError: the options do not go together.
    """
    fetched = _fetched(options)
    models = choose_models(options.only, fetched)

    # Only now: finding out that nothing is to be done should not cost the time to import what draws bars.
    from headrace_engines.demo.terminal import DemoDisplay, show_outcomes

    waiting = [m for m in models if options.force or demo_state(m, options.output, fetched) is not DemoState.UP_TO_DATE]
    with DemoDisplay(console, [model.name for model in waiting]) as display:
        outcomes = []
        for model in models:
            outcome = build_model(model, options.output, fetched, options.force, display.update)
            outcomes.append(outcome)
            if model in waiting:
                display.finish(outcome)
    show_outcomes(console, outcomes, options.output)
    return 1 if any(outcome.error for outcome in outcomes) else 0


def _fetched(options: argparse.Namespace) -> WeightsFile | None:
    if bool(options.weights_url) != bool(options.weights_sha256):
        raise BuildError("--weights-url and --weights-sha256 belong together: weights are not used unchecked")
    if options.weights_url:
        return WeightsFile(options.weights_url, options.weights_sha256.lower())
    return RESNET50_IMAGENET if options.pretrained else None
