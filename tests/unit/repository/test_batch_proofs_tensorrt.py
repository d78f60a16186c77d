"""Proof of the batch sizes of engines on a simulated GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from headrace.repository.batch_proofs import BatchProofs
from headrace.repository.explanation import explain

from tests.support import proof_cases as cases
from tests.support.control_thread import running


@pytest.mark.parametrize("source", ["", cases.RIGHT])
async def test_a_right_engine_is_proven_with_its_padding(trt: Any, tmp_path: Path, source: str) -> None:
    await cases.check_right_engine(tmp_path, source)


async def test_a_size_that_only_the_engine_computes_wrongly_is_not_used(trt: Any, tmp_path: Path) -> None:
    await cases.check_wrong_size(tmp_path)


async def test_an_engine_that_mixes_rows_of_a_right_model_runs_them_one_by_one(trt: Any, tmp_path: Path) -> None:
    await cases.check_mixing_engine(tmp_path)


@pytest.mark.parametrize("source", ["", cases.MIXED])
async def test_requests_to_a_model_that_mixes_rows_run_alone_and_whole_without_padding(
    trt: Any, tmp_path: Path, source: str
) -> None:
    await cases.check_mixing_model(tmp_path, source)


async def test_a_second_start_runs_no_tests(trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = cases.add_engine(tmp_path, cases.WRONG_EIGHT, cases.RIGHT)
    seen = []
    for _ in range(2):
        async with running(repository, cases.ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
            seen.append(explain(registry, "m")["batches"])
        monkeypatch.setattr("headrace.repository.batch_proofs._Proof.run", None)
    assert seen[0] == seen[1]
