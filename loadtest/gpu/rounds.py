"""Contenders in turns, round by round; one that fails is left out from then on and the others are measured on."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping

import grpc
from headrace.core.errors import HeadraceError

from loadtest.gpu.crowd import CrowdFailed
from loadtest.gpu.inprocess import CallersFailed
from loadtest.gpu.messages import Reporter
from loadtest.protocol import Refused
from loadtest.servers import ServerFailed

FAILURES = (HeadraceError, CallersFailed, CrowdFailed, ServerFailed, Refused, grpc.RpcError, OSError)

# Takes and reports one sample of a round.
Measure = Callable[[int], None]


class NothingMeasured(RuntimeError):
    """Every contender has failed; the notes say why."""


def in_turns(reporter: Reporter, rounds: int, contenders: Mapping[str, Measure]) -> None:
    """Measure every contender once a round, every second round in the opposite order.

    Raises:
        NothingMeasured: all of them failed.
    """
    alive = dict(contenders)
    for number in range(rounds):
        for name in list(alive) if number % 2 == 0 else list(reversed(alive)):
            try:
                alive[name](number)
            except FAILURES as error:
                traceback.print_exc()
                reporter.note(f"{name} failed in round {number} and is left out: {type(error).__name__}: {error}")
                del alive[name]
    if not alive:
        raise NothingMeasured("every contender failed, see the notes")
