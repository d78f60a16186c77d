"""`python -m loadtest.front_ends`: what front-end processes gain and cost, part by part.

    python -m loadtest.front_ends tiny lone two-cores overload --output out      on a CPU
    python -m loadtest.front_ends engines pictures --output out                  on a GPU: ResNet-50 in FP16 and INT8

Every figure is printed, and written to `out/front-ends.jsonl`, as soon as it is there. A part that fails is a line in the output
and does not affect the others. Server and clients have cores of their own (`--server-cores`, `--client-cores`). `headrace bench`
makes the load, in as many processes as the clients have cores.

Exit status: 0, or 2 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from headrace.front_ends.automatic import choose_front_ends

from loadtest.front_ends import host as hosts
from loadtest.front_ends import parts, pictures
from loadtest.gpu import place
from loadtest.gpu.part_process import name_package
from loadtest.gpu.setup import Setup
from loadtest.servers import ROOT

_PARTS = ("tiny", "lone", "two-cores", "overload", "engines", "pictures")
_FRONT_ENDS = (0, 1, 2, 3, 4, 6, 8)
_BUILD_S = 120.0


class Output:
    """Prints figures and writes them as lines of JSON.

    Args:
        folder: is made; its file is continued.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "front-ends.jsonl"
        self._start_s = time.monotonic()

    def report(self, part: str, /, **values: object) -> None:
        """Print and write one figure; values of None are left out."""
        rounded = {name: _rounded(value) for name, value in values.items() if value is not None}
        text = ", ".join(f"{name} {value}" for name, value in rounded.items())
        print(f"[{time.monotonic() - self._start_s:5.0f} s] {part}: {text}", flush=True)
        with self._file.open("a") as file:
            file.write(json.dumps({"part": part, **rounded}) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    options = _parser().parse_args(arguments)
    unknown = set(options.parts) - set(_PARTS)
    if unknown:
        print(f"there is no part {', '.join(sorted(unknown))}: choose from {', '.join(_PARTS)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # servers are stopped on the way out
    output = Output(options.output)
    with tempfile.TemporaryDirectory(prefix="headrace-front-ends-") as name:
        scratch = Path(name)
        name_package(options.work or scratch)
        host = _host(options, scratch)
        output.report(
            "machine",
            **place.describe(place.gpus()),
            server_cores=list(host.server_cores),
            client_cores=list(host.client_cores),
            hardware_threads=[list(group) for group in hosts.siblings_of(hosts.usable())],
            auto=str(choose_front_ends(len(host.server_cores))),
        )
        failed = [part for part in options.parts if not _run(part, options, host, output.report)]
    return 2 if failed else 0


def _run(part: str, options: argparse.Namespace, host: hosts.Host, report: Callable[..., None]) -> bool:
    """Run one part; report its failure."""
    begun_s = time.monotonic()
    try:
        _measure(part, options, host, report)
    except Exception as error:
        traceback.print_exc()
        report(part, failed=f"{type(error).__name__}: {error}"[-1500:])
        return False
    finally:
        report("time", of=part, seconds=time.monotonic() - begun_s)
    return True


def _measure(part: str, options: argparse.Namespace, host: hosts.Host, report: Callable[..., None]) -> None:
    setup = _setup(options, host.scratch)
    match part:
        case "tiny":
            parts.small_requests(host, report, _repository(host.scratch), options.front_ends)
        case "lone":
            parts.one_caller(host, report, _repository(host.scratch), (0, 1, "auto"), options.rounds)
        case "two-cores":
            parts.two_cores(host, report, host.scratch, options.rounds)
        case "overload":
            parts.overload(host, report, host.scratch)
        case "engines":
            pictures.build(setup, report, options.precisions)
        case "pictures":
            for precision in options.precisions:
                sized = _with_precision(setup, precision)
                pictures.over_the_wire(host, report, sized, options.front_ends, options.single_from, options.rounds)


def _host(options: argparse.Namespace, scratch: Path) -> hosts.Host:
    cores = hosts.usable()
    server, clients = hosts.divide(cores, hosts.siblings_of(cores))
    return hosts.Host(
        hosts.parse_cores(options.server_cores) if options.server_cores else server,
        hosts.parse_cores(options.client_cores) if options.client_cores else clients,
        scratch,
        options.seconds,
    )


def _setup(options: argparse.Namespace, scratch: Path) -> Setup:
    return Setup(
        backend=options.backend,
        model="resnet50" if options.backend == "tensorrt" else "small",
        work=str((options.work or scratch).absolute()),
        precision=options.precisions[0],
        seconds=options.seconds,
        rounds=options.rounds,
        instances=2,
        in_flight=0,
        clients=0,
        best_way="",
    )


def _with_precision(setup: Setup, precision: str) -> Setup:
    return replace(setup, precision=precision)


def _repository(scratch: Path) -> Path:
    """Folder of a repository with `tiny`: the demo models', or one that is built here."""
    demo = ROOT / "model_repository"
    if (demo / "tiny" / "1" / "model.onnx").exists():
        return demo
    folder = scratch / "tiny"
    if not folder.is_dir():
        command = [
            sys.executable,
            "-m",
            "headrace_engines",
            "models",
            "build",
            "--only",
            "tiny",
            "--output",
            str(folder),
        ]
        subprocess.run(command, cwd=ROOT, check=True, timeout=_BUILD_S, env=dict(os.environ))
    return folder


def _rounded(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.front_ends", description="What front-end processes gain and cost."
    )
    add = parser.add_argument
    add("parts", nargs="+", metavar="PART", help=f"of {', '.join(_PARTS)}")
    add("--output", type=Path, default=Path("loadtest/results/front-ends"), metavar="DIR", help="(%(default)s)")
    add("--front-ends", type=int, nargs="+", default=list(_FRONT_ENDS), metavar="N", help="of tiny and pictures")
    add("--seconds", type=float, default=3.0, metavar="S", help="of a sample (%(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="of lone, two-cores and pictures (%(default)s)")
    add("--server-cores", default="", metavar="LIST", help="e.g. 0-9 (five of eight cores)")
    add("--client-cores", default="", metavar="LIST", help="e.g. 10-15 (the others)")
    add(
        "--precisions",
        type=lambda text: text.split(","),
        default=["fp16", "int8"],
        metavar="P,P",
        help="of the engines",
    )
    text = "least number of front ends with which requests of one picture are measured (%(default)s)"
    add("--single-from", type=int, default=4, metavar="N", help=text)
    add("--work", type=Path, metavar="DIR", help="models and engines of ResNet-50, reused by the next run")
    add("--backend", choices=("tensorrt", "onnxruntime"), default="tensorrt", help="onnxruntime: try pictures on a CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
