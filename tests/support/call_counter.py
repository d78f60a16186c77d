"""Counts the Python calls of our own files for one request, in a process of its own (`python -m tests.support.call_counter`).

Prints a JSON object: for "http" and "grpc" the calls of the request that had the fewest, by function. Timers and other work
beside requests only add to a count, so that the smallest is that of the request itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from urllib.parse import urlsplit

import grpc
import numpy as np
from headrace import settings
from headrace.app import HeadraceServer
from headrace.banner import Addresses
from headrace.repository.registry import Registry
from tritonclient.grpc import service_pb2 as pb

from tests.support.serving import HOST, ROOT

OURS = (str(ROOT / "server") + os.sep, str(ROOT / "engines") + os.sep)
WARM_UP = 300
REQUESTS = 40
# The load report of the response headers is computed at most every 50 ms: the request with the fewest calls does not pay for it.
PAUSE_S = 0.01
ROW = np.ones((1, 16), "<f4").tobytes()
METHOD = "/inference.GRPCInferenceService/ModelInfer"

counts: Counter[str] = Counter()


def count(frame: FrameType, event: str, arg: object) -> None:
    """A profile function: notes a call, and each time that a coroutine goes on."""
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(OURS):
        counts[f"{os.path.relpath(code.co_filename, ROOT)}:{code.co_qualname}"] += 1


def fewest(send: Callable[[], None]) -> Counter[str]:
    """The calls of the request that had the fewest."""
    for _ in range(WARM_UP):
        send()
    measured = []
    for _ in range(REQUESTS):
        time.sleep(PAUSE_S)
        before = counts.copy()
        send()
        time.sleep(0.005)  # what a request does after its answer belongs to it
        measured.append(counts - before)
    return min(measured, key=Counter.total)


def over_http(port: int) -> Counter[str]:
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

    return fewest(send)


def over_grpc(address: str) -> Counter[str]:
    """Of a call without a deadline."""
    message = pb.ModelInferRequest(model_name="affine")
    message.inputs.add(name="X", datatype="FP32", shape=[1, 16])
    message.raw_input_contents.append(ROW)
    content = message.SerializeToString()
    with grpc.insecure_channel(address) as channel:
        run = channel.unary_unary(METHOD)

        def send() -> None:
            assert pb.ModelInferResponse.FromString(run(content)).model_name == "affine"

        return fewest(send)


def main() -> int:
    """Serve, measure, stop."""
    (repository,) = sys.argv[1:]
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    options = ["--model-repository", repository, "--http-port", "0", "--grpc-port", "0"]
    chosen = settings.from_arguments(parser.parse_args(options))

    def measure(addresses: Addresses) -> None:
        try:
            port = urlsplit(addresses.url).port
            assert port is not None
            print(json.dumps({"http": over_http(port), "grpc": over_grpc(addresses.grpc)}))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def announce(addresses: Addresses, registry: Registry) -> None:
        threading.Thread(target=measure, args=(addresses,)).start()

    # Of this thread, which runs the event loop, and of all that are started from here on.
    threading.setprofile(count)
    sys.setprofile(count)
    return HeadraceServer(chosen, announce).run()


if __name__ == "__main__":
    sys.exit(main())
