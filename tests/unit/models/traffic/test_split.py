"""Requests of one model over its versions: readiness, shadow requests, rules, abandoned requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from headrace.config.traffic_config import ALL_SHARES, Traffic
from headrace.core.clock import NS_PER_S
from headrace.core.completion import Mailbox
from headrace.core.errors import BadRequest, Cancelled, Conflict, HeadraceError, ModelFailed, NotFound, Unavailable
from headrace.core.request import NO_RANGES, InferRequest, InferResponse
from headrace.core.tensor import BY_NAME, Array, ModelSpec, PaddedInputs
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.models.traffic import shadow as shadow_module
from headrace.models.traffic.router import TrafficRouter
from headrace.models.traffic.split import TrafficSplit
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_versions import FakeVersion, spec_of

NAME = "model"


class BlockingVersion(FakeVersion):
    """A version whose shadow requests are answered by `answer_blocking`; `queued` is its depth."""

    queued = 0
    answer_blocking: Callable[[InferRequest], InferResponse] | None = None
    depth = property(lambda self: self.queued)

    def infer_blocking(self, request: InferRequest) -> InferResponse:
        assert self.answer_blocking is not None
        return self.answer_blocking(request)


class FakeRegistry:
    """Versions by number, the stable one chosen as in the registry."""

    def __init__(self, traffic: Traffic) -> None:
        self.handles: dict[str, BlockingVersion] = {}
        self.others: dict[str, BlockingVersion] = {}  # of other models, by their names
        self.in_force: Traffic | None = traffic
        self.router: TrafficRouter | None = None
        self.changed = threading.Event()

    def serving(self, name: str, version: str) -> VersionHandle | None:
        if name != NAME:
            return self.others.get(name)
        if not version and self.in_force is not None:
            version = self.in_force.stable_version(self.versions(name))
        return self.handles.get(version)

    def lease(self, name: str, version: str) -> VersionHandle:
        handle = self.serving(name, version)
        if handle is None or not handle.lease():
            raise NotFound(f"{name} is not found")
        return handle

    def versions(self, name: str) -> Sequence[str]:
        return sorted(self.handles, key=int)

    def traffic(self, name: str) -> Traffic | None:
        return self.in_force

    def set_traffic(self, name: str, traffic: Traffic | None) -> None:
        self.in_force = traffic
        assert self.router is not None
        self.router.publish(name, traffic)
        self.changed.set()

    def replace_traffic(self, name: str, before: Traffic, traffic: Traffic) -> None:
        if self.in_force == before:
            self.set_traffic(name, traffic)


class Scene:
    """A router with one model of versions 1 to 3."""

    def __init__(self, runner: asyncio.Runner, **block: object) -> None:
        self.runner, self.loop = runner, runner.get_loop()
        self.now_ns = 10**12
        traffic = Traffic.model_validate(block)
        self.registry = FakeRegistry(traffic)
        mailbox = Mailbox(self.loop)
        for number in ("1", "2", "3"):
            self.registry.handles[number] = BlockingVersion(replace(spec_of(NAME), version=number), mailbox)
        self.router = self.registry.router = TrafficRouter(self.registry, self.loop, clock=lambda: self.now_ns)
        self.router.publish(NAME, traffic)
        self.turn()

    @property
    def split(self) -> TrafficSplit:
        return self.router.splits[NAME]

    def version(self, target: str) -> BlockingVersion:
        return self.registry.others.get(target.removeprefix("model:")) or self.registry.handles[target]

    def add_model(self, name: str, spec: ModelSpec | None = None) -> BlockingVersion:
        """Serve another model, by default with the same tensors."""
        version = BlockingVersion(replace(spec or spec_of(name), version="7"), Mailbox(self.loop))
        self.registry.others[name] = version
        return version

    def turn(self, turns: int = 5) -> None:
        async def run() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.runner.run(run())

    def until(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline_s
            self.turn()
            time.sleep(0.001)

    def request(
        self, value: float = 1.0, output_ranges: Mapping[str, tuple[str, int, int]] = NO_RANGES
    ) -> InferRequest:
        inputs = {"X": np.full((1, 2), value, np.float32)}
        return InferRequest(
            inputs=dict[str, Array](inputs),
            rows=1,
            shape_key=None,
            received_ns=self.now_ns,
            output_ranges=output_ranges,
        )

    def send(
        self, outcome: InferResponse | HeadraceError | None = None, duration_ns: int = 0, *, only: str = ""
    ) -> str:
        """Send a request and answer it, with `outcome` if `only` is "" or its target; returns the target."""
        handle = self.split.lease({})
        number = handle.spec.version if handle.spec.name == NAME else f"model:{handle.spec.name}"
        request = self.request()
        completion = handle.infer(request)
        self.now_ns += duration_ns
        version = self.version(number)
        version.answer(len(version.requests) - 1, outcome if only in ("", number) else None)
        self.turn()
        if isinstance(completion.outcome, HeadraceError):
            handle.record_failure(completion.outcome, request.received_ns)
        handle.release()
        return number


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def doubled(request: InferRequest) -> InferResponse:
    return InferResponse({"Y": np.asarray(request.inputs["X"]) * 2})


def test_a_version_that_is_not_ready_gets_no_request(runner: asyncio.Runner) -> None:
    scene = Scene(runner, versions={"2": "50%"})
    assert Counter(scene.send() for _ in range(10)) == {"3": 5, "2": 5}
    scene.version("2").is_ready = False
    assert Counter(scene.send() for _ in range(10)) == {"3": 10}
    scene.version("2").is_ready = True
    assert Counter(scene.send() for _ in range(10)) == {"3": 5, "2": 5}
    gone = scene.registry.handles.pop("2")
    assert gone.in_flight == 0
    assert Counter(scene.send() for _ in range(10)) == {"3": 10}


def test_without_the_stable_version_a_canary_has_the_traffic(runner: asyncio.Runner) -> None:
    scene = Scene(runner, versions={"2": "10%", "1": "20%"})
    scene.version("3").is_ready = False
    counts = Counter(scene.send() for _ in range(10))
    assert counts == {"1": 9, "2": 1}, "those of version 3 go to the version with the largest share"


def test_without_any_version_the_error_is_that_of_the_stable_one(runner: asyncio.Runner) -> None:
    scene = Scene(runner, versions={"2": "10%"})
    for number in "123":
        scene.version(number).is_ready = False
    handle = scene.split.lease({})
    with pytest.raises(Unavailable, match="all instances"):
        handle.admit()
    handle.release()
    scene.registry.handles.clear()
    with pytest.raises(NotFound):
        scene.split.lease({})


def test_a_cancelled_request_is_cancelled_in_the_version(runner: asyncio.Runner) -> None:
    scene = Scene(runner, versions={"2": "100%"})
    handle = scene.split.lease({})
    completion = handle.infer(scene.request())
    completion.abandon()
    scene.turn()
    assert isinstance(completion.outcome, Cancelled)
    assert scene.version("2").requests[0][1].is_settled
    handle.release()


def test_errors_of_clients_are_no_errors_of_the_version(runner: asyncio.Runner) -> None:
    scene = Scene(runner, versions={"2": "100%"})
    handle = scene.split.lease({})
    handle.record_failure(BadRequest("no"), 0)
    handle.record_failure(Cancelled("gone"), 0)
    handle.release()
    figures = scene.split.figures("2")
    assert figures is not None
    assert figures.totals.requests == 0


def test_a_canary_with_errors_is_undone(runner: asyncio.Runner) -> None:
    scene = Scene(runner, versions={"2": "50%"}, rules={"max_error_rate": "10%", "min_requests": 20})
    for _ in range(5):
        scene.send(ModelFailed("broken"), only="2")
    sent = Counter[str]()
    while not scene.split.undone:
        sent[scene.send()] += 1
        assert sum(sent.values()) < 200
    assert sent["2"] == 17, "not before 20 requests, 3 of which have failed"
    assert Counter(scene.send() for _ in range(20)) == {"3": 20}
    scene.until(scene.registry.changed.is_set)
    assert scene.registry.in_force is not None
    assert scene.registry.in_force.versions == {"2": "0%"}
    assert (scene.split.state("2"), scene.split.share("2"), scene.split.share("3")) == ("undone", 0.0, 1.0)
    with pytest.raises(Conflict, match="its share was taken"):
        scene.split.check_promotion("2")
    runner.run(scene.router.change(NAME, {"versions": {"2": "50%"}}))
    assert scene.split.state("2") == "canary"


def test_a_slow_canary_is_undone(runner: asyncio.Runner) -> None:
    scene = Scene(runner, versions={"2": "50%"}, rules={"max_p99_ms": 50, "min_requests": 10})
    for _ in range(40):
        number = scene.send(duration_ns=60 * 10**6)
    assert scene.split.undone.keys() == {"2"}, "the stable version is as slow, and keeps its share"
    assert number == "3"


def test_a_promotion_waits_for_the_rules(runner: asyncio.Runner) -> None:
    scene = Scene(runner, versions={"2": "50%"}, rules={"max_error_rate": "10%", "min_requests": 10})
    with pytest.raises(Conflict, match="it has answered 0 requests"):
        runner.run(scene.router.change(NAME, {"promote": "2"}))
    for _ in range(20):
        scene.send()
    report = runner.run(scene.router.change(NAME, {"promote": "2"}))
    shares = {row["version"]: row["share"] for row in report["versions"]}  # type: ignore[attr-defined]  # JSON values
    assert shares == {"1": 0.0, "2": 1.0, "3": 0.0}
    assert Counter(scene.send() for _ in range(10)) == {"2": 10}


def test_figures_start_anew_with_another_load_of_a_version(runner: asyncio.Runner) -> None:
    scene = Scene(runner, versions={"2": "100%"}, rules={"max_error_rate": "10%", "min_requests": 2})
    scene.send()
    before = scene.split.lease({})
    scene.registry.handles["2"] = BlockingVersion(scene.version("2").spec, Mailbox(scene.loop))
    scene.send()
    before.record_failure(ModelFailed("of the version before"), 0)
    before.release()
    figures = scene.split.figures("2")
    assert figures is not None
    assert (figures.totals.requests, figures.totals.errors) == (1, 0)
    assert not scene.split.undone


# --- Other models ------------------------------------------------------------------------------------------------------

OTHER = "model:other"


def test_another_model_has_its_share_and_names_itself(runner: asyncio.Runner) -> None:
    scene = Scene(runner, versions={OTHER: "20%", "2": "10%"})
    other = scene.add_model("other")
    assert Counter(scene.send() for _ in range(50)) == {"3": 35, OTHER: 10, "2": 5}
    assert (len(other.requests), other.in_flight, other.spec.name) == (10, 0, "other")
    report = {row["version"]: row for row in scene.split.report()["versions"]}  # type: ignore[attr-defined]  # JSON values
    assert list(report) == ["1", "2", "3", OTHER]
    assert {key: report[OTHER][key] for key in ("state", "share", "routed", "requests", "reason")} == {
        "state": "canary",
        "share": 0.2,
        "routed": 10,
        "requests": 10,
        "reason": "",
    }
    assert [(row.version, row.share) for row in scene.split.rows()] == [
        ("1", 0.0),
        ("2", 0.1),
        ("3", 0.7),
        (OTHER, 0.2),
    ]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 25_000), min_size=4, max_size=4), st.integers(1, 300))
def test_shares_of_versions_and_models_are_exact(shares: list[int], requests: int) -> None:
    """The count of each target is its share of all requests, less or more by under one."""
    targets = ("1", "2", "model:a", "model:b.c")
    with asyncio.Runner() as runner:
        scene = Scene(
            runner, versions={name: f"{share / 1000:.3f}%" for name, share in zip(targets, shares, strict=True)}
        )
        scene.add_model("a")
        scene.add_model("b.c")
        for _ in range(requests):
            scene.split.lease({}).release()
        rest = ALL_SHARES - sum(shares)
        for target, share in [*zip(targets, shares, strict=True), ("3", rest)]:
            assert abs(scene.split.routed[target] * ALL_SHARES - share * requests) < ALL_SHARES
            assert scene.split.share(target) == pytest.approx(share / ALL_SHARES)


def test_a_sticky_value_selects_the_model_in_each_process(runner: asyncio.Runner) -> None:
    scenes = [Scene(runner, versions={OTHER: "30%"}, sticky_header="x-user") for _ in range(2)]
    selected = []
    for scene in scenes:
        scene.add_model("other")
        handles = [scene.split.lease({"x-user": f"user-{number}"}) for number in range(200)]
        selected.append([handle.target for handle in handles])
        for handle in handles:
            handle.release()
    assert selected[0] == selected[1]
    assert set(selected[0]) == {OTHER, "3"}


def test_a_model_that_does_not_serve_gets_no_request(runner: asyncio.Runner) -> None:
    scene = Scene(runner, versions={OTHER: "50%"})
    assert Counter(scene.send() for _ in range(10)) == {"3": 10}
    assert (scene.split.state(OTHER), scene.split.problem(OTHER)) == ("not_ready", "model 'other' does not serve")
    other = scene.add_model("other")
    assert Counter(scene.send() for _ in range(10)) == {"3": 5, OTHER: 5}
    other.is_ready = False
    assert Counter(scene.send() for _ in range(10)) == {"3": 10}
    del scene.registry.others["other"]
    assert Counter(scene.send() for _ in range(10)) == {"3": 10}
    assert other.in_flight == 0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (spec_of("other", inputs=("Z",)), "its inputs are Z, those of the stable version are X"),
        (spec_of("other", outputs=("Y", "Z")), "its outputs are Y, Z, those of the stable version are Y"),
        (
            spec_of("other", dtype=BY_NAME["INT32"]),
            "datatype of its input X is INT32, that of the stable version is FP32",
        ),
        (spec_of("other", rows=0), "shape of its input X is [2], that of the stable version is [-1, 2]"),
        (spec_of("other", rows=4), "its max_batch_size is 4, that of the stable version is 8"),
        (replace(spec_of("other"), decoupled=True), "one of the models is decoupled"),
        (
            replace(spec_of("other"), padded=PaddedInputs(frozenset("X"), 1, 8, 64)),
            "the largest length of its padded inputs is 64, that of the stable version is any",
        ),
    ],
)
def test_a_model_with_other_tensors_gets_no_request(
    runner: asyncio.Runner, caplog: pytest.LogCaptureFixture, spec: ModelSpec, words: str
) -> None:
    scene = Scene(runner, versions={OTHER: "50%"})
    other = scene.add_model("other", spec)
    assert Counter(scene.send() for _ in range(10)) == {"3": 10}
    assert not other.requests
    assert scene.split.state(OTHER) == "not_ready"
    assert words in scene.split.problem(OTHER)
    assert words in scene.split.promotion_problem(OTHER)
    assert [words in record.getMessage() for record in caplog.records] == [True], "once, not for each request"
    with pytest.raises(BadRequest, match="cannot answer the requests of model 'model'"):
        runner.run(scene.router.change(NAME, {"versions": {OTHER: "10%"}}))
    scene.add_model("other", spec_of("other", rows=16))  # loaded anew, with the tensors of the stable version
    assert Counter(scene.send() for _ in range(10)) == {"3": 5, OTHER: 5}


def test_changes_with_a_model_are_checked(runner: asyncio.Runner) -> None:
    scene = Scene(runner, versions={"2": "10%"})
    with pytest.raises(BadRequest, match="load model 'other' first"):
        runner.run(scene.router.change(NAME, {"versions": {OTHER: "10%"}}))
    with pytest.raises(BadRequest, match="'model' is a target of its own traffic"):
        runner.run(scene.router.change(NAME, {"versions": {f"model:{NAME}": "10%"}}))
    scene.add_model("other")
    runner.run(scene.router.change(NAME, {"versions": {OTHER: "10%"}}))
    assert Counter(scene.send() for _ in range(10)) == {"3": 9, OTHER: 1}


def test_a_model_with_errors_is_undone_and_another_one_is_promoted(runner: asyncio.Runner) -> None:
    scene = Scene(runner, versions={OTHER: "50%"}, rules={"max_error_rate": "10%", "min_requests": 10})
    scene.add_model("other")
    while not scene.split.undone:
        scene.send(ModelFailed("broken"), only=OTHER)
        assert sum(scene.split.routed.values()) < 100
    assert Counter(scene.send() for _ in range(10)) == {"3": 10}
    scene.until(scene.registry.changed.is_set)
    with pytest.raises(Conflict, match="its share was taken"):
        runner.run(scene.router.change(NAME, {"promote": OTHER}))
    scene.add_model("better")
    runner.run(scene.router.change(NAME, {"versions": {"model:better": "50%"}}))
    for _ in range(20):
        scene.send()
    runner.run(scene.router.change(NAME, {"promote": "model:better"}))
    assert Counter(scene.send() for _ in range(10)) == {"model:better": 10}
    del scene.registry.others["better"]
    assert Counter(scene.send() for _ in range(10)) == {"3": 10}, "the stable version is there if the model is not"


# --- Shadow requests ---------------------------------------------------------------------------------------------------


def shadow_counts(scene: Scene) -> dict[str, int]:
    return {outcome: count for (_, outcome), count in scene.split.shadow_counts.items()}


def test_a_shadow_is_compared_with_what_the_client_sent(runner: asyncio.Runner) -> None:
    """The memory of a request and of its answer may be used again after the answer."""
    scene = Scene(runner, shadow={"version": 2})
    scene.version("2").answer_blocking = doubled
    scene.version("3").queued = 1  # the shadow waits
    handle = scene.split.lease({})
    request = scene.request(5.0)
    completion = handle.infer(request)
    outputs = {"Y": np.asarray(request.inputs["X"]) * 2}
    scene.version("3").answer(0, InferResponse(outputs))
    scene.turn()
    assert isinstance(completion.outcome, InferResponse)
    request.inputs["X"].fill(0)
    outputs["Y"].fill(-1)
    handle.release()
    scene.version("3").queued = 0
    scene.send()
    scene.until(lambda: shadow_counts(scene).get("compared") == 2)
    figures = scene.split.figures("2")
    assert figures is not None
    assert figures.totals.difference == 0.0


def test_a_shadow_waits_for_the_queue_of_the_stable_version_and_is_dropped_beyond_the_bound(
    runner: asyncio.Runner,
) -> None:
    scene = Scene(runner, shadow={"version": 2})
    scene.version("2").answer_blocking = doubled
    scene.version("3").queued = 1
    for _ in range(shadow_module.MAX_REQUESTS + 3):
        assert scene.send() == "3"
    assert shadow_counts(scene) == {"queue_full": 3}
    scene.now_ns += 11 * NS_PER_S
    scene.send()
    assert shadow_counts(scene)["waited_too_long"] == shadow_module.MAX_REQUESTS
    scene.version("3").queued = 0
    scene.send()
    scene.until(lambda: shadow_counts(scene).get("compared"))


@pytest.mark.parametrize(
    ("error", "outcome", "rows"),
    [
        (ModelFailed("broken"), "failed", 1),
        (Unavailable("loading"), "unavailable", 0),
        (RuntimeError("bug"), "failed", 1),
    ],
)
def test_a_failing_shadow_never_fails_a_request(
    runner: asyncio.Runner, error: Exception, outcome: str, rows: int
) -> None:
    scene = Scene(runner, shadow={"version": 2})

    def fail(_: InferRequest) -> InferResponse:
        raise error

    scene.version("2").answer_blocking = fail
    assert scene.send() == "3"
    scene.until(lambda: shadow_counts(scene).get(outcome))
    figures = scene.split.figures("2")
    assert (0 if figures is None else figures.totals.rows) == rows
    assert scene.version("2").in_flight == 0


def test_a_hanging_shadow_holds_up_no_request(runner: asyncio.Runner) -> None:
    scene = Scene(runner, shadow={"version": 2})
    ending = threading.Event()

    def hang(request: InferRequest) -> InferResponse:
        assert ending.wait(60)
        return doubled(request)

    scene.version("2").answer_blocking = hang
    try:
        for _ in range(10):
            assert scene.send() == "3"
        assert not shadow_counts(scene)
    finally:
        ending.set()
    scene.until(lambda: shadow_counts(scene).get("compared") == 10)


def test_what_cannot_be_compared_is_counted(runner: asyncio.Runner) -> None:
    scene = Scene(runner, shadow={"version": 2})
    handle = scene.split.lease({})
    size = shadow_module.MAX_REQUEST_BYTES // 8 + 1
    large = InferRequest(inputs={"X": np.zeros((size, 2), np.float32)}, rows=size, shape_key=None, received_ns=0)
    handle.infer(large)
    handle.infer(scene.request(output_ranges={"Y": ("region", 0, 8)}))
    handle.release()
    assert shadow_counts(scene) == {"too_large": 1, "not_comparable": 1}
    scene.version("2").spec = replace(spec_of(NAME, inputs=("Z",)), version="2")
    scene.send()
    del scene.registry.handles["2"]
    scene.send()
    assert shadow_counts(scene) == {"too_large": 1, "not_comparable": 1, "other_inputs": 1, "not_ready": 1}


def test_a_version_that_disagrees_is_undone(runner: asyncio.Runner) -> None:
    rules = {"min_agreement": "90%", "min_requests": 5}
    scene = Scene(runner, versions={"2": "1%"}, shadow={"version": 2}, rules=rules)
    scene.version("2").answer_blocking = lambda request: InferResponse({"Y": np.asarray(request.inputs["X"]) * -1})
    scene.version("3").queued = 0

    def is_undone() -> bool:
        scene.send(InferResponse({"Y": np.array([[0.0, 1.0]], np.float32)}))
        return bool(scene.split.undone)

    scene.until(is_undone)
    assert "min_agreement is 90%" in scene.split.undone["2"]
    assert scene.split.undone_counts == {("2", "min_agreement"): 1}
