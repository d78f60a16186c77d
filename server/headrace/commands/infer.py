"""`headrace infer MODEL photo.jpg`: send pictures or tensors to a running server and print what it says."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from rich.console import Console
from rich.text import Text

from headrace.commands import pictures, show, tensor_files
from headrace.core.clock import NS_PER_MS
from headrace.core.command_line import open_console
from headrace.core.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.commands.infer_client import InferClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("model", help="name of the model")
    add("files", nargs="*", metavar="PICTURE", help="pictures to classify: JPEG, PNG, WebP, GIF, BMP, TIFF")
    text = "the server's gRPC address (%(default)s); grpcs://HOST:PORT for TLS"
    add("--url", default="127.0.0.1:8001", metavar="ADDRESS", help=text)
    add("--model-version", default="", metavar="N", help="version of the model (the one the server chooses)")
    add("--top", type=_count, default=5, metavar="N", help="best labels to print for a picture (%(default)s)")
    add("--timeout", type=_seconds, default=60.0, metavar="S", help="seconds to wait for an answer (%(default)g)")
    add("--raw", type=Path, metavar="FILE.npz", help="send the named arrays of this file instead of pictures")
    add("--json-input", type=Path, metavar="FILE.json", help='send {"inputs": [...]} of this file instead of pictures')
    add("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Run the command with what `add_arguments` declared; the exit status."""
    return run(
        args.model,
        args.files,
        args.url,
        args.top,
        open_console(highlight=False),
        version=args.model_version,
        raw=args.raw,
        json_input=args.json_input,
        as_json=args.json,
        timeout_s=args.timeout,
    )


def run(
    model: str,
    files: Sequence[str],
    url: str,
    top: int,
    console: Console,
    *,
    version: str = "",
    raw: Path | None = None,
    json_input: Path | None = None,
    as_json: bool = False,
    timeout_s: float = 60.0,
    errors: Console | None = None,
) -> int:
    """Classify pictures, or send tensors, and print the answer.

    Args:
        model: its name.
        files: pictures; none if `raw` or `json_input` is given.
        url: HOST:PORT of the server's gRPC, grpcs://HOST:PORT with TLS.
        top: how many labels to print for a picture.
        console: where the answer goes.
        version: of the model, empty for the one that the server chooses.
        raw: an .npz file with the model's inputs by name.
        json_input: a file with the inputs as the protocol's JSON has them.
        as_json: print JSON instead of bars and tables.
        timeout_s: for each wait for the server.
        errors: where an error goes; standard error by default.

    Returns:
        0; 1 if the server or a file failed; 2 if the arguments do not fit together.
    """
    errors = errors or open_console(stderr=True, highlight=False)
    if (bool(files), raw is not None, json_input is not None).count(True) != 1:
        _complain(errors, "give pictures, or --raw FILE.npz, or --json-input FILE.json: exactly one of them")
        return 2
    # tritonclient takes 0.3 s to import, which the other commands need not spend.
    from headrace.commands.infer_client import InferClient

    try:
        with InferClient(url, timeout_s) as client:
            if files:
                _classify(client, model, version, files, top, console, as_json)
            else:
                _send_tensors(client, model, version, raw, json_input, console, as_json)
    except HeadraceError as error:
        _complain(errors, str(error))
        return 1
    return 0


def _classify(
    client: InferClient, model: str, version: str, files: Sequence[str], top: int, console: Console, as_json: bool
) -> None:
    start_ns = time.monotonic_ns()
    task = pictures.PictureTask.of(client.config(model, version), client.metadata(model, version))
    before = client.successes(model, version)
    results = pictures.classify(client, task, files, top, version)
    server_ns = pictures.server_time_ns(before, client.successes(model, version), task.requests(len(files)))
    total_ns = time.monotonic_ns() - start_ns
    if as_json:
        shown = {
            "model": model,
            "results": [{"file": r.file, "classes": [asdict(c) for c in r.classes]} for r in results],
            "total_ms": total_ns / NS_PER_MS,
            "server_ms": None if server_ns is None else server_ns / NS_PER_MS,
        }
        _print_json(console, shown)
        return
    show.classes(console, results)
    show.times(console, len(files), task.requests(len(files)), total_ns, server_ns)


def _send_tensors(
    client: InferClient,
    model: str,
    version: str,
    raw: Path | None,
    json_input: Path | None,
    console: Console,
    as_json: bool,
) -> None:
    from headrace.commands.infer_client import datatype_of

    metadata = client.metadata(model, version)
    inputs = {} if json_input is None else tensor_files.read_json(json_input)
    if raw is not None:
        inputs = tensor_files.bfloat16_inputs(metadata, tensor_files.read_npz(raw))
    start_ns = time.monotonic_ns()
    outputs = client.infer(model, inputs, version)
    total_ns = time.monotonic_ns() - start_ns
    datatypes = {name: datatype_of(array, name) for name, array in outputs.items()}
    if as_json:
        plain = {name: show.plain(array, datatypes[name]) for name, array in outputs.items()}
        _print_json(console, {"model": model, "outputs": plain})
        return
    show.tensors(console, outputs, datatypes)
    show.times(console, 0, 1, total_ns, None)


def _print_json(console: Console, value: object) -> None:
    console.print(orjson.dumps(value).decode(), markup=False, soft_wrap=True)


def _complain(errors: Console, message: str) -> None:
    errors.print(Text.assemble(("headrace infer: ", "bold red"), show.printable(message)), soft_wrap=True)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds over 0")
    return seconds
