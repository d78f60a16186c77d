"""`python -m loadtest.front_ends`: what front-end processes gain and cost, part by part.

    python -m loadtest.front_ends tiny lone two-cores overload --output out      on a CPU
    python -m loadtest.front_ends engines pictures --output out                  on a GPU: ResNet-50 in FP16 and INT8
    python -m loadtest.front_ends engines gpus --precisions fp16 --output out    on several GPUs, pictures in shared memory

Every figure is printed, and written to `out/front-ends.jsonl`, as soon as it is there. A part that fails is a line in the output
and does not affect the others; so is one whose time is over. Server and clients have cores of their own (`--server-cores`,
`--client-cores`). `headrace bench` makes the load, in as many processes as the clients have cores.

`engines` builds in the background: on a machine with enough cores, lone, two-cores and overload run meanwhile on other cores. The
other parts wait for the builds.

Exit status: 0, or 2 if a part failed.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headrace.front_ends.automatic import choose_front_ends

from loadtest.figure_log import FigureLog
from loadtest.front_ends import host as hosts
from loadtest.front_ends import parts, pictures
from loadtest.gpu import place
from loadtest.gpu.part_process import name_package
from loadtest.gpu.setup import Setup
from loadtest.servers import ROOT

# The longest duration of each part in seconds; of pictures for each precision.
_LIMITS_S = {
    "tiny": 120.0,
    "lone": 120.0,
    "two-cores": 60.0,
    "overload": 150.0,
    "engines": 300.0,
    "pictures": 200.0,
    "gpus": 240.0,
}
_DURING_BUILDS = ("lone", "two-cores", "overload")
_BUILDER_CORES = 4
_FRONT_ENDS = (0, 1, 2, 3, 4, 6, 8)
_BUILD_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    options = _parser().parse_args(arguments)
    unknown = set(options.parts) - set(_LIMITS_S)
    if unknown:
        print(f"there is no part {', '.join(sorted(unknown))}: choose from {', '.join(_LIMITS_S)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # servers are stopped on the way out
    output = FigureLog(options.output / "front-ends.jsonl")
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
        failed = _Session(options, host, output.report).run()
    return 2 if failed else 0


class _Session:
    """The parts of a run, with engines that are built in the background."""

    def __init__(self, options: argparse.Namespace, host: hosts.Host, report: parts.Report) -> None:
        self._options = options
        self._host = host
        self._report = report
        self._setup = _setup(options, host.scratch)
        self._builds: pictures.EngineBuilds | None = None

    def run(self) -> list[str]:
        """Run all parts; return the names of those that failed."""
        return [part for part in self._options.parts if not self._run(part)] + self._failed_builds()

    def _run(self, part: str) -> bool:
        """Run one part; report its failure."""
        host = self._host_for(part)
        begun_s = time.monotonic()
        try:
            self._measure(part, replace(host, deadline_s=begun_s + (self._options.limit_s or _LIMITS_S[part])))
        except Exception as error:
            traceback.print_exc()
            self._report(part, failed=f"{type(error).__name__}: {error}"[-1500:])
            return False
        finally:
            self._report("time", of=part, seconds=time.monotonic() - begun_s)
        return True

    def _host_for(self, part: str) -> hosts.Host:
        """Return the cores for a part: those without builders, or all of them after the builds."""
        host = self._host
        if self._builds is None:
            return host
        if part in _DURING_BUILDS and len(host.server_cores) >= 2 * _BUILDER_CORES:
            return replace(host, server_cores=host.server_cores[:-_BUILDER_CORES])
        self._builds.wait()
        return host

    def _failed_builds(self) -> list[str]:
        return [] if self._builds is None else self._builds.failed()

    def _measure(self, part: str, host: hosts.Host) -> None:
        options, report, setup = self._options, self._report, self._setup
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
                cores = host.server_cores[-_BUILDER_CORES:]
                self._builds = pictures.EngineBuilds(setup, report, options.precisions, setup.gpus, cores)
            case "pictures":
                for precision in options.precisions:
                    sized, limited = replace(setup, precision=precision), self._limited(host, part)
                    single_from = options.single_from if precision == options.precisions[0] else math.inf
                    pictures.over_the_wire(limited, report, sized, options.front_ends, single_from, options.rounds)
            case "gpus":
                pictures.several_gpus(host, report, setup, options.front_ends, options.rounds)

    def _limited(self, host: hosts.Host, part: str) -> hosts.Host:
        return replace(host, deadline_s=time.monotonic() + (self._options.limit_s or _LIMITS_S[part]))


def _host(options: argparse.Namespace, scratch: Path) -> hosts.Host:
    server, clients = hosts.divide(hosts.usable(), hosts.siblings_of(hosts.usable()), options.cores)
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
        gpus=tuple(range(len(place.gpus()))) or (0,),
    )


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.front_ends", description="What front-end processes gain and cost."
    )
    add = parser.add_argument
    add("parts", nargs="+", metavar="PART", help=f"of {', '.join(_LIMITS_S)}")
    add("--output", type=Path, default=Path("loadtest/results/front-ends"), metavar="DIR", help="(%(default)s)")
    add("--front-ends", type=int, nargs="+", default=list(_FRONT_ENDS), metavar="N", help="of tiny, pictures and gpus")
    add("--seconds", type=float, default=3.0, metavar="S", help="of a sample (%(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="of lone, two-cores, pictures and gpus (%(default)s)")
    add("--limit-s", type=float, default=0.0, metavar="S", help="longest duration of each part (by the part)")
    add("--cores", type=int, default=0, metavar="N", help="logical cores of server and clients together (all)")
    add("--server-cores", default="", metavar="LIST", help="e.g. 0-9 (five of eight cores)")
    add("--client-cores", default="", metavar="LIST", help="e.g. 10-15 (the others)")
    add(
        "--precisions",
        type=lambda text: text.split(","),
        default=["fp16", "int8"],
        metavar="P,P",
        help="of the engines",
    )
    text = "least number of front ends with which requests of one picture are measured, first precision (%(default)s)"
    add("--single-from", type=int, default=4, metavar="N", help=text)
    add("--work", type=Path, metavar="DIR", help="models and engines of ResNet-50, reused by the next run")
    add("--backend", choices=("tensorrt", "onnxruntime"), default="tensorrt", help="onnxruntime: try pictures on a CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
