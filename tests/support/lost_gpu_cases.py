"""A GPU that fails for good under load, on fakes and for real.

The server has `first` of `gpu_pipeline_cases` on GPUs 0 and 1, and `second` on GPU 0. Once a file exists, GPU 0 fails. With
front ends, all GPUs of the engine process fail with it, as after an illegal address on a real one.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tests.support.gpu_pipeline_cases import OPTIONS as PIPELINE_OPTIONS
from tests.support.gpu_pipeline_cases import WIDTH, infer
from tests.support.serving import Server
from tests.support.waiting import until

FILE = "FAILING_GPU_FILE"
GPUS = ((0, 1), (0,))
OPTIONS = (*PIPELINE_OPTIONS, "--front-ends", "0")
WITH_FRONT_ENDS = (*PIPELINE_OPTIONS, "--front-ends", "2")
_X = np.ones((3, WIDTH), np.float32)
_TENSOR = {"name": "X", "datatype": "FP32", "shape": [3, WIDTH], "data": _X.reshape(-1).tolist()}
_REQUEST = json.dumps({"inputs": [_TENSOR]}).encode()


def _index(server: Server, model: str) -> tuple[str, str]:
    rows = json.loads(server.request("POST", "/v2/repository/index", b"{}")[2])
    (row,) = (row for row in rows if row["name"] == model)
    return row["state"], row["reason"]


def _statuses(server: Server, model: str, clients: int = 16) -> set[int]:
    """Statuses of requests that come together."""
    with ThreadPoolExecutor(clients) as pool:
        sent = [pool.submit(server.request, "POST", f"/v2/models/{model}/infer", _REQUEST) for _ in range(4 * clients)]
        return {each.result()[0] for each in sent}


def check_other_gpu_serves(server: Server, file: Path) -> None:
    """`first` serves on GPU 1 and stays ready; `second` and the server are not ready, and the index says why."""
    before = infer(server, "first", "X", _X)["Y"]
    assert _statuses(server, "second") == {200}
    file.touch()

    def has_failed() -> bool:
        assert _statuses(server, "first") <= {200, 500, 503}
        return _index(server, "first") == ("READY", "2 of 4 instances live")

    try:
        until(has_failed)
    except AssertionError as error:
        raise AssertionError(f"{error}: {_index(server, 'first')}\n{server.text}") from None
    assert _statuses(server, "first") == {200}, "no request meets the lost GPU any more"
    np.testing.assert_allclose(infer(server, "first", "X", _X)["Y"], before, rtol=1e-3, atol=1e-4)
    until(lambda: "GPU 0 has failed in this server" in _index(server, "second")[1])
    assert _index(server, "second")[0] == "UNAVAILABLE"
    assert _statuses(server, "second") == {503}
    assert server.request("GET", "/v2/models/first/ready", b"")[0] == 200
    assert server.request("GET", "/v2/health/ready", b"")[0] == 503
    assert b'headrace_gpu_up{gpu="0"} 0' in server.request("GET", "/metrics", b"")[2]
    status, _, body = server.request("POST", "/v2/repository/models/first/load", b"{}")
    assert status == 200, body
    assert _statuses(server, "first") == {200}
    assert "GPU 0 has failed" in server.text, server.text


def check_next_process_serves(server: Server, file: Path) -> None:
    """Requests get 503 until the next engine process has loaded the models, on all GPUs again; no answer is wrong."""
    before = infer(server, "first", "X", _X)["Y"]
    file.touch()

    def is_next() -> bool:
        for name in ("first", "second"):
            assert _statuses(server, name) <= {200, 500, 503}
        return "the next starts in" in server.text

    try:
        until(is_next)
    except AssertionError as error:
        raise AssertionError(f"{error}: {_index(server, 'first')}\n{server.text}") from None
    until(lambda: _statuses(server, "first") | _statuses(server, "second") == {200})
    assert not file.exists()
    for name in ("first", "second"):
        assert _index(server, name) == ("READY", "")
    np.testing.assert_allclose(infer(server, "first", "X", _X)["Y"], before, rtol=1e-3, atol=1e-4)
    until(lambda: server.request("GET", "/v2/health/ready", b"")[0] == 200)
    text = server.request("GET", "/metrics", b"")[2]
    assert b'headrace_process_starts_total{process="engine"} 2' in text
    assert b'headrace_gpu_up{gpu="0"} 1' in text
    assert "with it all GPUs of this process" in server.text, server.text
