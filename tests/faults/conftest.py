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
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with attack(tmp_path_factory.mktemp("attacked")) as server:
        yield server
        nothing_held(server)


@pytest.fixture
def channel(attacked: Attacked) -> Iterator[grpc.Channel]:
    """A channel of the test's own, which sends and takes messages of any size."""
    with attacked.channel() as connected:
        yield connected
