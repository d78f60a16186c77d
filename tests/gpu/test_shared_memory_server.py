"""A server on a real GPU whose clients keep inputs in shared memory: the GPU fetches them, whatever clients do meanwhile."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.progress import silent
from engines.targets.base import Order, ShapeRange
from engines.targets.tensorrt_target import TensorRtTarget
from server.core.tensor import Array
from tests.gpu.tensorrt_networks import answers, convolutions, pictures
from tests.serving import Server, serving

_missing = [name for name in ("pycuda", "tensorrt", "fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(_missing), reason="needs an NVIDIA GPU, PyCUDA, TensorRT and a server"),
]

ROWS = 32
ROW = (3, 16, 16)
ROW_BYTES = 3 * 16 * 16 * 4

# A client's process: puts a file's bytes on GPU 0, prints the IPC handle, and keeps the memory until its input ends.
_OWNER = """
import sys
import numpy as np
import pycuda.driver as driver
driver.init()
context = driver.Device(0).make_context()
content = np.fromfile(sys.argv[1], np.uint8)
memory = driver.mem_alloc(content.nbytes)
driver.memcpy_htod(memory, content)
print(bytes(driver.mem_get_ipc_handle(memory)).hex(), flush=True)
sys.stdin.read()
memory.free()
context.pop()
"""


@pytest.fixture(scope="module")
def right() -> tuple[Array, Array]:
    """Inputs of 48 rows, and the answers of ONNX Runtime."""
    x = pictures(48, seed=5)
    return x, answers(convolutions(), {"x": x})["logits"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("shared")
    version = folder / "repository" / "m" / "1"
    version.mkdir(parents=True)
    shapes = ShapeRange({"x": ((1, *ROW), (8, *ROW), (ROWS, *ROW))})
    TensorRtTarget(optimization_level=1).build(convolutions(), Order("fp32", (shapes,)), version / "model.plan", silent)
    config = f"backend: tensorrt\nmax_batch_size: {ROWS}\ndynamic_batching: {{}}\n"
    (version.parent / "config.yaml").write_text(config)
    with serving(folder / "repository", folder, "--allow-client-shm") as started:
        yield started
        assert "Traceback" not in started.text, started.text


def ask(server: Server, region: str, rows: int, offset: int = 0) -> Array:
    """Rows of a region through the model."""
    where = {
        "shared_memory_region": region,
        "shared_memory_offset": offset,
        "shared_memory_byte_size": rows * ROW_BYTES,
    }
    asked = {"inputs": [{"name": "x", "shape": [rows, *ROW], "datatype": "FP32", "parameters": where}]}
    return answer(server, asked)


def send(server: Server, x: Array) -> Array:
    """Rows in the request."""
    shape: list[int] = list(x.shape)
    return answer(
        server, {"inputs": [{"name": "x", "shape": shape, "datatype": "FP32", "data": x.reshape(-1).tolist()}]}
    )


def answer(server: Server, asked: dict[str, Any]) -> Array:
    asked["outputs"] = [{"name": "logits"}]
    status, _, body = server.request("POST", "/v2/models/m/infer", json.dumps(asked).encode())
    assert status == 200, body
    output = json.loads(body)["outputs"][0]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def call(server: Server, path: str, told: dict[str, Any] | None = None) -> None:
    status, _, body = server.request("POST", f"/v2/{path}", json.dumps(told or {}).encode())
    assert status == 200, body


@contextmanager
def system_region(server: Server, content: bytes) -> Iterator[Path]:
    """Registered as "r"."""
    path = Path("/dev/shm", f"test-{uuid.uuid4().hex}")
    path.write_bytes(content)
    try:
        size = len(content)
        told = {"key": f"/{path.name}", "offset": 0, "byte_size": size}
        call(server, "systemsharedmemory/region/r/register", told)
        yield path
    finally:
        call(server, "systemsharedmemory/region/r/unregister")
        path.unlink()


@contextmanager
def cuda_region(server: Server, content: bytes, folder: Path) -> Iterator[None]:
    """Registered as "g"."""
    file = folder / "content"
    file.write_bytes(content)
    words = [sys.executable, "-c", _OWNER, str(file)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        handle = base64.b64encode(bytes.fromhex(owner.stdout.readline())).decode()
        try:
            told = {"raw_handle": {"b64": handle}, "device_id": 0, "byte_size": len(content)}
            call(server, "cudasharedmemory/region/g/register", told)
            yield
        finally:
            call(server, "cudasharedmemory/region/g/unregister")
            owner.stdin.close()


def same(found: Array, right: Array) -> None:
    """In TF32, and some fused otherwise than others; the answers of other rows are far away."""
    np.testing.assert_allclose(found, right, atol=0.01 * float(np.abs(right).max()))


def mapped(server: Server, path: Path) -> bool:
    """True if the server has the file mapped, as it has once it is pinned."""
    return path.name in Path(f"/proc/{server.process.pid}/maps").read_text()


def until(condition: Any) -> None:
    waiting = threading.Event()
    for _ in range(500):
        if condition():
            return
        waiting.wait(0.02)
    raise AssertionError("it did not happen")


def test_rows_in_a_system_region(server: Server, right: tuple[Array, Array]) -> None:
    x, y = right
    with system_region(server, x.tobytes()) as path:
        same(ask(server, "r", 8), y[:8])  # copied: nothing is pinned yet
        until(lambda: mapped(server, path))
        for rows in (1, 2, 3, 8, 31, 32, 48):  # the last is cut
            same(ask(server, "r", rows), y[:rows])
        same(ask(server, "r", 4, 7 * ROW_BYTES), y[7:11])
        # What the client writes is what the next request sees.
        with path.open("r+b") as file:
            file.write(x[20:24].tobytes())
        same(ask(server, "r", 4), y[20:24])
    until(lambda: not mapped(server, path))


def test_rows_that_are_not_aligned(server: Server, right: tuple[Array, Array]) -> None:
    x, y = right
    with system_region(server, b"?" + x.tobytes()) as path:
        for _ in range(3):
            same(ask(server, "r", 5, 1 + ROW_BYTES), y[1:6])
            until(lambda: mapped(server, path))


def test_rows_in_a_cuda_region(server: Server, right: tuple[Array, Array], tmp_path: Path) -> None:
    x, y = right
    with cuda_region(server, b"????" + x.tobytes(), tmp_path):
        for rows in (1, 2, 3, 8, 31, 32, 44):
            same(ask(server, "g", rows, 4), y[:rows])
        same(ask(server, "g", 40, 4 + 3 * ROW_BYTES), y[3:43])


def test_all_kinds_share_batches(server: Server, right: tuple[Array, Array], tmp_path: Path) -> None:
    x, y = right

    def one(number: int) -> None:
        first, rows = number % 40, 1 + number % 5
        if number % 3 == 0:
            found = send(server, x[first : first + rows])
        else:
            found = ask(server, "rg"[number % 3 - 1], rows, first * ROW_BYTES)
        same(found, y[first : first + rows])

    with system_region(server, x.tobytes()), cuda_region(server, x.tobytes(), tmp_path), ThreadPoolExecutor(24) as pool:
        for _ in pool.map(one, range(600)):
            pass


def test_a_client_that_truncates_its_memory_hurts_only_its_own_answers(
    server: Server, right: tuple[Array, Array]
) -> None:
    x, y = right
    with system_region(server, x.tobytes()) as path:
        ask(server, "r", 8)
        until(lambda: mapped(server, path))
        os.truncate(path, 0)
        for rows in (1, 8, 32):
            ask(server, "r", rows)  # of what was there when it was pinned
        same(send(server, x[:4]), y[:4])
    assert server.process.poll() is None


def test_regions_come_and_go_under_load(server: Server, right: tuple[Array, Array]) -> None:
    x, y = right
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            with system_region(server, x.tobytes()):
                for future in [pool.submit(ask, server, "r", 16) for _ in range(24)]:
                    same(future.result(), y[:16])
