"""Order of the GPU bench's parts, their time limits, and its output files."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.config.model_folder import read_model_folder
from onnx import TensorProto, helper, numpy_helper, save

from loadtest.bench.results import at_least
from loadtest.gpu import place, subject
from loadtest.gpu.__main__ import _parser, _parts, _setup
from loadtest.gpu.parts import PARTS, TWO_GPUS
from loadtest.gpu.report import Compare, Output, PartFindings, to_markdown
from loadtest.gpu.run import Run, steps_of
from loadtest.servers import ROOT
from tests.unit.loadtest.test_gpu_bench import VirtualTime, findings, sample, verdict


@pytest.fixture
def clock() -> VirtualTime:
    return VirtualTime()


def test_the_report_has_a_table_a_part_and_the_targets() -> None:
    part = findings(
        verdict(Compare("ours / raw", "ours", "raw", "images/s", target=at_least(0.95))),
        *(
            sample(what, value, number)
            for number in (0, 1)
            for what, value in (("raw", 100.0), ("ours", 96.0 + number))
        ),
        sample("cut", 5.0),
        ("note", "what a reader has to know"),
    )
    part.command, part.date = "python -m loadtest.gpu", "today"
    report = to_markdown([part], {"GPU 0": "a GPU"})
    assert "    python -m loadtest.gpu\n\ntoday; GPU 0: a GPU." in report
    assert "| b fp16 | ours / raw | >= 0.95 | 0.965 (0.960-0.970) | PASS |" in report
    assert "|  | images/s | / raw |" in report
    assert "| raw | 100 (100-100) |  |" in report
    assert "| ours | 96.5 (96.0-97.0) | 0.965 (0.960-0.970) |" in report
    assert "| cut (1 round) | 5.000 |  |" in report
    assert "- what a reader has to know" in report


def test_a_run_adds_to_earlier_results(tmp_path: Path) -> None:
    for number, (add, name) in enumerate(((False, "a fp16"), (True, "b fp16"), (True, "a fp16"))):
        output = Output(tmp_path, f"command {number}", add=add)
        part = PartFindings(name, "title", notes=[f"note {number}"])
        output.begin(part)
        part.take(*verdict(Compare("ours / raw", "ours", "raw", "images/s", target=at_least(0.95))))
        for what in ("ours", "raw"):
            part.take(*sample(what, 7.0))
        output.part_ended(part)
    left = json.loads((tmp_path / "results.json").read_text())
    assert [(part["name"], part["notes"], part["command"]) for part in left["parts"]] == [
        ("b fp16", ["note 1"], "command 1"),
        ("a fp16", ["note 2"], "command 2"),
    ]
    assert [result["comparisons"][0]["verdict"] for result in left["results"]] == ["PASS", "PASS"]
    assert "a fp16 = ours / raw" in (tmp_path / "log.txt").read_text()
    Output(tmp_path, "anew").say("hello")
    assert "ours" not in (tmp_path / "log.txt").read_text()


def test_engines_are_built_in_parallel_with_enough_gpus() -> None:
    def names(only: str, gpus: int) -> list[str]:
        return [step.name for step in steps_of(_parts(only), ["fp16", "int8"], gpus)]

    assert names("b,two-gpus", 2) == ["prepare fp16 int8", "b fp16", "two-gpus fp16", "b int8", "two-gpus int8"]
    assert names("b,d", 1) == ["prepare fp16", "b fp16", "d fp16", "prepare int8", "b int8", "d int8"]
    assert names("two-gpus:fp16,d,a:int8", 2) == ["prepare fp16 int8", "two-gpus fp16", "d fp16", "d int8", "a int8"]
    assert [step.part.letter for step in steps_of([], ["fp16"], 1)] == ["prepare", "a", "b", "d", "c"]


# Of the last part of the name: seconds that it takes; more than anything is a part that hangs.
_H200_S = {
    "prepare": 85.0,
    "two_gpus": 130.0,
    "raw_engine": 11.0,
    "in_process": 18.0,
    "lone": 70.0,
    "over_wire": 55.0,
}
_VISIT = "two-gpus:fp16,d:fp16,b:fp16,a:int8,b:int8,d:int8,c:int8"


@pytest.mark.parametrize("hanging", [None, *sorted(set(_H200_S) - {"prepare"})])
def test_a_hanging_part_does_not_use_the_time_of_others(
    hanging: str | None, tmp_path: Path, clock: VirtualTime
) -> None:
    """The plan of a run on two GPUs within 550 s: the last part alone may lack some of its time if another one hangs."""
    start_s = clock.now_s
    environments: dict[str, dict[str, str]] = {}

    def run_part(command: list[str], limit_s: float, _log: Any, on_message: Any, environment: dict[str, str]) -> str:
        module = command[4]
        environments[module] = environment
        needed_s = 1e9 if module == hanging else _H200_S[module]
        clock.now_s += min(needed_s, limit_s)
        if module == "prepare":
            for precision in json.loads(command[6])["precisions"]:
                on_message(*sample(f"{precision} engine", 80.0, unit="s to build or find"))
        return "" if needed_s <= limit_s else "took longer"

    output = Output(tmp_path, "command")
    setup = _setup(_parser().parse_args(["--work", str(tmp_path)]), (0, 1))
    Run(output, setup, start_s + 550, run_part, clock.monotonic).all(steps_of(_parts(_VISIT), ["fp16", "int8"], 2))
    assert clock.now_s - start_s <= 550
    failed = [part.name for part in output.parts if part.failure]
    modules = {part.letter: part.run.__name__ for part in (*PARTS, TWO_GPUS)}
    assert len(output.parts) == 8
    assert {modules[name.split()[0]] for name in failed} == ({hanging} if hanging else set())
    assert environments.pop("prepare") == environments.pop("two_gpus") == {}
    assert set(map(json.dumps, environments.values())) == {'{"CUDA_VISIBLE_DEVICES": "0"}'}


def test_a_precision_without_an_engine_is_omitted(tmp_path: Path) -> None:
    def run_part(command: list[str], _limit_s: float, _log: Any, on_message: Any, _environment: Any) -> str:
        if command[4] == "prepare":
            on_message(*sample("fp16 engine", 80.0, unit="s to build or find"))
            return "INT8 has failed"
        return ""

    output = Output(tmp_path, "command")
    setup = _setup(_parser().parse_args(["--work", str(tmp_path)]), (0, 1))
    run = Run(output, setup, time.monotonic() + 400, run_part)
    run.all(steps_of(_parts("a:int8,b:fp16"), [], 2))
    assert [(part.name, part.failure) for part in output.parts] == [
        ("prepare int8 fp16", "INT8 has failed"),
        ("b fp16", ""),
    ]


def test_the_engine_is_held_to_the_demo_models_own_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the engine is the one that `headrace build resnet50` makes."""
    demo = tmp_path / "demo" / "resnet50"
    shutil.copytree(ROOT / "engines/headrace_engines/demo/files/resnet50", demo)
    (demo / "labels.txt").write_text("\n" * 1000)
    for name in ("1", "calibration", "accuracy"):
        (demo / name).mkdir()
    save_network(demo / "1" / "model.onnx")
    run: list[Any] = []
    monkeypatch.setattr(subject, "_run", lambda *arguments: run.append(arguments))
    setup = replace(_setup(_parser().parse_args(["--work", str(tmp_path)]), (0, 1)), precision="int8")
    subject.prepare(setup, 10, {"CUDA_VISIBLE_DEVICES": "1"})
    ((words, _, environment),) = run
    assert words[:2] == ["build", "resnet50_int8"]
    assert environment == {"CUDA_VISIBLE_DEVICES": "1"}
    created = read_model_folder(tmp_path / "models" / "resnet50_int8", tmp_path / "models").config
    settings = read_model_folder(demo, tmp_path / "demo").config.optimization
    assert created.optimization == settings.model_copy(update={"precision": "int8"})
    assert created.optimization.accuracy.min_top1_agreement == 0.7
    assert created.max_batch_size == 256


def save_network(path: Path) -> None:
    """Something with resnet50's input and output."""
    weights = numpy_helper.from_array(np.zeros((3, 1000), np.float32), "weights")
    nodes = [
        helper.make_node("GlobalAveragePool", ["input"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["logits"]),
    ]
    image = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["rows", 3, 224, 224])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", 1000])
    graph = helper.make_graph(nodes, "network", [image], [logits], [weights])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def test_one_gpu_of_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert place.seeing(1) == {"CUDA_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert place.seeing(1) == {"CUDA_VISIBLE_DEVICES": "5"}
