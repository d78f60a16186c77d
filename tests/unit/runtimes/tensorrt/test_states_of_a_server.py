"""The states of a served plan are in GPU memory if their shapes are constant, else in host memory."""

from __future__ import annotations

import logging
from pathlib import Path

import headrace
import numpy as np
import pytest
from headrace.core.request import InferRequest, InferResponse, SequenceFields
from headrace.runtimes.tensorrt.states import DeviceStates

from tests.support.sequence_models import states
from tests.support.virtual_gpu_states import build_sums

CONFIG = """
backend: "tensorrt"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_GPU } ]
sequence_batching { max_sequence_idle_microseconds: 3600000000 STATES }
"""


def send(server: headrace.Server, value: float, start: bool = False, end: bool = False) -> float:
    handle = server._running().registry.lease("sums", "")
    try:
        inputs = {"X": np.full((1, 1), value, np.float32)}
        fields = SequenceFields(7, start, end)
        request = InferRequest(inputs=inputs, rows=1, shape_key=None, received_ns=0, sequence=fields)
        response = handle.infer_blocking(request)
        assert isinstance(response, InferResponse)
        return float(response.outputs["Y"].item())
    finally:
        handle.release()


@pytest.mark.usefixtures("trt")
@pytest.mark.parametrize("dims", ["[ 1 ]", "[ -1 ]"])
def test_states_of_a_server(
    dims: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = states(free=False).replace("dims: [ 1 ]", f"dims: {dims}")
    folder = tmp_path / "repository" / "sums"
    (folder / "1").mkdir(parents=True)
    build_sums(tmp_path).rename(folder / "1" / "model.plan")
    (folder / "config.pbtxt").write_text(CONFIG.replace("STATES", text))
    on_gpu: list[int] = []
    save = DeviceStates.save
    monkeypatch.setattr(
        DeviceStates, "save", lambda self, outputs, rows: (on_gpu.append(len(rows.slots)), save(self, outputs, rows))[1]
    )
    with (
        caplog.at_level(logging.INFO, "headrace"),
        headrace.Server(tmp_path / "repository", state_dir="") as server,
    ):
        on_gpu.clear()  # of the proof of its batches
        assert [send(server, value, value == 5, value == 7) for value in (5, 6, 7)] == [5, 11, 18]
        assert send(server, 4, True, True) == 4
    assert len(on_gpu) == (4 if dims == "[ 1 ]" else 0)
    assert ("are in host memory: the shape of state 'SUM_IN' may change" in caplog.text) == (dims == "[ -1 ]")
