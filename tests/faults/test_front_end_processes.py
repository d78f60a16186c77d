"""Faults of a server with front-end processes: SIGKILL and hangs of each process, and SIGTERM during them.

A whole run of the slow tests repeats each fault ten times, or as often as FAULT_REPEATS says (50: half an hour on two cores).
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.support.examples import MORE_EXAMPLES
from tests.support.models import add_model, busy, row_sums
from tests.support.processes import alive, children, words
from tests.support.serving import HOST, Server, free_port, serving
from tests.support.waiting import at_rest, until

REPEATS = int(os.environ.get("FAULT_REPEATS", "10"))
# A process that only waits for a processor of a busy machine must not count as hung.
HANG_TIMEOUT_S = "3"
MANY = pytest.param(REPEATS, marks=[*MORE_EXAMPLES, pytest.mark.timeout(120 + 30 * REPEATS)], id="many")
REPEATED = pytest.mark.parametrize("times", [pytest.param(2, id="twice"), MANY])
BODY = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}).encode()
FRONT_ENDS = 2


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("front_ends") / "models"
    add_model(folder, "row_sums", row_sums())
    add_model(folder, "busy", busy())
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(repository, tmp_path_factory.mktemp("log"), "--front-ends", str(FRONT_ENDS)) as running:
        yield running


def processes(server: Server) -> dict[str, int]:
    """Live children of the supervisor by name, such as "front end 1"."""
    named = {}
    for pid in children(server.process.pid):
        title = words(pid)
        if title and title[0].startswith("headrace: "):
            named[title[0].removeprefix("headrace: ")] = pid
    return named


def is_whole(server: Server) -> bool:
    """Return True if every process runs and every front end serves connections."""
    running = processes(server)
    if len(running) != FRONT_ENDS + 1:
        return False
    with contextlib.ExitStack() as connections:
        opened = [connections.enter_context(contextlib.closing(connect(server))) for _ in range(2 * FRONT_ENDS)]
        try:
            if {infer(connection)[0] for connection in opened} != {200}:
                return False
            return all(served_by(server, pid) for name, pid in running.items() if name != "engine")
        except (OSError, http.client.HTTPException):
            return False


def served_by(server: Server, pid: int) -> int:
    """Return the number of HTTP connections that a process serves."""
    local = f":{server.port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {row[9] for row in rows if row[1].endswith(local) and row[3] == "01"}  # ESTABLISHED
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed just now
            count += os.readlink(link).removeprefix("socket:[").rstrip("]") in inodes
    return count


def connect(server: Server) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(HOST, server.port, timeout=30)
    connection.connect()
    return connection


def infer(connection: http.client.HTTPConnection) -> tuple[int, dict[str, str], bytes]:
    """Send one request on an open connection; never opens another."""
    sock = connection.sock
    connection.request("POST", "/v2/models/row_sums/infer", BODY)
    assert connection.sock is sock
    response = connection.getresponse()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


def survives(connection: http.client.HTTPConnection) -> bool:
    """Return True if a connection is served still."""
    if connection.sock is None:
        return False
    try:
        return infer(connection)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


@REPEATED
def test_only_connections_of_a_killed_front_end_fail(server: Server, times: int) -> None:
    for time_ in range(times):
        kill_front_end(server, 1 + time_ % FRONT_ENDS)
    assert "Traceback" not in server.text


def kill_front_end(server: Server, number: int) -> None:
    until(lambda: is_whole(server))
    until(lambda: b'headrace_connections{protocol="http"} 1.0' in server.request("GET", "/metrics")[2])
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(contextlib.closing(connect(server))) for _ in range(2 * FRONT_ENDS)]
        assert all(survives(connection) for connection in opened)
        before = requests_total(server)
        killed = processes(server)[f"front end {number}"]
        os.kill(killed, signal.SIGKILL)
        assert 1 <= sum(survives(connection) for connection in opened) < len(opened)
        until(lambda: processes(server).get(f"front end {number}", killed) != killed)
    until(lambda: is_whole(server))
    assert requests_total(server) >= before


def requests_total(server: Server) -> float:
    page = server.request("GET", "/metrics")[2].decode()
    match = re.search(r'^headrace_requests_total\{model="row_sums",version="1"\} (.+)$', page, re.MULTILINE)
    assert match is not None, page
    return float(match[1])


@REPEATED
def test_clients_keep_their_connections_while_the_engine_restarts(server: Server, times: int) -> None:
    for _ in range(times):
        kill_engine(server)
    assert "Traceback" not in server.text


def kill_engine(server: Server) -> None:
    until(lambda: is_whole(server))
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(contextlib.closing(connect(server))) for _ in range(2 * FRONT_ENDS)]
        assert all(infer(connection)[0] == 200 for connection in opened)
        killed = processes(server)["engine"]
        os.kill(killed, signal.SIGKILL)
        statuses: set[int] = set()
        until(lambda: statuses.update(_statuses(opened)) or 503 in statuses)
        assert server.request("GET", "/v2/health/live")[0] == 200
        until(lambda: {infer(connection)[0] for connection in opened} == {200})


def _statuses(opened: list[http.client.HTTPConnection]) -> list[int]:
    statuses = []
    for connection in opened:
        status, headers, body = infer(connection)
        assert status in (200, 503), body
        if status == 503:
            assert int(headers["retry-after"]) >= 1
            assert "error" in json.loads(body)
        statuses.append(status)
    return statuses


def client_state(server: Server) -> dict[str, Any]:
    """Return the models, traffic, regions and settings that clients have changed, as responses of the server."""
    paths = (
        "v2/models/changed/config",
        "v2/repository/models/row_sums/traffic",
        "v2/systemsharedmemory/status",
        "v2/logging",
        "v2/trace/setting",
        "v2/models/later/trace/setting",
    )
    result: dict[str, Any] = {path: server.request("GET", f"/{path}")[2] for path in paths}
    rows = json.loads(server.request("POST", "/v2/repository/index", b"{}")[2])
    result["index"] = {row["name"]: row["state"] for row in rows if row["name"] != "uploaded"}
    return result


@REPEATED
def test_changes_of_clients_outlive_the_engine_process(tmp_path: Path, times: int) -> None:
    repository, name = tmp_path / "models", f"test-{uuid.uuid4().hex}"
    for model in ("row_sums", "dropped", "later", "changed"):
        add_model(repository, model, row_sums(), config="version_policy { all { } }")
    shutil.copytree(repository / "row_sums" / "1", repository / "row_sums" / "2")
    options = ["--front-ends", "2", "--model-control", "explicit", "--allow-model-override", "--allow-client-shm"]
    options += ["--load-model", "row_sums", "--load-model", "dropped"]
    uploaded = base64.b64encode((repository / "later" / "1" / "model.onnx").read_bytes()).decode()
    changes: dict[str, Any] = {
        "v2/repository/models/later/load": {},
        "v2/repository/models/dropped/unload": {},
        "v2/repository/models/changed/load": {"parameters": {"config": '{"max_batch_size": 3}'}},
        "v2/repository/models/uploaded/load": {"parameters": {"config": "{}", "file:1/model.onnx": uploaded}},
        "v2/repository/models/row_sums/traffic": {"versions": {"1": "25%"}},
        "v2/systemsharedmemory/region/r/register": {"key": f"/{name}", "byte_size": 64},
        "v2/logging": {"log_verbose_level": 1},
        "v2/trace/setting": {"trace_rate": "77"},
        "v2/models/later/trace/setting": {"trace_rate": "78"},
    }

    path = Path("/dev/shm", name)
    path.write_bytes(bytes(64))
    try:
        with serving(repository, tmp_path, *options) as server:
            for change, document in changes.items():
                status, _, content = server.request("POST", f"/{change}", json.dumps(document).encode())
                assert status == 200, (change, content)
            before = client_state(server)
            shares = {
                row["version"]: row["share"]
                for row in json.loads(before["v2/repository/models/row_sums/traffic"])["versions"]
            }
            assert (shares["1"], before["index"]["later"]) == (0.25, "READY"), before
            for _ in range(times):
                os.kill(processes(server)["engine"], signal.SIGKILL)
                until(lambda: "engine" not in processes(server) or server.request("GET", "/v2/health/ready")[0] == 503)
                until(lambda: server.request("GET", "/v2/health/ready")[0] == 200)
                assert client_state(server) == before
                rows = json.loads(server.request("POST", "/v2/repository/index", b"{}")[2])
                (lost,) = [row for row in rows if row["name"] == "uploaded"]
                assert (lost["state"], "load it again" in lost["reason"]) == ("UNAVAILABLE", True)
                assert server.request("POST", "/v2/models/later/infer", BODY)[0] == 200
            assert "Traceback" not in server.text
    finally:
        path.unlink()


@REPEATED
def test_nothing_survives_the_supervisor(repository: Path, tmp_path: Path, times: int) -> None:
    for number in range(times):
        folder = tmp_path / str(number)
        folder.mkdir()
        ports = [free_port(), free_port()]
        options = ("--front-ends", "2", "--http-port", str(ports[0]), "--grpc-port", str(ports[1]))
        with serving(repository, folder, *options) as server:
            pids = children(server.process.pid)
            assert len(pids) == FRONT_ENDS + 1
            server.signal(signal.SIGKILL)
            server.process.wait()
            until(lambda pids=pids: not any(map(alive, pids)))
            for port in ports:
                with socket.socket() as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    sock.bind((HOST, port))
            server.process.returncode = 0  # `serving` expects the end


@REPEATED
@pytest.mark.parametrize("name", ["engine", "front end 1"])
def test_a_process_that_hangs_is_replaced(repository: Path, tmp_path: Path, name: str, times: int) -> None:
    with serving(repository, tmp_path, "--front-ends", str(FRONT_ENDS), "--hang-timeout-s", HANG_TIMEOUT_S) as server:
        for _ in range(times):
            until(lambda: is_whole(server))
            stopped = processes(server)[name]
            os.kill(stopped, signal.SIGSTOP)
            until(lambda stopped=stopped: processes(server).get(name, stopped) != stopped)
            until(lambda: is_whole(server))
        assert f"the process '{name}'" in server.text
        assert "has not answered" in server.text


def test_a_stopped_front_end_gets_no_new_connections(repository: Path, tmp_path: Path) -> None:
    """Others get them after a missed heartbeat, although they have more connections."""
    options = ("--front-ends", "2", "--hang-timeout-s", "120")
    with serving(repository, tmp_path, *options) as server, contextlib.ExitStack() as stack:
        until(lambda: is_whole(server))
        stopped = processes(server)["front end 1"]
        os.kill(stopped, signal.SIGSTOP)
        stack.callback(os.kill, stopped, signal.SIGCONT)

        def are_served() -> bool:
            opened = [stack.enter_context(contextlib.closing(connect(server))) for _ in range(6)]
            for connection in opened:
                connection.sock.settimeout(1)
            return all(map(survives, opened))

        until(are_served)
        assert processes(server)["front end 1"] == stopped


@REPEATED
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("name", ["engine", "front end 2"])
def test_sigterm_ends_everything_during_a_fault(
    repository: Path, tmp_path: Path, name: str, number: signal.Signals, times: int
) -> None:
    for time_ in range(times):
        folder = tmp_path / str(time_)
        folder.mkdir()
        options = ("--front-ends", "2", "--hang-timeout-s", HANG_TIMEOUT_S, "--drain-timeout-s", "2")
        with serving(repository, folder, *options) as server:
            pids = processes(server)
            os.kill(pids[name], number)
            server.signal(signal.SIGTERM)
            assert server.wait(60) in (0, 1)
            assert not any(map(alive, pids.values()))
            server.process.returncode = 0


def test_no_connection_is_lost_while_front_ends_do_not_read(server: Server) -> None:
    """More connections arrive than messages fit into the sockets to the front ends."""
    until(lambda: is_whole(server))
    stopped = [pid for name, pid in processes(server).items() if name.startswith("front end")]
    connections = []
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(900):
            connections.append(socket.create_connection((HOST, server.port), timeout=60))
            connections[-1].sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        at_rest(lambda: len(os.listdir(f"/proc/{server.process.pid}/fd")))  # the supervisor accepts
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    for connection in connections:
        with connection:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    until(lambda: is_whole(server))


def test_requests_in_flight_get_503_when_the_engine_ends(server: Server) -> None:
    until(lambda: is_whole(server))
    body = json.dumps({"inputs": [{"name": "STEPS", "datatype": "INT64", "shape": [1], "data": [10_000_000]}]})
    with contextlib.closing(connect(server)) as connection:
        connection.request("POST", "/v2/models/busy/infer", body)
        in_flight = re.compile(rb'headrace_in_flight\{model="busy",version="1"\} 1')
        until(lambda: in_flight.search(server.request("GET", "/metrics")[2]))
        os.kill(processes(server)["engine"], signal.SIGKILL)
        response = connection.getresponse()
        assert response.status == 503
        assert int(response.getheader("Retry-After", "0")) >= 1
        response.read()
        until(lambda: infer(connection)[0] == 200)


def test_grpc_calls_fail_as_unavailable_while_the_engine_restarts(server: Server) -> None:
    until(lambda: is_whole(server))
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        assert client.is_server_ready()
        os.kill(processes(server)["engine"], signal.SIGKILL)
        codes = set()

        def serves_again() -> bool:
            try:
                return bool(client.is_server_ready()) and bool(codes)
            except InferenceServerException as error:
                codes.add(error.status())
                return False

        until(serves_again)
        assert codes == {"StatusCode.UNAVAILABLE"}
