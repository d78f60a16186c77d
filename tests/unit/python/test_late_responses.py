"""One late response of a model that is not decoupled, by a response sender."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.core.completion import Mailbox
from headrace.core.errors import BatchLost, Cancelled, HeadraceError, ModelFailed
from headrace.core.request import InferResponse

from tests.support.decoupled_models import decoupled_handle, decoupled_spec, open_decoupled, stream_request
from tests.support.waiting import until_async

# The first value of a request says what happens to it.
CODE = """
class TritonPythonModel:
    def initialize(self, args):
        self.gate = threading.Event()
        self.errors = []
        self.cancelled = False

    def execute(self, requests):
        results = []
        for request in requests:
            action = int(value(request, "IN").reshape(-1)[0])
            if action == 0:
                results.append(answer(len(self.errors), self.cancelled, errors=" ".join(self.errors)))
                continue
            if action == 8:
                self.gate.set()
                results.append(answer(8))
                continue
            if action == 9:
                results.append(None)
                continue
            sender = request.get_response_sender()
            if action == 1:  # within execute
                sender.send(answer(10), flags=FINAL)
            else:
                threading.Thread(target=self.act, args=(request, sender, action), daemon=True).start()
            results.append(answer(1) if action == 7 else None)
        return results if any(result is not None for result in results) else None

    def act(self, request, sender, action):
        if action == 2:  # its input, once the gate is open
            self.gate.wait()
            sender.send(answer(*value(request, "IN").reshape(-1)), flags=FINAL)
        elif action == 3:  # two responses
            sender.send(answer(1))
            try:
                sender.send(answer(2))
            except pb_utils.TritonModelException as error:
                self.errors.append(str(error))
            sender.send(flags=FINAL)
        elif action == 4:
            try:
                sender.send(flags=FINAL)
            except pb_utils.TritonModelException as error:
                self.errors.append(str(error))
        elif action == 5:
            while not (request.is_cancelled() and sender.is_cancelled()):
                time.sleep(0.001)
            self.cancelled = True
            sender.send(answer(1), flags=FINAL)
        elif action == 6:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("late", 3)), flags=FINAL)
"""


class Model:
    """A model on an event loop."""

    def __init__(self, folder: Path, batched: bool = False) -> None:
        self.spec = decoupled_spec({"IN": "INT32"}, batched=batched, decoupled=False)
        self.processes = open_decoupled(folder / "m", CODE, self.spec, bounds=(1, 0))
        self.mailbox = Mailbox(asyncio.get_running_loop())
        self.handle = decoupled_handle(self.mailbox, self.processes, self.spec)

    def start(self, *values: int) -> Any:
        array = np.array(values, np.int32)
        request, stream = stream_request(
            self.mailbox, {"IN": array.reshape(1, -1) if self.spec.max_batch_size else array}
        )
        assert stream.sent == 0
        return self.handle.infer(request)

    async def ask(self, *values: int) -> Any:
        return await self.result(self.start(*values))

    @staticmethod
    async def result(completion: Any) -> Any:
        try:
            return (await completion).outputs["OUT"].tolist()
        except HeadraceError as error:
            return error


def play(folder: Path, scenario: Any, batched: bool = False) -> None:
    async def main() -> None:
        model = Model(folder, batched)
        try:
            await asyncio.wait_for(scenario(model), 100)
        finally:
            await asyncio.to_thread(model.handle.close, 20.0)

    asyncio.run(main())


def test_a_response_comes_from_a_thread_and_its_input_stays(tmp_path: Path) -> None:
    async def scenario(model: Model) -> None:
        waiting = [model.start(2, number, 7) for number in range(12)]  # more than slots
        for _ in range(12):
            assert await model.ask(1, 5, 5) == [10]
        assert await model.ask(8) == [8]
        for number, completion in enumerate(waiting):
            assert await model.result(completion) == [2, number, 7]
            assert isinstance(completion.outcome, InferResponse)
            assert completion.outcome.times is not None
        assert await model.ask(1) == [10]

    play(tmp_path, scenario)


def test_responses_and_senders_in_one_batch(tmp_path: Path) -> None:
    async def scenario(model: Model) -> None:
        # With `answer` of one dimension a batched output has the wrong shape: each request has its own error.
        results = await asyncio.gather(*[model.ask(action, 0) for action in (1, 8, 2, 1)])
        assert all("returned output 'OUT' with the shape" in str(result) for result in results)

    play(tmp_path, scenario, batched=True)


def test_errors_of_the_only_response(tmp_path: Path) -> None:
    async def scenario(model: Model) -> None:
        assert await model.ask(3) == [1]
        error = await model.ask(4)
        assert isinstance(error, ModelFailed)
        assert "dropped the response sender" in str(error)
        assert str(await model.ask(6)) == "late"
        assert "response sender: return None" in str(await model.ask(7))
        assert "returned nothing for 1 requests" in str(await model.ask(9))

        async def has_both() -> bool:
            return (await model.ask(0))[0] == 2

        await until_async(has_both)
        completion = model.start(0)
        texts = str((await completion).parameters["errors"])
        assert "exactly one response. Write model_transaction_policy" in texts
        assert "send it with the final flag" in texts

    play(tmp_path, scenario)


@pytest.mark.parametrize("ends", [False, True])
def test_a_late_request_is_cancelled_or_lost(tmp_path: Path, ends: bool) -> None:
    async def scenario(model: Model) -> None:
        completion = model.start(5)
        assert await model.ask(1) == [10]  # the batch of the other has returned
        if ends:
            connection = model.processes._processes[0].connection
            assert connection is not None
            connection.child.kill("by the test")
            assert isinstance(await model.result(completion), BatchLost)
            assert await model.ask(1) == [10]
            return
        completion.abandon()
        assert isinstance(await model.result(completion), Cancelled)

        async def is_seen() -> bool:
            return bool((await model.ask(0))[1])

        await until_async(is_seen)

    play(tmp_path, scenario)
