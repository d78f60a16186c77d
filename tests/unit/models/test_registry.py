"""States of versions in the registry: legal transitions, the index, and an old version that ends beside a new one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from headrace.config.traffic_config import Traffic
from headrace.core.completion import Mailbox
from headrace.core.errors import NotFound, Unavailable
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy
from headrace.models.registry import TRANSITIONS, Registry, Serving, State, transition
from headrace.models.version_closer import VersionCloser
from headrace.observability.counters import Recorder

from tests.support.fakes import DEATH, SPEC, FakeModel, handle, infer_request


@contextmanager
def loop_with_handles() -> Iterator[tuple[asyncio.Runner, Callable[[], ModelHandle]]]:
    """A loop, and what makes handles on it; all are closed at the end."""
    created: list[ModelHandle] = []
    with asyncio.Runner() as runner:
        mailbox = Mailbox(runner.get_loop())

        def make() -> ModelHandle:
            created.append(handle(mailbox, FakeModel()))
            return created[-1]

        yield runner, make
        for each in created:
            assert each.close(60)


def kill(runner: asyncio.Runner, victim: ModelHandle) -> None:
    async def infer() -> None:
        with pytest.raises(Exception, match="died"):
            await victim.infer(infer_request(DEATH))

    runner.run(infer())
    while victim.ready:
        runner.run(asyncio.sleep(0.001))


def states(registry: Registry) -> list[tuple[str, str]]:
    return [(str(row["state"]), str(row["reason"])) for row in registry.index()]


@pytest.mark.parametrize("current", State)
@pytest.mark.parametrize("following", State)
def test_only_the_tables_steps_are_legal(current: State, following: State) -> None:
    if following in TRANSITIONS[current]:
        assert transition(current, following) is following
    else:
        with pytest.raises(ValueError, match="cannot go"):
            transition(current, following)


class Scene:
    """Two registries with the same history, one for each value of --ready-when."""

    def __init__(self, runner: asyncio.Runner, make: Callable[[], ModelHandle]) -> None:
        self.registries = {"any": Registry(), "all": Registry("all")}
        self.handles: dict[str, ModelHandle] = {}
        self.runner = runner
        self._make = make

    def mark(self, name: str, *states: State) -> None:
        for registry in self.registries.values():
            for state in states:
                registry.mark(name, "1", state, "because")

    def serve(self, name: str) -> None:
        self.handles[name] = self._make()
        self.mark(name, State.LOADING)
        for registry in self.registries.values():
            registry.publish(name, Serving({"1": self.handles[name]}))

    def unload(self, name: str) -> None:
        for registry in self.registries.values():
            registry.publish(name, None)
            registry.mark_all_unloaded(name)

    def complete(self, complete: bool = True) -> None:
        for registry in self.registries.values():
            registry.set_complete(complete)

    @property
    def ready(self) -> tuple[bool, bool]:
        """Of any and of all."""
        return self.registries["any"].ready(), self.registries["all"].ready()

    @property
    def counts(self) -> tuple[int, int]:
        return self.registries["all"].model_counts()


@pytest.fixture
def scene() -> Iterator[Scene]:
    with loop_with_handles() as (runner, make):
        yield Scene(runner, make)


def test_a_server_with_nothing_to_serve_is_ready(scene: Scene) -> None:
    assert scene.ready == (False, False), "the first loading is not over"
    scene.complete()
    assert scene.ready == (True, True)
    scene.mark("asleep", State.UNLOADED)
    assert scene.ready == (True, True), "never loaded, in explicit mode"
    assert scene.counts == (0, 0)


def test_a_quarantined_model_counts_for_all_and_for_any_only_where_it_is_alone(scene: Scene) -> None:
    scene.mark("broken", State.LOADING, State.UNAVAILABLE)
    scene.complete()
    assert scene.ready == (False, False)
    assert scene.counts == (0, 1)
    scene.serve("good")
    assert scene.ready == (True, False)
    assert scene.counts == (1, 2)
    scene.unload("broken")
    assert scene.ready == (True, True), "unloaded on purpose"
    assert scene.counts == (1, 1)


def test_a_model_that_is_loaded_later_counts_once_its_loading_has_ended(scene: Scene) -> None:
    scene.serve("good")
    scene.complete()
    scene.mark("later", State.LOADING)
    assert scene.ready == (True, True)
    assert scene.counts == (1, 2)
    scene.mark("later", State.UNAVAILABLE)
    assert scene.ready == (True, False)
    scene.serve("later")
    assert scene.ready == (True, True)
    assert scene.counts == (2, 2)


def test_the_last_model_is_unloaded_on_purpose(scene: Scene) -> None:
    scene.serve("good")
    scene.complete()
    scene.unload("good")
    assert scene.ready == (True, True)


def test_a_model_whose_instances_have_died_counts_for_both(scene: Scene) -> None:
    scene.serve("good")
    scene.serve("dead")
    scene.complete()
    assert scene.ready == (True, True)
    kill(scene.runner, scene.handles["dead"])
    for registry in scene.registries.values():
        registry.update_health("dead", "1")
    assert scene.ready == (False, False), "another replica may serve it"
    assert scene.counts == (1, 2)


def test_a_server_that_drains_is_not_ready(scene: Scene) -> None:
    scene.serve("good")
    scene.complete()
    scene.complete(False)
    assert scene.ready == (False, False)


def test_the_index_reports_unloaded_like_triton() -> None:
    registry = Registry()
    registry.mark("m", "", State.UNLOADED, "not loaded")
    assert registry.index() == [{"name": "m", "version": "", "state": "UNAVAILABLE", "reason": "not loaded"}]
    assert registry.failures() == []
    with pytest.raises(Unavailable, match="is not loaded"):
        registry.lease("m", "")
    with pytest.raises(NotFound):
        registry.lease("n", "")


def test_publishing_makes_a_model_ready_and_a_reload_preserves_it() -> None:
    with loop_with_handles() as (_, make):
        registry = Registry()
        registry.mark("m", "1", State.LOADING)
        old, new = make(), make()
        registry.publish("m", Serving({"1": old}))
        registry.set_reason("m", "the last load failed: no")
        assert states(registry) == [("READY", "the last load failed: no")]
        registry.publish("m", Serving({"1": new}))
        assert states(registry) == [("READY", "")]
        registry.mark_unloaded("m", "1")
        assert states(registry) == [("READY", "")], "the old one has ended, not the new one"


def test_configured_traffic_is_held_for_serving_models_only() -> None:
    traffic = Traffic.model_validate({"2": "5%"})
    with loop_with_handles() as (_, make):
        registry = Registry()
        for number in range(3):
            registry.publish(f"plain-{number}", Serving({"1": make()}))
            registry.publish(f"canary-{number}", Serving({"1": make(), "2": make()}, traffic=traffic))
        assert set(registry._configured_traffic) == {f"canary-{number}" for number in range(3)}
        registry.publish("canary-0", None)
        registry.publish("canary-1", Serving({}, traffic=traffic))
        registry.publish("canary-2", Serving({"1": make()}))
        assert not registry._configured_traffic


def test_a_version_that_died_before_it_was_published_is_not_ready() -> None:
    with loop_with_handles() as (runner, make):
        registry = Registry()
        registry.mark("m", "1", State.LOADING)
        dead = make()
        kill(runner, dead)
        registry.publish("m", Serving({"1": dead}))
        assert states(registry) == [("UNAVAILABLE", "all its instances have died")]


def test_the_death_of_an_old_instance_does_not_mark_the_new_version() -> None:
    with loop_with_handles() as (runner, make):
        registry = Registry()
        registry.set_complete(True)
        registry.mark("m", "1", State.LOADING)
        old, new = make(), make()
        registry.publish("m", Serving({"1": old}))
        registry.publish("m", Serving({"1": new}))
        kill(runner, old)
        registry.update_health("m", "1")
        assert states(registry) == [("READY", "")]
        assert registry.ready()
        kill(runner, new)
        registry.update_health("m", "1")
        registry.update_health("m", "1")
        assert states(registry) == [("UNAVAILABLE", "all its instances have died")]
        assert not registry.ready()


def test_a_version_with_a_restarted_instance_is_ready_with_its_remark() -> None:
    with loop_with_handles() as (runner, make):
        registry = Registry()
        registry.set_complete(True)
        registry.mark("m", "1", State.LOADING)
        registry.publish("m", Serving({"1": make()}, remarks={"1": "from model.onnx"}))
        registry.update_health("m", "1")
        assert states(registry) == [("READY", "from model.onnx")], "it lives"
        dead = make()
        kill(runner, dead)
        registry.publish("m", Serving({"1": dead}, remarks={"1": "from model.onnx"}))
        registry.update_health("m", "1")
        registry.update_health("m", "1")
        assert states(registry) == [("UNAVAILABLE", "all its instances have died")], "not yet"
        while not dead.ready:
            runner.run(asyncio.sleep(0.01))
        registry.update_health("m", "1")
        registry.update_health("m", "1")
        registry.update_health("m", "2")
        registry.update_health("other", "1")
        assert states(registry) == [("READY", "from model.onnx")]
        assert registry.ready()


def test_a_late_end_event_of_an_earlier_load_is_ignored() -> None:
    registry = Registry()
    for state in (State.LOADING, State.READY, State.UNLOADING, State.LOADING):
        registry.mark("m", "1", state)
    registry.mark_unloaded("m", "1")
    assert states(registry) == [("LOADING", "")]


def test_pruning_removes_only_inactive_versions() -> None:
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


def test_a_label_of_a_broken_version_gives_the_reason() -> None:
    with loop_with_handles() as (_, make):
        registry = Registry()
        for version in ("1", "2"):
            registry.mark("m", version, State.LOADING)
        registry.mark("m", "2", State.UNAVAILABLE, "broken")
        registry.publish("m", Serving({"1": make()}, {"canary": "2", "stable": "1"}))
        with pytest.raises(Unavailable, match="broken"):
            registry.lease("m", "canary")
        registry.lease("m", "stable").release()


def test_an_unused_version_is_closed_at_once_unless_another_process_uses_it() -> None:
    with asyncio.Runner() as runner:
        mailbox, closed = Mailbox(runner.get_loop()), list[str]()
        closer = VersionCloser(Registry(), lambda handle: closed.append(threading.current_thread().name))
        idle, held = (
            ModelHandle(SPEC, HandlePolicy(batch=BatchPolicy(8)), None, mailbox, Recorder()) for _ in range(2)
        )
        closer.begin(idle)
        assert closed == [threading.current_thread().name]
        assert held.hold()
        closer.begin(held)
        assert len(closed) == 1
        held.end_hold()
        assert closer.wait(60)
        assert closed[1:] == ["drain fake/1"]


def test_the_end_waits_for_a_version_that_a_load_closes() -> None:
    with asyncio.Runner() as runner:
        begun, gate = threading.Event(), threading.Event()

        def closed(_handle: object) -> None:
            begun.set()
            gate.wait(20)

        closer = VersionCloser(Registry(), closed)
        policy = HandlePolicy(batch=BatchPolicy(8))
        idle = ModelHandle(SPEC, policy, None, Mailbox(runner.get_loop()), Recorder())
        load = threading.Thread(target=closer.begin, args=(idle,))  # closes it itself
        load.start()
        assert begun.wait(20)
        threading.Timer(0.05, gate.set).start()
        assert closer.wait(20)
        assert gate.is_set()
        load.join()


def test_an_unknown_model_may_exist_until_the_initial_load_has_ended() -> None:
    registry = Registry(is_starting=True)
    with pytest.raises(Unavailable, match="is starting"):
        registry.lease("m", "")
    registry.set_complete(True)
    with pytest.raises(NotFound):
        registry.lease("m", "")
