"""Lone requests run on the event loop over each protocol, with the responses of an instance's thread."""

from __future__ import annotations

import http.client
from pathlib import Path

import numpy as np
import pytest

from tests.support import models
from tests.support.serving import Server, serving
from tests.support.triton_clients import connect, infer

ROWS = [np.full((1, 16), value, np.float32) for value in (0.5, -2.0, 7.0)]


def counts(server: Server) -> dict[str, float]:
    """Counters of the model by metric name."""
    connection = http.client.HTTPConnection(server.address, timeout=30)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return {line.partition("{")[0]: float(line.split()[-1]) for line in lines if 'model="affine"' in line}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_lone_requests_over_each_protocol(protocol: str, tmp_path: Path) -> None:
    models.add_model(tmp_path / "repository", "affine", models.affine())
    result = []
    # A bound that a busy machine keeps to as well; one run of over 2 ms disables the rest.
    for bound_us in ("1000000", "0"):
        options = ("--inline-bound-us", bound_us)
        (tmp_path / bound_us).mkdir()
        with (
            serving(tmp_path / "repository", tmp_path / bound_us, *options) as server,
            connect(server, protocol) as client,
        ):
            answers = [infer(client, "affine", {"X": rows}).as_numpy("Y") for rows in ROWS * 20]
            result.append([answer.tobytes() for answer in answers])
            totals = counts(server)
            assert totals["headrace_requests_total"] == totals["headrace_encode_seconds_count"] == len(ROWS) * 20
            assert (totals["headrace_inline_runs_total"] > 0) == (bound_us != "0")
    assert result[0] == result[1]
