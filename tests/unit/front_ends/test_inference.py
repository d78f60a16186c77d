"""Models that a front end serves, from the engine's table."""

from __future__ import annotations

import socket
from pathlib import Path

import uvloop
from headrace.front_ends.inference import ServedModels

from tests.support import models
from tests.support.front_end_pair import Pair, open_pair


async def attach(pair: Pair, served: ServedModels) -> None:
    engine_end, front_end_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    await pair.engine.attach(7, 1, engine_end)
    await served.begin().attached(front_end_end)


def test_a_table_that_arrives_before_the_stream_is_applied(tmp_path: Path) -> None:
    models.add_model(tmp_path, "affine", models.affine())

    async def run() -> None:
        async with open_pair(tmp_path) as pair:
            served = ServedModels()
            served.apply_table(pair.engine.table_bytes())
            assert not served.serves("affine", "")
            await attach(pair, served)
            assert served.serves("affine", "")
            assert served.serves("affine", "1")
            served.detach()
            assert not served.serves("affine", "")
            await attach(pair, served)
            assert not served.serves("affine", ""), "the table was that of an engine process that has ended"
            served.apply_table(pair.engine.table_bytes())
            assert served.serves("affine", "")
            served.detach()

    uvloop.run(run())
