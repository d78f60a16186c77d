"""A real GPU that fails for good under load: another GPU serves in its place, and a model without another one says why not."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support import gpu_pipeline_cases as cases
from tests.support.failing_gpu_server import COMMAND, FILE
from tests.support.gpu_marks import gpu_marks
from tests.support.serving import Server, serving
from tests.support.waiting import until

pytestmark = [*gpu_marks(180, "fastapi", "uvicorn"), pytest.mark.usefixtures("two_gpus")]

X = np.ones((3, cases.WIDTH), np.float32)
_TENSOR = {"name": "X", "datatype": "FP32", "shape": [3, cases.WIDTH], "data": X.reshape(-1).tolist()}
REQUEST = json.dumps({"inputs": [_TENSOR]}).encode()


def index(server: Server, model: str) -> tuple[str, str]:
    rows = json.loads(server.request("POST", "/v2/repository/index", b"{}")[2])
    (row,) = (row for row in rows if row["name"] == model)
    return row["state"], row["reason"]


def statuses(server: Server, model: str, clients: int = 16) -> set[int]:
    """Statuses of requests that come together."""
    with ThreadPoolExecutor(clients) as pool:
        return set(
            pool.map(lambda _: server.request("POST", f"/v2/models/{model}/infer", REQUEST)[0], range(4 * clients))
        )


def test_requests_go_on_on_another_gpu(tmp_path: Path) -> None:
    repository = cases.make_repository(tmp_path, ((0, 1), (0,)))
    file = tmp_path / "fail"
    options = (*cases.OPTIONS, "--front-ends", "0")
    with serving(repository, tmp_path, *options, env={FILE: str(file)}, command=COMMAND) as server:
        before = cases.infer(server, "first", "X", X)["Y"]
        assert statuses(server, "second") == {200}
        file.touch()

        def has_failed() -> bool:
            assert statuses(server, "first") <= {200, 500, 503}
            return index(server, "first") == ("READY", "2 of 4 instances live")

        until(has_failed)
        assert statuses(server, "first") == {200}, "no request meets the lost GPU any more"
        np.testing.assert_allclose(cases.infer(server, "first", "X", X)["Y"], before, rtol=1e-3, atol=1e-4)
        until(lambda: index(server, "second")[0] == "UNAVAILABLE")
        until(lambda: "GPU 0 has failed in this server" in index(server, "second")[1])
        assert statuses(server, "second") == {503}
        assert server.request("GET", "/v2/models/first/ready", b"")[0] == 200
        assert server.request("GET", "/v2/health/ready", b"")[0] == 503
        assert b'headrace_gpu_up{gpu="0"} 0' in server.request("GET", "/metrics", b"")[2]
        status, _, body = server.request("POST", "/v2/repository/models/first/load", b"{}")
        assert status == 200, body
        assert statuses(server, "first") == {200}
    assert "GPU 0 has failed" in server.text, server.text
