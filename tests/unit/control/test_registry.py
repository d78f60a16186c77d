"""States of versions in the registry: every legal step, what the index says, and what an old version cannot do to a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from server.control.lifecycle import TRANSITIONS, State, step
from server.control.registry import Registry, Serving
from server.core.completion import Mailbox
from server.core.errors import NotFound, Unavailable
from server.dataplane.handle import ModelHandle
from tests.fakes import DEATH, FakeModel, ask, handle


@contextmanager
def loop_with_handles() -> Iterator[tuple[asyncio.Runner, Callable[[], ModelHandle]]]:
    """A loop, and what makes handles on it; all are closed at the end."""
    made: list[ModelHandle] = []
    with asyncio.Runner() as runner:
        mailbox = Mailbox(runner.get_loop())

        def make() -> ModelHandle:
            made.append(handle(mailbox, FakeModel()))
            return made[-1]

        yield runner, make
        for each in made:
            assert each.close(5)


def kill(runner: asyncio.Runner, victim: ModelHandle) -> None:
    async def infer() -> None:
        with pytest.raises(Exception, match="died"):
            await victim.infer(ask(DEATH))

    runner.run(infer())
    while victim.ready:
        runner.run(asyncio.sleep(0.001))


def states(registry: Registry) -> list[tuple[str, str]]:
    return [(str(row["state"]), str(row["reason"])) for row in registry.index()]


@pytest.mark.parametrize("current", State)
@pytest.mark.parametrize("following", State)
def test_only_the_tables_steps_are_legal(current: State, following: State) -> None:
    if following in TRANSITIONS[current]:
        assert step(current, following) is following
    else:
        with pytest.raises(ValueError, match="cannot go"):
            step(current, following)


def test_the_index_says_unloaded_as_triton_does() -> None:
    registry = Registry()
    registry.mark("m", "", State.UNLOADED, "not loaded")
    assert registry.index() == [{"name": "m", "version": "", "state": "UNAVAILABLE", "reason": "not loaded"}]
    assert registry.failures() == []
    with pytest.raises(Unavailable, match="is not loaded"):
        registry.lease("m", "")
    with pytest.raises(NotFound):
        registry.lease("n", "")


def test_publishing_makes_ready_and_a_reload_keeps_it_so() -> None:
    with loop_with_handles() as (_, make):
        registry = Registry()
        registry.mark("m", "1", State.LOADING)
        old, new = make(), make()
        assert registry.publish("m", Serving({"1": old})) is None
        registry.note("m", "the last load failed: no")
        assert states(registry) == [("READY", "the last load failed: no")]
        before = registry.publish("m", Serving({"1": new}))
        assert before is not None
        assert before.handles == {"1": old}
        assert states(registry) == [("READY", "")]
        registry.drained("m", "1")
        assert states(registry) == [("READY", "")], "the old one has ended, not the new one"


def test_a_version_that_died_before_it_was_published_is_not_ready() -> None:
    with loop_with_handles() as (runner, make):
        registry = Registry()
        registry.mark("m", "1", State.LOADING)
        dead = make()
        kill(runner, dead)
        registry.publish("m", Serving({"1": dead}))
        assert states(registry) == [("UNAVAILABLE", "all its instances have died")]


def test_the_death_of_an_old_version_is_not_laid_at_the_new_ones_door() -> None:
    with loop_with_handles() as (runner, make):
        registry = Registry()
        registry.set_complete(True)
        registry.mark("m", "1", State.LOADING)
        old, new = make(), make()
        registry.publish("m", Serving({"1": old}))
        registry.publish("m", Serving({"1": new}))
        kill(runner, old)
        registry.died("m", "1")
        assert states(registry) == [("READY", "")]
        assert registry.ready()
        kill(runner, new)
        registry.died("m", "1")
        registry.died("m", "1")
        assert states(registry) == [("UNAVAILABLE", "all its instances have died")]
        assert not registry.ready()


def test_a_version_whose_instance_is_back_is_ready_with_its_remark() -> None:
    with loop_with_handles() as (runner, make):
        registry = Registry()
        registry.set_complete(True)
        registry.mark("m", "1", State.LOADING)
        registry.publish("m", Serving({"1": make()}, remarks={"1": "from model.onnx"}))
        registry.died("m", "1")
        assert states(registry) == [("READY", "from model.onnx")], "it lives"
        dead = make()
        kill(runner, dead)
        registry.publish("m", Serving({"1": dead}, remarks={"1": "from model.onnx"}))
        registry.died("m", "1")
        registry.revived("m", "1")
        assert states(registry) == [("UNAVAILABLE", "all its instances have died")], "not yet"
        while not dead.ready:
            runner.run(asyncio.sleep(0.01))
        registry.revived("m", "1")
        registry.revived("m", "1")
        registry.revived("m", "2")
        registry.revived("other", "1")
        assert states(registry) == [("READY", "from model.onnx")]
        assert registry.ready()


def test_an_end_that_comes_after_the_next_beginning_is_no_news() -> None:
    registry = Registry()
    for state in (State.LOADING, State.READY, State.UNLOADING, State.LOADING):
        registry.mark("m", "1", state)
    registry.drained("m", "1")
    assert states(registry) == [("LOADING", "")]


def test_pruning_forgets_only_what_neither_serves_nor_ends() -> None:
    with loop_with_handles() as (_, make):
        registry = Registry()
        for version in ("1", "2", "3", "4"):
            registry.mark("m", version, State.LOADING)
        registry.publish("m", Serving({"1": make()}))
        registry.mark("m", "2", State.UNAVAILABLE, "broken")
        registry.mark("m", "3", State.UNAVAILABLE, "broken")
        registry.mark("m", "4", State.UNAVAILABLE, "broken")
        registry.mark("m", "4", State.UNLOADING)
        registry.prune("m", keep=["2"])
        assert [row["version"] for row in registry.index()] == ["1", "2", "4"]


def test_a_label_whose_version_is_broken_tells_why() -> None:
    with loop_with_handles() as (_, make):
        registry = Registry()
        for version in ("1", "2"):
            registry.mark("m", version, State.LOADING)
        registry.mark("m", "2", State.UNAVAILABLE, "broken")
        registry.publish("m", Serving({"1": make()}, {"canary": "2", "stable": "1"}))
        with pytest.raises(Unavailable, match="broken"):
            registry.lease("m", "canary")
        registry.lease("m", "stable").release()
