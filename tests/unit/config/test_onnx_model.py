from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from headrace.config.onnx_model import external_files, read_signature, table_sizes
from headrace.core.errors import ConfigError
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from tests.support.onnx_models import identity_model


def saved(folder: Path, model: onnx.ModelProto) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_signature(path, "m/1/model.onnx")
    (finding,) = caught.value.findings
    assert finding.path == "m/1/model.onnx"
    assert finding.cure
    return finding.message


def with_weights(names: list[str], as_inputs: bool = False) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(np.zeros((4, 4), np.float32), name) for name in names]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])]
    if as_inputs:
        inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in names]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", names[0]], ["y"])],
        "g",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        weights,
    )
    return helper.make_model(graph)


def test_names_types_shapes(tmp_path: Path) -> None:
    model = identity_model(
        {"a": (TensorProto.FLOAT16, ["batch", 3, None]), "b": (TensorProto.STRING, [])},
        {"c": (TensorProto.FLOAT16, [-1, 3, 5]), "d": (TensorProto.STRING, None)},
    )
    signature = read_signature(saved(tmp_path, model), "f")
    assert [(t.name, t.data_type, t.shape, t.batch_symbol) for t in signature.inputs] == [
        ("a", "TYPE_FP16", (-1, 3, -1), "batch"),
        ("b", "TYPE_STRING", (), ""),
    ]
    assert [(t.name, t.data_type, t.shape) for t in signature.outputs] == [
        ("c", "TYPE_FP16", (-1, 3, 5)),
        ("d", "TYPE_STRING", None),
    ]


def test_weights_listed_as_inputs_need_not_be_sent(tmp_path: Path) -> None:
    signature = read_signature(saved(tmp_path, with_weights(["w"], as_inputs=True)), "f")
    assert [tensor.name for tensor in signature.inputs] == ["x", "w"]
    assert [tensor.name for tensor in signature.required_inputs] == ["x"]


def test_unsupported_types_are_reported(tmp_path: Path) -> None:
    model = identity_model({"x": (TensorProto.FLOAT8E4M3FN, [1])}, {"y": (TensorProto.COMPLEX64, [1])})
    model.graph.output.append(
        helper.make_value_info(
            "z", helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [1]))
        )
    )
    signature = read_signature(saved(tmp_path, model), "f")
    types = [(tensor.data_type, tensor.onnx_type) for tensor in (*signature.inputs, *signature.outputs)]
    assert types == [("", "FLOAT8E4M3FN"), ("", "COMPLEX64"), ("", "sequence")]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = saved(tmp_path, identity_model())
    assert read_signature(path, "f").inputs[0].name == "x"
    saved(tmp_path, identity_model({"other": (TensorProto.FLOAT, [1])}))
    os.utime(path, ns=(1, 1))
    assert read_signature(path, "f").inputs[0].name == "other"


@pytest.mark.parametrize("content", [b"not a model at all", b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f"])
def test_garbage_is_no_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    assert refusal(tmp_path / "model.onnx") == "is no ONNX model, or a truncated one"


def test_every_truncation_is_refused_or_read_but_never_raises_something_else(tmp_path: Path) -> None:
    content = with_weights(["w"]).SerializeToString()
    refused = 0
    for end in range(len(content)):
        path = tmp_path / "model.onnx"
        path.write_bytes(content[:end])
        os.utime(path, ns=(end, end))
        try:
            read_signature(path, "f")
        except ConfigError:
            refused += 1
    # All but cuts behind the graph, through what comes after it.
    assert refused > len(content) * 0.9


def test_an_empty_file_holds_no_graph(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    assert "no graph" in refusal(tmp_path / "model.onnx")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "model.onnx")


def external(tmp_path: Path, location: str) -> Path:
    model = with_weights(["w"])
    external_data_helper.set_external_data(model.graph.initializer[0], location=location)
    model.graph.initializer[0].ClearField("raw_data")
    return saved(tmp_path, model)


@pytest.mark.parametrize("location", ["../w.bin", "/etc/passwd", "a/../../w.bin", "", "a\\b", "a\0b"])
def test_weights_outside_of_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    assert "not in the model's folder" in refusal(external(tmp_path, location))


def test_weights_behind_a_link_that_leads_out_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"0" * 64)
    for folder in (tmp_path / "repository" / "m" / "1", tmp_path / "folder"):
        folder.mkdir(parents=True)
        (folder / "w.bin").symlink_to(tmp_path / "secret")
        assert "leads out" in refusal(external(folder, "w.bin"))


def test_model_and_weights_may_be_links_into_one_folder(tmp_path: Path) -> None:
    (tmp_path / "store" / "2f").mkdir(parents=True)
    (tmp_path / "1").mkdir()
    (tmp_path / "store" / "2f" / "weights").write_bytes(b"0" * 64)
    (tmp_path / "1" / "w.bin").symlink_to("../store/2f/weights")
    model = external(tmp_path / "1", "w.bin")
    assert "leads out" in refusal(model)  # ONNX Runtime does not load it either
    model.rename(tmp_path / "store" / "model")
    model.symlink_to("../store/model")
    assert external_files(model, "m") == ("w.bin",)


def test_weights_in_the_folder_are_fine_but_must_be_there(tmp_path: Path) -> None:
    path = external(tmp_path, "w.bin")
    assert "does not exist" in refusal(path)
    (tmp_path / "w.bin").write_bytes(b"0" * 64)
    assert read_signature(path, "f").inputs[0].name == "x"


def test_weights_of_subgraphs_and_functions_are_looked_at_too(tmp_path: Path) -> None:
    outside = TensorProto(name="v", data_type=TensorProto.FLOAT, dims=[1])
    outside.data_location = TensorProto.EXTERNAL
    outside.external_data.add(key="location", value="../v.bin")
    branch = helper.make_graph([helper.make_node("Constant", [], ["k"], value=outside)], "b", [], [])
    for_graph, for_function = identity_model(), identity_model()
    for_graph.graph.node.append(helper.make_node("If", ["x"], ["q"], then_branch=branch, else_branch=branch))
    constant = helper.make_node("Constant", [], ["o"], value=outside)
    for_function.functions.append(helper.make_function("d", "f", [], ["o"], [constant], []))
    for model in (for_graph, for_function):
        path = saved(tmp_path, model)
        os.utime(path, ns=(len(model.functions) + 1, 1))
        assert "not in the model's folder" in refusal(path)


def test_the_smallest_table_that_an_input_indexes(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (int64[N, 3] ids, int64[N, 3] kinds, int64[N, 3] mask, float[N] x) => (float y)
        <float[30, 4] words = {}, float[4, 5] parts = {}, float[2, 4] kind_table = {}> {
          w = Gather (words, ids)
          flat = Cast <to: int = 6> (ids)
          p = Gather <axis: int = -1> (parts, flat)
          k = Gather (kind_table, kinds)
          m = Cast <to: int = 1> (mask)
          own = Gather (x, ids)
          y = Add (w, k)
        }""".replace("{}", "{0}")
    )
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(np.zeros(tuple(tensor.dims), np.float32), tensor.name))
    assert table_sizes(saved(tmp_path, model), "model.onnx") == {"ids": 5, "kinds": 2}
    with pytest.raises(ConfigError, match="cannot be read"):
        table_sizes(tmp_path / "missing.onnx", "missing.onnx")
