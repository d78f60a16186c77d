"""A backend in a process of its own: what comes back, and what becomes of a process that crashes, hangs or never comes up."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from headrace.core.errors import ConfigError
from headrace.core.ledger import HOST, Kind, Ledger, MemoryAccount, NoRoom
from headrace.core.tensor import Array
from headrace.runtimes.base import InputRefused
from headrace.runtimes.isolated.backend import FailedInChildError, IsolatedBackend, IsolatedModel
from headrace.runtimes.isolated.tensors import array_at, read_tensors, write_tensors
from headrace.runtimes.overlapped import is_overlapped
from headrace.runtimes.processes import supervisor
from headrace_model.slots import START, Slot

from tests.support import fragile_backend as fragile
from tests.support.fragile_backend import fly, pid, values, x_of
from tests.support.processes import isolated_children_of_this_process

Load = Callable[..., IsolatedModel]


@pytest.mark.parametrize(
    "x",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(12, dtype=np.int8).reshape(2, 3, 2).transpose(0, 2, 1),
        np.array([[True, False]]),
        np.zeros((0, 4), np.float64),
        np.arange(600_000, dtype=np.int64).reshape(2, -1),
        np.array([[b"a", b""], [b"\x00\xff", "ü".encode()]], object),
    ],
    ids=lambda x: f"{x.dtype}{list(x.shape)}",
)
def test_tensors_there_and_back(load: Load, x: Array) -> None:
    execution = load().execution(0)
    for _ in range(2):
        y = execution.run({"x": x})["y"]
        assert y.shape == x.shape
        expected = (
            [item + b"!" for item in x.reshape(-1).tolist()] if x.dtype.hasobject else (x * 2).reshape(-1).tolist()
        )  # type: ignore[operator]
        assert y.reshape(-1).tolist() == expected
        assert y.dtype == x.dtype or x.dtype == bool
    assert y.flags.writeable, "it belongs to the caller"


def test_all_instances_run_in_one_child_process(load: Load) -> None:
    model = load(instances=3)
    executions = [model.execution(index) for index in range(3)]
    result = {pid(execution.run(x_of(1))) for execution in executions}
    assert result == set(isolated_children_of_this_process())
    assert model.process is model
    assert model.process_status == (True, "", 0)
    assert not is_overlapped(executions[0])


def test_outputs_may_be_larger_than_the_memory(load: Load) -> None:
    execution = load().execution(0)
    first = execution.run(x_of(1))
    assert execution.run(x_of(fragile.BIG))["y"].shape == (1, 300_000)
    assert values(first) == [2], "answers given before are left alone"
    assert values(execution.run(x_of(4, 5))) == [8, 10]


@pytest.mark.parametrize("words", ["", "overlapped"])
def test_errors_of_the_model_are_raised_and_the_process_survives(load: Load, words: str) -> None:
    execution = load(words).execution(0)
    before = pid(execution.run(x_of(1)))
    with pytest.raises(InputRefused, match="five is too much"):
        execution.run(x_of(fragile.REFUSE))
    with pytest.raises(FailedInChildError, match="RuntimeError: poisoned"):
        execution.run(x_of(fragile.RAISE))
    assert pid(execution.run(x_of(1))) == before


def test_batches_overlap_and_finish_in_order(load: Load) -> None:
    model = load("overlapped")
    execution = model.execution(0)
    assert is_overlapped(execution)
    assert execution.depth == 2
    for _ in range(5):
        batches = [fly(execution, 1, 2), fly(execution, 3)]
        assert [values(execution.finish(batch)) for batch in batches] == [[2, 4], [6]]
    refused, launched, good = fly(execution, fragile.REFUSE), fly(execution, fragile.RAISE - 0.5), 7
    with pytest.raises(InputRefused):
        execution.finish(refused)
    last = fly(execution, good)
    with pytest.raises(FailedInChildError, match="at the launch"):
        execution.finish(launched)
    execution.discard(execution.begin(x_of(1), 1))
    assert values(execution.finish(last)) == [14]
    assert values(execution.run(x_of(1))) == [2]


@pytest.mark.parametrize(
    ("words", "prefix"),
    [
        ("refuse", "model:3: error: is refused (write another)"),
        (
            "abort",
            "m: error: its process died while it loaded the model: killed by SIGABRT (the server's log has more)",
        ),
        ("raise", "m: error: could not be loaded (RuntimeError) (the server's log has more)"),
        ("hang", "m: error: its process died while it loaded the model: it did not load the model within 0.5 s"),
    ],
)
def test_a_model_that_cannot_be_loaded(load: Load, monkeypatch: pytest.MonkeyPatch, words: str, prefix: str) -> None:
    if words == "hang":
        monkeypatch.setattr(supervisor, "LOAD_LIMIT_S", 0.5)
    with pytest.raises(ConfigError) as caught:
        load(words)
    assert str(caught.value).startswith(prefix)


def test_logs_of_the_process_appear_in_the_server_log(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    model = load()
    model.close()
    lines = [record.getMessage() for record in caplog.records if record.name == "headrace.fragile"]
    assert lines == ["loads model for 1 with ['a']", "closed"]


def loaded_with(folder: Path, account: MemoryAccount, weights: int) -> IsolatedModel:
    (folder / "model").write_text("")
    backend = IsolatedBackend("m", fragile.FACTORY, 20.0)
    return backend.load(folder / "model", 1, {"weights": str(weights)}, account)


def test_gpu_memory_of_the_process_is_booked_with_us(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.set_limit(0, 1000)
    ledger.account("n", "1").reservation(0, Kind.SCRATCH, 300)
    model = loaded_with(tmp_path, ledger.account("m", "1"), 600)
    assert [tuple(holding)[:5] for holding in ledger.holdings() if holding.model == "m"] == [
        (HOST, "m", "1", "buffers", 10),
        (0, "m", "1", "weights", 600),
    ]
    assert ledger.reserved_bytes(0) == 900
    model.close()


@pytest.mark.parametrize(
    ("weights", "budget", "others", "lacking", "words"),
    [
        (800, None, True, 100, "700 B of 1000 B are free (it holds 0 B, n/1 300 B)"),
        (1200, None, False, 500, "are free"),
        (600, 500, False, 100, "its gpu_memory_budget is 500 B"),
    ],
)
def test_a_load_without_room_in_the_process_is_refused_like_by_the_ledger(
    tmp_path: Path, weights: int, budget: int | None, others: bool, lacking: int, words: str
) -> None:
    ledger = Ledger()
    ledger.set_limit(0, 1000)
    ledger.account("n", "1").reservation(0, Kind.SCRATCH, 300)
    with pytest.raises(NoRoom, match=re.escape(words)) as caught:
        loaded_with(tmp_path, ledger.account("m", "1", budget), weights)
    assert (caught.value.gpu, caught.value.others, caught.value.lacking_bytes) == (0, others, lacking)
    assert caught.value.findings[0].path == "m/1"
    assert isolated_children_of_this_process() == []


def test_an_output_in_the_memory_of_the_slot_is_not_copied() -> None:
    slot = Slot.create("test", 100)
    array = array_at(slot, START, (300, 4), np.float32)
    array[:] = 7
    (layout,) = write_tensors(slot, {"y": array}, START)
    result = read_tensors(slot, [layout])["y"]
    assert (layout.offset, result.shape, result.ctypes.data) == (START, (300, 4), array.ctypes.data)
    assert (result == 7).all()
    (moved,) = write_tensors(slot, {"y": array}, 64 * 1024)
    assert (read_tensors(slot, [moved])["y"] == 7).all()


def test_a_frame_that_is_too_long_for_the_socket_lies_in_the_slot(load: Load) -> None:
    inputs = {"x": np.ones((2, 3), np.float32), **{f"{'n' * 60}{index}": np.ones(1, np.int8) for index in range(500)}}
    for words in ("", "overlapped"):
        execution = load(words).execution(0)
        for _ in range(3):
            assert values(execution.run(inputs)) == [2, 2]
