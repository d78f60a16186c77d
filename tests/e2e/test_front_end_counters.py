"""Metrics of a server with front ends: equal to the requests that were sent, also after SIGKILL of a front end."""

from __future__ import annotations

import http.client
import json
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tests.e2e.test_front_ends import children, row
from tests.support import models
from tests.support.grpc_requests import INFER, STREAM, steps
from tests.support.serving import HOST, Server, serving
from tests.support.waiting import until

pb: Any = service_pb2
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="front ends need Linux")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    models.add_model(tmp_path / "repository", "row_sums", models.row_sums())
    log = ("--request-log", "all", "--request-log-file", str(tmp_path / "requests.jsonl"))
    with serving(tmp_path / "repository", tmp_path, "--front-ends", "2", *log) as running:
        yield running


def samples(server: Server) -> dict[str, float]:
    """Samples of the metrics page by name and labels."""
    text = server.request("GET", "/metrics")[2].decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def send(connections: list[http.client.HTTPConnection], body: bytes, model: str = "row_sums") -> list[int]:
    statuses = []
    for connection in connections:
        connection.request("POST", f"/v2/models/{model}/infer", body)
        response = connection.getresponse()
        response.read()
        statuses.append(response.status)
    return statuses


def opened(server: Server, count: int) -> list[http.client.HTTPConnection]:
    result = [http.client.HTTPConnection(HOST, server.port, timeout=30) for _ in range(count)]
    for each in result:
        each.connect()
    return result


def counted(server: Server) -> tuple[float, float, float, float]:
    """Successful and failed requests of the model, and errors by reason."""
    values = samples(server)
    return (
        values['headrace_requests_total{model="row_sums",version="1"}'],
        values.get('headrace_failures_total{model="row_sums",reason="bad_request",version="1"}', 0.0),
        values.get('headrace_errors_total{protocol="http",reason="bad_request"}', 0.0),
        values.get('headrace_errors_total{protocol="http",reason="not_found"}', 0.0),
    )


ROUNDS, TURNS, CLIENTS = 3, 5, 8
BAD = row().replace(b'"X"', b'"Y"')


def run_round(server: Server, number: int) -> None:
    """Send requests over connections to both front ends, and kill one front end when all are answered."""
    clients, total = opened(server, CLIENTS), number * TURNS * CLIENTS
    for _ in range(TURNS):
        assert send(clients, row()) == [200] * CLIENTS
        assert send(clients, BAD) == [400] * CLIENTS
        assert send(clients, row(), "missing") == [404] * CLIENTS
    until(lambda: counted(server) == (total, total, total, total))
    values = samples(server)
    shares = [values[f'headrace_process_connections{{process="front_end_{each}"}}'] for each in (1, 2)]
    assert sum(shares) in (CLIENTS, CLIENTS + 1), "and perhaps that of the scrape"
    assert min(shares) >= 1, "both front ends have connections"
    os.kill(children(server)["headrace: front end 1"], signal.SIGKILL)
    until(lambda: is_replaced(server, number + 1))
    assert counted(server) == (total, total, total, total), "totals never fall"
    for client in clients:
        client.close()


def test_totals_are_exact_after_a_front_end_is_killed(server: Server, tmp_path: Path) -> None:
    assert counted(server) == (0, 0, 0, 0)
    for number in range(1, ROUNDS + 1):
        run_round(server, number)
    values = samples(server)
    assert values['headrace_process_starts_total{process="engine"}'] == 1
    assert values['headrace_process_cpu_seconds_total{process="engine"}'] > 0
    until(lambda: samples(server)['headrace_connections{protocol="http"}'] <= 1)
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    reasons = Counter(line["reason"] for line in lines)
    total = ROUNDS * TURNS * CLIENTS
    assert reasons == {"ok": total, "bad_request": total, "not_found": total}


def is_replaced(server: Server, starts: int) -> bool:
    """Return whether front end 1 has served this scrape after this number of starts: it has the fewest connections."""
    try:
        values = samples(server)
    except OSError:
        return False
    is_ready = values['headrace_process_connections{process="front_end_1"}'] == 1
    return is_ready and values['headrace_process_starts_total{process="front_end_1"}'] == starts


def test_the_page_names_the_processes(server: Server) -> None:
    processes = json.loads(server.request("GET", "/v2/status")[2])["processes"]
    assert [each["name"] for each in processes] == ["supervisor", "engine", "front_end_1", "front_end_2"]
    assert all(each["pid"] > 0 and each["memory_bytes"] > 1 << 20 and each["starts"] == 1 for each in processes)
    assert processes[0]["pid"] == server.process.pid
    assert "Processes: an engine and 2 front ends" in server.text


def test_connections_are_limited_for_all_front_ends_together(tmp_path: Path) -> None:
    models.add_model(tmp_path / "repository", "row_sums", models.row_sums())
    with serving(tmp_path / "repository", tmp_path, "--front-ends", "2", "--max-connections", "6") as server:
        clients = opened(server, 6)
        held = []
        for client in clients:  # a request that has begun: not idle, so no other connection takes its place
            client.putrequest("POST", "/v2/models/row_sums/infer")
            client.putheader("Content-Length", "1000")
            client.endheaders(b"{")
            held.append(client)
        until(lambda: server.request("POST", "/v2/models/row_sums/infer", row())[0] == 503)
        # Metrics are served on reserved connections.
        assert samples(server)['headrace_limit_hits_total{limit="max_connections",protocol="http"}'] >= 1
        for client in held:
            client.close()
        until(lambda: server.request("POST", "/v2/models/row_sums/infer", row())[0] == 200)


def slow_request(server: Server) -> bytes:
    """A request to `busy` that takes a fifth of a second or longer, also in its fastest run on a machine with other work.

    All that were sent to find it are counted: a request is counted after its answer is sent.
    """
    steps, took_s, sent = 1000, 0.0, 0
    while took_s < 0.2:
        steps, sent = 2 * steps, sent + 3
        body = b'{"inputs": [{"name": "STEPS", "datatype": "INT64", "shape": [1], "data": [%d]}]}' % steps
        took_s = math.inf
        for _ in range(3):
            began_s = time.monotonic()
            assert server.request("POST", "/v2/models/busy/infer", body)[0] == 200
            took_s = min(took_s, time.monotonic() - began_s)
    until(lambda: samples(server)['headrace_requests_total{model="busy",version="1"}'] == sent)
    return body


@pytest.mark.parametrize(
    ("config", "reason", "text"),
    [
        ("slo: {p99_ms: 1000}\n", "would_miss", b"admission control"),
        ("", "overloaded", b"the queue is full: a request"),
    ],
    ids=["promise", "longest wait"],
)
def test_rejections_under_overload_are_counted_exactly(tmp_path: Path, config: str, reason: str, text: bytes) -> None:
    folder = models.add_model(tmp_path / "repository", "busy", models.busy())
    (folder / "config.yaml").write_text(config)
    with serving(tmp_path / "repository", tmp_path, "--front-ends", "2") as server:
        body = slow_request(server)
        before = samples(server)

        def client() -> Counter[tuple[int, bool]]:
            connection = http.client.HTTPConnection(HOST, server.port, timeout=120)
            outcomes = Counter[tuple[int, bool]]()
            for _ in range(3):
                connection.request("POST", "/v2/models/busy/infer", body)
                response = connection.getresponse()
                content = response.read()
                is_known = response.status == 200 or text in content or b"can no longer" in content
                assert is_known, content
                assert (response.headers["Retry-After"] is not None) == (response.status == 503)
                outcomes[response.status, text in content] += 1
            connection.close()
            return outcomes

        with ThreadPoolExecutor(20) as pool:
            outcomes = sum((each.result() for each in [pool.submit(client) for _ in range(20)]), Counter())
        assert outcomes.total() == 60
        assert outcomes[200, False] > 0
        assert outcomes[503, True] > 0, "twenty requests of a fifth of a second do not end within one"
        refused = sum(count for (status, _), count in outcomes.items() if status == 503)

        def increase(name: str) -> float:
            return samples(server).get(name, 0.0) - before.get(name, 0.0)

        until(lambda: increase('headrace_requests_total{model="busy",version="1"}') == outcomes[200, False])
        until(lambda: increase(f'headrace_failures_total{{model="busy",reason="{reason}",version="1"}}') == refused)
        assert increase(f'headrace_errors_total{{protocol="http",reason="{reason}"}}') == refused


def test_rejections_over_grpc_are_counted_exactly(tmp_path: Path) -> None:
    """Unary calls and streams; a rejection leaves the stream open."""
    config = "dynamic_batching { default_queue_policy { max_queue_size: 2 } }\n"
    models.add_model(tmp_path / "repository", "busy", models.busy(), config=config)
    with serving(tmp_path / "repository", tmp_path, "--front-ends", "2") as server:
        body = json.loads(slow_request(server))
        before = samples(server)
        content = steps("", body["inputs"][0]["data"][0])

        def unary() -> Counter[bool]:
            outcomes = Counter[bool]()
            with grpc.insecure_channel(server.grpc_address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                for _ in range(3):
                    try:
                        channel.unary_unary(INFER)(content, timeout=120)
                        outcomes[True] += 1
                    except grpc.RpcError as error:
                        assert error.code() is grpc.StatusCode.UNAVAILABLE, error
                        assert {"retry-after", "grpc-status-details-bin"} <= {
                            key for key, _ in error.trailing_metadata()
                        }
                        outcomes[False] += 1
            return outcomes

        def streamed() -> Counter[bool]:
            with grpc.insecure_channel(server.grpc_address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                call = channel.stream_stream(STREAM)(iter([content] * 20), timeout=120)
                answers = [pb.ModelStreamInferResponse.FromString(answer) for answer in call]
            rejected = [each for each in answers if each.error_message]
            assert all(each.infer_response.parameters["headrace_retry_after_ms"].int64_param > 0 for each in rejected)
            return Counter({True: len(answers) - len(rejected), False: len(rejected)})

        with ThreadPoolExecutor(8) as pool:
            sent = [pool.submit(each) for each in [streamed] * 2 + [unary] * 6]
            outcomes = sum((each.result() for each in sent), Counter())
        assert outcomes.total() == 58
        assert outcomes[True] > 0
        assert outcomes[False] > 0, "two of forty requests at once may wait"

        def increase(name: str) -> float:
            after = samples(server)
            return sum(value - before.get(key, 0.0) for key, value in after.items() if key.startswith(name))

        until(lambda: increase('headrace_requests_total{model="busy"') == outcomes[True])
        until(lambda: increase('headrace_failures_total{model="busy"') == outcomes[False])
        assert increase('headrace_errors_total{protocol="grpc"') == outcomes[False]
