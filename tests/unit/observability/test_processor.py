"""Processor time of machine and server, from a folder in place of /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from headrace.core.clock import NS_PER_S
from headrace.observability.processor import ProcessorMeter, ProcessorUse, read_ticks


def write(proc: Path, busy: int, idle: int) -> None:
    (proc / "stat").write_text(
        f"cpu  {2 * busy} 0 0 {2 * idle} 0 0 0 0 0 0\n" + f"cpu0 {busy} 0 0 {idle} 0 0 0 0 0 0\n" * 1
    )


def test_the_use_is_the_median_of_the_last_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: len(os.sched_getaffinity(0)))
    now = own = busy = idle = 0
    meter = ProcessorMeter(2.0, lambda: own, tmp_path, lambda: now)
    meter.sample()  # no file: no sample
    assert meter.use() is None
    for share in (0, 0, 96, 98, 100, 96, 98, 96, 20):  # the load began two seconds late and ended in the last one
        busy, idle = busy + share, idle + 100 - share
        write(tmp_path, busy, idle)
        now, own = now + NS_PER_S, own + NS_PER_S // 2
        meter.sample()
    use = meter.use()
    assert use == ProcessorUse(2.0, 1.92, 0.5)
    assert use.is_full
    assert meter.use(1) == ProcessorUse(2.0, 1.16, 0.5)
    assert ProcessorUse(0.5, 0.1, 0.48).is_full, "a quota is full although the machine has idle cores"


def test_only_the_cores_of_the_server_are_counted(tmp_path: Path) -> None:
    lines = ["cpu  120 0 0 480 0 0 0 0 0 0", *(f"cpu{number} {20 * number} 0 0 100 0 0 0 0 0 0" for number in range(4))]
    (tmp_path / "stat").write_text("\n".join([*lines, "intr 5 7", "ctxt 9"]) + "\n")
    assert read_ticks(tmp_path) == (120, 600)
    assert read_ticks(tmp_path, frozenset({1, 3})) == (80, 280)
    (tmp_path / "stat").write_text("cpu x\n")
    assert read_ticks(tmp_path) is None
