"""Lone requests run on the event loop over each protocol, with the responses of an instance's thread."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.support import models
from tests.support.serving import Server, serving

ROWS = [np.full((1, 16), value, np.float32) for value in (0.5, -2.0, 7.0)]
Send = Callable[[np.ndarray], np.ndarray]


def counts(server: Server) -> dict[str, float]:
    """Counters of the model by metric name."""
    connection = http.client.HTTPConnection(server.address, timeout=30)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return {line.partition("{")[0]: float(line.split()[-1]) for line in lines if 'model="affine"' in line}


@contextmanager
def over_http(server: Server) -> Iterator[Send]:
    with triton_http.InferenceServerClient(server.address) as client:

        def send(rows: np.ndarray) -> np.ndarray:
            tensor = triton_http.InferInput("X", list(rows.shape), "FP32").set_data_from_numpy(rows)
            return np.asarray(client.infer("affine", [tensor]).as_numpy("Y"))

        yield send


@contextmanager
def over_grpc(server: Server) -> Iterator[Send]:
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:

        def send(rows: np.ndarray) -> np.ndarray:
            tensor = triton_grpc.InferInput("X", list(rows.shape), "FP32").set_data_from_numpy(rows)
            return np.asarray(client.infer("affine", [tensor]).as_numpy("Y"))

        yield send


@pytest.mark.parametrize("connect", [over_http, over_grpc], ids=["http", "grpc"])
def test_lone_requests_over_each_protocol(
    connect: Callable[[Server], AbstractContextManager[Send]], tmp_path: Path
) -> None:
    models.add_model(tmp_path / "repository", "affine", models.affine())
    result = []
    # A bound that a busy machine keeps to as well; one run of over 2 ms disables the rest.
    for bound_us in ("1000000", "0"):
        options = ("--inline-bound-us", bound_us)
        (tmp_path / bound_us).mkdir()
        with serving(tmp_path / "repository", tmp_path / bound_us, *options) as server, connect(server) as send:
            result.append([send(rows).tobytes() for rows in ROWS * 20])
            totals = counts(server)
            assert totals["headrace_requests_total"] == totals["headrace_encode_seconds_count"] == len(ROWS) * 20
            assert (totals["headrace_inline_runs_total"] > 0) == (bound_us != "0")
    assert result[0] == result[1]
