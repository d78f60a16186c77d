"""Quotas of keys on a server with front ends: they hold for the whole server, and their refusals are those of one process."""

from __future__ import annotations

import http.client
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from headrace.core.access import Scope
from tritonclient.grpc import service_pb2

from tests.e2e.test_front_ends import row
from tests.support import models
from tests.support.grpc_requests import INFER, STREAM, message
from tests.support.keys import Keys
from tests.support.serving import HOST, Server, serving
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="front ends need Linux")
pb: Any = service_pb2

BURST = 30
CLIENTS = 4
# A token comes after days: a slow machine must not see a second one.
QUOTA = {"requests_per_s": 0.00001, "burst": BURST}
X = np.ones((1, 4), np.float32)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    result = Keys(tmp_path_factory.mktemp("keys"))
    for name in ("shop", "other", "third"):
        result.add(name, scopes=[Scope.INFER.value], quota=dict(QUOTA))
    result.write()
    return result


@pytest.fixture(scope="module")
def servers(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """A server with front ends, and one without."""
    repository = tmp_path_factory.mktemp("quotas") / "repository"
    models.add_model(repository, "row_sums", models.row_sums())
    options = ("--api-keys-file", str(keys.path))
    many, one = tmp_path_factory.mktemp("many"), tmp_path_factory.mktemp("one")
    with (
        serving(repository, many, *options, "--front-ends", "2") as first,
        serving(repository, one, *options, "--front-ends", "0") as second,
    ):
        yield [first, second]


def over_http(server: Server, keys: Keys, count: int) -> list[str]:
    connection = http.client.HTTPConnection(HOST, server.port, timeout=30)
    statuses = []
    for _ in range(count):
        connection.request("POST", "/v2/models/row_sums/infer", row(), keys.bearer("shop"))
        response = connection.getresponse()
        response.read()
        statuses.append({200: "ok", 429: "refused"}[response.status])
    connection.close()
    return statuses


def over_grpc(server: Server, keys: Keys, count: int) -> list[str]:
    results = []
    with grpc.insecure_channel(server.grpc_address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        for _ in range(count):
            try:
                channel.unary_unary(INFER)(message("row_sums", "", X), timeout=30, metadata=keys.metadata("shop"))
                results.append("ok")
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
                results.append("refused")
    return results


def over_stream(server: Server, keys: Keys, count: int) -> list[str]:
    requests = [message("row_sums", str(n), X) for n in range(count)]
    with grpc.insecure_channel(server.grpc_address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.stream_stream(STREAM)(iter(requests), timeout=30, metadata=keys.metadata("shop"))
        answers = [pb.ModelStreamInferResponse.FromString(answer) for answer in call]
    assert [answer.infer_response.id for answer in answers] == [str(n) for n in range(count)]
    assert all("exceeded the quota" in answer.error_message for answer in answers if answer.error_message)
    return ["refused" if answer.error_message else "ok" for answer in answers]


def errors(server: Server, keys: Keys) -> Counter[str]:
    """Failed requests by protocol, and those that the model counts."""
    text = server.request("GET", "/metrics", headers=keys.bearer("metrics"))[2].decode()
    result: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith("headrace_errors_total{") and 'reason="quota"' in line:
            result[line.split('protocol="')[1].split('"')[0]] += int(float(line.rsplit(" ", 1)[1]))
        elif line.startswith("headrace_failures_total{"):
            result["model"] += int(float(line.rsplit(" ", 1)[1]))
        elif line.startswith('headrace_requests_total{model="row_sums"'):
            result["ok"] += int(float(line.rsplit(" ", 1)[1]))
    return result


def test_a_quota_is_exact_over_all_front_ends_and_protocols(servers: list[Server], keys: Keys) -> None:
    server, count = servers[0], 10
    before = errors(server, keys)
    protocols = [over_http, over_grpc, over_stream]
    with ThreadPoolExecutor(CLIENTS * len(protocols)) as pool:
        sent = [(each.__name__, pool.submit(each, server, keys, count)) for each in protocols for _ in range(CLIENTS)]
        answers = [(name, answer) for name, future in sent for answer in future.result()]
    total = count * CLIENTS * len(protocols)
    assert Counter(answer for _, answer in answers) == {"ok": BURST, "refused": total - BURST}
    refused = Counter(name for name, answer in answers if answer == "refused")
    expected = Counter(http=refused["over_http"], grpc=refused["over_grpc"] + refused["over_stream"], ok=BURST)
    until(lambda: errors(server, keys) - before == expected)


def http_refusal(server: Server, headers: dict[str, str], body: bytes) -> tuple[int, list[str], bytes]:
    status, answer, content = server.request("POST", "/v2/models/row_sums/infer", body, headers)
    if status == 429:
        assert int(answer["retry-after"]) > 1000
    return status, sorted(answer), content


def grpc_refusal(server: Server, metadata: list[tuple[str, str]]) -> tuple[Any, str, list[str], str]:
    with grpc.insecure_channel(server.grpc_address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(INFER)(message("row_sums", "", X), timeout=30, metadata=metadata)
        (streamed,) = channel.stream_stream(STREAM)(iter([message("row_sums", "", X)]), timeout=30, metadata=metadata)
    error = pb.ModelStreamInferResponse.FromString(streamed)
    assert error.infer_response.parameters["headrace_retry_after_ms"].int64_param > 10**6
    trailers = {key for key, _ in caught.value.trailing_metadata()}
    return caught.value.code(), caught.value.details(), sorted(trailers), error.error_message


def test_refusals_equal_those_of_one_process(servers: list[Server], keys: Keys) -> None:
    """Also that requests are charged before they are read: invalid ones use up the quota, and refusals come first."""
    answers = []
    for server in servers:
        headers, metadata = keys.bearer("other"), keys.metadata("other")
        refusals: list[Any] = [http_refusal(server, headers, b"no JSON")[0] for _ in range(BURST)]
        refusals.append(http_refusal(server, headers, b"no JSON"))
        refusals.append(http_refusal(server, headers, row()))
        refusals.append(grpc_refusal(server, metadata))
        refusals.append(server.request("POST", "/v2/models/missing/infer", row(), headers)[0])
        answers.append(refusals)
    assert answers[0] == answers[1]
    assert answers[0][: BURST + 1] == [400] * BURST + [answers[0][BURST]]
    assert answers[0][BURST][0] == 429


def test_a_raised_quota_acts_at_once_in_all_front_ends(servers: list[Server], keys: Keys) -> None:
    server = servers[0]
    assert over_http_of(server, keys, BURST + 2) == BURST
    keys.clients["third"]["quota"] = {"requests_per_s": 1e6, "burst": 10**6}
    keys.write()
    until(lambda: over_http_of(server, keys, 8) == 8)


def over_http_of(server: Server, keys: Keys, count: int) -> int:
    """Accepted requests of `count`, each on a connection of its own."""
    answers = [server.request("POST", "/v2/models/row_sums/infer", row(), keys.bearer("third")) for _ in range(count)]
    return sum(status == 200 for status, _, _ in answers)
