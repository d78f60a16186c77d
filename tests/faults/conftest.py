"""Servers to attack: everything switched on that clients may be let do, limits as they are by default but for bodies."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from tests.support.attacks import Attacked, attack
from tests.support.waiting import until


def nothing_held(server: Attacked) -> None:
    """Check that all body memory is released after each test."""
    until(lambda: server.samples("headrace_body_bytes") == [0.0])


@pytest.fixture(scope="session")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """With our own gRPC engine; HTTP is the same behind both."""
    with attack("fast", tmp_path_factory.mktemp("attacked")) as server:
        yield server
        nothing_held(server)


@pytest.fixture(scope="session")
def grpcio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """With grpcio."""
    with attack("grpcio", tmp_path_factory.mktemp("attacked")) as server:
        yield server
        nothing_held(server)


@pytest.fixture(params=["fast", "grpcio"])
def attacked(request: pytest.FixtureRequest) -> Attacked:
    """Either engine, for what goes over gRPC."""
    server: Attacked = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def channel(attacked: Attacked) -> Iterator[grpc.Channel]:
    """A channel of the test's own, which sends and takes messages of any size."""
    with attacked.channel() as connected:
        yield connected
