"""Memory that a TensorRT model books in its account, on a fake GPU."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path

import pytest
from headrace.core.ledger import HOST, Kind, Ledger, NoRoom
from headrace.runtimes.cuda.driver import DeviceError
from headrace.runtimes.tensorrt import plan as tensorrt_plan
from headrace.runtimes.tensorrt import tuning as tensorrt_tuning
from headrace.runtimes.tensorrt.backend import GPUS, MAX_BATCH_SIZE, TensorRtBackend
from headrace.runtimes.tensorrt.contexts import PreparedContext
from headrace.runtimes.tensorrt.plan import load

from tests.support.fake_streams import LateCuda
from tests.support.tensorrt_case import build

pytestmark = pytest.mark.usefixtures("trt")


def test_weights_scratch_and_buffers_are_booked_on_each_gpu(cuda: LateCuda, tmp_path: Path) -> None:
    cuda.devices = 2
    plan = build(tmp_path)
    ledger = Ledger()
    parameters = {MAX_BATCH_SIZE: "8", GPUS: "0,1,1"}
    with closing(TensorRtBackend().load(plan, 3, parameters, ledger.account("m", "1"))) as model:
        weights = plan.stat().st_size
        assert {(h.gpu, h.kind): h.size_bytes for h in ledger.holdings()} == {
            (0, Kind.WEIGHTS): weights,
            (1, Kind.WEIGHTS): weights,
        }
        executions = [model.execution(index) for index in range(3)]
        booked = {(h.gpu, h.kind): h.size_bytes for h in ledger.holdings()}
        assert booked.keys() == {(HOST, Kind.BUFFERS), *((gpu, kind) for gpu in (0, 1) for kind in Kind)}
        # Three batches of eight rows of three and two floats at the least, for every instance.
        assert booked[0, Kind.BUFFERS] >= 3 * 8 * (3 + 2) * 4
        assert booked[1, Kind.BUFFERS] == 2 * booked[0, Kind.BUFFERS]
        for execution in executions:
            execution.close()
        assert {h.kind for h in ledger.holdings()} == {Kind.WEIGHTS}
    assert ledger.holdings() == []


@pytest.mark.parametrize("kind", list(Kind))
def test_without_room_the_model_is_refused_and_leaks_nothing(tmp_path: Path, kind: Kind) -> None:
    plan = build(tmp_path)
    ledger = Ledger()
    limit = plan.stat().st_size - 1
    if kind is not Kind.WEIGHTS:
        limit += 100 if kind is Kind.SCRATCH else 4096 + 100
    ledger.set_limit(0, limit)

    def load() -> None:
        with closing(TensorRtBackend().load(plan, 1, {MAX_BATCH_SIZE: "8"}, ledger.account("m", "1"))) as model:
            model.execution(0)

    with pytest.raises(NoRoom, match=f"more of GPU 0 for {kind}"):
        load()
    assert ledger.holdings() == []


def test_a_reloaded_plan_books_its_earlier_size_whatever_else_uses_the_gpu(
    cuda: LateCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = build(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    plans = [plan, plan, (other / "same.plan").resolve()]
    plans[2].write_bytes(plan.read_bytes())
    used, choices = [], []
    noise = itertools.count()

    def measured(*_: object) -> float:
        """Return a different duration at each call."""
        return 1.0 + 7919 * next(noise) % 97

    for name in ("measured_us", "latency_us"):
        monkeypatch.setattr(tensorrt_tuning, name, measured)
    for file in plans:
        ledger = Ledger()
        with (
            closing(TensorRtBackend().load(file, 1, {MAX_BATCH_SIZE: "8"}, ledger.account("m", "1"))) as model,
            closing(model.execution(0)) as execution,
        ):
            resources = execution._resources
            booked = {(h.gpu, h.kind): h.size_bytes for h in ledger.holdings()}
            used.append(
                (len(resources._contexts), len(resources._shared_contexts), len(cuda.graphs), len(cuda.live), booked)
            )
            choices.append(resources.tuning_result)
    assert used[1:] == used[:1] * 2
    assert choices[1:] == choices[:1] * 2


@pytest.mark.parametrize("change", [{MAX_BATCH_SIZE: "4"}, {"wait": "spin"}, {"one_graph_rows": "2"}, {GPUS: "1"}])
def test_changed_options_are_measured_again(
    cuda: LateCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    cuda.devices = 2
    plan = build(tmp_path)
    tuned: list[int] = []
    choose = tensorrt_tuning.Tuner.choose
    monkeypatch.setattr(tensorrt_tuning.Tuner, "choose", lambda tuner: tuned.append(1) or choose(tuner))

    def load(parameters: dict[str, str]) -> int:
        tuned.clear()
        with (
            closing(TensorRtBackend().load(plan, 1, {MAX_BATCH_SIZE: "8", **parameters})) as model,
            closing(model.execution(0)),
        ):
            return len(tuned)

    assert [load({}), load(change), load({}), load(change)] == [1, 1, 0, 0]


def test_sizes_without_captured_graphs_are_measured_again(
    cuda: LateCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = build(tmp_path)

    def graphs() -> int:
        with (
            closing(TensorRtBackend().load(plan, 1, {MAX_BATCH_SIZE: "8"})) as model,
            closing(model.execution(0)),
        ):
            return len(cuda.graphs)

    with monkeypatch.context() as patch:
        patch.setattr(PreparedContext, "capture", _refuse)
        assert graphs() == 0
    assert graphs() > 0


def _refuse(*_: object) -> None:
    raise DeviceError("this cannot be captured")


def test_no_more_is_remembered_than_a_bounded_number(
    cuda: LateCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_plan, "_MAX_TUNING_RESULTS", 2)
    plan = build(tmp_path)
    for max_batch in "12345":
        with (
            closing(TensorRtBackend().load(plan, 1, {MAX_BATCH_SIZE: max_batch})) as model,
            closing(model.execution(0)),
        ):
            pass
    names = list(load().tuning_results)
    assert [how[0].max_rows for _, _, how in names] == [4, 5]  # type: ignore[index, misc]
