"""Requests of different length share batches of a real server, and each response is that of the request alone."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton_http

from tests.support.models import add_model
from tests.support.ragged_models import PADDED_CONFIG, RAGGED_CONFIG, ragged_sums, token_sums
from tests.support.serving import Server, serving
from tests.support.triton_clients import ask

Array = np.ndarray[Any, Any]
CALLERS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ragged")
    repository = folder / "models"
    add_model(repository, "ragged", ragged_sums(), config=RAGGED_CONFIG)
    add_model(repository, "padded", token_sums(), files={"config.yaml": PADDED_CONFIG})
    add_model(repository, "unmasked", token_sums(masked=False), files={"config.yaml": PADDED_CONFIG})
    with serving(repository, folder) as running:
        yield running


def lengths(seed: int, count: int, longest: int = 40) -> list[int]:
    return [int(length) for length in np.random.default_rng(seed).integers(1, longest, count)]


PROTOCOLS = pytest.mark.parametrize("protocol", ["http", "grpc"])


def batch_sizes(server: Server, model: str) -> dict[int, int]:
    """Return the number of executions of a model by rows."""
    with triton_http.InferenceServerClient(server.address) as client:
        statistics = client.get_inference_statistics(model)["model_stats"][0]
        return {entry["batch_size"]: entry["compute_infer"]["count"] for entry in statistics["batch_stats"]}


def send_all(protocol: str, server: Server, model: str, requests: list[dict[str, Array]]) -> list[dict[str, Array]]:
    with ThreadPoolExecutor(CALLERS) as pool:
        return list(pool.map(lambda inputs: ask(server, protocol, model, inputs), requests))


def texts(length: int, rows: int, seed: int) -> dict[str, Array]:
    ids = np.random.default_rng(seed).integers(0, 1000, (rows, length))
    return {"ids": ids, "mask": np.ones_like(ids)}


@PROTOCOLS
def test_ragged_requests_share_batches(server: Server, protocol: str) -> None:
    requests = [
        {"ELEMENTS": np.random.default_rng(seed).integers(0, 1000, (1, length))}
        for seed, length in enumerate(lengths(1, 5 * CALLERS))
    ]
    before = batch_sizes(server, "ragged")
    for request, response in zip(requests, send_all(protocol, server, "ragged", requests), strict=True):
        elements = request["ELEMENTS"]
        assert response["SUM"].tolist() == [[elements.sum()]]
        assert np.array_equal(response["DOUBLED"], 2 * elements)
    after = batch_sizes(server, "ragged")
    assert any(count > before.get(rows, 0) for rows, count in after.items() if rows > 1), after


def test_a_lone_ragged_request_is_joined_too(server: Server) -> None:
    response = ask(server, "http", "ragged", {"ELEMENTS": np.array([[5, 6, 7]])})
    assert response["SUM"].tolist() == [[18]]
    assert response["DOUBLED"].tolist() == [[10, 12, 14]]


def test_computed_inputs_are_hidden_from_clients(server: Server) -> None:
    with triton_http.InferenceServerClient(server.address) as client:
        assert [tensor["name"] for tensor in client.get_model_metadata("ragged")["inputs"]] == ["ELEMENTS"]
        config = client.get_model_config("ragged")
    assert config["batch_input"][0]["target_name"] == ["OFFSETS"]
    assert config["input"][0]["allow_ragged_batch"] is True


@PROTOCOLS
@pytest.mark.parametrize("model", ["padded", "unmasked"])
def test_padding_never_leaks(server: Server, protocol: str, model: str) -> None:
    requests = [
        texts(length, rows, seed)
        for seed, (length, rows) in enumerate(zip(lengths(2, 5 * CALLERS), lengths(3, 5 * CALLERS, 3), strict=True))
    ]
    for request, response in zip(requests, send_all(protocol, server, model, requests), strict=True):
        ids = request["ids"]
        assert np.array_equal(response["doubled"], 2 * ids)
        added = 1 if model == "padded" else 2
        assert np.array_equal(response["total"], (ids + added).sum(axis=1, keepdims=True))


def test_requests_of_different_length_share_padded_batches(server: Server) -> None:
    """Twelve lengths of one multiple: without padding each batch has one row. Times decide, but some batches are always tried."""
    before = batch_sizes(server, "padded")
    requests = [texts(length, 1, length) for length in range(1, 13)]
    for _ in range(60):
        for request, response in zip(requests, send_all("http", server, "padded", requests), strict=True):
            assert np.array_equal(response["total"], (request["ids"] + 1).sum(axis=1, keepdims=True))
        after = batch_sizes(server, "padded")
        if any(count > before.get(rows, 0) for rows, count in after.items() if rows > 1):
            return
    raise AssertionError(f"no batch of several lengths ran: {after}")


def test_a_model_that_does_not_mask_is_not_padded(server: Server) -> None:
    assert "model unmasked: its requests are not padded: output 'total'" in server.text
    assert "model padded: its requests are not padded" not in server.text
    before = batch_sizes(server, "unmasked")
    send_all("http", server, "unmasked", [texts(length, 1, length) for length in range(1, 13)])
    after = batch_sizes(server, "unmasked")
    assert {rows for rows, count in after.items() if count > before.get(rows, 0)} == {1}


def read(server: Server, path: str) -> bytes:
    with urllib.request.urlopen(server.url + path, timeout=10) as response:
        body: bytes = response.read()
    return body


def explained(server: Server, model: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(read(server, f"/v2/models/{model}/explain"))
    return document


def test_metrics_and_explain_show_padding(server: Server) -> None:
    send_all("http", server, "padded", [texts(length, 1, length) for length in range(1, 13)])
    page = read(server, "/metrics").decode()
    samples = {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("headrace_"))
    }
    labels = '{model="padded",version="1"}'
    positions, padding = (
        samples["headrace_batch_positions_total" + labels],
        samples["headrace_padding_positions_total" + labels],
    )
    assert 0 <= padding < positions
    assert not any(name.startswith("headrace_batch_positions") and "ragged" in name for name in samples)
    assert samples['headrace_padding_positions_total{model="unmasked",version="1"}'] == 0
    assert explained(server, "padded")["padding"]["state"] in ("on", "off")
    unmasked = explained(server, "unmasked")["padding"]
    assert unmasked["state"] == "off"
    assert "output 'total' of a request changes when it is padded" in unmasked["reason"]
    assert "padding" not in explained(server, "ragged")
