"""The bench of front ends drives real processes, measures what it says, and stops on a wrong answer."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest
import uvloop
from onnx import TensorProto

from loadtest import front_ends
from loadtest.front_ends import EngineAlone, EngineFailed, EngineSample, SyntheticFrontEnd
from tests.support import models
from tests.support.onnx_models import identity_model

# On a slow machine a request of the bench may wait for more than the default of 1 s.
CONFIG = """
max_batch_size: 64
parameters { key: "headrace.max_queue_wait_microseconds" value { string_value: "0" } }
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="front-end processes need Linux")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    model = identity_model(
        {"input": (TensorProto.FLOAT, ["batch", 16])}, {"output": (TensorProto.FLOAT, ["batch", 16])}
    )
    models.add_model(folder, "tiny", model, config=CONFIG)
    return folder


def drive(repository: Path, members: int) -> list[EngineSample]:
    async def main() -> list[EngineSample]:
        async with EngineAlone(repository, "tiny", 2) as engine:
            return await engine.drive(members, 8, 0.2, 2)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def test_the_engine_answers_groups_of_synthetic_front_ends(repository: Path) -> None:
    samples = drive(repository, 4)
    assert len(samples) == 2
    assert sum(sample.total_us for sample in samples) > 0
    for sample in samples:
        assert sample.requests > 0
        assert sample.total_us == sample.loop_us + sample.other_us
        assert 1 <= sample.batch_rows <= 16, "two front ends have eight rows each in flight"


def test_a_wrong_answer_ends_the_run(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init = SyntheticFrontEnd.__init__

    def expects_other(self, sock, row, inputs, groups, expected=None):  # type: ignore[no-untyped-def]
        init(self, sock, row, inputs, groups, None if expected is None else {"output": expected["output"] + 1})

    monkeypatch.setattr(SyntheticFrontEnd, "__init__", expects_other)
    with pytest.raises(EngineFailed, match="output 'output' of members from 0 differs"):
        drive(repository, 2)


def test_table_of_the_engine_alone(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["engine", "--repository", str(repository), "--front-ends", "1", "--members", "1", "8"]
    assert front_ends.main([*words, "--seconds", "0.1", "--rounds", "1", "--callers", "8"]) == 0
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [cells[:2] for cells in lines[2:]] == [["1", "1"], ["1", "8"]]
    for cells in lines[2:]:
        assert float(cells[2]) == pytest.approx(float(cells[3]) + float(cells[4]), abs=0.02)


def test_a_round_trip_takes_time() -> None:
    before = os.sched_getaffinity(0)
    assert front_ends.ping_pong_us(0.05, (min(before),)) > 0
    assert os.sched_getaffinity(0) == before


@pytest.mark.slow
def test_latency_of_one_caller(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["lone", "--repository", str(repository), "--rounds", "2", "--seconds", "0.3"]
    assert front_ends.main(words) == 0
    out = capsys.readouterr().out
    names = re.findall(
        r"^\| (one process|one front end|ping-pong of two processes) \| \d+ \| \d+ \|", out, re.MULTILINE
    )
    assert names == ["one process", "one front end", "ping-pong of two processes"]
    assert "added by the front end: " in out
    assert "beyond the ping-pong: " in out
