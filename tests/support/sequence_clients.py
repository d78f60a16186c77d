"""Clients of a server with sequences that send random requests and compare each response with a dictionary.

Each client has correlation ids of its own, and a dictionary from id to the sums that its sequence may have: a request that was
cancelled or failed may have run or not. A response must be one of these sums plus the value of its request. Any other one has
read the state of another sequence, or a state that lacks a request.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.support.serving import Server

_ANSWER_S = 60.0
# Values below have a meaning for the accumulator of `tests.support.sequence_models`.
_SMALLEST, _LARGEST = 2000, 1 << 16


class Cancelled(Exception):
    """The client has cancelled the request."""


class SequenceClient:
    """One client; `run` sends requests on its thread.

    Args:
        server: the server.
        model: an accumulator of `tests.support.sequence_models`.
        number: number of the client; its ids begin at `1000 * number`.
        seed: seed of all choices.

    Attributes:
        cancels_out_of_order: a cancelled request may arrive after later ones: its id is not used again.
        counts: number of each outcome.
        problems: responses that the dictionary does not allow.
        process: process of the last response; 0 before the first.
    """

    cancels_out_of_order = False

    def __init__(self, server: Server, model: str, number: int, seed: int) -> None:
        self.server, self.model = server, model
        self._numbers = itertools.count(1000 * number)
        self._ids = [next(self._numbers) for _ in range(3)]
        self._choose = random.Random(seed)
        self._sums: dict[int, set[int]] = {}  # possible sums of each live sequence
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.process = 0

    def run(self, steps: int) -> None:
        """Send requests, and end all sequences."""
        try:
            self.open()
            for _ in range(steps):
                self._step()
            for sequence_id in list(self._sums):
                self._request(sequence_id, 0, False, True)
            self.close()
        except Exception as error:  # shown by the test, which would not see it on this thread
            self.problems.append(f"{type(error).__name__}: {error}")

    def _step(self) -> None:
        choose, sequence_id = self._choose, self._choose.choice(self._ids)
        is_live = sequence_id in self._sums
        start = choose.random() < (0.08 if is_live else 0.85)
        cancel_s = choose.choice((0.0001, 0.001, 0.01)) if choose.random() < 0.08 else 0.0
        timeout_us = choose.choice((1, 500, 20_000)) if choose.random() < 0.08 else 0
        self._request(sequence_id, timeout_us, start, choose.random() < 0.15, cancel_s)

    def _request(self, sequence_id: int, timeout_us: int, start: bool, end: bool, cancel_s: float = 0.0) -> None:
        value = self._choose.randint(_SMALLEST, _LARGEST)
        before = self._sums.get(sequence_id, set())
        allowed = {value} if start else {each + value for each in before}
        what = f"id {sequence_id}, value {value}, start {start}, end {end}, allowed {sorted(allowed)}"
        try:
            total = self.send(value, sequence_id, start, end, timeout_us, cancel_s)
        except Cancelled:
            self.counts["cancelled"] += 1
            self._sums[sequence_id] = before | allowed
            if self.cancels_out_of_order:
                del self._sums[sequence_id]
                self._ids = [next(self._numbers) if each == sequence_id else each for each in self._ids]
        except InferenceServerException as error:
            self._on_error(str(error), sequence_id, start, before | allowed, what)
        else:
            self.counts["answered"] += 1
            if total not in allowed:
                self.problems.append(f"{what}: the server returned {total}")
            self._sums[sequence_id] = {total}
            if end:
                del self._sums[sequence_id]

    def _on_error(self, text: str, sequence_id: int, start: bool, possible: set[int], what: str) -> None:
        """Record an error: the sequence has ended, or the request may have run."""
        if "START flag" in text:
            self.counts["not live"] += 1
            if start:
                self.problems.append(f"{what}: {text}")
            self._sums.pop(sequence_id, None)
            return
        for part, name in (("timeout", "timed out"), ("died", "died"), ("has ended", "ended"), ("", "other")):
            if part in text:
                self.counts[name] += 1
                break
        self._sums[sequence_id] = possible

    # By protocol

    def open(self) -> None:
        """Connect, on the client's thread."""
        raise NotImplementedError

    def close(self) -> None:
        """Disconnect."""
        raise NotImplementedError

    def send(self, value: int, sequence_id: int, start: bool, end: bool, timeout_us: int, cancel_s: float) -> int:
        """Send a request and return the sum of the response.

        Args:
            value: to add.
            sequence_id, start, end: sequence of the request.
            timeout_us: longest time in the queue, 0 for none.
            cancel_s: time after which the client cancels, 0 for never.

        Raises:
            Cancelled: it was cancelled.
            InferenceServerException: the server returned an error.
        """
        raise NotImplementedError


def _tensor(kind: Any, value: int) -> list[Any]:
    return [kind.InferInput("INPUT", (1, 1), "INT32").set_data_from_numpy(np.array([[value]], np.int32))]


class HttpClient(SequenceClient):
    """Sends requests over HTTP; cancels by closing a connection that has this request only."""

    cancels_out_of_order = True

    def open(self) -> None:
        """Connect; the client of gevent belongs to one thread."""
        self._client = triton_http.InferenceServerClient(self.server.address)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def send(self, value: int, sequence_id: int, start: bool, end: bool, timeout_us: int, cancel_s: float) -> int:
        """Send a request of a sequence and return its result."""
        if cancel_s:
            return self._send_and_leave(value, sequence_id, start, end, cancel_s)
        fields = {"sequence_id": sequence_id, "sequence_start": start, "sequence_end": end}
        result = self._client.infer(self.model, _tensor(triton_http, value), timeout=timeout_us or None, **fields)
        self.process = int(result.as_numpy("PROCESS")[0, 0])
        return int(result.as_numpy("OUTPUT")[0, 0])

    def _send_and_leave(self, value: int, sequence_id: int, start: bool, end: bool, cancel_s: float) -> int:
        parameters = {"sequence_id": sequence_id, "sequence_start": start, "sequence_end": end}
        tensor = {"name": "INPUT", "shape": [1, 1], "datatype": "INT32", "data": [value]}
        connection = http.client.HTTPConnection(self.server.address, timeout=_ANSWER_S)
        body = json.dumps({"inputs": [tensor], "parameters": parameters})
        connection.request("POST", f"/v2/models/{self.model}/infer", body)
        time.sleep(cancel_s)
        connection.close()
        raise Cancelled


class GrpcClient(SequenceClient):
    """Sends unary gRPC calls."""

    def open(self) -> None:
        """Connect."""
        self._client = triton_grpc.InferenceServerClient(self.server.grpc_address)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def send(self, value: int, sequence_id: int, start: bool, end: bool, timeout_us: int, cancel_s: float) -> int:
        """Send a request of a sequence and return its result."""
        answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        fields: dict[str, Any] = {"sequence_id": sequence_id, "sequence_start": start, "sequence_end": end}
        call = self._client.async_infer(
            self.model,
            _tensor(triton_grpc, value),
            lambda result, error: answers.put((result, error)),
            timeout=timeout_us or None,
            **fields,
        )
        if cancel_s:
            time.sleep(cancel_s)
            call.cancel()
        return self._sum(*answers.get(timeout=_ANSWER_S))

    def _sum(self, result: Any, error: Any) -> int:
        if error is not None:
            if "cancelled by the user" in str(error) or "CANCELLED" in str(error.status()):
                raise Cancelled
            raise error
        self.process = int(result.as_numpy("PROCESS")[0, 0])
        return int(result.as_numpy("OUTPUT")[0, 0])


class StreamClient(GrpcClient):
    """Sends requests on a gRPC stream; cancels by ending the stream."""

    def open(self) -> None:
        """Connect and start the stream."""
        super().open()
        self._start()

    def _start(self) -> None:
        answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        self._answers = answers
        self._client.start_stream(lambda result, error: answers.put((result, error)))

    def close(self) -> None:
        """End the stream and disconnect."""
        self._client.stop_stream()
        super().close()

    def send(self, value: int, sequence_id: int, start: bool, end: bool, timeout_us: int, cancel_s: float) -> int:
        """Send a request of a sequence and return its result."""
        fields: dict[str, Any] = {"sequence_id": sequence_id, "sequence_start": start, "sequence_end": end}
        self._client.async_stream_infer(self.model, _tensor(triton_grpc, value), timeout=timeout_us or None, **fields)
        if cancel_s:
            time.sleep(cancel_s)
            self._client.stop_stream(cancel_requests=True)
            self._start()
            raise Cancelled
        return self._sum(*self._answers.get(timeout=_ANSWER_S))


KINDS = (HttpClient, GrpcClient, StreamClient)


def running(clients: list[SequenceClient], steps: int) -> Iterator[list[SequenceClient]]:
    """Run clients on threads of their own; yields them each 50 ms until all have ended."""
    threads = [threading.Thread(target=client.run, args=(steps,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        yield clients
        time.sleep(0.05)
