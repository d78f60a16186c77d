"""Offers of work to idle models: only while no model has requests, and one at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from headrace.models.idle_tasks import IdleTasks
from headrace.runtimes.base import ExecutionLost

MS = 1_000_000


class Version(SimpleNamespace):
    """A version whose instance runs a task as soon as it is offered."""

    def __init__(self, name: str) -> None:
        super().__init__(in_flight=0, used_ns=0, is_ending=False, spec=SimpleNamespace(name=name), runs=0)

    __hash__ = object.__hash__

    def offer(self, task: Callable[[Any], None]) -> None:
        self.runs += 1
        task(self)


class World:
    """Two versions, of which the first has a task."""

    def __init__(self, task: Callable[[Any, Callable[[], bool]], None] | None = None) -> None:
        self.now_ns, self.loading, self.added = 1000 * MS, False, 0
        self.one, self.other = Version("one"), Version("other")
        self.busy: list[bool] = []
        commands: Any = SimpleNamespace(wake=self._count)
        self.tasks = IdleTasks(commands, lambda: self.now_ns)
        self.registry: Any = SimpleNamespace(used_sources=lambda: [("", "", each) for each in (self.one, self.other)])
        self.tasks.set(self.one, task or self._work)  # type: ignore[arg-type]

    def _count(self) -> None:
        self.added += 1

    def _work(self, _execution: object, is_busy: Callable[[], bool]) -> None:
        self.busy.append(is_busy())
        self.other.in_flight = 1
        self.busy.append(is_busy())
        self.other.in_flight = 0

    def look(self) -> int | None:
        return self.tasks.look(self.registry, lambda: self.loading)


def test_a_task_runs_while_no_model_has_requests_and_sees_those_that_come() -> None:
    world = World()
    assert world.look() == world.now_ns + 250 * MS
    assert world.busy == [False, True]
    world.tasks.set(world.one, None)  # type: ignore[arg-type]
    assert world.look() is None
    assert world.added == 1


@pytest.mark.parametrize("name", ["one", "other"])
@pytest.mark.parametrize("change", [{"in_flight": 1}, {"used_ns": 950 * MS}])
def test_no_task_is_offered_while_any_model_is_in_use(name: str, change: dict[str, int]) -> None:
    world = World()
    vars(getattr(world, name)).update(change)
    assert world.look() is not None
    assert world.one.runs == 0
    vars(getattr(world, name)).update(in_flight=0)
    world.now_ns += 100 * MS
    world.look()
    assert world.one.runs == 1


def test_no_task_is_offered_while_a_model_is_loaded() -> None:
    world = World()
    world.loading = True
    world.look()
    assert world.one.runs == 0


def test_a_task_ends_with_its_version() -> None:
    world = World()
    world.one.is_ending = True
    world.look()
    assert world.busy == [True, True]


def test_tasks_run_one_at_a_time() -> None:
    running = []

    def begin(_execution: object, _is_busy: object) -> None:
        running.append(world.one.runs)
        if len(running) == 1:
            world.tasks.set(world.other, begin)  # type: ignore[arg-type]
            world.look()
            world.tasks._run(world.other, begin, lambda: False, world.other)  # type: ignore[arg-type]

    world = World(begin)
    world.look()
    assert (running, world.other.runs) == ([1], 0)
    world.look()
    assert (len(running), world.other.runs) == (3, 1)


def test_a_task_that_fails_is_not_repeated_and_its_instance_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_execution: object, _is_busy: object) -> None:
        raise ValueError("no")

    world = World(fail)
    with caplog.at_level(logging.ERROR):
        world.look()
    assert "model one: work while it was idle failed" in caplog.text
    assert world.look() is None


def test_an_instance_that_is_lost_ends() -> None:
    def lose(_execution: object, _is_busy: object) -> None:
        raise ExecutionLost("gone")

    world = World(lose)
    with pytest.raises(ExecutionLost):
        world.look()
    world.tasks.set(world.one, world._work)  # type: ignore[arg-type]
    world.look()
    assert world.busy == [False, True]
