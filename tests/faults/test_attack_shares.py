"""Attacks by one client on the share of the others: sequences that wait for a slot (S50 in docs/security.md)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.attacks import Attacked, head, watched
from tests.support.models import add_model, affine
from tests.support.sequence_models import add_state_sums
from tests.support.serving import serving
from tests.support.waiting import until

MANY = 300
# Two seconds until a sequence gives way; the rest is for a busy machine.
WAIT_S = 15.0


@contextmanager
def shared(folder: Path, front_ends: str) -> Iterator[Attacked]:
    """A server with a model of two slots on each instance, in one process or with front ends."""
    repository = folder / "models"
    add_model(repository, "affine", affine(), config="max_batch_size: 64\ndynamic_batching { }")
    add_state_sums(repository, "sums", "oldest { max_candidate_sequences: 2 }", fails=False)
    with serving(repository, folder, "--front-ends", front_ends) as server:
        yield Attacked(server, repository)


def body(correlation_id: int, **flags: bool) -> bytes:
    """A request of a sequence."""
    x = {"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}
    parameters = {"sequence_id": correlation_id, **flags}
    return json.dumps({"inputs": [x], "outputs": [{"name": "Y"}], "parameters": parameters}).encode()


def total(server: Attacked, correlation_id: int, **flags: bool) -> float:
    """Sum of the sequence of another client, after one more request."""
    headers = {"X-Headrace-Client": "other"}
    status, _, content = server.server.request("POST", "/v2/models/sums/infer", body(correlation_id, **flags), headers)
    assert status == 200, content
    return float(json.loads(content)["outputs"][0]["data"][0])


@pytest.mark.parametrize("front_ends", ["0", "2"])
def test_sequences_that_wait_leave_a_slot_to_other_clients(tmp_path: Path, front_ends: str) -> None:
    """A client starts 300 sequences that never end: another one gets a slot, and its sequence goes on."""
    with shared(tmp_path, front_ends) as server:
        with watched(server, f"S50 sequences, {front_ends} front ends") as watch, ExitStack() as stack:
            for number in range(MANY):
                content = body(1000 + number, sequence_start=True)
                wire = stack.enter_context(server.connect())
                length = f"Content-Length: {len(content)}"
                wire.pour([head("/v2/models/sums/infer", length, "X-Headrace-Client: many") + content])
            until(lambda: sum(server.samples("headrace_sequence_backlog", model="sums")) >= MANY / 2)
            start_s = time.monotonic()
            assert total(server, 1, sequence_start=True) == 1.0
            assert time.monotonic() - start_s < WAIT_S
            start_s = time.monotonic()
            assert [total(server, 1) for _ in range(20)] == [2.0 + step for step in range(20)]
            assert time.monotonic() - start_s < WAIT_S, "its requests do not wait for those of the other client"
            assert total(server, 1, sequence_end=True) == 22.0
            assert server.samples("headrace_sequence_ends_total", model="sums", reason="share") == [1.0]
        until(lambda: not sum(server.samples("headrace_sequence_backlog", model="sums")))
        watch.check()
        server.still_serves()
