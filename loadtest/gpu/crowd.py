"""Starts client processes, sends the same command to all of them at the same moment, and ends them."""

from __future__ import annotations

import base64
import json
import os
import selectors
import subprocess
import sys
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.protocol import Array
from loadtest.servers import ROOT

# From an order to the moment at which all begin.
_LEAD_S = 0.15
_SLACK_S = 30.0
_END_S = 5.0


class CrowdFailed(RuntimeError):
    """A client's command failed, or it sent no reply in time."""


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """Combined results of all clients.

    Attributes:
        per_s: requests a second; those answered until the end, in an open loop.
        latencies_us: of all requests that were answered.
        wrong: requests that were answered with an error.
        first_error: the first of these errors.
        unanswered: of an open loop, requests offered and never begun.
        late: of an open loop, requests that began later than they should have.
        busy: cores that the busiest client used.
    """

    per_s: float
    latencies_us: Array
    wrong: int
    first_error: str
    unanswered: int = 0
    late: int = 0
    busy: float = 0.0

    def percentile_ms(self, percent: float) -> float:
        """Of the latencies; not a number where nothing was answered."""
        return float(np.percentile(self.latencies_us, percent)) / 1e3 if len(self.latencies_us) else float("nan")


class Crowd(AbstractContextManager["Crowd"]):
    """So many client processes.

    Args:
        count: processes.
        scratch: for what they print when something goes wrong.
    """

    def __init__(self, count: int, scratch: Path) -> None:
        self.count = count
        self._processes: list[subprocess.Popen[bytes]] = []
        self._orders = 0
        self._log = (scratch / f"clients.{os.getpid()}.log").open("ab")
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, "-m", "loadtest.gpu.client"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                bufsize=0,
            )
            self._processes.append(process)

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        last_s = time.monotonic() + _END_S
        for process in self._processes:
            try:
                process.wait(max(0.1, last_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._log.close()

    def open(self, key: str, slots: int, clients: int | None = None, **how: Any) -> None:
        """Have connections opened, `slots` in all, evenly among the clients (or the first so many of them).

        Raises:
            CrowdFailed: a client could not.
        """
        count = min(clients or self.count, max(1, slots), self.count)
        shares = [slots // count + (number < slots % count) for number in range(count)]
        self._order(
            [{"do": "open", "key": key, "slots": share, "seed": n, **how} for n, share in enumerate(shares)], _SLACK_S
        )

    def shut(self, key: str, clients: int | None = None) -> None:
        """Have them closed."""
        self._order([{"do": "shut", "key": key}] * (clients or self.count), _SLACK_S)

    def closed(self, key: str, seconds: float, warm_s: float = 0.3) -> Taken:
        """Everything under way all the time.

        Raises:
            CrowdFailed: a client could not.
        """
        start_s = time.monotonic() + _LEAD_S
        order = {"do": "closed", "key": key, "start_s": start_s, "warm_s": warm_s, "seconds": seconds}
        replies = self._order([order] * self.count, seconds + warm_s + _SLACK_S)
        return _joined(replies, sum(reply["per_s"] for reply in replies))

    def open_loop(self, key: str, per_s: float, seconds: float) -> Taken:
        """Random arrivals, `per_s` requests a second in all.

        Raises:
            CrowdFailed: a client could not.
        """
        start_s = time.monotonic() + _LEAD_S
        orders = [
            {
                "do": "open_loop",
                "key": key,
                "start_s": start_s,
                "seconds": seconds,
                "rate": per_s / self.count,
                "seed": 100 + number,
            }
            for number in range(self.count)
        ]
        replies = self._order(orders, seconds + _SLACK_S)
        return _joined(replies, sum(reply["in_time"] for reply in replies) / seconds)

    def lone(self, key: str, seconds: float, warm_s: float = 0.2) -> Taken:
        """One caller in the first client.

        Raises:
            CrowdFailed: it could not.
        """
        order = {"do": "lone", "key": key, "warm_s": warm_s, "seconds": seconds}
        replies = self._order([order], seconds + warm_s + _SLACK_S)
        found = _joined(replies, 0.0)
        return Taken(len(found.latencies_us) / seconds, found.latencies_us, 0, "")

    def _order(self, orders: list[dict[str, Any]], limit_s: float) -> list[dict[str, Any]]:
        """One order to each of the first clients, and their replies."""
        processes = self._processes[: len(orders)]
        self._orders += 1
        for process, order in zip(processes, orders, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps({**order, "number": self._orders}).encode() + b"\n")
        replies = _replies(processes, self._orders, limit_s)
        for reply in replies:
            if "error" in reply:
                raise CrowdFailed(f"a client could not {orders[0]['do']} {orders[0]['key']}: {reply['error']}")
        return replies


def _replies(processes: list[subprocess.Popen[bytes]], order: int, limit_s: float) -> list[dict[str, Any]]:
    """Return each client's reply to the command of this number; late replies to earlier commands are ignored."""
    deadline_s = time.monotonic() + limit_s
    buffers = [b""] * len(processes)
    found: dict[int, dict[str, Any]] = {}
    with selectors.DefaultSelector() as selector:
        for number, process in enumerate(processes):
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, number)
        while len(found) < len(processes):
            ready = selector.select(max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise CrowdFailed(f"{len(processes) - len(found)} clients sent no reply within {limit_s:.0f} s")
            for key, _ in ready:
                number = key.data
                data = os.read(key.fd, 1 << 20)
                if not data:
                    raise CrowdFailed("a client has died; the clients' log has more")
                buffers[number] += data
                *lines, buffers[number] = buffers[number].split(b"\n")
                for reply in map(json.loads, lines):
                    if reply["number"] == order:
                        found[number] = reply
    return [found[number] for number in range(len(processes))]


def _joined(replies: list[dict[str, Any]], per_s: float) -> Taken:
    latencies = [np.frombuffer(base64.b64decode(reply["latencies"]), dtype="<f4") for reply in replies]
    first_error = [text for reply in replies for text in reply.get("errors", ())]
    return Taken(
        per_s=per_s,
        latencies_us=np.concatenate(latencies),
        wrong=sum(reply.get("wrong", 0) for reply in replies),
        first_error=first_error[0] if first_error else "",
        unanswered=sum(reply.get("unanswered", 0) for reply in replies),
        late=sum(reply.get("late", 0) for reply in replies),
        busy=max(reply.get("busy", 0.0) for reply in replies),
    )
