"""Live sequences, slots and backlog on the metrics page, in `explain`, in the status and on the web page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from headrace.__main__ import main
from tritonclient.utils import InferenceServerException

from tests.support.browser import DESKTOP, Browser
from tests.support.prometheus import read_page
from tests.support.sequence_models import add_accumulator
from tests.support.serving import Server, serving
from tests.support.waiting import until

MODEL = "one_slot"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("figures")
    add_accumulator(folder / "repository", MODEL, strategy="oldest { max_candidate_sequences: 1 }")
    with serving(folder / "repository", folder) as running:
        yield running


def value(kind: Any = triton) -> list[Any]:
    return [kind.InferInput("INPUT", (1, 1), "INT32").set_data_from_numpy(np.ones((1, 1), np.int32))]


@pytest.fixture
def waiting(server: Server, client: triton.InferenceServerClient) -> Iterator[None]:
    """One live sequence on the only slot, and one that waits for it."""
    client.infer(MODEL, value(), sequence_id=1, sequence_start=True)
    answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    with triton_grpc.InferenceServerClient(server.grpc_address) as other:
        other.async_infer(
            MODEL,
            value(triton_grpc),
            lambda result, error: answers.put((result, error)),
            sequence_id=2,
            sequence_start=True,
            sequence_end=True,
        )
        until(lambda: status(server)["backlog"] == 1)
        yield
        client.infer(MODEL, value(), sequence_id=1, sequence_end=True)
        result, error = answers.get(timeout=60)
    assert error is None
    assert result.as_numpy("OUTPUT")[0, 0] == 1
    until(lambda: status(server)["live"] == 0)


def status(server: Server) -> dict[str, Any]:
    (row,) = json.loads(server.request("GET", "/v2/status")[2])["models"]
    sequences: dict[str, Any] = row["serving"]["sequences"]
    return sequences


def metrics(server: Server) -> dict[tuple[str, ...], float]:
    families = read_page(server.request("GET", "/metrics")[2].decode())
    return {
        (sample.name, *(label for name, label in sample.labels.items() if name == "reason")): sample.value
        for family in families
        if family.name.startswith("headrace_sequence")
        for sample in family.samples
    }


@pytest.mark.usefixtures("waiting")
def test_metrics(server: Server) -> None:
    figures = metrics(server)
    gauges = {name: figures[f"headrace_sequence{name}",] for name in ("s", "_slots", "_slots_used", "_backlog")}
    assert gauges == {"s": 2, "_slots": 1, "_slots_used": 1, "_backlog": 1}


def test_ends_and_refused_requests_are_counted(server: Server, client: triton.InferenceServerClient) -> None:
    before = metrics(server)
    client.infer(MODEL, value(), sequence_id=1, sequence_start=True, sequence_end=True)
    with pytest.raises(InferenceServerException, match="START"):
        client.infer(MODEL, value(), sequence_id=1)
    until(lambda: status(server)["live"] == 0)
    after = metrics(server)
    changes = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changes == {
        ("headrace_sequence_ends_total", "end"): 1,
        ("headrace_sequence_refusals_total", "not_live"): 1,
    }


@pytest.mark.usefixtures("waiting")
def test_explain_names_the_full_slots(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(server.request("GET", f"/v2/models/{MODEL}/explain")[2])
    assert document["limit"] == "slots"
    assert document["findings"][0]["explanation"].startswith(
        "sequences in the backlog: 1; 1 of 1 slots have a sequence"
    )
    assert "max_candidate_sequences" in document["findings"][0]["setting"]
    assert document["sequences"] == status(server)
    assert main(["explain", MODEL, "--url", server.url]) == 0
    assert "sequences: 2 live; 1 of 1 slots in use; 1 in the backlog" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("waiting")
def test_the_page_shows_sequences(server: Server, browser: Browser, client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="START"):
        client.infer(MODEL, value(), sequence_id=3)
    page = browser.open(f"{server.url}/#{MODEL}/1", DESKTOP)
    section = "document.querySelector('#view .sequences')"
    page.wait(f"{section} && !{section}.hidden && {section}.innerText.includes('2 live sequences')")
    page.wait(f"{section}.innerText.includes('without START')")
    text = page.evaluate(f"{section}.innerText")
    assert "1 of 1" in text
    bars = page.evaluate(f"[...{section}.querySelectorAll('li')].map((it) => it.innerText.split('\\n').slice(0, 2))")
    assert bars == [["slots in use", "1 of 1"], ["waiting for a slot", "1"]]
    assert page.complaints() == []
    page.close()
