"""The inputs that fuzzing has kept, run without atheris: code they reach keeps its properties."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import SHARES
from tests.fuzz.targets import TARGETS, check

CORPUS = Path(__file__).parent / "corpus"


def test_every_target_has_a_share_and_a_corpus() -> None:
    assert set(SHARES) == set(TARGETS) == {folder.name for folder in CORPUS.iterdir()}


@pytest.mark.parametrize("target", TARGETS)
def test_kept_inputs_break_no_property(target: str) -> None:
    inputs = sorted((CORPUS / target).iterdir())
    assert inputs
    for file in inputs:
        data = file.read_bytes()
        try:
            check(target, data)
        except Exception as error:
            raise AssertionError(f"{file.name}: {data!r}") from error


def test_a_broken_property_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: bytes) -> None:
        if data == b"x":
            raise KeyError(data)

    monkeypatch.setitem(TARGETS, "hpack", fail)
    check("hpack", b"y")
    with pytest.raises(KeyError):
        check("hpack", b"x")
