"""`python -m loadtest.gpu`: every figure of serving on a GPU, in one run.

Exit status: 0 if every part came to its end and met its targets, 1 if a target was missed, 2 if a part failed or had no
time left.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headrace_reports.command_line import number_parser

from loadtest.gpu import place
from loadtest.gpu.parts import TWO_GPUS
from loadtest.gpu.report import Output, missed
from loadtest.gpu.run import BY_LETTER, Run, steps_of
from loadtest.gpu.setup import Setup
from loadtest.gpu.table import CELLS, TABLE

# Batches under way that keep an engine busy whatever waits on the host: three of the largest, and as much again in the queue.
_BATCHES_IN_FLIGHT = 6
_MOST_CLIENTS = 8
_CORES_OF_SERVER = 4
_LIMIT_S, _QUICK_LIMIT_S = 700.0, 300.0


_positive = number_parser(float, lambda number: 0 < number < 1e6, "is not a number above 0")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    output = Output(options.output, shlex.join(["python", "-m", "loadtest.gpu", *words]), add=options.add)
    found = place.gpus()
    output.machine |= place.describe(found)
    for label, text in output.machine.items():
        output.say(f"{label}: {text}")
    setup = _setup(options, tuple(range(len(found))) or (0,))
    limit_s = options.limit_s or (_QUICK_LIMIT_S if options.quick else _LIMIT_S)
    steps = steps_of(options.only, _precisions(options), len(setup.gpus))
    Run(output, setup, time.monotonic() + limit_s).all(steps)
    if any(part.failure for part in output.parts):
        return 2
    return int(missed(output.parts) and not options.quick)


def _setup(options: argparse.Namespace, gpus: tuple[int, ...]) -> Setup:
    quick = options.quick
    clients = options.clients or max(2, min(_MOST_CLIENTS, len(os.sched_getaffinity(0)) - _CORES_OF_SERVER))
    work = options.work or Path(tempfile.gettempdir()) / "headrace-gpu-bench" / options.backend
    setup = Setup(
        backend=options.backend,
        model=options.model or ("resnet50" if options.backend == "tensorrt" else "small"),
        work=str(work.absolute()),
        precision="",
        seconds=options.seconds or (0.4 if quick else 0.8),
        rounds=options.rounds or (1 if quick else 3),
        instances=options.instances,
        in_flight=0,
        clients=clients,
        gpus=gpus,
        front_ends=options.front_ends,
        cells=options.cells,
        more_clients=options.more_clients,
    )
    return replace(setup, in_flight=options.in_flight or _BATCHES_IN_FLIGHT * setup.max_rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.gpu", description="What is left of an engine once it is served."
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("loadtest/results/gpu"), metavar="DIR", help="(%(default)s)")
    add("--add", action="store_true", help="keep what other runs left in DIR, but for the parts that this one measures")
    letters = ",".join(BY_LETTER)
    add(
        "--only",
        type=_parts,
        default=[],
        metavar="X,Y:P",
        help=f"of {letters}, perhaps for one precision (b:int8); {TWO_GPUS.letter} and {TABLE.letter} only if named",
    )
    add("--quick", action="store_true", help="one short round, to check that everything runs; no targets")
    add("--seconds", type=_positive, metavar="S", help="of one sample (0.8; 0.4 with --quick)")
    add("--rounds", type=int, metavar="N", help="of each part (3; 1 with --quick)")
    add("--limit-s", type=_positive, metavar="S", help=f"of the whole run, builds included ({_LIMIT_S:.0f})")
    add("--precisions", default="", metavar="P,P", help="(fp16,int8; fp16 with --quick)")
    add(
        "--instances",
        type=int,
        default=1,
        metavar="N",
        help="on each GPU, where a part does not vary them (%(default)s)",
    )
    add("--in-flight", type=int, metavar="N", help=f"pictures under way ({_BATCHES_IN_FLIGHT} of the largest batches)")
    add("--clients", type=int, metavar="N", help="client processes (by the cores)")
    add("--front-ends", type=_words, default=("auto", "0"), metavar="M,M", help="modes of table and two-gpus (auto,0)")
    add(
        "--cells", type=_words, default=(), metavar="T,T", help=f"of table, by parts of names such as {CELLS[1].name!r}"
    )
    add("--more-clients", type=int, default=0, metavar="N", help="processes of table beyond those of its crowds (0)")
    add("--work", type=Path, metavar="DIR", help="models and engines, reused by the next run")
    models = ("resnet50", "small")
    add("--model", choices=models, help="small: try the bench itself (resnet50; small with --backend onnxruntime)")
    backends = ("tensorrt", "onnxruntime")
    add("--backend", choices=backends, default=backends[0], help="onnxruntime: try the bench itself on a CPU")
    return parser


def _precisions(options: argparse.Namespace) -> list[str]:
    if options.precisions:
        return [word for word in options.precisions.split(",") if word]
    if options.backend == "onnxruntime":
        return ["fp32"]
    return ["fp16"] if options.quick else ["fp16", "int8"]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _parts(text: str) -> list[tuple[str, str]]:
    found = [(letter, precision) for letter, _, precision in (word.partition(":") for word in text.split(",") if word)]
    unknown = {letter for letter, _ in found} - BY_LETTER.keys()
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no part {', '.join(sorted(unknown))}")
    return found


if __name__ == "__main__":
    sys.exit(main())
