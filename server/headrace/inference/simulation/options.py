"""Options of `headrace simulate`; modules that they need are imported when the command runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from headrace_reports.command_line import number_parser, path_or_url, positive_count

Value = TypeVar("Value")

_natural = number_parser(float, lambda number: 0 <= number < float("inf"), "is not a finite number: use 0 or more")
_positive = number_parser(float, lambda number: 0 < number < float("inf"), "is not a number above 0")
_share = number_parser(float, lambda number: 0 <= number <= 1, "is out of range: use a number from 0 to 1")

KINDS = ("poisson", "bursty", "diurnal")


class SettingParser(argparse.ArgumentParser):
    """Argument parser that raises ValueError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError for an invalid argument; called by argparse."""
        raise ValueError(message)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("folders", nargs="*", metavar="MODEL", help="models whose configuration gives the policy: names or folders")
    text = "repository in which model names are looked up, or the URL of one in a store"
    add("--model-repository", type=path_or_url, default=Path("model_repository"), metavar="DIR_OR_URL", help=text)
    workload = parser.add_argument_group("workload")
    add = workload.add_argument
    add("--arrivals", default="poisson", metavar="KIND", help=f"{', '.join(KINDS)}, or a .csv file (%(default)s)")
    add("--rate", type=_positive, default=100.0, metavar="HZ", help="requests per second, all models (%(default)g)")
    add("--seconds", type=_positive, default=60.0, metavar="S", help="length of the trace (%(default)g)")
    text = "rows of a request, with weights (1)"
    add("--rows", type=_weighted(_count), default=((1, 1.0),), metavar="N[:W,...]", help=text)
    add("--timeout-ms", type=_natural, default=0.0, metavar="MS", help="deadline of each request (none)")
    text = "names of clients, with weights (none)"
    add("--clients", type=_weighted(str), default=(), metavar="NAME[:W],...", help=text)
    add("--models", type=_count, default=1, metavar="N", help="number of equal models, without folders (%(default)s)")
    add("--skew", type=_natural, default=0.0, metavar="S", help="the k-th model gets k**-S times the requests (0)")
    add("--burst-factor", type=_positive, default=10.0, metavar="F", help="rate of a burst over the calm rate (10)")
    add("--burst-seconds", type=_positive, default=0.5, metavar="S", help="mean length of a burst (%(default)s)")
    add("--calm-seconds", type=_positive, default=4.5, metavar="S", help="mean time between bursts (%(default)s)")
    add("--period", type=_natural, default=0.0, metavar="S", help="period of `diurnal` (length of the trace)")
    add("--swing", type=_share, default=0.8, metavar="0..1", help="amplitude of `diurnal` over the mean (%(default)s)")
    add("--seed", type=int, default=0, help="seed of all random numbers (%(default)s)")
    add_setting(parser.add_argument_group("server (defaults come from the model configuration)"))
    out = parser.add_argument_group("output")
    add = out.add_argument
    add("--warm-up", type=_natural, default=0.0, metavar="S", help="seconds left out at the start (%(default)g)")
    text = 'another setting: "delay-us=500 instances=2"; may be repeated'
    add("--compare", action="append", default=[], metavar="OPTIONS", help=text)
    add("--json", action="store_true", help="print JSON")
    add("--plot", type=Path, metavar="FILE", help="plot latencies and goodput over time (SVG)")


def add_setting(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare the options of a setting."""

    # Without defaults: a setting of --compare starts from the values of the first setting.
    def add(option: str, **options: object) -> None:
        parser.add_argument(option, default=argparse.SUPPRESS, **options)  # type: ignore[arg-type]

    text = "time of a batch of n rows in us: 450+20n, or a .json file; or NAME=T,... (as measured here)"
    add("--profile", metavar="T", help=text)
    add("--variation", type=_natural, metavar="CV", help="variation of that time: 0 constant, 1 exponential (0)")
    add("--overhead-us", type=_natural, metavar="US", help="time of a request in network and codec (0)")
    text = "latency objective, for batching and the report; or NAME=MS,..."
    add("--slo-ms", type=_by_name(_positive), metavar="MS", help=text)
    text = "fixed: close batches by size and delay, and use the SLO for the report only (promise)"
    add("--scheduler", choices=("promise", "fixed"), help=text)
    add("--max-batch-size", type=_count, metavar="N", help="rows of a batch (8)")
    add("--preferred", type=_counts, metavar="N,...", help="batch sizes that close a batch at once")
    add("--delay-us", type=_natural, metavar="US", help="longest delay of a request to form a larger batch (0)")
    add("--instances", type=_count, metavar="N", help="instances of each model (1)")
    add("--depth", type=_count, metavar="N", help="batches in flight of an instance: 1 CPU, 2 or more GPU (1)")
    add("--devices", type=_count, metavar="N", help="devices shared by all instances (one for each instance)")
    add("--max-queue-size", type=_count, metavar="N", help="queued requests (4096)")
    add("--queue-timeout-us", type=_natural, metavar="US", help="longest queue time of a request (no limit)")
    add("--levels", type=_count, metavar="N", help="priority levels; the default level is the lowest (1)")
    add("--aging-us", type=_natural, metavar="US", help="queue time after which a request rises a level (never)")
    text = "weights of clients for fair sharing; others have 1"
    add("--share", type=_weighted(str), metavar="NAME[:W],...", help=text)
    text = "requests per second of a client; or NAME=HZ[:BURST],..."
    add("--quota", type=_by_name(_quota), metavar="HZ[:BURST]", help=text)


def _count(text: str) -> int:
    """Parse a whole number of at least 1; lists may have spaces, as in `4, 8`."""
    return positive_count(text.strip())


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _by_name(read: Callable[[str], Value]) -> Callable[[str], dict[str, Value]]:
    """Return a parser of `5` or `NAME=5,...` to values by name; the name "" stands for every other name."""

    def table(text: str) -> dict[str, Value]:
        values = {}
        for part in text.split(","):
            name, _, value = part.rpartition("=")
            values[name] = read(value)
        return values

    return table


def _quota(text: str) -> tuple[float, int]:
    rate, _, burst = text.partition(":")
    return _positive(rate), _count(burst or "1")


def _weighted(read: Callable[[str], Value]) -> Callable[[str], tuple[tuple[Value, float], ...]]:
    """Return a parser of `5:W,...` to pairs of a value and its weight, by default 1."""

    def pairs(text: str) -> tuple[tuple[Value, float], ...]:
        values = []
        for part in text.split(","):
            value, _, weight = part.partition(":")
            values.append((read(value), _positive(weight or "1")))
        return tuple(values)

    return pairs
