"""Random interleavings of sends, slow readers, cancellations and ends of the process.

Oracle: a reader gets a prefix of what the model sent, in order and each response once; all of it where the request ends well.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from headrace.core.completion import Mailbox
from headrace.core.errors import BatchLost, Cancelled, HeadraceError, ModelFailed
from headrace.core.request import InferResponse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.decoupled_models import ACTIONS, decoupled_handle, decoupled_spec, open_decoupled, stream_request


@dataclass(frozen=True)
class Script:
    """One request and its reader.

    Attributes:
        action: of `ACTIONS`: 1 counts up to `number`; 2 the same with the flag on the last; 4 drops its sender; 5 is a crash.
        number: responses.
        portion: responses that the reader takes at once before it consumes them.
        cancel_at: responses after which the client leaves; None: it stays.
    """

    action: int
    number: int
    portion: int
    cancel_at: int | None


SCRIPTS = st.builds(
    Script,
    action=st.sampled_from([1, 1, 1, 2, 2, 4, 22, 24]),
    number=st.integers(1, 150),
    portion=st.integers(1, 40),
    cancel_at=st.none() | st.none() | st.integers(0, 120),
)
CRASHES = st.builds(Script, action=st.just(5), number=st.integers(0, 150), portion=st.just(5), cancel_at=st.none())


class Served:
    """The model on an event loop of its own thread, for all examples."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        spec = decoupled_spec({"IN": "INT32"})
        self.mailbox = Mailbox(self.loop)
        self.handle = decoupled_handle(self.mailbox, open_decoupled(folder / "m", ACTIONS, spec), spec)

    def close(self) -> None:
        self.handle.close(20.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def play(self, scripts: list[Script]) -> None:
        crashes = any(script.action == 5 for script in scripts)
        await asyncio.wait_for(asyncio.gather(*[self._run(script, crashes) for script in scripts]), 100)

    async def _run(self, script: Script, crashes: bool) -> None:
        inputs = {"IN": np.array([script.action, script.number], np.int32)}
        request, stream = stream_request(self.mailbox, inputs)
        completion = self.handle.infer(request)
        values: list[int] = []
        taken = 0
        arrived = asyncio.Event()
        stream.then(arrived.set)
        completion.then(arrived.set)
        while True:
            is_over = completion.woken
            response = stream.take()
            if response is None and is_over:
                break
            if response is None:
                stream.consumed(taken)
                taken = 0
                await arrived.wait()
                arrived.clear()
                continue
            assert isinstance(response, InferResponse)
            values.append(int(response.outputs["OUT"][0]))  # type: ignore[index,call-overload]
            taken += 1
            if taken == script.portion:
                stream.consumed(taken)
                taken = 0
                await asyncio.sleep(0)
            if len(values) == script.cancel_at:
                completion.abandon()
        outcome = completion.outcome
        assert values == list(range(len(values))), "in order, each once"
        assert len(values) <= script.number
        if isinstance(outcome, InferResponse):
            assert script.action in (1, 2, 22)
            assert len(values) == script.number, "all responses before a good end"
        elif isinstance(outcome, Cancelled):
            assert script.cancel_at is not None
            assert len(values) >= script.cancel_at
        elif isinstance(outcome, BatchLost):
            assert crashes
            assert script.action != 5 or len(values) == script.number, "what was sent before the end arrives"
        else:
            assert isinstance(outcome, ModelFailed)
            assert script.action in (4, 24)
            assert len(values) == script.number
        assert isinstance(outcome, InferResponse | HeadraceError)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    running = Served(tmp_path_factory.mktemp("decoupled"))
    yield running
    running.close()


def check(served: Served, scripts: list[Script]) -> None:
    asyncio.run_coroutine_threadsafe(served.play(scripts), served.loop).result(120)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scripts=st.lists(SCRIPTS, min_size=1, max_size=8))
def test_readers_get_what_was_sent(served: Served, scripts: list[Script]) -> None:
    check(served, scripts)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scripts=st.lists(SCRIPTS, max_size=4), crash=CRASHES)
def test_readers_get_what_was_sent_before_a_crash(
    tmp_path_factory: pytest.TempPathFactory, scripts: list[Script], crash: Script
) -> None:
    fresh = Served(tmp_path_factory.mktemp("crash"))  # a second crash of one would be followed by a pause
    try:
        check(fresh, [*scripts, crash])
        check(fresh, [Script(1, 3, 1, None)])
    finally:
        fresh.close()
