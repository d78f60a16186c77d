"""Active wait for an answer: only for the only request, and seldom if the answers take longer."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest
from headrace.core.errors import ModelFailed
from headrace.front_ends import frames
from headrace.front_ends.active_wait import ActiveWait, wait_limit_us
from headrace.front_ends.errors import describe_error
from headrace.front_ends.remote_models import RemoteModels

from tests.support.front_end_pair import open_pair, over_http
from tests.support.models import add_model, row_sums

BODY = b'{"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}'


class RecordedWait(ActiveWait):
    """Keeps the outcomes of all waits."""

    def __init__(self, limit_us: float) -> None:
        super().__init__(limit_us)
        self.outcomes: list[bool] = []

    def end(self, has_answer: bool) -> None:
        self.outcomes.append(has_answer)
        super().end(has_answer)


def test_waits_without_an_answer_become_rare_and_one_answer_brings_them_back() -> None:
    wait = ActiveWait(50)
    begun = []
    for number in range(40):
        if wait.begins():
            begun.append(number)
            wait.end(False)
    assert begun == [0, 2, 6, 14, 30]
    while not wait.begins():
        pass
    wait.end(True)
    assert wait.begins()
    wait.end(True)
    assert wait.begins()


def test_no_wait_without_a_limit() -> None:
    assert not ActiveWait(0).begins()


@pytest.mark.parametrize(
    ("cores", "front_ends", "limit_us"), [(2, 1, 0), (3, 1, 50), (4, 3, 0), (16, 4, 50), (1.5, 1, 0)]
)
def test_processes_without_a_core_each_do_not_wait_actively(cores: float, front_ends: int, limit_us: float) -> None:
    assert wait_limit_us(50, cores, front_ends) == limit_us


def engine(sock: socket.socket, answers: int) -> None:
    """Answer requests by an error, after `answers` of them not at all."""
    for _ in range(answers):
        header = sock.recv(1 << 16)
        group = frames.HEADER.unpack_from(header)[4]
        sock.sendall(frames.error_frame(group, 0, 1, describe_error(ModelFailed("the model has failed"))))


def test_the_answer_to_the_only_request_is_waited_for(tmp_path: Path) -> None:
    add_model(tmp_path, "row_sums", row_sums())

    async def main() -> None:
        async with open_pair(tmp_path) as pair:
            wait = RecordedWait(limit_us=20e6)
            models = RemoteModels(asyncio.get_running_loop(), wait=wait)
            models.apply_table(pair.engine.table_bytes())
            ours, theirs = socket.socketpair()
            models.new_arena()
            await models.attached(ours)
            thread = threading.Thread(target=engine, args=(theirs, 2), daemon=True)
            thread.start()
            for _ in range(2):
                status, _, body = await over_http(models, "row_sums", BODY)
                assert (status, b"the model has failed" in body) == (500, True)
            thread.join(20)
            assert wait.outcomes == [True, True]
            models.detached()
            theirs.close()

    asyncio.run(main())


def test_several_requests_are_not_waited_for(tmp_path: Path) -> None:
    add_model(tmp_path, "row_sums", row_sums())

    async def main() -> None:
        async with open_pair(tmp_path) as pair:
            wait = RecordedWait(limit_us=20e6)
            models = pair.front_ends[0] = RemoteModels(asyncio.get_running_loop(), wait=wait)
            pair.apply_table()
            await pair.attach(0)
            answers = await asyncio.gather(*(over_http(models, "row_sums", BODY) for _ in range(3)))
            assert [status for status, _, _ in answers] == [200, 200, 200]
            assert not wait.outcomes

    asyncio.run(main())
