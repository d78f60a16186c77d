"""A client process: `python -m loadtest.gpu.client` reads one command a line, see `Crowd`.

    {"do": "open", "key": k, ...}               connections, requests and shared memory, ready to be used
    {"do": "closed", "key": k, ...}             all slots under way, each begun again once it is answered
    {"do": "open_loop", "key": k, ...}          requests at random moments, whether or not the last ones are answered
    {"do": "lone", "key": k, ...}               one request after the other
    {"do": "shut", "key": k}                    release what `open` opened

Every line is answered by one with its number; {"error": text} if it could not be done. The process ends with its input.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.bench.spread import completion_rate
from loadtest.gpu.lines import GrpcLines, HttpLines, Lines
from loadtest.gpu.part_process import end_with_parent
from loadtest.gpu.subject import INPUT
from loadtest.grpc_protocol import infer_message, shared_memory_message
from loadtest.protocol import Array, binary_request, shared_memory_request
from loadtest.regions import CudaRegion, Region, SystemRegion

# Different requests that the slots of a client send.
_DIFFERENT = 4
# epoll sleeps whole milliseconds: what is due sooner is waited for awake.
_AWAKE_S = 0.002
_STRAGGLERS_S = 15.0


@dataclass(slots=True, eq=False)
class _Opened:
    lines: Lines
    region: Region | None

    def close(self) -> None:
        self.lines.close()
        if self.region is not None:
            self.region.close()


class Client:
    """Connections and shared memory of this process."""

    def __init__(self) -> None:
        self._opened: dict[str, _Opened] = {}

    def execute(self, order: dict[str, Any]) -> dict[str, Any]:
        """Execute a command.

        Raises:
            Exception: it could not be done.
        """
        key = order["key"]
        if key in self._opened and order["do"] != "shut":
            self._opened[key].lines.renew()
        match order["do"]:
            case "open":
                self._opened[key] = _open(order)
                return {}
            case "shut":
                self._opened.pop(key).close()
                return {}
            case "closed":
                return closed_loop(self._opened[key].lines, order["start_s"], order["warm_s"], order["seconds"])
            case "open_loop":
                random = np.random.default_rng(order["seed"])
                return open_loop(self._opened[key].lines, order["start_s"], order["seconds"], order["rate"], random)
            case "lone":
                return lone_caller(self._opened[key].lines, order["warm_s"], order["seconds"])
        raise ValueError(f"unknown command {order['do']!r}")

    def close(self) -> None:
        """Close all connections and regions."""
        for opened in self._opened.values():
            opened.close()


def closed_loop(lines: Lines, start_s: float, warm_s: float, seconds: float) -> dict[str, Any]:
    """All slots under way from `start_s` on; answers count from `start_s + warm_s` for `seconds`."""
    _wait_until(start_s)
    cpu_s = time.process_time()
    begun = [0.0] * lines.slots
    for slot in range(lines.slots):
        begun[slot] = time.monotonic()
        lines.begin(slot)
    first_s = start_s + warm_s
    end_s = first_s + seconds
    under_way, times_s, latencies_us, wrong = lines.slots, list[float](), list[float](), list[str]()
    while under_way:
        if time.monotonic() > end_s + _STRAGGLERS_S:
            raise TimeoutError(f"{under_way} requests were not answered within {_STRAGGLERS_S:.0f} s")
        for slot, at_s, error in lines.poll(1.0):
            if error:
                wrong.append(error)
            elif first_s <= at_s < end_s:
                times_s.append(at_s)
                latencies_us.append((at_s - begun[slot]) * 1e6)
            if at_s < end_s and len(wrong) < lines.slots:
                begun[slot] = time.monotonic()
                lines.begin(slot)
            else:
                under_way -= 1
    busy = (time.process_time() - cpu_s) / max(time.monotonic() - start_s, 1e-3)
    per_s = completion_rate(times_s) if len(set(times_s)) > 1 else len(times_s) / seconds
    return {"per_s": per_s, "wrong": len(wrong), "errors": wrong[:1], "busy": busy, "latencies": _packed(latencies_us)}


@dataclass(slots=True)
class Arrivals:
    """Outcome of an open loop.

    Attributes:
        offered: number of requests that were due.
        late: number of requests that began later than they were due.
        answers: time of the answer, and from the due time to it, in seconds, and the error or "".
    """

    offered: int
    late: int
    answers: list[tuple[float, float, str]]


def poisson_arrivals(
    lines: Lines,
    start_s: float,
    seconds: float,
    rate: float,
    random: np.random.Generator,
    stragglers_s: float = _STRAGGLERS_S,
) -> Arrivals:
    """Poisson arrivals at `rate` a second; a latency counts from the moment when the request should have begun.

    Raises:
        TimeoutError: an answer has not come `stragglers_s` after the end.
    """
    end_s = start_s + seconds
    # Some more than will be needed: those beyond the end are not offered.
    moments = start_s + np.cumsum(random.exponential(1 / rate, 100 + round(1.5 * rate * seconds)))
    due = deque(moments[moments < end_s].tolist())
    arrivals = Arrivals(len(due), 0, [])
    free, intended = deque(range(lines.slots)), [0.0] * lines.slots
    _wait_until(start_s)
    while True:
        now_s = time.monotonic()
        while due and due[0] <= now_s and free:
            slot = free.popleft()
            intended[slot] = due.popleft()
            arrivals.late += now_s - intended[slot] > _AWAKE_S
            lines.begin(slot)
        # What has not begun when the time is over was offered in vain.
        if now_s > end_s and (len(free) == lines.slots or now_s > end_s + stragglers_s):
            break
        for slot, at_s, error in lines.poll(_sleep_s(due, free, now_s, end_s)):
            free.append(slot)
            arrivals.answers.append((at_s, at_s - intended[slot], error))
        if now_s > end_s:
            due.clear()
    if len(free) < lines.slots:
        raise TimeoutError(f"{lines.slots - len(free)} requests were not answered within {stragglers_s:.0f} s")
    return arrivals


def open_loop(lines: Lines, start_s: float, seconds: float, rate: float, random: np.random.Generator) -> dict[str, Any]:
    """`poisson_arrivals`, counted."""
    arrivals = poisson_arrivals(lines, start_s, seconds, rate, random)
    wrong = [error for _, _, error in arrivals.answers if error]
    return {
        "offered": arrivals.offered,
        "in_time": sum(at_s <= start_s + seconds and not error for at_s, _, error in arrivals.answers),
        "wrong": len(wrong),
        "errors": wrong[:1],
        "late": arrivals.late,
        "unanswered": arrivals.offered - len(arrivals.answers),
        "latencies": _packed([took_s * 1e6 for _, took_s, error in arrivals.answers if not error]),
    }


def lone_caller(lines: Lines, warm_s: float, seconds: float) -> dict[str, Any]:
    """One request after the other."""
    latencies_us = []
    first_s = time.monotonic() + warm_s
    end_s = first_s + seconds
    while (begun_s := time.monotonic()) < end_s:
        error = lines.ask(0)
        if error:
            raise ValueError(f"a request was answered with {error}")
        if begun_s >= first_s:
            latencies_us.append((time.monotonic() - begun_s) * 1e6)
    return {"latencies": _packed(latencies_us)}


def _sleep_s(due: deque[float], free: deque[int], now_s: float, end_s: float) -> float:
    if not due or not free:
        return 0.05 if now_s <= end_s else 0.5
    left_s = due[0] - now_s
    return left_s - _AWAKE_S / 2 if left_s > _AWAKE_S else 0.0


def _open(order: dict[str, Any]) -> _Opened:
    rows, side = order["rows"], order["side"]
    random = np.random.default_rng(order["seed"])
    different = min(_DIFFERENT, order["slots"])
    pixels: Array = random.integers(0, 256, (different, rows, side, side, 3), dtype=np.uint8)
    region: Region | None = None
    if order["data"] != "body":
        kind = SystemRegion if order["data"] == "system" else CudaRegion
        region = kind(order["http_port"], f"{order['key']}_{os.getpid()}".replace(" ", "_"), pixels)
    try:
        lines = _lines(order, pixels, region)
        for slot in range(different):
            if error := lines.ask(slot):
                raise ValueError(f"the first request was answered with {error}")
    except BaseException:
        if region is not None:
            region.close()
        raise
    return _Opened(lines, region)


def _lines(order: dict[str, Any], pixels: Array, region: Region | None) -> Lines:
    """Connections whose slots send the requests in turn."""
    over_http = order["transport"] == "http"
    requests: list[Any] = []
    for number, tensor in enumerate(pixels):
        model, inputs = order["model"], {INPUT: tensor}
        if region is None:
            requests.append(binary_request(model, inputs) if over_http else infer_message(model, inputs))
        else:
            encode = shared_memory_request if over_http else shared_memory_message
            requests.append(encode(model, inputs, region.name, number * tensor.nbytes))
    by_slot = [requests[slot % len(requests)] for slot in range(order["slots"])]
    return HttpLines(order["http_port"], by_slot) if over_http else GrpcLines(order["grpc_port"], by_slot)


def _wait_until(start_s: float) -> None:
    time.sleep(max(0.0, start_s - time.monotonic()))


def _packed(latencies_us: list[float]) -> str:
    return base64.b64encode(np.array(latencies_us, dtype="<f4").tobytes()).decode()


def main() -> None:
    """Execute commands until the input ends."""
    end_with_parent()
    client = Client()
    try:
        for line in sys.stdin:
            order = json.loads(line)
            try:
                reply = client.execute(order)
            except Exception as error:
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({**reply, "number": order["number"]}), flush=True)
    finally:
        client.close()


if __name__ == "__main__":
    main()
