"""Shares of versions, sticky headers, shadow requests and promotion rules on a running server, with and without front ends."""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from headrace.core.response_bodies import TRAFFIC_STATES
from headrace.core.tensor import Array
from headrace.observability.metrics_traffic import RULES

from tests.support import models
from tests.support.prometheus import read_page
from tests.support.serving import HOST, Server, serving
from tests.support.waiting import until

X = np.random.default_rng(3).standard_normal((1, 16)).astype(np.float32)
BODY = json.dumps(
    {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": X.ravel().tolist()}]}
).encode()
OPTIONS = ("--model-control", "explicit", "--load-model", "*")


def answer(seed: int) -> Array:
    """Y of `models.affine` with this seed, whose version has the number of the seed."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((16, 4)).astype(np.float32)
    return np.asarray(np.maximum(X @ weights + rng.standard_normal(4).astype(np.float32), 0))


def add(repository: Path, name: str, config: str, *versions: int, seeds: dict[int, int] | None = None) -> None:
    for version in versions:
        seed = (seeds or {}).get(version, version)
        models.add_model(repository, name, models.affine(seed=seed), version=version, files={"config.yaml": config})


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traffic") / "repository"
    add(folder, "short", 'traffic: {"2": 5%}\n', 1, 2)
    add(folder, "sticky", 'traffic: {"2": 30%, sticky_header: X-User}\n', 1, 2)
    add(folder, "changed", 'traffic: {"2": 10%}\n', 1, 2)
    # Version 2 is a copy of version 1, version 3 is another model.
    add(folder, "shadowed", "traffic: {shadow: {version: 2}}\n", 1, 2, seeds={2: 1})
    ruled = "traffic: {shadow: {version: 3}, rules: {min_agreement: 99%, min_requests: 5}}\n"
    add(folder, "ruled", 'traffic: {"3": 1%, ' + ruled.removeprefix("traffic: {"), 1, 3, seeds={3: 7})
    add(folder, "plain", "{}\n", 1, 2)
    # Other models: their answers have their names. "wider" has another input.
    add(folder, "first", 'traffic: {"model:second": 25%, "model:wider": 50%, sticky_header: X-User}\n', 1)
    add(folder, "second", "{}\n", 7)
    models.add_model(folder, "wider", models.affine(features=17), files={"config.yaml": "{}\n"})
    # The same configuration in the text format.
    for version in (1, 2):
        config = 'parameters { key: "headrace.traffic.2" value { string_value: "50%" } }'
        models.add_model(folder, "text", models.affine(seed=version), version=version, config=config)
    return folder


@pytest.fixture(scope="module", params=["one process", "front ends"])
def server(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    front_ends = () if request.param == "one process" else ("--front-ends", "2")
    with serving(repository, tmp_path_factory.mktemp("log"), *OPTIONS, *front_ends) as running:
        yield running


class Client:
    """A connection that repeats requests."""

    def __init__(self, server: Server) -> None:
        self.model = ""  # of the last answer
        self._connection = http.client.HTTPConnection(HOST, server.port, timeout=60)

    def version(self, model: str, headers: dict[str, str] | None = None, named: str = "") -> str:
        """Send a request, and return the version of its answer, which must be that version's."""
        path = f"/v2/models/{model}" + (f"/versions/{named}" if named else "") + "/infer"
        self._connection.request("POST", path, BODY, headers or {})
        response = self._connection.getresponse()
        body = response.read()
        assert response.status == 200, body
        document = json.loads(body)
        self.model = document["model_name"]
        if model not in ("shadowed", "ruled"):
            expected = answer(int(document["model_version"]))
            np.testing.assert_allclose(document["outputs"][0]["data"], expected.ravel(), rtol=1e-4, atol=1e-5)
        return str(document["model_version"])


def traffic(server: Server, model: str, changes: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    path = f"/v2/repository/models/{model}/traffic"
    body = None if changes is None else json.dumps(changes).encode()
    status, _, content = server.request("GET" if changes is None else "POST", path, body)
    return status, json.loads(content)


def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["version"]: row for row in report["versions"]}


def test_shares_are_exact_over_http(server: Server) -> None:
    """On several connections, and so in both front ends: the shares are those of all requests together."""
    clients = [Client(server) for _ in range(4)]
    before = {version: row["routed"] for version, row in rows(traffic(server, "short")[1]).items()}
    versions = Counter(clients[number % 4].version("short") for number in range(200))
    assert versions == {"1": 190, "2": 10}
    after = {version: row["routed"] for version, row in rows(traffic(server, "short")[1]).items()}
    assert {version: after[version] - before[version] for version in after} == {"1": 190, "2": 10}


def test_shares_are_exact_over_grpc(server: Server) -> None:
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        x = triton_grpc.InferInput("X", [1, 16], "FP32").set_data_from_numpy(X)
        versions: Counter[str] = Counter()
        for _ in range(100):
            result = client.infer("short", [x])
            version = result.get_response().model_version
            np.testing.assert_allclose(result.as_numpy("Y"), answer(int(version)), rtol=1e-4, atol=1e-5)
            versions[version] += 1
        assert versions == {"1": 95, "2": 5}
        assert client.infer("short", [x], model_version="2").get_response().model_version == "2"


def test_the_text_format_has_the_same_block(server: Server) -> None:
    client = Client(server)
    assert Counter(client.version("text") for _ in range(20)) == {"1": 10, "2": 10}


def test_a_request_that_names_a_version_gets_it(server: Server) -> None:
    client = Client(server)
    for version in ("1", "2", "2", "1"):
        assert client.version("short", named=version) == version


def test_a_sticky_header_selects_the_same_version_on_every_connection_and_protocol(server: Server) -> None:
    clients = [Client(server) for _ in range(3)]
    users = [f"user-{number}" for number in range(60)]
    by_http = {user: clients[0].version("sticky", {"X-User": user}) for user in users}
    assert set(by_http.values()) == {"1", "2"}
    for client in clients:
        assert {user: client.version("sticky", {"x-user": user}) for user in users} == by_http
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        x = triton_grpc.InferInput("X", [1, 16], "FP32").set_data_from_numpy(X)
        by_grpc = {
            user: client.infer("sticky", [x], headers={"x-user": user}).get_response().model_version for user in users
        }
    assert by_grpc == by_http
    # The same in every process and after every restart: the values are those of the hash, written down.
    assert "".join(by_http.values())[:20] == "12211111211111111112"


def test_traffic_is_changed_promoted_and_reset(server: Server) -> None:
    client = Client(server)
    status, report = traffic(server, "changed", {"versions": {"2": "50%"}})
    assert (status, rows(report)["2"]["share"], rows(report)["2"]["state"]) == (200, 0.5, "canary")
    assert Counter(client.version("changed") for _ in range(20)) == {"1": 10, "2": 10}
    status, report = traffic(server, "changed", {"promote": "2"})
    assert (status, rows(report)["2"]["share"], rows(report)["2"]["state"]) == (200, 1.0, "stable")
    assert Counter(client.version("changed") for _ in range(20)) == {"2": 20}
    status, _, body = server.request("GET", "/v2/models/changed/stats")
    assert status == 200, body
    assert traffic(server, "changed", {"reset": True})[0] == 200
    assert Counter(client.version("changed") for _ in range(20)) == {"1": 18, "2": 2}


def test_invalid_changes_are_refused_with_the_reason(server: Server) -> None:
    for changes, words in (
        ({"versions": {"2": "60%", "1": "50%"}}, "the shares of the versions are 110% together"),
        ({"versions": {"9": "5%"}}, "version 9 of model 'short' is not served: served are 1, 2"),
        ({"versions": {"2": "5 percent"}}, "the body does not match the schema"),
        ({"promote": "9"}, "has no share and is no shadow"),
        ({}, "one change is needed"),
        ({"promote": "2", "reset": True}, "one change is needed"),
        ({"sticky_header": "Authorization"}, "cannot be the sticky header"),
        ({"rules": {"min_agreement": "99%"}}, "there is no shadow"),
    ):
        status, document = traffic(server, "short", changes)
        assert status == 400, (changes, document)
        assert words in document["error"], (changes, document)
    assert traffic(server, "plain")[0] == 404
    assert traffic(server, "absent")[0] == 404
    assert traffic(server, "absent", {"versions": {"2": "5%"}})[0] == 404


def test_another_model_has_a_share(server: Server) -> None:
    """Each answer has name, version and values of the model that computed it; a model with other inputs gets no request."""
    client = Client(server)
    counts = Counter((client.version("first"), client.model) for _ in range(100))
    assert counts == {("1", "first"): 75, ("7", "second"): 25}
    with triton_grpc.InferenceServerClient(server.grpc_address) as grpc_client:
        x = triton_grpc.InferInput("X", [1, 16], "FP32").set_data_from_numpy(X)
        over_grpc: Counter[tuple[str, str]] = Counter()
        for _ in range(40):
            result = grpc_client.infer("first", [x])
            response = result.get_response()
            np.testing.assert_allclose(result.as_numpy("Y"), answer(int(response.model_version)), rtol=1e-4, atol=1e-5)
            over_grpc[response.model_name, response.model_version] += 1
    assert over_grpc == {("first", "1"): 30, ("second", "7"): 10}
    users = [f"user-{number}" for number in range(40)]
    by_user = {user: client.version("first", {"X-User": user}) for user in users}
    assert set(by_user.values()) == {"1", "7"}
    assert {user: Client(server).version("first", {"X-User": user}) for user in users} == by_user
    report = rows(traffic(server, "first")[1])
    assert (report["model:second"]["state"], report["model:second"]["share"]) == ("canary", 0.25)
    assert report["model:wider"]["state"] == "not_ready"
    different = "shape of its input X is [-1, 17], that of the stable version is [-1, 16]"
    assert report["model:wider"]["reason"] == different
    until(lambda: f"model first: model:wider gets no request of its traffic: {different}" in server.text)
    status, document = traffic(server, "first", {"versions": {"model:wider": "5%"}})
    assert (status, document["error"]) == (
        400,
        f"model 'wider' cannot answer the requests of model 'first': {different}",
    )
    status, document = traffic(server, "first", {"versions": {"model:absent": "5%"}})
    assert (status, document["error"]) == (
        400,
        "model:absent of the traffic does not serve: load model 'absent' first",
    )


def test_a_model_without_traffic_serves_its_latest_version(server: Server) -> None:
    client = Client(server)
    assert {client.version("plain") for _ in range(5)} == {"2"}


def test_shadow_answers_are_compared_and_never_returned(server: Server) -> None:
    client = Client(server)

    def compared(model: str, version: str) -> int:
        assert client.version(model) == "1"
        return int(rows(traffic(server, model)[1])[version]["shadow"].get("compared", 0))

    until(lambda: compared("shadowed", "2") >= 3)
    row = rows(traffic(server, "shadowed")[1])["2"]
    assert (row["state"], row["share"], row["routed"]) == ("shadow", 0.0, 0)
    assert row["agreement"] == 1.0
    assert row["max_difference"] == 0.0


def test_a_canary_that_breaks_a_rule_is_undone(server: Server) -> None:
    client = Client(server)
    assert rows(traffic(server, "ruled", {"reset": True})[1])["3"]["state"] in ("canary", "undone")
    status, document = traffic(server, "ruled", {"promote": "3"})
    assert status == 409
    assert "is not promoted" in document["error"]

    def is_undone() -> bool:
        client.version("ruled")
        return bool(rows(traffic(server, "ruled")[1])["3"]["state"] == "undone")

    until(is_undone)
    row = rows(traffic(server, "ruled")[1])["3"]
    assert row["share"] == 0.0
    assert "min_agreement is 99%" in row["reason"]
    until(lambda: "model ruled: the traffic of version 3 is undone by rule min_agreement" in server.text)
    assert {client.version("ruled") for _ in range(120)} == {"1"}
    status, document = traffic(server, "ruled", {"promote": "3"})
    assert status == 409
    assert "its share was taken" in document["error"]


def test_metrics_page_and_explain_show_the_traffic(server: Server) -> None:
    Client(server).version("short")
    page = {family.name: family for family in read_page(server.request("GET", "/metrics")[2].decode())}

    def values(name: str, model: str, label: str = "") -> dict[tuple[str, ...], float]:
        names = ("version", label) if label else ("version",)
        return {
            tuple(sample.labels[each] for each in names): sample.value
            for sample in page[name].samples
            if sample.labels["model"] == model
        }

    assert values("headrace_traffic_share", "short") == {("1",): 0.95, ("2",): 0.05}
    states = values("headrace_traffic_state", "short", "state")
    assert {key for key, value in states.items() if value} == {("1", "stable"), ("2", "canary")}
    assert {state for _, state in states} == set(TRAFFIC_STATES)
    assert {rule for _, rule in values("headrace_traffic_undone", "short", "rule")} == set(RULES)
    assert values("headrace_shadow_requests", "shadowed", "outcome").keys() >= {("2", "compared"), ("2", "failed")}
    explanation = json.loads(server.request("GET", "/v2/models/short/explain")[2])
    assert explanation["version"] == "1"
    assert {row["version"]: row["share"] for row in explanation["traffic"]["versions"]} == {"1": 0.95, "2": 0.05}
    status = json.loads(server.request("GET", "/v2/status")[2])
    shown = {row["version"]: row["serving"]["traffic"] for row in status["models"] if row["name"] == "short"}
    assert {version: (row["state"], row["share"]) for version, row in shown.items()} == {
        "1": ("stable", 0.95),
        "2": ("canary", 0.05),
    }


def test_no_wrong_answer_while_the_canary_is_reloaded_and_removed(tmp_path: Path) -> None:
    """Each answer is the one of the version that it names, which serves at that time, and no request fails."""
    repository = tmp_path / "repository"
    add(repository, "moving", 'traffic: {"2": 50%}\n', 1, 2)
    with serving(repository, tmp_path, *OPTIONS, "--front-ends", "2") as server:
        ending, problems = threading.Event(), list[BaseException]()
        counts: Counter[str] = Counter()

        def send() -> None:
            try:
                client = Client(server)
                while not ending.is_set():
                    counts[client.version("moving")] += 1
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=send) for _ in range(3)]
        for thread in threads:
            thread.start()
        canary, client = repository / "moving" / "2", Client(server)
        for _ in range(3):
            canary.rename(tmp_path / "away")
            assert server.request("POST", "/v2/repository/models/moving/load")[0] == 200
            assert rows(traffic(server, "moving")[1])["2"]["state"] == "not_ready"
            assert {client.version("moving") for _ in range(10)} == {"1"}
            (tmp_path / "away").rename(canary)
            assert server.request("POST", "/v2/repository/models/moving/load")[0] == 200
            assert rows(traffic(server, "moving")[1])["2"]["state"] == "canary"
            until(lambda: client.version("moving") == "2")
        ending.set()
        for thread in threads:
            thread.join()
        assert not problems
        assert counts["1"]
        assert counts["2"]
