"""Lone requests run on the event loop over each protocol, with the responses of an instance's thread."""

from __future__ import annotations

import http.client
from pathlib import Path

import numpy as np

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


def test_lone_requests_over_each_protocol(tmp_path: Path) -> None:
    models.add_model(tmp_path / "repository", "affine", models.affine())
    result = set()
    # A bound that a busy machine keeps to as well; one run of over 2 ms disables the rest.
    for bound_us in ("1000000", "0"):
        options = ("--inline-bound-us", bound_us)
        (tmp_path / bound_us).mkdir()
        with serving(tmp_path / "repository", tmp_path / bound_us, *options) as server:
            inline = 0.0
            for number, protocol in enumerate(("http", "grpc"), 1):
                with connect(server, protocol) as client:
                    answers = [infer(client, "affine", {"X": rows}).as_numpy("Y") for rows in ROWS * 20]
                result.add(b"".join(answer.tobytes() for answer in answers))
                totals, before = counts(server), inline
                assert totals["headrace_requests_total"] == number * len(ROWS) * 20
                assert totals["headrace_encode_seconds_count"] == number * len(ROWS) * 20
                inline = totals["headrace_inline_runs_total"]
                assert (inline > before) == (bound_us != "0")
    assert len(result) == 1
