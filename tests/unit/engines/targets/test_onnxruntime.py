"""The ONNX Runtime target: artefacts, runs, timings, layers, memory."""

from __future__ import annotations

import itertools
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from headrace.runtimes.onnxruntime import session_options as server_options
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import read_onnx
from headrace_engines.progress import silent
from headrace_engines.targets import onnxruntime
from headrace_engines.targets.base import Engine, Target, TargetSpec
from headrace_engines.targets.onnxruntime import OnnxRuntimeTarget
from headrace_engines.targets.onnxruntime_session import session_options
from onnx import TensorProto, helper, numpy_helper

TARGET = OnnxRuntimeTarget()
FP32 = TargetSpec("fp32")


def conv_relu(channels: int = 16) -> onnx.ModelProto:
    parsed = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[N,{channels},8,8] x) => (float[N,{channels},8,8] y)
        {{ [conv] c = Conv(x, w) [relu] y = Relu(c) }}"""
    )
    weights = np.random.default_rng(0).standard_normal((channels, channels, 1, 1)).astype("f4")
    parsed.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    return parsed


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    path = tmp_path / "model.onnx"
    TARGET.build(conv_relu(), FP32, path, silent)
    opened = TARGET.open(path, conv_relu())
    yield opened
    opened.close()


BATCH = {"x": np.random.default_rng(1).standard_normal((4, 16, 8, 8)).astype("f4")}


def test_it_is_a_target() -> None:
    target: Target = TARGET
    assert (target.name, target.suffix, target.describe().target) == ("onnxruntime", ".onnx", "onnxruntime")


def test_an_artefact_matches_the_model(engine: Engine, tmp_path: Path) -> None:
    direct = ort.InferenceSession(conv_relu().SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(engine.run(BATCH)["y"], direct.run(None, BATCH)[0], atol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_constants_are_folded_and_no_kernel_of_this_machine_is_written(tmp_path: Path) -> None:
    model = conv_relu()
    model.graph.node.insert(0, helper.make_node("Neg", ["w"], ["v"], name="fold"))
    model.graph.node[1].input[1] = "v"
    TARGET.build(model, FP32, tmp_path / "a.onnx", silent)
    written = read_onnx(tmp_path / "a.onnx")
    assert [node.op_type for node in written.graph.node] == ["Conv", "Relu"]
    assert {opset.domain for opset in written.opset_import} == {""}


def test_quantization_pairs_are_unchanged(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[2,4] x) => (float[2,4] y) {
        [q] a = QuantizeLinear(x, s, z) [dq] b = DequantizeLinear(a, s, z) [wdq] v = DequantizeLinear(w, s, i)
        [mul] c = MatMul(b, v) [oq] d = QuantizeLinear(c, s, z) [odq] y = DequantizeLinear(d, s, z) }"""
    )
    for name, array in {
        "s": np.array(0.1, "f4"),
        "z": np.array(128, "u1"),
        "i": np.array(0, "i1"),
        "w": np.eye(4, dtype="i1") * 10,
    }.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    TARGET.build(model, TargetSpec("int8"), tmp_path / "a.onnx", silent)
    assert [node.name for node in read_onnx(tmp_path / "a.onnx").graph.node] == [node.name for node in model.graph.node]
    inputs = {"x": np.random.default_rng(0).uniform(-5, 5, (2, 4)).astype("f4")}
    layers = TARGET.open(tmp_path / "a.onnx").layers(inputs)
    inner = next(layer for layer in layers if "mul" in layer.nodes)
    assert inner.precision == "int8"
    assert inner.kind in ("QLinearMatMul", "QGemm")


def test_layers_name_the_nodes_fused_into_them(engine: Engine) -> None:
    layers = engine.layers(BATCH)
    assert [layer.nodes for layer in layers if layer.nodes] == [("conv", "relu")]
    assert all(layer.time_us >= 0 and layer.precision == "fp32" and layer.kind and layer.tactic for layer in layers)
    assert sum(layer.share for layer in layers) == pytest.approx(1)


@pytest.mark.slow
def test_layers_of_digits_cover_every_node(demo_repository: Callable[[str], Path]) -> None:
    source = read_onnx(demo_repository("digits") / "digits" / "1" / "model.onnx")
    engine = TARGET.open(demo_repository("digits") / "digits" / "1" / "model.onnx", source)
    layers = engine.layers({"image": np.zeros((8, 1, 8, 8), "f4")})
    done = [name for layer in layers for name in layer.nodes]
    assert sorted(done) == sorted(node.name for node in source.graph.node)
    assert sum(layer.share for layer in layers) == pytest.approx(1)


def test_the_time_of_a_branch_is_its_ifs(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (bool c, float[N] x) => (float[N] y) {
        [if] y = If(c) <then_branch = t () => (float[N] o) { [inner] o = Exp(x) }, else_branch = e () => (float[N] p)
        { [other] p = Neg(x) }> }"""
    )
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    layers = TARGET.open(path, model).layers({"c": np.array(True), "x": np.ones(4, "f4")})
    assert [layer.nodes for layer in layers] == [("if",)]
    assert layers[0].share == 1


def test_times_and_rows_belong_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = itertools.count(step=1_000_000)  # a millisecond passes from one reading to the next
    monkeypatch.setattr(onnxruntime, "time", SimpleNamespace(perf_counter_ns=now_ns.__next__))
    timing = engine.time(BATCH, 0.05)
    assert (timing.rows, timing.median_us, timing.p99_us) == (4, 1000, 1000)
    assert timing.rows_per_s == pytest.approx(4000)


def test_memory_grows_with_the_weights(tmp_path: Path) -> None:
    used = []
    for channels in (16, 2048):
        path = tmp_path / f"{channels}.onnx"
        TARGET.build(conv_relu(channels), FP32, path, silent)
        used.append(TARGET.open(path).memory_bytes)
    weights_bytes = 2048 * 2048 * 4
    assert used[1] - used[0] > 0.9 * weights_bytes
    assert used[1] < 8 * weights_bytes


def test_memory_counts_the_batch_that_was_run(engine: Engine) -> None:
    small = engine.memory_bytes
    engine.run({"x": np.zeros((8192, 16, 8, 8), "f4")})
    assert engine.memory_bytes - small > 8192 * 16 * 8 * 8 * 4 / 2


def test_sessions_are_the_servers(tmp_path: Path) -> None:
    ours, theirs = session_options(), server_options(1, {}, tmp_path)
    for name in ("intra_op_num_threads", "inter_op_num_threads", "graph_optimization_level", "execution_mode"):
        assert getattr(ours, name) == getattr(theirs, name)
    key = "session.intra_op.allow_spinning"
    assert ours.get_session_config_entry(key) == theirs.get_session_config_entry(key) == "0"


def test_precisions_without_kernels_are_refused() -> None:
    assert [TARGET.refuses(precision) for precision in ("fp32", "fp16", "int8")] == ["", "", ""]
    assert "FP8" in TARGET.refuses("fp8")
    probe = helper.make_graph(
        [helper.make_node("MatMul", ["x", "x"], ["y"])],
        "probe",
        [helper.make_tensor_value_info("x", TensorProto.BFLOAT16, [4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.BFLOAT16, [4, 4])],
    )
    model = helper.make_model(probe, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    try:
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception as error:  # the binding has no base class for what it raises
        assert "MatMul" in str(error)
        assert "MatMul" in TARGET.refuses("bf16")


@pytest.mark.parametrize(
    ("operator", "domain", "kind", "expected"),
    [
        ("Unheard", "my.ops", TensorProto.FLOAT, "Unheard"),
        ("Relu", "", TensorProto.BFLOAT16, "culprit"),
        ("Relu", "", TensorProto.STRING, "culprit"),
    ],
)
def test_an_unsupported_operator_is_named(operator: str, domain: str, kind: int, expected: str, tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", kind, [4])
    node = helper.make_node(operator, ["x"], ["y"], name="culprit", domain=domain)
    graph = helper.make_graph([node], "g", [value], [helper.make_tensor_value_info("y", kind, [4])])
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    if operator == "Relu" and kind == TensorProto.BFLOAT16 and not TARGET.refuses("bf16"):
        pytest.skip("this CPU has BF16 kernels")
    with pytest.raises(BuildError, match=expected) as caught:
        TARGET.build(helper.make_model(graph, opset_imports=opsets, ir_version=8), FP32, tmp_path / "a.onnx", silent)
    assert operator in str(caught.value)
    assert "FP32" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_full_disk_leaves_no_files(precision: str, tmp_path: Path) -> None:
    model = conv_relu(256)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(BuildError, match=r"cannot be written|cannot write"):
            TARGET.build(model, TargetSpec(precision), tmp_path / "a.onnx", silent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_written_is_a_build_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="cannot be written"):
        TARGET.build(conv_relu(), TargetSpec("int8"), tmp_path / "missing" / "a.onnx", silent)


def test_wrong_inputs_are_a_build_error(engine: Engine) -> None:
    with pytest.raises(BuildError, match=r"model\.onnx does not run"):
        engine.run({"x": np.zeros((1, 3, 8, 8), "f4")})


def test_files_that_are_no_model_are_a_build_error(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(os.urandom(64))
    with pytest.raises(BuildError, match="cannot load"):
        TARGET.open(tmp_path / "a.onnx")
