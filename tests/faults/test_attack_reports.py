"""Reports whose size the number of models decides, requested by many clients at once (S27 in docs/security.md)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from tests.support.attacks import SERVICE, Attacked, attack, watched
from tests.support.models import add_model, affine

pb: Any = service_pb2
# Folders whose model file is empty, which cannot be loaded, and models that serve.
FOLDERS, SERVING = 3000, 120
CLIENTS = 24


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A server with thousands of model folders, of which some serve."""
    folder, content = tmp_path_factory.mktemp("fleet"), affine()
    for number in range(SERVING):
        add_model(folder / "models", f"serving_{number:04}", content)
    for number in range(FOLDERS):
        add_model(folder / "models", f"unloaded_{number:04}", b"")
    with attack(folder) as server:
        yield server


def http_report(method: str, path: str) -> Callable[[Attacked], int]:
    def fetch(server: Attacked) -> int:
        status, _, content = server.server.request(method, path, b"{}" if method == "POST" else None)
        assert status == 200, content
        return len(content)

    return fetch


def grpc_report(method: str, message: Any) -> Callable[[Attacked], int]:
    def fetch(server: Attacked) -> int:
        with server.channel() as channel:
            return len(channel.unary_unary(SERVICE + method)(message.SerializeToString(), timeout=60))

    return fetch


REPORTS = {
    "index": http_report("POST", "/v2/repository/index"),
    "list": http_report("GET", "/v2/models"),
    "statistics": http_report("GET", "/v2/models/stats"),
    "status": http_report("GET", "/v2/status"),
    "metrics": http_report("GET", "/metrics"),
    "gRPC index": grpc_report("RepositoryIndex", pb.RepositoryIndexRequest()),
    "gRPC statistics": grpc_report("ModelStatistics", pb.ModelStatisticsRequest()),
}


@pytest.mark.slow
@pytest.mark.parametrize("report", REPORTS)
def test_reports_of_thousands_of_models(fleet: Attacked, report: str) -> None:
    """Many clients at once: the liveness route answers all the time, and all clients together wait for a few runs."""
    fetch = REPORTS[report]
    fetch(fleet)
    with watched(fleet, f"S27 {report} of thousands of models") as watch, ThreadPoolExecutor(CLIENTS) as pool:
        begun_s = time.monotonic()
        size = fetch(fleet)
        alone_s = time.monotonic() - begun_s
        sizes = list(pool.map(lambda _: fetch(fleet), range(6 * CLIENTS)))
        assert min(sizes) > size // 2
        assert time.monotonic() - begun_s < 8 + 25 * alone_s
    watch.check(room_bytes=128 << 20)
    assert watch.probe.quantile_s(0.5) < 0.1, "most of the time the event loop is free"
    fleet.still_serves()
