"""Measure streams of server-sent events: delay of the first event, memory of stalled readers, delay of cancellations.

    python -m loadtest.bench.events --streams 1000 --seconds 20
    python -m loadtest.bench.events --stalled 50
    python -m loadtest.bench.events --cancel

Each starts a server with one decoupled Python model, `events`, and prints one JSON line. The model writes the time at which it
sends a response into the response; client, model and server read the same monotonic clock. The client is one process on `epoll`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import re
import selectors
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.servers import HOST, Running, headrace, resident_bytes, running

CONFIG = """
backend: "python"
max_batch_size: 0
parameters { key: "headrace.max_open_requests" value { string_value: "4096" } }
parameters { key: "headrace.max_queue_wait_microseconds" value { string_value: "0" } }
model_transaction_policy { decoupled: true }
instance_group [ { count: 1 kind: KIND_CPU } ]
input [ { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "PERIOD_US" data_type: TYPE_INT32 dims: [ 1 ] },
        { name: "PAD_BYTES" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "SENT_NS" data_type: TYPE_INT64 dims: [ 1 ] }, { name: "PAD" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
# One thread sends the responses of all requests that have no pad, each at its time. A request with a pad has a thread of its own,
# which may wait for its reader.
MODEL = """
import heapq
import threading
import time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def send(sender, pad, is_last):
    sent_ns = pb_utils.Tensor("SENT_NS", np.array([time.monotonic_ns()], np.int64))
    tensors = [sent_ns, pb_utils.Tensor("PAD", np.array([pad], object))]
    sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL if is_last else 0)

class TritonPythonModel:
    def initialize(self, args):
        self.due, self.changed, self.number = [], threading.Condition(), 0
        threading.Thread(target=self.run, daemon=True).start()

    def execute(self, requests):
        for request in requests:
            values = {tensor.name(): int(tensor.as_numpy()[0]) for tensor in request.inputs()}
            count, period_us, pad_bytes = values["COUNT"], values["PERIOD_US"], values["PAD_BYTES"]
            sender = request.get_response_sender()
            if pad_bytes or not count:
                threading.Thread(target=self.fill, args=(sender, count, b"x" * pad_bytes), daemon=True).start()
                continue
            with self.changed:
                self.number += 1
                heapq.heappush(self.due, (time.monotonic(), self.number, sender, count, period_us / 1e6))
                self.changed.notify()

    def run(self):
        while True:
            with self.changed:
                while not self.due or self.due[0][0] > time.monotonic():
                    self.changed.wait(self.due[0][0] - time.monotonic() if self.due else None)
                due_s, number, sender, count, period_s = heapq.heappop(self.due)
            send(sender, b"", count == 1)
            if count > 1:
                with self.changed:
                    heapq.heappush(self.due, (due_s + period_s, number, sender, count - 1, period_s))

    def fill(self, sender, count, pad):
        send(sender, pad, False)
        for number in range(1, count):
            send(sender, pad, number == count - 1)
            if sender.is_cancelled():
                break
        while not count and not sender.is_cancelled():
            time.sleep(0.0005)
        print("cancelled %d" % time.monotonic_ns(), flush=True)
        if not count or sender.is_cancelled():
            sender.send(flags=FINAL)
"""
_SENT = re.compile(rb'"SENT_NS":(\d+)')
_END = b"0\r\n\r\n"
_LIMIT_S = 60.0


@dataclass(eq=False)
class Reader:
    """One connection, which sends one request after the other.

    Attributes:
        sock: connected socket.
        tail: end of the bytes received, which may be the start of an event.
        waits: True until the first event of the running request.
    """

    sock: socket.socket
    tail: bytes = b""
    waits: bool = True


@dataclass
class Delays:
    """Results of a run.

    Attributes:
        first_ns: from the model's first response to its arrival, one for each request.
        events: received events.
        requests: requests that have ended.
        late_ns: greatest delay of a request behind its planned start.
    """

    first_ns: list[int] = field(default_factory=list)
    events: int = 0
    requests: int = 0
    late_ns: int = 0


def request_bytes(count: int, period_us: int, pad_bytes: int = 0) -> bytes:
    """Return a request of `count` events."""
    body = json.dumps({"COUNT": count, "PERIOD_US": period_us, "PAD_BYTES": pad_bytes}).encode()
    head = f"POST /v2/models/events/generate_stream HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def stream(port: int, streams: int, events: int, period_us: int, seconds: float) -> Delays:
    """Keep `streams` requests of `events` events open for so long, then read them to their ends.

    The requests start evenly over the time of one request, so that as many start in each part of a second.
    """
    delays, request = Delays(), request_bytes(events, period_us)
    readers: list[Reader] = []
    lifetime_s = events * period_us / 1e6
    with selectors.DefaultSelector() as selector:
        begin_s = time.monotonic()
        end_s = begin_s + seconds
        starts = [(begin_s + lifetime_s * index / streams, index) for index in range(streams)]
        open_requests = 0
        while starts or open_requests:
            now_s = time.monotonic()
            while starts and starts[0][0] <= now_s:
                due_s, index = heapq.heappop(starts)
                if due_s < end_s:
                    delays.late_ns = max(delays.late_ns, int((now_s - due_s) * 1e9))
                    if index == len(readers):  # the server closes a connection whose first request is late
                        readers.append(Reader(socket.create_connection((HOST, port))))
                        selector.register(readers[index].sock, selectors.EVENT_READ, readers[index])
                    readers[index].waits = True
                    readers[index].sock.sendall(request)
                    open_requests += 1
            if not starts and not open_requests:
                break
            ready = selector.select(max(starts[0][0] - now_s, 0) if starts else _LIMIT_S)
            if not ready and not starts:
                raise RuntimeError(f"no event within {_LIMIT_S:g} s, {open_requests} requests are open")
            for key, _ in ready:
                if _receive(key.data, delays):
                    open_requests -= 1
                    heapq.heappush(starts, (time.monotonic(), readers.index(key.data)))
    for reader in readers:
        reader.sock.close()
    return delays


def _receive(reader: Reader, delays: Delays) -> bool:
    """Count the events that have arrived; True at the end of the request."""
    data = reader.sock.recv(1 << 16)
    now_ns = time.monotonic_ns()
    if not data:
        raise RuntimeError(f"the server closed a connection: {reader.tail[-200:]!r}")
    text = reader.tail + data
    if text.startswith(b"HTTP/1.1 ") and not text.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"a request was refused: {text[-300:]!r}")
    if reader.waits and (match := _SENT.search(text)) is not None and match.end() < len(text):
        delays.first_ns.append(now_ns - int(match[1]))
        reader.waits = False
    delays.events += text.count(b"}\n\n") - reader.tail.count(b"}\n\n")
    is_end = text.endswith(_END)
    delays.requests += is_end
    reader.tail = b"" if is_end else text[-512:]
    return is_end


def percentiles(values_ns: Sequence[int]) -> dict[str, float]:
    """Return count, median, 99th percentile and maximum in milliseconds."""
    ordered = sorted(values_ns)
    last = len(ordered) - 1
    marks = {"p50": last // 2, "p99": min(last * 99 // 100 + 1, last), "max": last}
    return {"count": len(ordered), **{f"{name}_ms": round(ordered[at] / 1e6, 2) for name, at in marks.items()}}


def measure_first(server: Running, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the rate of events that the server reaches with as many streams, then first events at half of it."""
    stream(server.port, 8, 100, 0, 1)  # warm
    begin_s = time.monotonic()
    full = stream(server.port, options.streams, options.events, 1000, options.seconds / 4)
    full_hz = full.events / (time.monotonic() - begin_s)
    rate_hz = options.rate or full_hz / 2
    period_us = max(int(options.streams / rate_hz * 1e6), 1)
    begin_s = time.monotonic()
    half = stream(server.port, options.streams, options.events, period_us, options.seconds)
    lasted_s = time.monotonic() - begin_s
    return {
        "streams": options.streams,
        "full_events_per_s": round(full_hz),
        "events_per_s": round(half.events / lasted_s),
        "requests": half.requests,
        "expected_events": half.requests * options.events,
        "events": half.events,
        "first_event": percentiles(half.first_ns),
        "client_late_ms": round(half.late_ns / 1e6, 2),
    }


def measure_stalled(server: Running, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the memory of readers that stop to read after the first event."""
    stream(server.port, 4, 10, 0, 1)
    before_bytes, before_total = _own_bytes(server.pid), resident_bytes(server.pid)
    request = request_bytes(100_000, 0, options.pad_bytes)
    readers = []
    for _ in range(options.stalled):
        sock = socket.create_connection((HOST, server.port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        sock.sendall(request)
        sock.recv(4096)
        readers.append(sock)
    sizes = [resident_bytes(server.pid)]
    while len(sizes) < 6 or max(sizes[-6:]) - min(sizes[-6:]) > 1 << 20:  # until it stays the same for 3 s
        time.sleep(0.5)
        sizes.append(resident_bytes(server.pid))
    after_bytes, after_total = _own_bytes(server.pid), resident_bytes(server.pid)
    for sock in readers:
        sock.close()
    each_mib = (after_bytes - before_bytes) / options.stalled / (1 << 20)
    all_mib = (after_total - before_total) / options.stalled / (1 << 20)
    return {
        "stalled": options.stalled,
        "pad_bytes": options.pad_bytes,
        "server_mib_each": round(each_mib, 2),
        "server_and_model_mib_each": round(all_mib, 2),
    }


def _own_bytes(pid: int) -> int:
    """Return the resident memory of a process without its descendants."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_cancel(server: Running, options: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Measure the time from a client's close to the model that sees it."""
    seen: dict[str, list[int]] = {"reset": [], "end": []}
    for number in range(2 * options.cancels):
        how = "reset" if number % 2 else "end"
        sock = socket.create_connection((HOST, server.port))
        sock.sendall(request_bytes(0, 0))
        text = b""
        while not text.endswith(b"}\n\n\r\n"):
            text += sock.recv(4096)
        if how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        closed_ns = time.monotonic_ns()
        sock.close()
        while len(found := re.findall(r"cancelled (\d+)", log.read_text("utf-8", "replace"))) <= number:
            time.sleep(0.002)
        seen[how].append(int(found[-1]) - closed_ns)
    return {f"{how}_to_cancelled": percentiles(values) for how, values in seen.items()}


@contextmanager
def events_server(folder: Path, options: Sequence[str]) -> Iterator[Running]:
    """Start a server with the model `events`; its log is in `folder`."""
    model = folder / "repository" / "events" / "1"
    model.mkdir(parents=True)
    (model / "model.py").write_text(MODEL)
    (model.parent / "config.pbtxt").write_text(CONFIG)
    with running(headrace(folder / "repository", options=options), folder) as server:
        yield server


def main() -> None:
    """Start from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000, help="open streams")
    parser.add_argument("--events", type=int, default=20, help="events of each")
    parser.add_argument(
        "--rate", type=float, default=0, help="events per second of all; 0: half of what the server reaches"
    )
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--stalled", type=int, default=0, help="measure the memory of so many stalled readers instead")
    parser.add_argument("--pad-bytes", type=int, default=65_536, help="size of a response of --stalled")
    parser.add_argument("--cancel", action="store_true", help="measure cancellations instead")
    parser.add_argument("--cancels", type=int, default=40, help="cancellations of each kind")
    parser.add_argument("server_options", nargs="*", help="options of headrace serve, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, events_server(Path(name), options.server_options) as server:
        if options.stalled:
            result = measure_stalled(server, options)
        elif options.cancel:
            (log,) = Path(name).glob("*.log")
            result = measure_cancel(server, options, log)
        else:
            result = measure_first(server, options)
    result["load_average"] = round(statistics.fmean(os.getloadavg()[:1]), 1)
    json.dump(result, sys.stdout)
    print()


if __name__ == "__main__":
    main()
