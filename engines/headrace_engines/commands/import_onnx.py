"""`headrace import onnx`: brings an ONNX file into a model repository, with a free batch dimension if requested."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace_reports.command_line import pickup_text, plural
from rich.console import Console

from headrace_engines.commands import add_repository
from headrace_engines.errors import CallError
from headrace_engines.importers.onnx_import import DEFAULT_MAX_BATCH_SIZE, import_onnx, model_name
from headrace_engines.report import BuildDisplay, print_text

# Rewritten nodes that are printed.
_LISTED = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `import onnx`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the ONNX file; external data lie beside it")
    text = "free the batch dimension of a model that was exported with a fixed one, and prove it"
    parser.add_argument("--dynamic-batch", action="store_true", help=text)
    text = f"rows of a batch after --dynamic-batch (default: {DEFAULT_MAX_BATCH_SIZE})"
    parser.add_argument("--max-batch-size", type=int, metavar="N", help=text)
    parser.add_argument("--name", default="", help="name of the model (default: that of the file)")
    text = "number of the version (default: the next one)"
    parser.add_argument("--version", type=int, metavar="N", help=text)
    add_repository(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Import one file and print what was changed and proven; return 0.

    Raises:
        BuildError: the file is no valid model, fails, mixes rows, or the version exists.
    """
    if options.max_batch_size is not None and not options.dynamic_batch:
        raise CallError("--max-batch-size belongs to --dynamic-batch: add that, or leave it out")
    rows = DEFAULT_MAX_BATCH_SIZE if options.max_batch_size is None else options.max_batch_size
    if rows < 1:
        raise CallError(f"--max-batch-size is {rows}, a batch has one row or more: write a positive number")
    if options.version is not None and options.version < 1:
        raise CallError(f"--version is {options.version}, versions are positive: write a positive number")
    name = options.name or model_name(options.file)
    with BuildDisplay(console, [name]) as display:
        result = import_onnx(
            options.file,
            options.model_repository,
            name=name,
            version=options.version,
            dynamic_batch=options.dynamic_batch,
            max_batch_size=rows,
            report=display.report(name),
        )
        display.finish(name, "imported")
    for change in result.changes[:_LISTED]:
        print_text(console, f"{change}.")
    if len(result.changes) > _LISTED:
        print_text(console, f"{len(result.changes) - _LISTED} more nodes were rewritten.")
    if result.proof is not None:
        proof = result.proof
        sizes = ", ".join(map(str, sorted(set(proof.batches))))
        print_text(
            console,
            f"Batches of {sizes} rows have the values of single runs of the original, also with random values in "
            f"{plural(proof.weights, 'weight')}: the largest deviation is {proof.max_error:.1e} of the largest difference "
            "between two rows.",
        )
    for note in result.notes:
        print_text(console, f"Note: {note}.")
    batch = f"max_batch_size {result.config.max_batch_size}" if result.config.max_batch_size else "without batching"
    print_text(console, f"{result.name} is in {result.folder}, {batch}.")
    print_text(console, pickup_text(result.name, str(options.model_repository)))
    return 0
