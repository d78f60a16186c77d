"""`headrace validate` and `headrace serve` agree on every model of one repository: results, states, messages."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.http as triton
from headrace.server.commands import validate
from headrace.server.commands.validate import ModelCheck
from onnx import TensorProto, helper
from rich.console import Console

from loadtest.onnx_models import onnx_model
from tests.e2e import conftest
from tests.support import models
from tests.support.serving import ROOT, Server, run_headrace, serving, start

FP32 = TensorProto.FLOAT
EXAMPLES = ROOT / "tests" / "unit" / "config" / "triton_examples"


def classifier(
    shape: tuple[int | str, ...] = ("batch", 3, 8, 8), classes: tuple[int | str, ...] = ("batch", 10)
) -> onnx.ModelProto:
    """data_0 -> fc6_1: a model with the names and ranks of an image classifier; its answers do not matter."""
    sums = helper.make_node("ReduceSum", ["data_0"], ["sum"], keepdims=1)
    flat = helper.make_node("Reshape", ["sum", "one"], ["flat"])
    wide = helper.make_node("Expand", ["flat", "ones"], ["fc6_1"])
    constants = {"one": np.array([1], np.int64), "ones": np.array([1] * len(classes), np.int64)}
    return onnx_model([sums, flat, wide], {"data_0": (FP32, shape)}, {"fc6_1": (FP32, classes)}, constants)


def zipmap(label: bool = True) -> onnx.ModelProto:
    """A scikit-learn classifier as skl2onnx exports it by default: a label, and a ZipMap of the probabilities."""
    linear = helper.make_node(
        "LinearClassifier",
        ["X"],
        ["label", "scores"],
        domain="ai.onnx.ml",
        coefficients=[1.0, 0.0, 0.0, -1.0, 0.0, 0.0],
        intercepts=[0.0, 0.0],
        classlabels_ints=[0, 1],
        multi_class=1,
        post_transform="SOFTMAX",
    )
    zipped = helper.make_node(
        "ZipMap", ["scores"], ["output_probability"], domain="ai.onnx.ml", classlabels_int64s=[0, 1]
    )
    cast = helper.make_node("Cast", ["label"], ["output_label"], to=TensorProto.INT64)
    entry = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(FP32, []))
    probability = helper.make_value_info("output_probability", helper.make_sequence_type_proto(entry))
    graph = helper.make_graph(
        [linear, zipped, *([cast] if label else [])],
        "sklearn",
        [helper.make_tensor_value_info("X", FP32, [None, 3])],
        [*([helper.make_tensor_value_info("output_label", TensorProto.INT64, [None])] if label else []), probability],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def text_model(locale: str | None) -> onnx.ModelProto:
    """A text pipeline: StringNormalizer, which reads a locale when the model is loaded."""
    attributes = {} if locale is None else {"locale": locale}
    node = helper.make_node("StringNormalizer", ["X"], ["Y"], case_change_action="LOWER", **attributes)
    return onnx_model([node], {"X": (TensorProto.STRING, ["n"])}, {"Y": (TensorProto.STRING, ["m"])})


def unknown_operator() -> onnx.ModelProto:
    """A node of a domain that no library here has, with the inputs and outputs of `models.affine`."""
    graph = helper.make_graph(
        [helper.make_node("Mystery", ["X"], ["Y"], domain="com.example")],
        "graph",
        [helper.make_tensor_value_info("X", FP32, ["batch", 16])],
        [helper.make_tensor_value_info("Y", FP32, ["batch", 4])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.example", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def with_node(operator: str, opset: int = 17, domain: str = "") -> onnx.ModelProto:
    """A model of one node, of an operator or an opset that ONNX Runtime does not have."""
    graph = helper.make_graph(
        [helper.make_node(operator, ["X"], ["Y"], domain=domain)],
        "graph",
        [helper.make_tensor_value_info("X", FP32, ["batch", 4])],
        [helper.make_tensor_value_info("Y", FP32, ["batch", 4])],
    )
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            with_node("Relu", 99),
            "has opset 99 of ai.onnx, ONNX Runtime .* runs up to [0-9]+ .export it with opset_version=",
        ),
        (with_node("Frobnicate"), "has no operator Frobnicate in opset 17"),
        (with_node("MyOp", domain="my.domain"), "has the operator MyOp of the domain my.domain, a custom one"),
    ],
)
def test_what_the_runtime_lacks_is_one_sentence(tmp_path: Path, model: onnx.ModelProto, message: str) -> None:
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    output = run_headrace("validate", str(tmp_path)).stdout
    (line,) = [line for line in output.splitlines() if "error:" in line]
    assert re.search(message, line), line
    assert "ONNXRuntimeError" not in line
    assert "onnx.checker" not in line


def newer_onnx() -> onnx.ModelProto:
    """A file of an IR version that does not exist yet."""
    model = models.affine()
    model.ir_version = 99
    return model


IO = """
input [ { name: "data_0" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] } ]
output [ { name: "fc6_1" data_type: TYPE_FP32 dims: [ 10 ] } ]
"""
# Written after what public repositories have: the fields, sizes and mistakes are theirs, the text is ours.
PUBLIC: Mapping[str, tuple[onnx.ModelProto, str]] = {
    "quick_start": (classifier((1, 3, 8, 8), (1, 10, 1, 1)), """
        name: "quick_start" platform: "onnxruntime_onnx" max_batch_size: 0
        input [ { name: "data_0" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 8, 8 ]
                  reshape { shape: [ 1, 3, 8, 8 ] } } ]
        output [ { name: "fc6_1" data_type: TYPE_FP32 dims: [ 10 ] reshape { shape: [ 1, 10, 1, 1 ] } } ]"""),
    "quick_start_wrong_shape": (classifier((1, 3, 8, 8), (1, 10, 1, 1)), f'platform: "onnxruntime_onnx" max_batch_size: 0 {IO}'),
    "fixed_shapes": (classifier((1, 3, 8, 8), (1, 10)), """
        backend: "onnxruntime" max_batch_size: 0
        input [ { name: "data_0", data_type: TYPE_FP32, dims: [1, 3, 8, 8] } ]
        output [ { name: "fc6_1", data_type: TYPE_FP32, dims: [1, 10] } ]
        instance_group [ { kind: KIND_CPU, count: 1 } ]"""),
    "fixed_batch_of_one": (classifier((1, 3, 8, 8), (1, 10)), f'backend: "onnxruntime" max_batch_size: 8 {IO}'),
    "batching_on_a_cpu": (classifier(), f"""
        platform: "onnxruntime_onnx" max_batch_size: 32 {IO}
        dynamic_batching {{ preferred_batch_size: [ 4, 8, 16, 32 ] max_queue_delay_microseconds: 100 }}
        instance_group [ {{ count: 2 kind: KIND_CPU }} ]
        version_policy: {{ specific {{ versions: 1 }} }}"""),
    "colons_and_commas": (classifier(), f"""
        backend: "onnxruntime", max_batch_size: 4, {IO},
        dynamic_batching: {{}}, instance_group: [{{count: 1, kind: KIND_CPU}}]"""),
    "free_dimensions": (classifier(("a", "b", "c", "d"), ("a", "k")), """
        backend: "onnxruntime" max_batch_size: 0
        input: [ { name: "data_0", data_type: TYPE_FP32, dims: [ -1, -1, -1, -1 ] } ]
        output: [ { name: "fc6_1", data_type: TYPE_FP32, dims: [ -1, -1 ] } ]"""),
    "missing_bracket": (classifier(), 'name: "missing_bracket" input [ { name: "data_0" '),
    "other_name": (classifier(), 'name: "something_else" backend: "onnxruntime" max_batch_size: 2' + IO),
    "wrong_output": (classifier(), """
        max_batch_size: 2 input [ { name: "data_0" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] } ]
        output [ { name: "probabilities" data_type: TYPE_FP32 dims: [ 10 ] } ]"""),
    "accelerated": (classifier(), f"""
        platform: "onnxruntime_onnx" max_batch_size: 8 {IO}
        optimization {{ execution_accelerators {{ gpu_execution_accelerator : [ {{ name : "tensorrt"
          parameters {{ key: "precision_mode" value: "FP16" }}
          parameters {{ key: "trt_engine_cache_enable" value: "1" }} }} ] }} }}"""),
    "openvino_accelerated": (classifier(), f"""
        max_batch_size: 8 {IO}
        optimization {{ execution_accelerators {{ cpu_execution_accelerator : [ {{ name : "openvino" }} ] }} }}"""),
    "threads": (classifier(), f"""
        max_batch_size: 8 {IO} optimization {{ graph : {{ level : 1 }} }}
        parameters {{ key: "intra_op_thread_count" value: {{ string_value: "1" }} }}
        parameters {{ key: "inter_op_thread_count" value: {{ string_value: "1" }} }}
        parameters {{ key: "execution_mode" value: {{ string_value: "0" }} }}
        parameters {{ key: "do_copy_in_default_stream" value: {{ string_value: "0" }} }}"""),
    "tokenizer": (classifier(), """
        backend: "python" max_batch_size: 8
        input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
        output [ { name: "IDS" data_type: TYPE_INT64 dims: [ -1 ] } ]
        parameters: { key: "EXECUTION_ENV_PATH", value: {string_value: "/opt/env.tar.gz"} }"""),
    "token_stream": (classifier(), f"max_batch_size: 8 {IO} model_transaction_policy {{ decoupled: True }}"),
    "stateful": (classifier(), f"max_batch_size: 8 {IO} sequence_batching {{ iterative_sequence: true }}"),
    "cached": (classifier(), f"max_batch_size: 8 {IO} response_cache {{ enable: true }}"),
    "operators": (classifier(), f'{IO} model_operations: {{ op_library_filename: ["/opt/libortextensions.so"] }}'),
    "torchscript": (classifier(), f'platform: "pytorch_libtorch" max_batch_size: 8 {IO}'),
    "saved_model": (classifier(), f'platform: "tensorflow_savedmodel" max_batch_size: 8 {IO}'),
    "forest": (classifier(), f'backend: "fil" {IO} parameters {{ key: "model_type" value {{ string_value: "xgboost" }} }}'),
    "decoder": (classifier(), f'backend: "dali" max_batch_size: 8 {IO}'),
    "intel": (classifier(), f'backend: "openvino" max_batch_size: 8 {IO}'),
    "on_a_gpu_or_cpu": (classifier(), f'max_batch_size: 32 {IO} instance_group [ {{ kind: KIND_GPU }} ]'),
    "on_a_gpu": (classifier(), f'platform: "tensorrt_plan" max_batch_size: 32 {IO} instance_group [ {{ kind: KIND_GPU }} ]'),
}  # fmt: skip


def add_public(repository: Path) -> None:
    for name, (model, config) in PUBLIC.items():
        models.add_model(repository, name, model, config=config)
    for path in sorted(EXAMPLES.iterdir()):
        text = path.read_text().replace('name: "add_sub"', "")
        models.add_model(
            repository, f"example_{path.stem}_{path.suffix[1:]}", models.affine(), files={f"config{path.suffix}": text}
        )


def add_ours(repository: Path) -> None:
    """A model for each way in which the two commands used to differ, and for each way to be broken."""
    models.add_model(repository, "zipmap", zipmap())
    models.add_model(repository, "zipmap_alone", zipmap(label=False))
    models.add_model(repository, "text_default_locale", text_model(None))
    models.add_model(repository, "text_locale", text_model("xx_YY.UTF-8"))
    models.add_model(repository, "text_c_locale", text_model("C.UTF-8"))
    models.add_model(repository, "yml", models.affine(), files={"config.yml": "max_batch_size: 7\n"})
    both = {"config.yml": "max_batch_size: 7\n", "config.yaml": "max_batch_size: 7\n"}
    models.add_model(repository, "yml_and_yaml", models.affine(), files=both)
    for name, parameters in {
        "unknown_parameter": "{intra_op_threads: 2}",
        "wrong_threads": "{intra_op_thread_count: many}",
        "wrong_switch": "{enable_mem_arena: perhaps}",
        "wrong_level": "{optimization_level: 7}",
    }.items():
        models.add_model(repository, name, models.affine(), files={"config.yaml": f"parameters: {parameters}\n"})
    models.add_model(repository, "unknown_operator", unknown_operator())
    models.add_model(repository, "newer_onnx", newer_onnx())
    models.add_model(repository, "truncated", models.affine().SerializeToString()[:-20])
    models.add_model(repository, "isolated", models.affine(), files={"config.yaml": "isolation: process\n"})
    broken = {"config.yaml": "isolation: process\n"}
    models.add_model(repository, "isolated_broken", unknown_operator(), files=broken)
    models.add_model(
        repository, "fallback", models.affine(), files={"config.yaml": "backend: tensorrt\nfallback: onnxruntime\n"}
    )
    models.add_model(
        repository, "no_version_served", models.affine(), config="version_policy { specific { versions: 9 } }"
    )
    models.add_model(repository, "half_broken", models.affine(), config="version_policy { all {} }")
    models.add_model(repository, "half_broken", unknown_operator(), version=2)
    warmup = "model_warmup: [{name: w, batch_size: 1, inputs: {X: {data_type: fp32, dims: [16], zero_data: true}}}]\n"
    models.add_model(repository, "warmed", models.affine(), files={"config.yaml": warmup})
    (repository / "misplaced").mkdir()
    (repository / "misplaced" / "model.onnx").write_bytes(models.affine().SerializeToString())
    (repository / "no_model_file" / "1").mkdir(parents=True)


def add_volume(repository: Path) -> None:
    """Adds the folders of a Kubernetes volume that are not models."""
    (repository / "lost+found").mkdir()
    (repository / ".git").mkdir()
    (repository / "empty").mkdir()
    (repository / "notes").mkdir()
    (repository / "notes" / "README.md").write_text("no model")
    (repository / "__pycache__").mkdir()
    # A ConfigMap mount: a hidden folder with the files, and links to them that are swapped together.
    content = repository / "..2026_11_22" / "mapped"
    models.add_model(content.parent, "mapped", models.affine())
    (repository / "..data").symlink_to("..2026_11_22")
    (repository / "mapped").symlink_to("..data/mapped")


SKIPPED = {"lost+found", ".git", "empty", "notes", "__pycache__", "..data", "..2026_11_22"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("both") / "repository"
    conftest.build(folder)
    add_public(folder)
    add_ours(folder)
    add_volume(folder)
    return folder


@pytest.fixture(scope="module")
def inspections(repository: Path) -> dict[str, ModelCheck]:
    """Results of `validate` by model."""
    results = validate.inspect(repository)
    return {name_of(inspection): inspection for inspection in results if inspection.skipped is None}


def name_of(inspection: ModelCheck) -> str:
    return inspection.model.name if inspection.model is not None else inspection.findings[0].path.partition("/")[0]


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(repository, tmp_path_factory.mktemp("log")) as running:
        yield running


@pytest.fixture(scope="module")
def index(server: Server) -> dict[str, list[tuple[str, str, str]]]:
    """Version, state and reason of every model of the server."""
    rows: dict[str, list[tuple[str, str, str]]] = {}
    for row in json.loads(server.request("POST", "/v2/repository/index")[2]):
        rows.setdefault(row["name"], []).append((row.get("version", ""), row["state"], row.get("reason", "")))
    return rows


def test_validate_and_serve_agree_on_every_model(
    inspections: dict[str, ModelCheck], index: dict[str, list[tuple[str, str, str]]]
) -> None:
    assert inspections.keys() == index.keys()
    different = {}
    for name, inspection in inspections.items():
        expected = list(inspection.states)
        if inspection.model is None:  # its files cannot be read as a model's: nothing was loaded
            expected = [("", "UNAVAILABLE", "; ".join(map(str, inspection.findings)))]
        if expected != index[name]:
            different[name] = (expected, index[name])
    assert different == {}
    states = {state for rows in index.values() for _, state, _ in rows}
    assert states == {"READY", "UNAVAILABLE"}, "the fixtures have both kinds"


def test_ok_is_printed_for_ready_models_only(repository: Path, index: dict[str, list[tuple[str, str, str]]]) -> None:
    out = io.StringIO()
    status = validate.main([repository], Console(file=out, width=40))
    printed = {
        line.split()[1]: line.split(":")[0].split()[2:]
        for line in out.getvalue().splitlines()
        if line.startswith("OK ")
    }
    ready = {name: [version for version, state, _ in rows if state == "READY"] for name, rows in index.items()}
    assert {name: [v.rstrip(",") for v in versions] for name, versions in printed.items()} == {
        name: versions for name, versions in ready.items() if versions
    }
    assert status == 1


@pytest.mark.slow
def test_strict_refuses_models_that_validate_refuses(repository: Path, tmp_path: Path) -> None:
    """Status of `validate` and of `validate --strict`, which is that of `serve --strict`."""
    for name, plain, strict in (
        ("zipmap", 0, 0),
        ("unknown_parameter", 0, 0),
        ("on_a_gpu_or_cpu", 0, 1),
        ("text_locale", 1, 1),
        ("half_broken", 1, 1),
    ):
        alone = tmp_path / name
        alone.mkdir()
        # A copy, as a link would lead out of the repository.
        for file in sorted(path for path in (repository / name).rglob("*") if path.is_file()):
            target = alone / name / file.relative_to(repository / name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
        assert validate.main([alone], Console(file=io.StringIO())) == plain, name
        assert validate.main([alone], Console(file=io.StringIO()), strict=True) == strict, name
        if strict:
            assert start(alone, tmp_path / f"{name}.log", "--strict").wait() == 1, name
        else:
            with serving(alone, tmp_path, "--strict"):
                pass


def test_a_scikit_learn_classifier_serves_its_label(server: Server, inspections: dict[str, ModelCheck]) -> None:
    assert inspections["zipmap"].ready == ("1",)
    warning = next(finding for finding in inspections["zipmap"].findings if "output_probability" in finding.message)
    assert 'output "output_probability"' in warning.message
    assert "zipmap" in warning.cure
    with triton.InferenceServerClient(server.address) as client:
        rows = np.array([[2, 0, 0], [-2, 0, 0], [3, 1, 1]], np.float32)
        tensor = triton.InferInput("X", rows.shape, "FP32").set_data_from_numpy(rows)
        answer = client.infer("zipmap", [tensor])
        assert answer.as_numpy("output_label").tolist() == [0, 1, 0]
        assert [output["name"] for output in client.get_model_metadata("zipmap")["outputs"]] == ["output_label"]
    assert inspections["zipmap_alone"].ready == ()


def test_a_missing_locale_is_named_with_its_cure(inspections: dict[str, ModelCheck]) -> None:
    finding = inspections["text_locale"].findings[-1]
    assert 'needs the locale "xx_YY.UTF-8", which this machine does not have' in finding.message
    assert "localedef -i xx_YY -f UTF-8 xx_YY.UTF-8" in finding.cure
    assert '"C.UTF-8"' in finding.cure
    assert inspections["text_c_locale"].ready == ("1",)


def test_config_yml_is_read(server: Server, inspections: dict[str, ModelCheck]) -> None:
    config = json.loads(server.request("GET", "/v2/models/yml/config")[2])
    assert config["max_batch_size"] == 7
    assert "has both config.yaml and config.yml (keep one of them)" in str(inspections["yml_and_yaml"].findings[0])


def test_unknown_parameters_are_warned_of_by_name_in_both(server: Server, inspections: dict[str, ModelCheck]) -> None:
    (finding,) = inspections["unknown_parameter"].findings
    assert str(finding) == (
        'unknown_parameter/config.yaml:1: warning: the parameter "intra_op_threads" has no effect: no backend here reads it '
        "(did you mean intra_op_thread_count?)"
    )
    assert 'the parameter "intra_op_threads" has no effect' in " ".join(server.text.split())
    assert [f.message for f in inspections["threads"].findings if "do_copy_in_default_stream" in f.message]
    assert "'many'" in inspections["wrong_threads"].findings[-1].message
    assert "'perhaps'" in inspections["wrong_switch"].findings[-1].message


def test_other_files_of_a_volume_are_skipped_with_a_note(
    repository: Path, server: Server, index: dict[str, list[tuple[str, str, str]]]
) -> None:
    assert not SKIPPED & index.keys()
    assert [state for _, state, _ in index["mapped"]] == ["READY"]
    notes = {i.skipped.path.name: i.skipped.reason for i in validate.inspect(repository, load=False) if i.skipped}
    assert notes.keys() == SKIPPED
    log = " ".join(server.text.split())
    for name, reason in notes.items():
        assert log.count(f"{name} is skipped: {reason}") == 1, name
    assert [state for _, state, _ in index["misplaced"]] == ["UNAVAILABLE"], "a model in the wrong place is an error"
