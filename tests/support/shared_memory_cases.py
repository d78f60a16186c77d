"""Clients that keep inputs in shared memory, and a server whose GPU fetches them: the same cases for a real GPU and for a fake.

A case gets a server that serves `repository`, and whatever exports memory of the GPU.
"""

from __future__ import annotations

import base64
import json
import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from headrace.core.tensor import Array
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support.processes import children
from tests.support.serving import Server
from tests.support.tensorrt_networks import answers, convolutions, pictures
from tests.support.waiting import until

ROWS = 32
ROW = (3, 16, 16)
ROW_BYTES = 3 * 16 * 16 * 4
OPTIONS = ("--allow-client-shm",)

# A model that has only a plan, without a description of its tensors.
CONFIG = f"""
backend: tensorrt
max_batch_size: {ROWS}
dynamic_batching: {{}}
input:
- {{name: x, data_type: TYPE_FP32, dims: [3, 16, 16]}}
output:
- {{name: logits, data_type: TYPE_FP32, dims: [10]}}
- {{name: top, data_type: TYPE_INT64, dims: []}}
- {{name: positive, data_type: TYPE_BOOL, dims: [10]}}
"""

# Puts bytes into memory of the GPU that another process owns, for the length of a `with`; its IPC handle.
Export = Callable[[bytes], AbstractContextManager[bytes]]


def make_repository(folder: Path) -> Path:
    """A repository with the model `m`, its plan alone, built by whatever TensorRT there is."""
    version = folder / "repository" / "m" / "1"
    version.mkdir(parents=True)
    shapes = ShapeRange({"x": ((1, *ROW), (8, *ROW), (ROWS, *ROW))})
    TensorRtTarget(optimization_level=1).build(
        convolutions(), TargetSpec("fp32", (shapes,)), version / "model.plan", silent
    )
    (version.parent / "config.yaml").write_text(CONFIG)
    return folder / "repository"


def inputs_and_answers() -> tuple[Array, Array]:
    """Inputs of 48 rows, and the answers of ONNX Runtime."""
    x = pictures(48, seed=5)
    return x, answers(convolutions(), {"x": x})["logits"]


def infer_from_region(server: Server, region: str, rows: int, offset: int = 0) -> Array:
    """Rows of a region through the model."""
    return answer(server, question(region, rows, offset))


def question(region: str, rows: int, offset: int) -> dict[str, Any]:
    where = {
        "shared_memory_region": region,
        "shared_memory_offset": offset,
        "shared_memory_byte_size": rows * ROW_BYTES,
    }
    return {"inputs": [{"name": "x", "shape": [rows, *ROW], "datatype": "FP32", "parameters": where}]}


def send(server: Server, x: Array) -> Array:
    """Rows in the request."""
    shape: list[int] = list(x.shape)
    return answer(
        server, {"inputs": [{"name": "x", "shape": shape, "datatype": "FP32", "data": x.reshape(-1).tolist()}]}
    )


def answer(server: Server, document: dict[str, Any]) -> Array:
    document["outputs"] = [{"name": "logits"}]
    status, body = sent(server, document)
    assert status == 200, body
    output = json.loads(body)["outputs"][0]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def sent(server: Server, document: dict[str, Any]) -> tuple[int, bytes]:
    status, _, body = server.request("POST", "/v2/models/m/infer", json.dumps(document).encode())
    return status, body


def call(server: Server, path: str, document: dict[str, Any] | None = None) -> None:
    status, _, body = server.request("POST", f"/v2/{path}", json.dumps(document or {}).encode())
    assert status == 200, body


@contextmanager
def system_region(server: Server, content: bytes) -> Iterator[Path]:
    """Registered as "r"."""
    path = Path("/dev/shm", f"test-{uuid.uuid4().hex}")
    path.write_bytes(content)
    try:
        size = len(content)
        document = {"key": f"/{path.name}", "offset": 0, "byte_size": size}
        call(server, "systemsharedmemory/region/r/register", document)
        yield path
    finally:
        call(server, "systemsharedmemory/region/r/unregister")
        path.unlink()


@contextmanager
def cuda_region(server: Server, content: bytes, export: Export, gpu: int = 0) -> Iterator[None]:
    """Registered as "g"."""
    with export(content) as handle:
        raw_handle = {"b64": base64.b64encode(handle).decode()}
        document = {"raw_handle": raw_handle, "device_id": gpu, "byte_size": len(content)}
        call(server, "cudasharedmemory/region/g/register", document)
        try:
            yield
        finally:
            call(server, "cudasharedmemory/region/g/unregister")


def same(actual: Array, right: Array) -> None:
    """In TF32, and some fused otherwise than others; the answers of other rows are far away."""
    np.testing.assert_allclose(actual, right, atol=0.01 * float(np.abs(right).max()))


def mapped(server: Server, path: Path) -> bool:
    """True if a process of the server has the file mapped, as the engine process has once it is pinned."""
    processes = (server.process.pid, *children(server.process.pid))
    return any(path.name in Path(f"/proc/{process}/maps").read_text() for process in processes)


def _system_region(server: Server, right: tuple[Array, Array], _export: Export) -> None:
    x, y = right
    with system_region(server, x.tobytes()) as path:
        same(infer_from_region(server, "r", 8), y[:8])  # copied: nothing is pinned yet
        until(lambda: mapped(server, path))
        for rows in (1, 2, 3, 8, 31, 32, 48):  # the last is cut
            same(infer_from_region(server, "r", rows), y[:rows])
        same(infer_from_region(server, "r", 4, 7 * ROW_BYTES), y[7:11])
        # What the client writes is what the next request sees.
        with path.open("r+b") as file:
            file.write(x[20:24].tobytes())
        same(infer_from_region(server, "r", 4), y[20:24])
    until(lambda: not mapped(server, path))


def _unaligned_rows(server: Server, right: tuple[Array, Array], _export: Export) -> None:
    x, y = right
    with system_region(server, b"?" + x.tobytes()) as path:
        for _ in range(3):
            same(infer_from_region(server, "r", 5, 1 + ROW_BYTES), y[1:6])
            until(lambda: mapped(server, path))


def _cuda_memory(server: Server, right: tuple[Array, Array], export: Export) -> None:
    x, y = right
    with cuda_region(server, b"????" + x.tobytes(), export):
        for rows in (1, 2, 3, 8, 31, 32, 44):
            same(infer_from_region(server, "g", rows, 4), y[:rows])
        same(infer_from_region(server, "g", 40, 4 + 3 * ROW_BYTES), y[3:43])


def _all_kinds_together(server: Server, right: tuple[Array, Array], export: Export) -> None:
    x, y = right

    def one(number: int) -> None:
        first, rows = number % 40, 1 + number % 5
        if number % 3 == 0:
            actual = send(server, x[first : first + rows])
        else:
            actual = infer_from_region(server, "rg"[number % 3 - 1], rows, first * ROW_BYTES)
        same(actual, y[first : first + rows])

    with system_region(server, x.tobytes()), cuda_region(server, x.tobytes(), export), ThreadPoolExecutor(24) as pool:
        for _ in pool.map(one, range(600)):
            pass


def _truncated_memory(server: Server, right: tuple[Array, Array], _export: Export) -> None:
    x, y = right
    with system_region(server, x.tobytes()) as path:
        infer_from_region(server, "r", 8)
        until(lambda: mapped(server, path))
        os.truncate(path, 0)
        for rows in (1, 8, 32):
            infer_from_region(server, "r", rows)  # of what was there when it was pinned
            # Not aligned, it is copied by the host.
            status, body = sent(server, question("r", rows, 1))
            assert (status, b"smaller than when it was registered" in body) == (400, True), body
        same(send(server, x[:4]), y[:4])
    assert server.process.poll() is None


def _regions_come_and_go(server: Server, right: tuple[Array, Array], _export: Export) -> None:
    x, y = right
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            with system_region(server, x.tobytes()):
                for future in [pool.submit(infer_from_region, server, "r", 16) for _ in range(24)]:
                    same(future.result(), y[:16])


def bodies_through_front_ends(server: Server, right: tuple[Array, Array]) -> None:
    """Tensors in bodies, which front ends receive in memory shared with the engine: aligned and not, several at once.

    Requests that arrive together have equal shapes, so that some of them form groups.
    """
    x, logits = right

    def send_binary(start: int) -> None:
        rows = x[start : start + 12 + start // 8]  # some 40 KB and more: in the arena
        spec = {
            "name": "x",
            "shape": list(rows.shape),
            "datatype": "FP32",
            "parameters": {"binary_data_size": rows.nbytes},
        }
        header = json.dumps({"inputs": [spec], "outputs": [{"name": "logits"}]} | {"id": "i" * (start % 5)}).encode()
        headers = {"Inference-Header-Content-Length": str(len(header))}
        status, _, body = server.request("POST", "/v2/models/m/infer", header + rows.tobytes(), headers)
        assert status == 200, body
        output = json.loads(body)["outputs"][0]
        found = np.array(output["data"], np.float32).reshape(output["shape"])
        np.testing.assert_allclose(found, logits[start : start + len(rows)], rtol=1e-2, atol=1e-2)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send_binary, [number % 28 for number in range(300)]))


# Tests by name; each gets a server with the repository of `make_repository`, the inputs with their answers, and `export`.
CASES: dict[str, Callable[[Server, tuple[Array, Array], Export], None]] = {
    "rows in a system region": _system_region,
    "rows that are not aligned": _unaligned_rows,
    "rows in a CUDA region": _cuda_memory,
    "all kinds share batches": _all_kinds_together,
    "a client that truncates its memory affects only its own responses": _truncated_memory,
    "regions come and go under load": _regions_come_and_go,
}
