"""A client process whose requests name CUDA shared memory, which `headrace bench` does not have; see `wire`.

Each caller is a thread that sends its next request after an answer. The process prints "ready" once all callers have had an
answer, reads the time of the start from its input, and prints one line of JSON.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import grpc
import numpy as np

from loadtest.gpu.part_process import end_with_parent
from loadtest.gpu.subject import INPUT
from loadtest.grpc_protocol import MODEL_INFER, shared_memory_message
from loadtest.protocol import Array, Refused, send_json, shared_memory_request, wire_bytes
from loadtest.servers import HOST

_DIFFERENT = 4  # different requests that the callers send
_TIMEOUT_S = 20.0
# Without it channels to the same server share a connection.
_OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)

Send = Callable[[], None]


@contextmanager
def cuda_region(http_port: int, name: str, content: Array, gpu: int) -> Iterator[None]:
    """Register memory of a GPU with a server, which opens it by its IPC handle."""
    from headrace.runtimes.cuda.driver import current, loaded

    with current(gpu):
        memory = loaded().mem_alloc(content.nbytes)
        loaded().memcpy_htod(memory, content)
        handle = base64.b64encode(bytes(loaded().mem_get_ipc_handle(memory))).decode()
    url = f"/v2/cudasharedmemory/region/{name}"
    body = {"raw_handle": {"b64": handle}, "device_id": gpu, "byte_size": content.nbytes}
    try:
        send_json(HOST, http_port, f"{url}/register", body)
        yield
    finally:
        with suppress(OSError, Refused):  # a server that has ended does not read the memory any more
            send_json(HOST, http_port, f"{url}/unregister", {})
        with current(gpu):
            memory.free()


def callers(options: argparse.Namespace, pixels: Array, region: str) -> list[Send]:
    """Return a function for each caller that sends a request and waits for its answer; it raises for a failed request."""
    sends: list[Send] = []
    for number in range(options.callers):
        which = number % len(pixels)
        inputs, offset = {INPUT: pixels[which]}, which * pixels[which].nbytes
        if options.transport == "grpc":
            channel = grpc.insecure_channel(f"{HOST}:{options.grpc_port}", options=_OWN_CONNECTION)
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(MODEL_INFER)
            message = shared_memory_message(options.model, inputs, region, offset)
            sends.append(lambda call=call, message=message: call(message, timeout=_TIMEOUT_S))  # type: ignore[misc]
            continue
        data = wire_bytes(shared_memory_request(options.model, inputs, region, offset), options.http_port)
        connection = socket.create_connection((HOST, options.http_port), _TIMEOUT_S)

        def post(connection: socket.socket = connection, data: bytes = data) -> None:
            connection.sendall(data)  # head and body at once, as `headrace bench` does
            response = http.client.HTTPResponse(connection, method="POST")
            response.begin()
            if (content := response.read()) and response.status != 200:
                raise ValueError(f"a request was answered with {response.status}: {content[:300]!r}")

        sends.append(post)
    return sends


def closed_loop(sends: list[Send], start_s: float, warm_s: float, seconds: float) -> dict[str, object]:
    """All callers from `start_s` on; requests count that begin from `start_s + warm_s` on, for `seconds`."""
    first_s = start_s + warm_s
    end_s = first_s + seconds
    latencies_ms: list[float] = []
    failures: list[str] = []

    def run(send: Send) -> None:
        time.sleep(max(0.0, start_s - time.monotonic()))
        try:
            while (begun_s := time.monotonic()) < end_s:
                send()
                if begun_s >= first_s:
                    latencies_ms.append((time.monotonic() - begun_s) * 1e3)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")

    cpu_s = time.process_time()
    threads = [threading.Thread(target=run, args=(send,)) for send in sends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    busy = (time.process_time() - cpu_s) / max(time.monotonic() - start_s, 1e-3)
    return {"latencies_ms": latencies_ms, "failures": failures[:1], "busy": busy}


def main() -> None:
    """Take one sample."""
    end_with_parent()
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("model")
    add("--transport", choices=("http", "grpc"), required=True)
    for name in ("--http-port", "--grpc-port", "--rows", "--side", "--callers", "--gpu"):
        add(name, type=int, required=True)
    for name in ("--warm-s", "--seconds"):
        add(name, type=float, required=True)
    options = parser.parse_args()
    random = np.random.default_rng(os.getpid())
    count = min(_DIFFERENT, options.callers)
    pixels: Array = random.integers(0, 256, (count, options.rows, options.side, options.side, 3), dtype=np.uint8)
    region = f"bench_{os.getpid()}"
    with cuda_region(options.http_port, region, pixels, options.gpu):
        sends = callers(options, pixels, region)
        for send in sends:
            send()
        print("ready", flush=True)
        start_s = float(sys.stdin.readline())
        print(json.dumps(closed_loop(sends, start_s, options.warm_s, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
