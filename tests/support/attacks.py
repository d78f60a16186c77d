"""A server under attack: ways to send what no client library sends, and to see what became of the server."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2

from tests.support.liveness import LivenessProbe
from tests.support.models import add_model, affine, busy, identity, row_sums, table_lookup
from tests.support.serving import COMMAND, HOST, Server, serving

pb: Any = service_pb2
SERVICE = "/inference.GRPCInferenceService/"
MAX_BODY_BYTES = 12 << 20
OPTIONS = ("--model-control", "explicit", "--load-model", "*", "--allow-client-shm", "--allow-model-override")
# Allowed growth of the server's memory under an attack: allocators keep some memory, and other tests use the same server.
FLAT_BYTES = 48 << 20
# The memory of the server is back after an attack if it is within this share of the memory before. Tests accept some more: parts
# of the server allocate memory at their first use, and keep it.
BACK_SHARE = 0.05
BACK_BYTES = 16 << 20
# Time in which free memory of the heap returns to the system, in seconds.
RETURN_S = 8.0


UNBOUNDED_WAITS = 'parameters { key: "headrace.max_queue_wait_microseconds" value { string_value: "0" } }'


def build(repository: Path) -> Path:
    """The models: `affine` and `identity_bytes` answer, `row_sums` takes any width, `busy` computes for a given time."""
    add_model(repository, "affine", affine(), config="max_batch_size: 64\ndynamic_batching { }")
    add_model(repository, "identity_bytes", identity("BYTES"))
    add_model(repository, "row_sums", row_sums(), config="max_batch_size: 8\ndynamic_batching { }")
    # Its requests wait for minutes, and none is refused for that.
    add_model(repository, "busy", busy(), config=UNBOUNDED_WAITS)
    add_model(repository, "table_lookup", table_lookup())
    add_model(repository, "broken", b"this is no ONNX file")
    return repository


@contextmanager
def attack(folder: Path, *options: str, command: Sequence[str] = COMMAND) -> Iterator[Attacked]:
    """A server of its own for the length of a `with`; then it must stop as every server does, with status 0."""
    repository = build(folder / "models")
    limits = ("--max-body-bytes", str(MAX_BODY_BYTES))
    with serving(repository, folder, *limits, *OPTIONS, *options, command=command) as running:
        yield Attacked(running, repository)


def http_changes(log_verbose_level: int, trace_rate: str) -> dict[str, dict[str, Any] | None]:
    """Every HTTP route that changes state, with a body that it accepts; None for an empty one. The region need not exist.

    Args:
        log_verbose_level, trace_rate: values of the bodies.
    """
    return {
        "/v2/repository/models/affine/load": {},
        "/v2/repository/models/affine/unload": {},
        "/v2/logging": {"log_verbose_level": log_verbose_level},
        "/v2/trace/setting": {"trace_rate": trace_rate},
        "/v2/models/affine/trace/setting": {"trace_rate": trace_rate},
        "/v2/systemsharedmemory/region/r/register": {"key": "/r", "byte_size": 1},
        "/v2/systemsharedmemory/region/r/unregister": None,
        "/v2/systemsharedmemory/unregister": None,
        "/v2/cudasharedmemory/region/r/register": {"raw_handle": {"b64": ""}, "device_id": 0, "byte_size": 1},
        "/v2/cudasharedmemory/region/r/unregister": None,
        "/v2/cudasharedmemory/unregister": None,
    }


def x_json(**more: object) -> dict[str, Any]:
    """The input of `affine` in JSON."""
    return {"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16, **more}


def http_body(*inputs: object, **more: object) -> bytes:
    """An inference request; of `affine` without arguments."""
    return json.dumps({"inputs": list(inputs) or [x_json()], **more}).encode()


def grpc_request(**more: object) -> Any:
    """A request for `affine`."""
    request = pb.ModelInferRequest(model_name="affine", **more)
    request.inputs.add(name="X", datatype="FP32", shape=[1, 16])
    request.raw_input_contents.append(bytes(64))
    return request


def busy_request(steps: int) -> Any:
    """A request for `busy`, which computes for so many steps: some 30 us each, and not less than 50 in a ms."""
    request = pb.ModelInferRequest(model_name="busy")
    request.inputs.add(name="STEPS", datatype="INT64", shape=[1])
    request.raw_input_contents.append(struct.pack("<q", steps))
    return request


@dataclass
class Attacked:
    """Server under attack.

    Attributes:
        server: its process and ports.
        repository: the folder of its models.
    """

    server: Server
    repository: Path

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    def post(self, path: str, body: bytes, **headers: str) -> tuple[int, str]:
        """Status and text of the error, "" if there is none."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        status, _, content = self.server.request("POST", path, body, named)
        return status, _error(content)

    def infer(self, body: bytes, model: str = "affine", **headers: str) -> tuple[int, str]:
        """Status and text of the error of an inference request."""
        return self.post(f"/v2/models/{model}/infer", body, **headers)

    def connect(self) -> Wire:
        """A connection for bytes of any kind."""
        return Wire(socket.create_connection((HOST, self.server.port), timeout=20))

    # --- gRPC ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """A channel of its own, which sends and takes messages of any size."""
        unbounded = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        with grpc.insecure_channel(self.server.grpc_address, options=unbounded) as connected:
            yield connected

    def call(self, message: Any, method: str = "ModelInfer", **more: Any) -> tuple[str, str]:
        """Code and text of a call that may fail; ("OK", "") if it does not."""
        content = message if isinstance(message, bytes) else message.SerializeToString()
        with self.channel() as channel:
            try:
                channel.unary_unary(SERVICE + method)(content, timeout=30, **more)
            except grpc.RpcError as error:
                return error.code().name, error.details() or ""
        return "OK", ""

    # --- What became of the server ------------------------------------------------------------------------------------

    def samples(self, name: str, **labels: str) -> list[float]:
        """The values of a metric with these labels."""
        _, _, page = self.server.request("GET", "/metrics")
        # The parser takes 40 ms for a whole page, and many tests wait for a value.
        lines = [line for line in page.decode().splitlines() if line.startswith((name + "{", name + " "))]
        return [
            sample.value
            for family in text_string_to_metric_families("\n".join([*lines, ""]))
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def reached(self, limit: str, protocol: str = "http") -> float:
        """Return the number of times that a limit was reached since the start of the server."""
        (count,) = self.samples("headrace_limit_hits_total", limit=limit, protocol=protocol)
        return count

    @contextmanager
    def reaches(self, limit: str, protocol: str = "http", times: int = 1) -> Iterator[None]:
        """Fail unless a limit is counted so often in the `with`."""
        before = self.reached(limit, protocol)
        yield
        met = self.reached(limit, protocol) - before
        assert met == times, f"{limit} was met {met:g} times"

    def memory_bytes(self) -> int:
        """Return the resident memory of the process, in bytes."""
        return self._status("VmRSS") << 10

    def peak_bytes(self) -> int:
        """Return the peak of the resident memory since `forget_peak`, in bytes."""
        return self._status("VmHWM") << 10

    def forget_peak(self) -> int:
        """Reset the peak and return the resident memory, in bytes."""
        Path(f"/proc/{self.server.process.pid}/clear_refs").write_text("5")
        return self.memory_bytes()

    def threads(self) -> int:
        """Return the number of threads."""
        return self._status("Threads")

    def descriptors(self) -> int:
        """Return the number of open files and sockets."""
        return len(list(Path(f"/proc/{self.server.process.pid}/fd").iterdir()))

    def _status(self, name: str) -> int:
        text = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return int(next(line for line in text.splitlines() if line.startswith(name + ":")).split()[1])

    @contextmanager
    def flat_memory(self, room_bytes: int = FLAT_BYTES) -> Iterator[None]:
        """Fail if the server's memory grows beyond `room_bytes` at any moment of the `with`."""
        self.still_serves()
        before = self.forget_peak()
        yield
        grown = self.peak_bytes() - before
        assert grown < room_bytes, f"the server's memory grew by {grown >> 20} MiB"

    def still_serves(self) -> None:
        """Fail unless both protocols serve as before, without a trace of a fault in the log."""
        assert self.infer(http_body()) == (200, "")
        assert self.call(grpc_request()) == ("OK", "")
        text = self.server.text
        assert "Traceback" not in text, text[max(0, text.index("Traceback") - 1000) :][:8000]


class Wire:
    """A TCP connection of HTTP/1.1."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._read_ahead = b""  # of the next answer: two may arrive together

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def pour(self, parts: Iterable[bytes]) -> bool:
        """Send all parts; False if the server has closed before."""
        try:
            for part in parts:
                self.socket.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def answer(self) -> tuple[int, str]:
        """Status and error text of an answer; (0, "") if the server closes instead."""
        data = self._read_ahead
        try:
            while b"\r\n\r\n" not in data or len(data) < _size(data):
                more = self.socket.recv(65536)
                if not more:
                    break
                data += more
        except ConnectionResetError:
            pass
        if not data:
            return 0, ""
        data, self._read_ahead = data[: _size(data)], data[_size(data) :]
        head, _, body = data.partition(b"\r\n\r\n")
        return int(head.split()[1]), _error(body)

    def closed(self) -> bool:
        """Read until the server closes; fails with a time-out if it does not."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass
        return True


# Slowest answer of the liveness probe during an attack, on a machine that runs other tests at the same time.
LIVENESS_S = 2.0
# Threads that a server may start at its first use of a pool, and keep.
POOL_THREADS = 16


@dataclass
class Watch:
    """Liveness, memory, threads and descriptors of a server around an attack; see `watched`.

    Attributes:
        server: the attacked server.
        name: of the attack, in the figures.
        probe: the liveness probe.
        before_bytes: resident memory before the attack.
        before_threads: threads before it.
        before_descriptors: open files and sockets before it.
        peak_bytes: largest resident memory during it.
    """

    server: Attacked
    name: str
    probe: LivenessProbe
    before_bytes: int
    before_threads: int
    before_descriptors: int
    peak_bytes: int = 0

    def check(self, room_bytes: int = BACK_BYTES, liveness_s: float = LIVENESS_S, timeout_s: float = 30.0) -> None:
        """Fail unless the server was live all the time and its memory, threads and descriptors are back.

        The exact figures go to the file that the variable ATTACK_FIGURES names, one JSON object a line. The bounds here hold on
        a busy machine.

        Args:
            room_bytes: memory that may stay. The figures are those after the memory is within `BACK_SHARE`, or after `RETURN_S`.
            liveness_s: slowest answer allowed.
            timeout_s: time for memory, threads and descriptors to return.
        """
        server, probe = self.server, self.probe
        begun = time.monotonic()
        while not self._is_back(int(BACK_SHARE * self.before_bytes)) and time.monotonic() < begun + RETURN_S:
            time.sleep(0.05)
        while not (is_back := self._is_back(room_bytes)) and time.monotonic() < begun + timeout_s:
            time.sleep(0.05)
        figures = {
            "attack": self.name,
            "probes": len(probe.latencies_s),
            "unanswered": len(probe.failed_s),
            "liveness_p50_ms": round(1e3 * probe.quantile_s(0.5), 2),
            "liveness_p99_ms": round(1e3 * probe.quantile_s(0.99), 2),
            "liveness_max_ms": round(1e3 * probe.quantile_s(1.0), 2),
            "memory_before_mb": round(self.before_bytes / 1e6, 1),
            "memory_peak_mb": round(self.peak_bytes / 1e6, 1),
            "memory_after_mb": round(server.memory_bytes() / 1e6, 1),
            "threads": server.threads() - self.before_threads,
            "descriptors": server.descriptors() - self.before_descriptors,
        }
        if path := os.environ.get("ATTACK_FIGURES", ""):
            with open(path, "a") as file:
                file.write(json.dumps(figures) + "\n")
        assert is_back, f"memory, threads or descriptors are not back: {figures}"
        assert not probe.failed_s, f"liveness was not answered: {figures}"
        assert probe.quantile_s(1.0) < liveness_s, f"liveness was slow: {figures}"

    def _is_back(self, room_bytes: int) -> bool:
        server = self.server
        return (
            server.memory_bytes() - self.before_bytes < room_bytes
            and server.threads() - self.before_threads <= POOL_THREADS
            and server.descriptors() <= self.before_descriptors + 2
        )


@contextmanager
def watched(server: Attacked, name: str) -> Iterator[Watch]:
    """Watch a server during the attack in a `with`; call `check` of the watch after it.

    Args:
        server: the server; it answers a request of each protocol before the watch begins.
        name: of the attack: its number in docs/security.md and a few words.
    """
    server.still_serves()
    watch = Watch(
        server,
        name,
        LivenessProbe(HOST, server.server.port, server.server.process.pid),
        0,
        server.threads(),
        server.descriptors(),
    )
    watch.before_bytes = server.forget_peak()
    with watch.probe:
        yield watch
    watch.peak_bytes = server.peak_bytes()


def head(path: str = "/v2/models/affine/infer", *headers: str) -> bytes:
    """Request line and headers."""
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: localhost", *headers, "", "")).encode()


def is_idle(attacked: Attacked, model: str) -> bool:
    """Nothing in the queue, nothing in flight."""
    names = ("headrace_in_flight", "headrace_queue_depth")
    return not any(sum(attacked.samples(name, model=model)) for name in names)


def is_closed(sock: socket.socket, within_s: float) -> bool:
    """True if the other side closes in time; what it says before is dropped."""
    sock.settimeout(within_s)
    with closing(sock):
        try:
            while sock.recv(65536):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
    return True


def _size(data: bytes) -> int:
    answer_head, _, _ = data.partition(b"\r\n\r\n")
    for line in answer_head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(answer_head) + 4 + int(line.split(b":")[1])
    return len(data)


def _error(content: bytes) -> str:
    if not content:
        return ""
    try:
        answer = json.loads(content)
    except ValueError:
        pytest.fail(f"the answer is no JSON: {content[:200]!r}")
    return str(answer.get("error", "")) if isinstance(answer, dict) else ""
