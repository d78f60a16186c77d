"""Attacks by leaving: ten thousand callers that go at every moment (line 17 of the table in docs/security.md)."""

from __future__ import annotations

import itertools
import random
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tests.support.attacks import SERVICE, Attacked, busy_request, grpc_request, head, http_body, is_idle
from tests.support.serving import HOST
from tests.support.waiting import until

pytestmark = pytest.mark.slow

pb: Any = service_pb2
INFER = SERVICE + "ModelInfer"
INFER_PATH = "/v2/models/affine/infer"
STEPS_PER_S = 20_000  # of `busy`, at the most


def counts(attacked: Attacked, model: str) -> dict[str, float]:
    """Requests of a model so far, by how they ended."""
    failures = sum(attacked.samples("headrace_failures_total", model=model))
    return {"answered": sum(attacked.samples("headrace_requests_total", model=model)), "failed": failures}


def settled(attacked: Attacked, before: dict[str, float], model: str, most: int) -> None:
    """Everything has ended, once: no request is counted twice, none is left."""
    until(lambda: is_idle(attacked, model))
    after = counts(attacked, model)
    assert after["answered"] + after["failed"] - before["answered"] - before["failed"] <= most


def test_ten_thousand_calls_that_are_cancelled(attacked: Attacked) -> None:
    """At any moment between the sending and the answer: on the way, in the queue, in execution, on the way back."""
    content, rng, total, batch = grpc_request().SerializeToString(), random.Random(3), 10_000, 250
    threads, descriptors = attacked.threads(), attacked.descriptors()
    with attacked.flat_memory(), attacked.channel() as channel:
        before = counts(attacked, "affine")  # with the two requests that `flat_memory` sends
        infer = channel.unary_unary(INFER)
        for _ in range(total // batch):
            futures = [infer.future(content, timeout=30) for _ in range(batch)]
            rng.shuffle(futures)
            for index, future in enumerate(futures):
                if index % 50 == 0:
                    time.sleep(rng.random() * 0.004)
                future.cancel()
        assert infer(content, timeout=30), "the channel is as good as new"
    settled(attacked, before, "affine", total + 1)
    until(lambda: attacked.descriptors() <= descriptors + 2)
    assert attacked.threads() <= threads + 4
    attacked.still_serves()


def test_ten_thousand_http_clients_disconnect(attacked: Attacked) -> None:
    body, rng, total = http_body(), random.Random(5), 10_000
    content = head(INFER_PATH, f"Content-Length: {len(body)}") + body
    before, threads, descriptors = counts(attacked, "affine"), attacked.threads(), attacked.descriptors()

    def leave(number: int) -> None:
        with socket.create_connection((HOST, attacked.server.port)) as sock:
            if number % 3 == 0:  # a reset instead of a good-bye
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(content[: rng.randrange(len(content))] if number % 5 == 0 else content)
            time.sleep(rng.random() * 0.003)

    with attacked.flat_memory(), ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(total)))
    settled(attacked, before, "affine", total)
    until(lambda: attacked.descriptors() <= descriptors + 2)
    assert attacked.threads() <= threads + 4
    attacked.still_serves()


def test_callers_that_disconnect_while_queued_and_running(attacked: Attacked, channel: grpc.Channel) -> None:
    """One that computes and a thousand that wait; all leave but every tenth, which must all be answered."""
    before = counts(attacked, "busy")
    infer = channel.unary_unary(INFER)
    first = infer.future(busy_request(5 * STEPS_PER_S).SerializeToString(), timeout=60)
    until(lambda: sum(attacked.samples("headrace_in_flight", model="busy")) >= 1)
    waiting = [infer.future(busy_request(1).SerializeToString(), timeout=60) for _ in range(1_000)]
    until(lambda: sum(attacked.samples("headrace_queue_depth", model="busy")) >= 900)
    first.cancel()
    stay = waiting[::10]
    for number, future in enumerate(waiting):
        if number % 10:
            future.cancel()
    for future in stay:
        answer = pb.ModelInferResponse.FromString(future.result())
        assert struct.unpack("<f", answer.raw_output_contents[0]) == (1.0,)
    settled(attacked, before, "busy", 1_001)
    attacked.still_serves()


@pytest.mark.parametrize("read_first", [0, 3])
def test_streams_that_are_cancelled_in_the_middle(attacked: Attacked, read_first: int) -> None:
    before = counts(attacked, "affine")
    content = grpc_request().SerializeToString()
    with attacked.flat_memory(), attacked.channel() as channel:
        for _ in range(100):
            call = channel.stream_stream(SERVICE + "ModelStreamInfer")(itertools.repeat(content), timeout=30)
            for _, _ in zip(range(read_first), call, strict=False):
                pass
            call.cancel()
    until(lambda: is_idle(attacked, "affine"))
    after = counts(attacked, "affine")
    assert after["answered"] - before["answered"] >= 100 * read_first
    attacked.still_serves()
