"""A server with front-end processes: names, one banner, every protocol, signals, exit status."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from headrace.core.clock import NS_PER_S

from tests.support import models
from tests.support.serving import Server, serving, start


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("front_ends") / "repository"
    models.add_model(folder, "row_sums", models.row_sums())
    models.add_model(folder, "busy", models.busy())
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--front-ends", "2", "--model-control", "explicit", "--load-model", "*")
    with serving(repository, tmp_path_factory.mktemp("log"), *options) as running:
        yield running


def children(server: Server) -> dict[str, int]:
    """Process ids by the name in `ps`, of the processes that the supervisor has started."""
    result = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text("latin-1").rpartition(")")[2].split()[1])
            name = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:  # it has ended
            continue
        if parent == server.process.pid:
            result[name] = int(stat.parent.name)
    return result


def own_memory(pid: int) -> int:
    """Return the bytes of a process that it shares with no other."""
    rows = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(words[1]) for words in rows if words[0] in ("Private_Clean:", "Private_Dirty:")) << 10


def row(columns: int = 3) -> bytes:
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, columns], "data": [1] * columns}
    return json.dumps({"inputs": [tensor]}).encode()


def test_processes_have_names(server: Server) -> None:
    assert set(children(server)) == {"headrace: engine", "headrace: front end 1", "headrace: front end 2"}


def test_front_ends_share_the_modules_of_the_supervisor(server: Server) -> None:
    sizes = {name: own_memory(pid) for name, pid in children(server).items() if "front end" in name}
    assert len(sizes) == 2
    assert max(sizes.values()) < 40 << 20, sizes  # 60 MB when each has imported them; see docs/scaling.md


def test_the_banner_is_printed_once(server: Server) -> None:
    assert len(re.findall("Headrace listens on", server.text)) == 1
    assert "Traceback" not in server.text


def test_every_protocol_answers(server: Server) -> None:
    for _ in range(4):  # both front ends
        status, headers, body = server.request("POST", "/v2/models/row_sums/infer", row())
        assert (status, headers["content-type"]) == (200, "application/json"), body
        assert server.request("GET", "/v2/health/ready")[0] == 200
        assert b"headrace_requests_total" in server.request("GET", "/metrics")[2]
        assert server.request("GET", "/")[0] == 200
        with triton_grpc.InferenceServerClient(server.grpc_address) as client:
            x = triton_grpc.InferInput("X", [2, 3], "FP32").set_data_from_numpy(np.ones((2, 3), np.float32))
            assert client.infer("row_sums", [x]).get_response().outputs
            assert client.is_server_ready()


def test_large_messages_of_grpc_are_answered(server: Server) -> None:
    """They are received in memory that is shared with the engine process."""
    rows = np.random.default_rng(0).random((100, 3_000), np.float32)
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        for _ in range(4):
            x = triton_grpc.InferInput("X", list(rows.shape), "FP32").set_data_from_numpy(rows)
            output = client.infer("row_sums", [x]).as_numpy("SUM")
            np.testing.assert_allclose(output.ravel(), rows.sum(axis=1), rtol=1e-4)


def test_loads_and_unloads_are_seen_by_all_front_ends(server: Server) -> None:
    for _ in range(3):
        assert server.request("POST", "/v2/repository/models/row_sums/unload")[0] == 200
        assert {server.request("POST", "/v2/models/row_sums/infer", row())[0] for _ in range(4)} == {503}
        assert server.request("POST", "/v2/repository/models/row_sums/load")[0] == 200
        assert {server.request("POST", "/v2/models/row_sums/infer", row())[0] for _ in range(4)} == {200}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_signals_end_all_processes(repository: Path, tmp_path: Path, number: signal.Signals) -> None:
    with serving(repository, tmp_path, "--front-ends", "2") as server:
        pids = children(server).values()
        server.signal(number)
        assert server.wait() == 0
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert "Traceback" not in server.text


def test_a_failed_load_ends_the_server(repository: Path, tmp_path: Path) -> None:
    models.add_model(tmp_path / "broken", "broken", b"this is no ONNX file")
    server = start(tmp_path / "broken", tmp_path / "log", "--front-ends", "2", "--strict")
    assert server.wait() == 1
    assert "--strict: 1 of the models cannot be served" in server.text
    assert "Headrace listens" not in server.text


@pytest.mark.parametrize("count", ["0", "2"])
def test_a_repository_without_models_is_reported(tmp_path: Path, count: str) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    with start(folder, tmp_path / "log", "--front-ends", count) as server:
        server.wait_until_ready()
        assert f"{folder} has no models: put NAME/1/model.onnx there, or name the folder above" in server.text
        assert "0 models ready\n" in server.text
    with start(folder, tmp_path / "log", "--front-ends", count, "--strict") as server:
        assert server.wait() == 1


def test_idle_processes_use_little_processor_time(server: Server) -> None:
    pids = [server.process.pid, *children(server).values()]
    began_s, began_ns = sum(map(used_s, pids)), time.monotonic_ns()
    time.sleep(2)
    share = (sum(map(used_s, pids)) - began_s) * NS_PER_S / (time.monotonic_ns() - began_ns)
    assert share < 0.1  # a process that polls or spins; the figure of an idle server is in docs/scaling.md


def used_s(pid: int) -> float:
    """Processor time of a process, seconds."""
    nanoseconds = Path(f"/proc/{pid}/schedstat").read_text().split()[0]
    return int(nanoseconds) / NS_PER_S
