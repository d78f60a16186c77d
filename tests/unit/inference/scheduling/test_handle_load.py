"""The load report of a version."""

from __future__ import annotations

import asyncio

from headrace.core.completion import Mailbox

from tests.support.fakes import FakeModel, handle, infer_request


async def test_the_load_as_a_whole_and_by_level() -> None:
    model = FakeModel()
    served = handle(Mailbox(asyncio.get_running_loop()), model, levels=3, default_level=2)
    for _ in range(3):
        await served.infer(infer_request(1))
    model.gate.clear()
    while model.started.acquire(blocking=False):
        pass
    waiting = [served.infer(infer_request(1))]
    assert await asyncio.to_thread(model.started.acquire, timeout=60)
    waiting += [served.infer(infer_request(1, rows=2, priority=level)) for level in (*[1] * 9, 2, 2, 3)]
    load, short = served.load(), served.load(by_level=False)
    assert [(level.level, level.depth, level.rows) for level in load.levels] == [(1, 9, 18), (2, 2, 4), (3, 1, 2)]
    assert (load.depth, load.rows, load.running_rows, load.instances) == (12, 24, 1, 1)
    assert load.levels[0].wait_ns <= load.levels[1].wait_ns <= load.levels[2].wait_ns
    assert short.levels == ()
    assert short[:5] == load[:5]
    assert short.wait_ns > 0  # two full batches are ahead of it
    model.gate.set()
    for each in waiting:
        await each
    assert served.close(60)
