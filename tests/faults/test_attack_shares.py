"""Attacks by one client on the share of the others: waiting sequences, unread streams (S50, S51 in docs/security.md)."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2

from tests.support.attacks import SERVICE, Attacked, head, watched
from tests.support.decoupled_models import HEAD
from tests.support.http2_peer import HELLO, data, grpc_head, message, request
from tests.support.models import add_model, affine
from tests.support.python_models import add_python_model
from tests.support.sequence_models import add_state_sums
from tests.support.serving import HOST, serving
from tests.support.waiting import until

MANY = 300
MAX_OPEN = 8
STREAMS = 3 * MAX_OPEN
# Two seconds until a sequence gives way; the rest is for a busy machine.
WAIT_S = 15.0

TEXTS_CONFIG = f"""
backend: "python"
max_batch_size: 0
model_transaction_policy {{ decoupled: True }}
input [ {{ name: "SIZE" data_type: TYPE_INT32 dims: [ 1 ] }}, {{ name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
parameters {{ key: "headrace.max_open_requests" value {{ string_value: "{MAX_OPEN}" }} }}
"""
# Sends COUNT texts of SIZE bytes from a thread, small ones every 50 ms.
TEXTS = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            size, count = (int(value(request, name)[0]) for name in ("SIZE", "COUNT"))
            sender = request.get_response_sender()
            threading.Thread(target=self.send, args=(sender, size, count), daemon=True).start()
        return None

    def send(self, sender, size, count):
        text = np.array([b"x" * size], object)
        for _ in range(count):
            if sender.is_cancelled():
                break
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)]))
            time.sleep(0 if size > 1000 else 0.05)
        sender.send(flags=FINAL)
"""
)


@contextmanager
def shared(folder: Path, front_ends: str) -> Iterator[Attacked]:
    """A server with a model of two slots on each instance, in one process or with front ends."""
    repository = folder / "models"
    add_model(repository, "affine", affine(), config="max_batch_size: 64\ndynamic_batching { }")
    add_state_sums(repository, "sums", "oldest { max_candidate_sequences: 2 }", fails=False)
    add_python_model(repository, "texts", TEXTS, TEXTS_CONFIG)
    with serving(repository, folder, "--front-ends", front_ends) as server:
        yield Attacked(server, repository)


def body(correlation_id: int, **flags: bool) -> bytes:
    """A request of a sequence."""
    x = {"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}
    parameters = {"sequence_id": correlation_id, **flags}
    return json.dumps({"inputs": [x], "outputs": [{"name": "Y"}], "parameters": parameters}).encode()


def total(server: Attacked, correlation_id: int, **flags: bool) -> float:
    """Sum of the sequence of another client, after one more request."""
    headers = {"X-Headrace-Client": "other"}
    status, _, content = server.server.request("POST", "/v2/models/sums/infer", body(correlation_id, **flags), headers)
    assert status == 200, content
    return float(json.loads(content)["outputs"][0]["data"][0])


@pytest.mark.parametrize("front_ends", ["0", "2"])
def test_sequences_that_wait_leave_a_slot_to_other_clients(tmp_path: Path, front_ends: str) -> None:
    """A client starts 300 sequences that never end: another one gets a slot, and its sequence goes on."""
    with shared(tmp_path, front_ends) as server:
        with watched(server, f"S50 sequences, {front_ends} front ends") as watch, ExitStack() as stack:
            for number in range(MANY):
                content = body(1000 + number, sequence_start=True)
                wire = stack.enter_context(server.connect())
                length = f"Content-Length: {len(content)}"
                wire.pour([head("/v2/models/sums/infer", length, "X-Headrace-Client: many") + content])
            until(lambda: sum(server.samples("headrace_sequence_backlog", model="sums")) >= MANY / 2)
            start_s = time.monotonic()
            assert total(server, 1, sequence_start=True) == 1.0
            assert time.monotonic() - start_s < WAIT_S
            start_s = time.monotonic()
            assert [total(server, 1) for _ in range(20)] == [2.0 + step for step in range(20)]
            assert time.monotonic() - start_s < WAIT_S, "its requests do not wait for those of the other client"
            assert total(server, 1, sequence_end=True) == 22.0
            assert server.samples("headrace_sequence_ends_total", model="sums", reason="share") == [1.0]
        until(lambda: not sum(server.samples("headrace_sequence_backlog", model="sums")))
        watch.check()
        server.still_serves()


@pytest.mark.parametrize("front_ends", ["0", "2"])
@pytest.mark.parametrize(
    ("protocol", "size", "client"),
    [("http", 1 << 20, ""), ("grpc", 1 << 20, ""), ("http", 10, "many")],
    ids=["unread", "unread gRPC", "endless"],
)
def test_streams_leave_room_to_other_clients(
    tmp_path: Path, front_ends: str, protocol: str, size: int, client: str
) -> None:
    """More streams than a model may have open: unread ones give way to any request, others to those of other clients."""
    with shared(tmp_path, front_ends) as server:
        assert texts(server) == 3
        with watched(server, f"S51 streams of {size} bytes, {front_ends} front ends") as watch, ExitStack() as stack:
            port = server.server.port if protocol == "http" else server.server.grpc_port
            content = endless_stream(protocol, size, client)
            for _ in range(STREAMS):
                sock = stack.enter_context(socket.socket())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.connect((HOST, port))
                sock.sendall(content)
            until(lambda: arrived(server) >= STREAMS)
            start_s = time.monotonic()
            assert [texts(server) for _ in range(3)] == [3, 3, 3]
            assert time.monotonic() - start_s < 3 * WAIT_S
        until(lambda: not sum(server.samples("headrace_queue_depth", model="texts")))
        start_s = time.monotonic()
        assert texts(server) == 3
        assert time.monotonic() - start_s < WAIT_S
        watch.check()
        server.still_serves()


def arrived(server: Attacked) -> float:
    """Streams that wait, are open, or have given way: those that are not read give way to others from 2 s on."""
    names = ("headrace_queue_depth", "headrace_in_flight", "headrace_failures_total")
    return sum(sum(server.samples(name, model="texts")) for name in names)


def endless_stream(protocol: str, size: int, client: str) -> bytes:
    """First bytes of a connection: a request for a million texts."""
    count = 1_000_000
    if protocol == "grpc":
        call = service_pb2.ModelInferRequest(model_name="texts")
        for name, number in (("SIZE", size), ("COUNT", count)):
            call.inputs.add(name=name, datatype="INT32", shape=[1])
            call.raw_input_contents.append(struct.pack("<i", number))
        opening = request(1, end=False, fields=grpc_head(SERVICE + "ModelStreamInfer"))
        return HELLO + opening + data(1, message(call.SerializeToString()))
    content = json.dumps({"SIZE": size, "COUNT": count}).encode()
    lines = [f"Content-Length: {len(content)}", *([f"X-Headrace-Client: {client}"] if client else [])]
    return head("/v2/models/texts/generate_stream", *lines) + content


def texts(server: Attacked) -> int:
    """Number of events of a short stream of another client."""
    headers = {"X-Headrace-Client": "other"}
    content = json.dumps({"SIZE": 10, "COUNT": 3}).encode()
    status, _, events = server.server.request("POST", "/v2/models/texts/generate_stream", content, headers)
    assert status == 200, events
    return events.count(b"xxxxxxxxxx")
