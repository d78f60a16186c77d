"""A model whose process crashes, hangs or is killed: error messages, blamed batches and restarts."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headrace.core.errors import ModelFailed, Unavailable
from headrace.runtimes.base import ExecutionLost
from headrace.runtimes.isolated.backend import IsolatedModel
from headrace.runtimes.processes import supervisor

from tests.support import fragile_backend as fragile
from tests.support.fragile_backend import fly, pid, values, x_of
from tests.support.processes import alive, isolated_children_of_this_process, stop
from tests.support.waiting import until

# Each of these starts processes of its own; together they take most of a minute.
pytestmark = pytest.mark.slow

Load = Callable[..., IsolatedModel]


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (fragile.ABORT, "killed by SIGABRT"),
        (fragile.SEGFAULT, "killed by SIGSEGV"),
        (fragile.UNKNOWN, "killed by SIGKILL: is there enough memory?"),
        (fragile.EXIT, "it ended with status 3"),
        (fragile.HANG, "it gave no answer within 0.5 s"),
        (fragile.LOST, "its device failed"),
    ],
)
@pytest.mark.parametrize("words", ["", "overlapped"])
def test_a_batch_that_kills_its_process_fails_and_the_next_one_runs(
    load: Load, words: str, value: float, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(words, limit_s=0.5)
    execution = model.execution(0)
    before = pid(execution.run(x_of(1)))
    with pytest.raises(ModelFailed) as caught:
        execution.run(x_of(1, value))
    assert str(caught.value) == f"the process of m died while it ran the request: {cause}"
    after = execution.run(x_of(3))
    assert values(after) == [6]
    assert pid(after) != before
    assert not alive(before)
    assert model.process_status == (True, "", 1)
    (message,) = [record.getMessage() for record in caplog.records if "has died" in record.getMessage()]
    assert f"the process of m has died: {cause}, with 1 batches inside; the next in 0 s" in message
    assert "printed by the child" in message, "its last words"


def test_the_descriptors_of_a_dead_process_are_closed_without_the_collector(load: Load) -> None:
    model = load("")
    execution = model.execution(0)
    counts = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            with pytest.raises(ModelFailed):
                execution.run(x_of(1, fragile.ABORT))
            assert values(execution.run(x_of(3))) == [6]
            counts.append(len(os.listdir("/proc/self/fd")))
    finally:
        gc.enable()
    assert counts[1:] == counts[:1] * 3


def test_only_the_batch_that_kills_the_process_fails(load: Load, tmp_path: Path) -> None:
    model = load("overlapped wait")
    execution = model.execution(0)
    batches = [fly(execution, 1, fragile.ABORT), fly(execution, 4, 5)]
    (tmp_path / "go").touch()
    with pytest.raises(ModelFailed, match="SIGABRT"):
        execution.finish(batches[0])
    third = fly(execution, 6)
    assert values(execution.finish(batches[1])) == [8, 10]
    assert values(execution.finish(third)) == [12]
    assert model.process_status.restarts == 2, "together, then alone"


def test_a_batch_that_a_dead_process_never_began_is_not_to_blame(load: Load) -> None:
    model = load()
    execution = model.execution(0)
    (child,) = isolated_children_of_this_process()
    stop(child)
    answers: list[list[float]] = []
    pending = threading.Thread(target=lambda: answers.append(values(execution.run(x_of(3)))))
    pending.start()
    until(lambda: model.admission._inside)
    os.kill(child, signal.SIGKILL)
    pending.join(20)
    assert answers == [[6]]
    until(lambda: model.process_status.restarts == 1)


def test_launches_during_the_restart_wait_for_it_and_then_overlap_again(load: Load, tmp_path: Path) -> None:
    model = load("overlapped")
    execution = model.execution(0)
    batch = fly(execution, fragile.EXIT)
    until(lambda: model.process_status.restarts == 1)
    waiting = fly(execution, 2)
    with pytest.raises(ModelFailed):
        execution.finish(batch)
    batches = [waiting, fly(execution, 2)]
    overlapped = []
    for _ in range(40):
        assert values(execution.finish(batches.pop(0))) == [4]
        batches.append(fly(execution, 2))
        overlapped.append(batches[0].state.process is not None and batches[1].state.process is not None)  # type: ignore[attr-defined]
    assert not any(overlapped[:30]), "one at a time, for a while"
    assert all(overlapped[-5:])
    for batch in batches:
        assert values(execution.finish(batch)) == [4]


def test_the_other_instances_lose_nothing(load: Load, tmp_path: Path) -> None:
    model = load("wait", instances=3)
    executions = [model.execution(index) for index in range(3)]
    results: dict[int, Any] = {}

    def run(index: int) -> None:
        try:
            results[index] = values(executions[index].run(x_of(fragile.SEGFAULT if index == 1 else index + 5)))
        except ModelFailed as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    gate = model.admission
    until(lambda: len(gate._inside) == 3)
    (tmp_path / "go").touch()
    for thread in threads:
        thread.join(30)
    assert isinstance(results.pop(1), ModelFailed)
    assert results == {0: [10], 2: [14]}


def test_restart_pauses_grow_and_batches_are_then_refused_at_once(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "PAUSES_S", (0.0, 0.02, 600.0))
    model = load()
    execution = model.execution(0)
    for _ in range(3):
        with pytest.raises(ModelFailed):
            execution.run(x_of(fragile.EXIT))
    with pytest.raises(Unavailable, match="the process of m has died and is being started again"):
        execution.run(x_of(1))
    assert model.process_status == (False, "the process of m has died and is being started again", 3)
    pauses = [
        record.getMessage().split("next in ")[1].split(" s")[0]
        for record in caplog.records
        if "next in" in record.getMessage()
    ]
    assert pauses == ["0", "0.02", "600"]
    execution.close()
    model.close()  # does not wait for the pause


def test_a_process_that_has_lived_long_counts_anew(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PAUSES_S", (0.0, 600.0))
    monkeypatch.setattr(supervisor, "SETTLED_S", 0.0)
    execution = load().execution(0)
    for _ in range(3):
        with pytest.raises(ModelFailed):
            execution.run(x_of(fragile.EXIT))
    assert values(execution.run(x_of(1))) == [2]


def test_a_dead_supervisor_thread_ends_the_model(
    load: Load, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # In the report's log the error would keep its frames, and with them the sockets.
    logging.disable(logging.CRITICAL)
    request.addfinalizer(lambda: logging.disable(logging.NOTSET))
    model = load()
    execution = model.execution(0)

    def broken(*_arguments: object) -> float:
        raise SystemError("the keeper's own fault")

    monkeypatch.setattr(supervisor.ProcessSupervisor, "_record_end", broken)
    with pytest.raises(ModelFailed):
        execution.run(x_of(fragile.EXIT))
    with pytest.raises(ExecutionLost):
        execution.run(x_of(1))
    assert not model.process_status.up


def test_a_process_that_does_not_end_is_killed(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CLOSE_GRACE_S", 0.3)
    model = load()
    (child,) = isolated_children_of_this_process()
    stop(child)
    model.close()
    assert not alive(child)


def test_unfinished_batches_do_not_block_others(load: Load, tmp_path: Path) -> None:
    model = load("overlapped wait", instances=2)
    first_execution, other = model.execution(0), model.execution(1)
    batch, lost = fly(other, 7), fly(first_execution, fragile.ABORT)
    assert lost.state is not None
    (tmp_path / "go").touch()
    closing = threading.Thread(target=first_execution.close)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    assert values(other.finish(batch)) == [14]
    assert values(other.run(x_of(1))) == [2]


def test_a_model_that_cannot_be_loaded_again_is_tried_again(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "PAUSES_S", (0.05,))
    model = load()
    execution = model.execution(0)
    (tmp_path / "model").write_text("refuse")
    with pytest.raises(ModelFailed):
        execution.run(x_of(fragile.EXIT))
    until(lambda: model.process_status.refusal)
    assert not model.process_status.up
    (tmp_path / "model").write_text("")
    until(lambda: model.process_status.up)
    assert model.process_status.refusal == ""
    assert values(execution.run(x_of(1))) == [2]
