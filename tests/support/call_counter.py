"""Counts the Python calls of our own files for one request, in a process of its own (`python -m tests.support.call_counter`).

Prints a JSON object: for "http" and "grpc" the calls of the request that had the fewest, by function. Timers and other work
beside requests only add to a count, so that the smallest is that of the request itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from urllib.parse import urlsplit

import grpc
import numpy as np
from headrace.inference.scheduling import inline_gate
from headrace.models.registry import Registry
from headrace.server import settings
from headrace.server.app import HeadraceServer
from headrace.server.banner import Addresses
from tritonclient.grpc import service_pb2 as pb

from tests.support.serving import HOST, ROOT

OURS = (str(ROOT / "server") + os.sep, str(ROOT / "engines") + os.sep)
US_PER_S = 1_000_000
WARM_UP = 300
REQUESTS = 300
ROW = np.ones((1, 16), "<f4").tobytes()
METHOD = "/inference.GRPCInferenceService/ModelInfer"

counts: Counter[str] = Counter()


def count(frame: FrameType, event: str, arg: object) -> None:
    """A profile function: notes a call, and each time that a coroutine goes on."""
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(OURS):
        counts[f"{os.path.relpath(code.co_filename, ROOT)}:{code.co_qualname}"] += 1


def fewest(send: Callable[[], None], loop: asyncio.AbstractEventLoop) -> Counter[str]:
    """The calls of the request that had the fewest; what the event loop does after the answer belongs to it."""
    for _ in range(WARM_UP):
        send()
    measured = []
    for _ in range(REQUESTS):
        before = counts.copy()
        send()
        settle(loop)
        measured.append(counts - before)
    return min(measured, key=Counter.total)


def settle(loop: asyncio.AbstractEventLoop) -> None:
    """Wait for three turns of the event loop."""
    for _ in range(3):
        turned = threading.Event()
        loop.call_soon_threadsafe(turned.set)
        turned.wait()


def over_http(port: int, loop: asyncio.AbstractEventLoop) -> Counter[str]:
    """Of a request with a binary tensor and no headers beyond those it needs."""
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, 16], "parameters": {"binary_data_size": 64}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    body = head + ROW
    lines = ["POST /v2/models/affine/infer HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    content = "\r\n".join([*lines, f"Inference-Header-Content-Length: {len(head)}", "", ""]).encode() + body
    connection = socket.create_connection((HOST, port), timeout=30)

    def send() -> None:
        connection.sendall(content)
        answer = connection.recv(1 << 16)  # one write of the server's
        assert answer.startswith(b"HTTP/1.1 200 "), answer

    return fewest(send, loop)


def over_grpc(address: str, loop: asyncio.AbstractEventLoop) -> Counter[str]:
    """Of a call without a deadline."""
    message = pb.ModelInferRequest(model_name="affine")
    message.inputs.add(name="X", datatype="FP32", shape=[1, 16])
    message.raw_input_contents.append(ROW)
    content = message.SerializeToString()
    with grpc.insecure_channel(address) as channel:
        run = channel.unary_unary(METHOD)

        def send() -> None:
            assert pb.ModelInferResponse.FromString(run(content)).model_name == "affine"

        return fewest(send, loop)


def main() -> int:
    """Serve, measure, stop."""
    (repository,) = sys.argv[1:]
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    options = ["--model-repository", repository, "--http-port", "0", "--grpc-port", "0"]
    # A busy machine makes runs slow, and after a slow one requests take the longer way over the queue for a while.
    options += ["--inline-bound-us", str(US_PER_S)]
    inline_gate.INLINE_PAUSE = 0
    # Lone requests run on the event loop, also where the machine is too busy for the default bound.
    options += ["--inline-bound-us", "1000000"]
    chosen = settings.from_arguments(parser.parse_args(options))

    def measure(addresses: Addresses, loop: asyncio.AbstractEventLoop) -> None:
        try:
            port = urlsplit(addresses.url).port
            assert port is not None
            print(json.dumps({"http": over_http(port, loop), "grpc": over_grpc(addresses.grpc, loop)}))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def announce(addresses: Addresses, registry: Registry) -> None:
        threading.Thread(target=measure, args=(addresses, asyncio.get_running_loop())).start()

    # Of this thread, which runs the event loop, and of all that are started from here on.
    threading.setprofile(count)
    sys.setprofile(count)
    return HeadraceServer(chosen, announce).run()


if __name__ == "__main__":
    sys.exit(main())
