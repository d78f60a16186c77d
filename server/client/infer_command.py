"""`headrace infer MODEL photo.jpg`: send pictures or tensors to a running server and print what it says."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.text import Text

from server.client import pictures, show, tensor_files
from server.client.http_client import DEFAULT_URL, Client
from server.core.clock import NS_PER_MS
from server.core.console import open_console
from server.core.errors import HeadraceError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("model", help="name of the model")
    add("files", nargs="*", metavar="PICTURE", help="pictures to classify: JPEG, PNG, WebP, GIF, BMP, TIFF")
    add("--url", default=DEFAULT_URL, help="the server's address (%(default)s)")
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
        url: of the server.
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
    try:
        client = Client(url, timeout_s)
        if files:
            _classify(client, model, version, files, top, console, as_json)
        else:
            _send_tensors(client, model, version, raw, json_input, console, as_json)
    except HeadraceError as error:
        _complain(errors, str(error))
        return 1
    return 0


def _classify(
    client: Client, model: str, version: str, files: Sequence[str], top: int, console: Console, as_json: bool
) -> None:
    start_ns = time.monotonic_ns()
    task = pictures.PictureTask.of(client.config(model, version), client.metadata(model, version))
    before = _statistics(client, model, version)
    results = pictures.classify(client, task, files, top, version)
    server_ns = pictures.server_time_ns(before, _statistics(client, model, version), task.requests(len(files)))
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
    client: Client,
    model: str,
    version: str,
    raw: Path | None,
    json_input: Path | None,
    console: Console,
    as_json: bool,
) -> None:
    metadata = client.metadata(model, version)
    if raw is not None:
        inputs = tensor_files.read_npz(raw)
        datatypes = tensor_files.bfloat16_inputs(metadata, inputs)
    elif json_input is not None:
        inputs, datatypes = tensor_files.read_json(json_input)
    start_ns = time.monotonic_ns()
    outputs = client.infer(model, inputs, version, datatypes=datatypes)
    total_ns = time.monotonic_ns() - start_ns
    shown_as = tensor_files.datatypes(metadata, "outputs")
    if as_json:
        plain = {name: show.plain(array, shown_as.get(name, "")) for name, array in outputs.items()}
        _print_json(console, {"model": model, "outputs": plain})
        return
    show.tensors(console, outputs, shown_as)
    show.times(console, 0, 1, total_ns, None)


def _statistics(client: Client, model: str, version: str) -> Mapping[str, Any]:
    """The model's statistics, empty from a server that keeps none: they only serve to show a time."""
    try:
        return client.statistics(model, version)
    except HeadraceError:
        return {}


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
