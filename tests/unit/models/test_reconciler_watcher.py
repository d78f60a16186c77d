"""The watcher reports a changed model once, after two equal scans and the settle time."""

from __future__ import annotations

from headrace.models.folders import Fingerprint
from headrace.models.watcher import Watcher

SETTLE_NS = 100


def look(size: int) -> Fingerprint:
    return (("1/model.onnx", size, 0, 0),)


def test_a_new_model_is_reported_once_after_it_settles() -> None:
    watcher = Watcher(SETTLE_NS)
    assert watcher.update({"m": look(1)}, 0) == []
    assert watcher.is_changing
    assert watcher.update({"m": look(1)}, 99) == [], "too early"
    assert watcher.update({"m": look(1)}, 100) == ["m"]
    assert not watcher.is_changing
    assert watcher.update({"m": look(1)}, 1000) == [], "a model that failed is tried again only when it changes"


def test_one_scan_is_not_enough_however_late() -> None:
    watcher = Watcher(0)
    assert watcher.update({"m": look(1)}, 10**9) == []
    assert watcher.update({"m": look(1)}, 10**9) == ["m"]


def test_a_file_that_grows_starts_the_time_anew() -> None:
    watcher = Watcher(SETTLE_NS)
    for step in range(10):
        assert watcher.update({"m": look(step)}, 99 * step) == []
    assert watcher.update({"m": look(9)}, 9 * 99 + 99) == []
    assert watcher.update({"m": look(9)}, 9 * 99 + 100) == ["m"]


def test_a_change_there_and_back_is_none() -> None:
    watcher = Watcher(SETTLE_NS)
    watcher.update({"m": look(1)}, 0)
    assert watcher.update({"m": look(1)}, 100) == ["m"]
    assert watcher.update({"m": look(2)}, 200) == []
    assert watcher.update({"m": look(1)}, 250) == []
    assert watcher.update({"m": look(1)}, 1000) == []


def test_a_removal_must_last_too() -> None:
    watcher = Watcher(SETTLE_NS)
    watcher.update({"m": look(1)}, 0)
    watcher.update({"m": look(1)}, 100)
    assert watcher.update({}, 200) == []
    assert watcher.update({"m": look(1)}, 250) == [], "the folder was only being replaced"
    assert watcher.update({}, 300) == []
    assert watcher.update({}, 400) == ["m"]
    assert watcher.update({}, 500) == []
    assert watcher.names == set(), "nothing is kept of what is gone"
    assert watcher.update({"m": look(1)}, 600) == []
    assert watcher.update({"m": look(1)}, 700) == ["m"], "it came back"


def test_a_model_removed_before_it_settles_is_forgotten() -> None:
    watcher = Watcher(SETTLE_NS)
    watcher.update({"m": look(1)}, 0)
    assert watcher.update({}, 10) == []
    assert watcher.update({}, 20) == []
    assert watcher.names == set()


def test_models_settle_apart() -> None:
    watcher = Watcher(SETTLE_NS)
    watcher.update({"a": look(1), "b": look(1)}, 0)
    assert watcher.update({"a": look(1), "b": look(2)}, 100) == ["a"]
    assert watcher.update({"a": look(1), "b": look(2)}, 200) == ["b"]
