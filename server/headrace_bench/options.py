"""Options of `headrace bench`; modules that they need are imported when the command runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from headrace.core.tensor import BY_NAME
from headrace.server.commands import connection
from headrace_reports.command_line import number_parser, positive_count

Value = TypeVar("Value")

_positive = number_parser(float, lambda number: 0 < number < 1e9, "is not a number above 0")
_natural = number_parser(float, lambda number: 0 <= number < 1e9, "is not a number of at least 0")


def _listed(parse: Callable[[str], Value]) -> Callable[[str], tuple[Value, ...]]:
    """Return a parser of values between commas."""
    return lambda text: tuple(parse(part.strip()) for part in text.split(","))


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, colon, sizes = text.rpartition(":")
    parts = [part.strip() for part in sizes.split(",")] if sizes.strip() else []
    if not colon or not name or not all(part.isascii() and part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write NAME:SIZE,SIZE,..., e.g. image:1,3,224,224")
    return name, tuple(int(part) for part in parts)


def _range(text: str) -> tuple[str, tuple[float, float]]:
    name, colon, bounds = text.rpartition(":")
    try:
        low, high = (float(part) for part in bounds.split(","))
    except ValueError:
        low, high = 1.0, 0.0
    if not colon or not name or not low <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is no range: write NAME:LOWEST,HIGHEST, e.g. tokens:0,30521")
    return name, (low, high)


def _input(text: str) -> tuple[str, str, tuple[int, ...]]:
    name, _, rest = text.partition(":")
    datatype, colon, sizes = rest.partition(":")
    parts = [part.strip() for part in sizes.split(",")] if sizes.strip() else []
    is_shape = all(part.removeprefix("-").isdecimal() and int(part) >= -1 for part in parts)
    if not name or not colon or datatype not in BY_NAME or not is_shape:
        names = ", ".join(BY_NAME)
        raise argparse.ArgumentTypeError(
            f"{text!r} is no input: write NAME:DATATYPE:SIZE,..., e.g. x:FP32:-1,16 (-1: rows), with a datatype of {names}"
        )
    return name, datatype, tuple(int(part) for part in parts)


def add_arguments(
    parser: argparse.ArgumentParser, api_key: str = "", address: connection.ServerAddress = connection.DEFAULT_ADDRESS
) -> None:
    """Declare the command's options; `api_key` is the value of HEADRACE_API_KEY, `address` that of the server."""
    add = parser.add_argument
    text = f"http://HOST:8000 or grpc://HOST:8001; https:// and grpcs:// with TLS ({address.url})"
    add("url", nargs="?", metavar="URL", help=text)
    parser.set_defaults(default_url=address.url)
    add("model", nargs="?", metavar="MODEL", help="name of the model")
    add("--model-version", default="", metavar="N", help="version of the model (the one the server chooses)")
    text = "compare the results of two runs, written by --json"
    add("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"), help=text)
    _add_load(parser)
    _add_inputs(parser)
    group = parser.add_argument_group("results")
    add = group.add_argument
    add("--slo", type=_positive, metavar="MS", help="count answers within this time as goodput")
    add("--check", action="store_true", help="compare every answer with the first one to the same request")
    text = "process of a server on this machine: report its processor time for each request (Linux)"
    add("--server-pid", type=positive_count, metavar="PID", help=text)
    add("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    add("--html", type=Path, metavar="FILE", help="write a page with histogram and sweep")
    group = parser.add_argument_group("connection")
    text = "further header of every request, e.g. 'x-client: team-a'; repeat it for more"
    group.add_argument("--header", action="append", default=[], metavar="'NAME: VALUE'", help=text)
    text = "seconds to wait for an answer (%(default)g)"
    group.add_argument("--timeout", type=_positive, default=30.0, metavar="S", help=text)
    connection.add_arguments(parser, api_key)


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    kinds = group.add_mutually_exclusive_group()
    text = "closed loop: callers that send their next request after an answer; several numbers are a sweep (8)"
    kinds.add_argument("--concurrency", type=_listed(positive_count), metavar="N,...", help=text)
    text = "open loop: requests a second at equal distances, whether or not earlier ones are answered"
    kinds.add_argument("--rate", type=_listed(_positive), metavar="HZ,...", help=text)
    text = "open loop: arrival times in seconds, one a line or a .csv with the column `seconds`"
    kinds.add_argument("--trace", type=Path, metavar="FILE", help=text)
    add = group.add_argument
    add("--poisson", action="store_true", help="random arrivals with the mean rate --rate")
    add("--duration", type=_positive, metavar="S", help="seconds that are measured (10; with --trace all of it)")
    add("--warm-up", type=_natural, metavar="S", help="seconds before them (1; with --trace 0)")
    add("--repeat", type=positive_count, default=1, metavar="N", help="runs of each load (%(default)s)")
    add("--processes", type=positive_count, metavar="N", help="client processes (half of the cores, at most 4)")
    text = "connections at most (HTTP: one for each caller, 512 in an open loop; gRPC: 8)"
    add("--connections", type=positive_count, metavar="N", help=text)


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("inputs")
    sources = group.add_mutually_exclusive_group()
    sources.add_argument("--npz", type=Path, metavar="FILE", help="arrays by input name; random values without it")
    text = "folder of pictures: files for BYTES, pixels for UINT8, tensors by the model's `preprocess` section"
    sources.add_argument("--pictures", type=Path, metavar="DIR", help=text)
    add = group.add_argument
    add("--batch", type=positive_count, metavar="N", help="rows of a request (1)")
    text = "shape of an input whose sizes the model leaves open, with or without the rows; repeat it for more"
    add("--shape", type=_shape, action="append", default=[], metavar="NAME:SIZE,...", help=text)
    text = "an input of the model (-1: rows), for servers whose metadata name none; repeat it for more"
    add("--input", type=_input, action="append", default=[], metavar="NAME:TYPE:SIZE,...", help=text)
    text = "lowest and highest random value of an input; repeat it for more"
    add("--range", type=_range, action="append", default=[], metavar="NAME:LOW,HIGH", help=text)
    add("--distinct", type=positive_count, default=16, metavar="N", help="different random requests (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of random values and arrivals (%(default)s)")
    add("--shared-memory", action="store_true", help="send inputs in system shared memory")
    text = "form of HTTP bodies: raw tensors, or JSON for servers without the binary extension (%(default)s)"
    add("--body", choices=("binary", "json"), default="binary", help=text)
