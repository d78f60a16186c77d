"""`python -m loadtest.gpu.part_process PART --setup JSON --report-fd N`: one part in a process of its own.

Exit status: 0 if the part came to its end, 1 if it failed and said why.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import signal
import sys
import tomllib
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from loadtest.bench import machine
from loadtest.gpu.report import Reporter
from loadtest.gpu.run import BY_NAME
from loadtest.gpu.setup import Setup
from loadtest.servers import ROOT

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def main() -> int:
    """Run the part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("--setup", required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    options = parser.parse_args()
    end_with_parent()
    # Hundreds of connections, each with two ends; servers and clients inherit it.
    machine.allow_open_files()
    reporter = Reporter(options.report_fd)
    setup = Setup.from_json(options.setup)
    name_package(Path(setup.work))
    # As a server does: what was there at the start is never looked through again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    try:
        BY_NAME[options.part].run(setup, reporter)
    except BaseException as error:
        traceback.print_exc()
        reporter.failure(f"{type(error).__name__}: {error}")
        return 1
    return 0


def end_with_parent() -> None:
    """Be killed when the process that started this one goes, however that happens; SIGTERM unwinds what is open."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
    signal.signal(signal.SIGTERM, _leave)


def name_package(work: Path) -> None:
    """Give this process and its children the metadata of Headrace, if it runs from a checkout that is not installed."""
    try:
        version("headrace")
        return
    except PackageNotFoundError:
        number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        folder = work / "metadata" / f"headrace-{number}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: headrace\nVersion: {number}\n")
    place = str(folder.parent)
    sys.path.append(place)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), place)))


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
