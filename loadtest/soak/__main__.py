"""`python -m loadtest.soak`: the soak against a server of its own.

Exit status: 0 if everything that it asserts has held, 1 if not, 2 if it could not be run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from deploy.make_keys import KEYS, KEYS_FILE, make_keys
from loadtest.bench import machine
from loadtest.servers import HEADRACE_COMMAND, ROOT, Running, ServerFailed, headrace, running
from loadtest.soak.clients import Client, ConnectionCrowd, GrpcClient, HttpClient, Onlooker, StreamClient
from loadtest.soak.judge import Bounds, Run, verdicts
from loadtest.soak.leavers import GrpcLeaver, HttpLeaver
from loadtest.soak.ledger import Ledger
from loadtest.soak.models import APART, GUEST, MODELS, PICTURES, SLOW, STEADY, SWAPPED, Repository
from loadtest.soak.operations import Operator
from loadtest.soak.report import picture, to_html, to_json
from loadtest.soak.spoilers import GrpcSpoiler, HttpSpoiler
from loadtest.soak.watch import Watch, counted, settled

_DEFAULT_S = 600.0
_LONGEST_PHASE_S = 60.0
_FEWEST_PHASES = 5
_JOIN_S = 90.0
# Requests of --connections, all together: of 1,000 connections each sends one in 20 s.
_CROWD_PER_S = 50.0
# Connections of HTTP stay open between phases, too.
_KEEP_ALIVE = ("--keep-alive-timeout-s", "600")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the verdicts, write the report, return the exit status."""
    options = _parser().parse_args(arguments)
    console = Console()
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    start = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        run = soak(options, folder, console)
    except (ServerFailed, OSError) as error:
        console.print(f"{error}\nthe server's log is in {folder / 'log'}", style="red", markup=False)
        return 2
    bounds = Bounds(p99_ratio=options.p99_ratio, p99_slack_s=options.p99_slack_ms / 1e3)
    found = verdicts(run, bounds)
    keys = ", with API keys" if options.keys else ""
    about = [f"{start}, {options.seconds:g} s{keys}"]
    about += [machine.processor(), f"{machine.system()}, {machine.python()}, commit {machine.commit()}"]
    (folder / "soak.html").write_text(to_html(run, found, "Headrace: soak", about), encoding="utf-8")
    (folder / "soak.svg").write_text(picture(run, f"{options.seconds:g} s of soak"), encoding="utf-8")
    (folder / "soak.json").write_text(to_json(run, found, about), encoding="utf-8")
    for detail in run.details:
        console.print(detail, style="red", markup=False)
    for verdict in found:
        style = "green" if verdict.passed else "bold red"
        console.print(
            f"{'PASS' if verdict.passed else 'FAIL'}  {verdict.name}: {verdict.found}", style=style, markup=False
        )
    console.print(f"report: {folder / 'soak.html'}", markup=False, highlight=False)
    return int(not all(verdict.passed for verdict in found))


def soak(options: argparse.Namespace, folder: Path, console: Console) -> Run:
    """Start the server, load it phase by phase, stop it, and return the record.

    Raises:
        ServerFailed: it did not start, died, or did not stop with status 0.
    """
    count = max(_FEWEST_PHASES, round(options.seconds / _LONGEST_PHASE_S))
    phase_s = options.seconds / count
    ledger = Ledger()
    with tempfile.TemporaryDirectory(prefix="headrace-soak-") as scratch:
        repository = Repository(Path(scratch) / "models")
        api_keys, key_options = _api_keys(Path(scratch)) if options.keys else ({}, ())
        # Nothing is left of other runs, and nothing for them.
        command = headrace(
            repository.folder,
            command=shlex.split(options.command),
            models=MODELS,
            options=("--state-dir", "", *_KEEP_ALIVE, *key_options),
        )
        phases = []
        logs = folder / "log"
        logs.mkdir(exist_ok=True)
        for old in logs.glob("headrace.*.log"):
            old.unlink()
        with running(command, logs) as started:
            server = replace(started, api_keys=api_keys)
            crowd = ConnectionCrowd(server, ledger, _CROWD_PER_S, 7, repository.cases[STEADY], options.connections)
            crowd.open()
            watch = Watch(server)
            try:
                for number in range(count):
                    start_s = time.monotonic()
                    clients = _clients(server, ledger, repository, phase_s, number)
                    _phase([*clients, crowd] if options.connections else clients, phase_s)
                    if options.connections:
                        crowd.check()
                    phases.append(settled(server, start_s, time.monotonic()))
                    console.print(f"phase {number} of {count - 1}: {phases[-1].held}", markup=False, highlight=False)
            finally:
                watch.stop()
                crowd.end()
            said = counted(server)
    tracebacks = [
        line
        for log in logs.glob("*.log")
        for line in log.read_text(errors="replace").splitlines()
        if "Traceback" in line
    ]
    return Run(ledger.lines, ledger.details, ledger.events, phases, watch.samples, said, tracebacks)


def _api_keys(folder: Path) -> tuple[dict[str, str], tuple[str, str]]:
    """Create the keys that a deployment has; return them by name, and the options of a server with these keys."""
    make_keys(folder)
    keys = {name: (folder / f"{name}.key").read_text().strip() for name in KEYS}
    return keys, ("--api-keys-file", str(folder / KEYS_FILE))


def _clients(server: Running, ledger: Ledger, repository: Repository, phase_s: float, phase: int) -> list[Client]:
    """Clients of one phase: some 250 requests a second, which leaves a small machine room to answer in."""
    cases = repository.cases
    small = [case for model in (STEADY, SWAPPED, STEADY, APART, GUEST) for case in cases[model]]
    streamed = [case for model in (STEADY, SWAPPED, APART) for case in cases[model]]
    left = [case for model in (STEADY, SWAPPED, PICTURES) for case in cases[model][:4]] + cases[SLOW]
    seed = 100 * phase
    clients: list[Client] = []
    for number in range(3):
        clients.append(HttpClient(server, ledger, 30.0, seed + number, small))
        clients.append(GrpcClient(server, ledger, 30.0, seed + 10 + number, small))
    steps_per_s = (len(Operator.STEPS) + 0.5) / phase_s
    return [
        *clients,
        HttpClient(server, ledger, 6.0, seed + 20, cases[PICTURES]),
        GrpcClient(server, ledger, 6.0, seed + 21, cases[PICTURES]),
        HttpClient(server, ledger, 3.0, seed + 22, cases[SLOW]),
        StreamClient(server, ledger, 3.0, seed + 30, streamed),
        HttpLeaver(server, ledger, 8.0, seed + 40, left),
        GrpcLeaver(server, ledger, 8.0, seed + 41, left),
        HttpSpoiler(server, ledger, 8.0, seed + 50),
        GrpcSpoiler(server, ledger, 5.0, seed + 51),
        Onlooker(server, ledger, 2.0, seed + 60),
        Operator(server, ledger, steps_per_s, seed + 70, repository),
    ]


def _phase(clients: Sequence[Client], seconds: float) -> None:
    """Run the clients for `seconds`, then stop them.

    Raises:
        ServerFailed: a client still waits for an answer long after.
    """
    stop = threading.Event()
    threads = [
        threading.Thread(target=client.run, args=(stop,), name=type(client).__name__, daemon=True) for client in clients
    ]
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    stop.set()
    deadline_s = time.monotonic() + _JOIN_S
    for thread in threads:
        thread.join(max(deadline_s - time.monotonic(), 0.0))
    hanging = [thread.name for thread in threads if thread.is_alive()]
    if hanging:
        raise ServerFailed(f"clients still wait {_JOIN_S:g} s after the end of a phase: {', '.join(hanging)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.soak", description="Soak a Headrace and judge it.")
    seconds = float(os.environ.get("SOAK_SECONDS") or _DEFAULT_S)
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="of load, all in all (SOAK_SECONDS; default: %(default)g)"
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "loadtest" / "results" / "soak", metavar="DIR", help="for report and log"
    )
    parser.add_argument(
        "--command", default=shlex.join(HEADRACE_COMMAND), help="how to start a server (default: %(default)s)"
    )
    parser.add_argument(
        "--keys",
        action="store_true",
        help="a server with API keys: clients, monitoring and operator have one each, and requests with wrong keys are sent",
    )
    parser.add_argument(
        "--connections",
        type=int,
        default=0,
        metavar="N",
        help=f"further connections, nine of ten over gRPC, with {_CROWD_PER_S:g} requests/s in all (default: none)",
    )
    bounds = Bounds()
    parser.add_argument(
        "--p99-ratio",
        type=float,
        default=bounds.p99_ratio,
        help="of later phases to earlier ones (default: %(default)g)",
    )
    parser.add_argument(
        "--p99-slack-ms", type=float, default=bounds.p99_slack_s * 1e3, help="above that (default: %(default)g)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
