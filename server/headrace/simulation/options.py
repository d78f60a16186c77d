"""Options of `headrace simulate`; modules that they need are imported when the command runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

Value = TypeVar("Value")

KINDS = ("poisson", "bursty", "diurnal")


class SettingParser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse for what it does not understand."""
        raise ValueError(message)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("folders", nargs="*", metavar="MODEL", help="models whose configuration is the policy: names, or their folders")
    add(
        "--model-repository",
        type=Path,
        default=Path("model_repository"),
        metavar="DIR",
        help="where names are looked up",
    )
    what = parser.add_argument_group("what is asked")
    add = what.add_argument
    add("--arrivals", default="poisson", metavar="KIND", help=f"{', '.join(KINDS)}, or a .csv file (%(default)s)")
    add("--rate", type=_positive, default=100.0, metavar="HZ", help="requests a second of all models (%(default)g)")
    add("--seconds", type=_positive, default=60.0, metavar="S", help="how long (%(default)g)")
    add("--rows", type=_rows, default=((1, 1.0),), metavar="N[:W,...]", help="rows of a request, with weights (1)")
    add("--timeout-ms", type=_natural, default=0.0, metavar="MS", help="deadline of each request (none)")
    add(
        "--clients",
        type=_weights,
        default=(),
        metavar="NAME[:W],...",
        help="who asks, with weights (nobody in particular)",
    )
    add("--models", type=_count, default=1, metavar="N", help="models alike, without folders (%(default)s)")
    add("--skew", type=_natural, default=0.0, metavar="S", help="the k-th model is asked k**-S times as often (0)")
    add("--burst-factor", type=_positive, default=10.0, metavar="F", help="rate of a burst over the calm's (10)")
    add("--burst-seconds", type=_positive, default=0.5, metavar="S", help="mean length of a burst (%(default)s)")
    add("--calm-seconds", type=_positive, default=4.5, metavar="S", help="mean time between two (%(default)s)")
    add("--period", type=_natural, default=0.0, metavar="S", help="length of a day of `diurnal` (that of the trace)")
    add("--swing", type=_share, default=0.8, metavar="0..1", help="how far its rate goes up and down (%(default)s)")
    add("--seed", type=int, default=0, help="of everything that is drawn (%(default)s)")
    add_setting(parser.add_argument_group("who answers (what is not given is the configuration's)"))
    out = parser.add_argument_group("what is told")
    add = out.add_argument
    add("--warm-up", type=_natural, default=0.0, metavar="S", help="leave the first seconds out (%(default)g)")
    add(
        "--compare",
        action="append",
        default=[],
        metavar="OPTIONS",
        help='another setting: "delay-us=500 instances=2"; repeat it',
    )
    add("--json", action="store_true", help="print JSON")
    add("--plot", type=Path, metavar="FILE", help="draw latencies and good answers over time (SVG)")


def add_setting(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare the options that tell a setting."""

    # Without defaults, so that another setting starts from the first one's.
    def add(option: str, **more: object) -> None:
        parser.add_argument(option, default=argparse.SUPPRESS, **more)  # type: ignore[arg-type]

    add(
        "--profile",
        metavar="T",
        help="what a batch of n rows takes, us: 450+20n, or a .json file; or NAME=T,... (1000+100n)",
    )
    add("--variation", type=_natural, metavar="CV", help="of that time: 0 is always the same, 1 is exponential (0)")
    add("--overhead-us", type=_natural, metavar="US", help="what a request takes besides, in network and codec (0)")
    add(
        "--slo-ms",
        type=_by_name(_positive),
        metavar="MS",
        help="latency promised: to plan and judge by; or NAME=MS,...",
    )
    add(
        "--scheduler",
        choices=("promise", "fixed"),
        help="fixed: by size and delay alone, as if nothing were promised; the SLO only judges (promise)",
    )
    add("--max-batch-size", type=_count, metavar="N", help="rows of a batch (8)")
    add("--preferred", type=_counts, metavar="N,...", help="rows worth closing a batch for")
    add("--delay-us", type=_natural, metavar="US", help="how long the oldest request may be held back (0)")
    add("--instances", type=_count, metavar="N", help="of each model (1)")
    add("--depth", type=_count, metavar="N", help="batches that an instance has under way: 1 CPU, 2 or more GPU (1)")
    add("--devices", type=_count, metavar="N", help="that all instances share, in turn (one for each)")
    add("--max-queue-size", type=_count, metavar="N", help="requests that may wait (4096)")
    add("--queue-timeout-us", type=_natural, metavar="US", help="how long one may (for ever)")
    add("--levels", type=_count, metavar="N", help="of priority; a request that names none has the lowest (1)")
    add("--aging-us", type=_natural, metavar="US", help="how long a request waits before it rises a level (never)")
    add("--share", type=_weights, metavar="NAME[:W],...", help="clients share by weight; those not named have 1")
    add(
        "--quota",
        type=_by_name(_quota),
        metavar="HZ[:BURST]",
        help="requests a second of a client; or NAME=HZ[:BURST],...",
    )


def _natural(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0")
    return value


def _positive(text: str) -> float:
    value = _natural(text)
    if not value:
        raise argparse.ArgumentTypeError("0 is not above 0")
    return value


def _share(text: str) -> float:
    value = _natural(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _by_name(read: Callable[[str], Value]) -> Callable[[str], dict[str, Value]]:
    """Reads `5` or `NAME=5,...`: values by name, "" being all that are not named."""

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


def _weights(text: str) -> tuple[tuple[str, float], ...]:
    values = []
    for part in text.split(","):
        name, _, weight = part.partition(":")
        values.append((name, _positive(weight or "1")))
    return tuple(values)


def _rows(text: str) -> tuple[tuple[int, float], ...]:
    values = []
    for part in text.split(","):
        rows, _, weight = part.partition(":")
        values.append((_count(rows), _positive(weight or "1")))
    return tuple(values)
