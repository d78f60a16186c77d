"""Small ONNX models for tests, built by `onnx.helper`, and the model repository to put them in.

Every builder returns a `ModelProto` that ONNX Runtime runs in process too, so that a served answer can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from headrace.config.binding import bind
from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import CONFIG_FILES
from headrace.core.errors import ConfigError, Finding
from headrace.core.tensor import BY_NAME
from onnx import TensorProto, helper, numpy_helper

from loadtest.onnx_models import Dim, onnx_model
from loadtest.onnx_models import busy as busy


def identity(
    datatype: str = "FP32", shape: Sequence[Dim] = ("batch", "n"), names: tuple[str, str] = ("X", "Y")
) -> onnx.ModelProto:
    """Y = X, for any datatype of the protocol; `shape` with the batch dimension."""
    kind = BY_NAME[datatype].onnx_number
    return onnx_model(
        [helper.make_node("Identity", [names[0]], [names[1]])], {names[0]: (kind, shape)}, {names[1]: (kind, shape)}
    )


def affine(features: int = 16, classes: int = 4, seed: int = 0) -> onnx.ModelProto:
    """Y = relu(X @ W + B): FP32 X (batch, features), Y (batch, classes); seeded weights, different for each seed."""
    rng = np.random.default_rng(seed)
    weights = {
        "W": rng.standard_normal((features, classes)).astype(np.float32),
        "B": rng.standard_normal(classes).astype(np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["X", "W"], ["XW"]),
        helper.make_node("Add", ["XW", "B"], ["XWB"]),
        helper.make_node("Relu", ["XWB"], ["Y"]),
    ]
    fp32 = TensorProto.FLOAT
    return onnx_model(nodes, {"X": (fp32, ("batch", features))}, {"Y": (fp32, ("batch", classes))}, weights)


def sum_difference(width: int = 4) -> onnx.ModelProto:
    """SUM = A + B and DIFFERENCE = A - B as FP32, of INT32 A and FP32 B, all (batch, width)."""
    nodes = [
        helper.make_node("Cast", ["A"], ["A_FP32"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["A_FP32", "B"], ["SUM"]),
        helper.make_node("Sub", ["A_FP32", "B"], ["DIFFERENCE"]),
    ]
    shape = ("batch", width)
    return onnx_model(
        nodes,
        {"A": (TensorProto.INT32, shape), "B": (TensorProto.FLOAT, shape)},
        {"SUM": (TensorProto.FLOAT, shape), "DIFFERENCE": (TensorProto.FLOAT, shape)},
    )


def row_sums() -> onnx.ModelProto:
    """DOUBLE = 2 X (batch, n) and SUM (batch, 1) of FP32 X (batch, n): rows of any length, so requests of different shapes."""
    constants = {"two": np.array(2, np.float32), "axes": np.array([1], np.int64)}
    nodes = [
        helper.make_node("Mul", ["X", "two"], ["DOUBLE"]),
        helper.make_node("ReduceSum", ["X", "axes"], ["SUM"], keepdims=1),
    ]
    fp32 = TensorProto.FLOAT
    return onnx_model(
        nodes,
        {"X": (fp32, ("batch", "n"))},
        {"DOUBLE": (fp32, ("batch", "n")), "SUM": (fp32, ("batch", 1))},
        constants,
    )


def unbatched() -> onnx.ModelProto:
    """Y = -X, FP32 (2, 3): no batch dimension at all."""
    fp32 = TensorProto.FLOAT
    return onnx_model([helper.make_node("Neg", ["X"], ["Y"])], {"X": (fp32, (2, 3))}, {"Y": (fp32, (2, 3))})


def transposed() -> onnx.ModelProto:
    """Y (batch, 3, 2) is each row of X (batch, 2, 3) transposed; for `reshape`, which callers see as 6 numbers."""
    fp32 = TensorProto.FLOAT
    node = helper.make_node("Transpose", ["X"], ["Y"], perm=[0, 2, 1])
    return onnx_model([node], {"X": (fp32, ("batch", 2, 3))}, {"Y": (fp32, ("batch", 3, 2))})


def scores(classes: int = 5) -> onnx.ModelProto:
    """SCORES (batch, classes) FP32 is a copy of X, BEST (batch, 1) INT64 the index of each row's highest."""
    nodes = [
        helper.make_node("Identity", ["X"], ["SCORES"]),
        helper.make_node("ArgMax", ["X"], ["BEST"], axis=1, keepdims=1),
    ]
    shape = ("batch", classes)
    return onnx_model(
        nodes,
        {"X": (TensorProto.FLOAT, shape)},
        {"SCORES": (TensorProto.FLOAT, shape), "BEST": (TensorProto.INT64, ("batch", 1))},
    )


def optional_bias(width: int = 3) -> onnx.ModelProto:
    """Y = X + BIAS, FP32 (batch, width); BIAS (1, width) has a default of 100, so a request may leave it out."""
    fp32 = TensorProto.FLOAT
    model = onnx_model(
        [helper.make_node("Add", ["X", "BIAS"], ["Y"])],
        {"X": (fp32, ("batch", width)), "BIAS": (fp32, ("bias_batch", width))},
        {"Y": (fp32, ("batch", width))},
    )
    model.graph.initializer.append(numpy_helper.from_array(np.full((1, width), 100, np.float32), "BIAS"))
    return model


def table_lookup(size: int = 4) -> onnx.ModelProto:
    """Y = 10 * X for INT64 X (batch, 1) in [-size, size); the model itself refuses any other value (a failing Gather)."""
    table = {"table": np.arange(size, dtype=np.int64) * 10}
    int64 = TensorProto.INT64
    node = helper.make_node("Gather", ["table", "X"], ["Y"], axis=0)
    return onnx_model([node], {"X": (int64, ("batch", 1))}, {"Y": (int64, ("batch", 1))}, table)


def integer_matrix() -> onnx.ModelProto:
    """Y (batch, 8) INT32 = X (batch, 16) INT8 times constants: TensorRT 10 refuses MatMulInteger, ONNX Runtime has it on GPUs."""
    weights = {"W": np.random.default_rng(3).integers(-100, 100, (16, 8)).astype(np.int8)}
    node = helper.make_node("MatMulInteger", ["X", "W"], ["Y"], name="integers")
    return onnx_model(
        [node], {"X": (TensorProto.INT8, ("batch", 16))}, {"Y": (TensorProto.INT32, ("batch", 8))}, weights
    )


def ramp() -> onnx.ModelProto:
    """Y (n,) FP32 is 0.5, 1.5, 2.5 ..., COUNT (1,) INT64 numbers of them: a small request for a large response."""
    constants = {name: np.array(value, np.int64) for name, value in (("zero", 0), ("one", 1))}
    constants |= {"axes": np.array([0], np.int64), "half": np.array(0.5, np.float32)}
    nodes = [
        helper.make_node("Squeeze", ["COUNT", "axes"], ["count"]),
        helper.make_node("Range", ["zero", "count", "one"], ["numbers"]),
        helper.make_node("Cast", ["numbers"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["floats", "half"], ["Y"]),
    ]
    return onnx_model(nodes, {"COUNT": (TensorProto.INT64, (1,))}, {"Y": (TensorProto.FLOAT, ("n",))}, constants)


def pictures(height: int = 224, width: int = 224, classes: int = 10, seed: int = 0) -> onnx.ModelProto:
    """LOGITS (batch, classes) of IMAGE (batch, 3, height, width), FP32: a convolution, its mean, and a matrix; seeded weights."""
    rng = np.random.default_rng(seed)
    weights = {
        "kernel": rng.standard_normal((8, 3, 4, 4)).astype(np.float32),
        "W": rng.standard_normal((8, classes)).astype(np.float32) * 8,
    }
    nodes = [
        helper.make_node("Conv", ["IMAGE", "kernel"], ["edges"], strides=[4, 4]),
        helper.make_node("Relu", ["edges"], ["strong"]),
        helper.make_node("GlobalAveragePool", ["strong"], ["means"]),
        helper.make_node("Flatten", ["means"], ["flat"]),
        helper.make_node("MatMul", ["flat", "W"], ["LOGITS"]),
    ]
    fp32 = TensorProto.FLOAT
    shape = ("batch", 3, height, width)
    return onnx_model(nodes, {"IMAGE": (fp32, shape)}, {"LOGITS": (fp32, ("batch", classes))}, weights)


def channel_means(height: int = 8, width: int = 8) -> onnx.ModelProto:
    """LOGITS (batch, 3): the mean of each channel of IMAGE (batch, 3, height, width), FP32."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["IMAGE"], ["means"]),
        helper.make_node("Flatten", ["means"], ["LOGITS"]),
    ]
    fp32 = TensorProto.FLOAT
    return onnx_model(nodes, {"IMAGE": (fp32, ("batch", 3, height, width))}, {"LOGITS": (fp32, ("batch", 3))})


def add_model(
    repository: Path,
    name: str,
    model: onnx.ModelProto | bytes,
    *,
    version: int = 1,
    config: str = "",
    files: Mapping[str, str] | None = None,
) -> Path:
    """Put one version of a model into a repository.

    Args:
        repository: the folder of models; made if it is not there.
        name: of the model and its folder.
        model: what goes into `<version>/model.onnx`; bytes as they are, for files that are no model.
        version: the version's number.
        config: what goes into `config.pbtxt`, if anything.
        files: more files of the model's folder by name, e.g. labels, `config.yaml`.

    Returns:
        The model's folder.
    """
    folder = repository / name
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    content = model if isinstance(model, bytes) else model.SerializeToString()
    (folder / str(version) / "model.onnx").write_bytes(content)
    if config:
        (folder / "config.pbtxt").write_text(config)
    for file, text in (files or {}).items():
        (folder / file).write_text(text)
    return folder


def add_pipeline(
    repository: Path, name: str, config: str, *, version: int = 1, files: Mapping[str, str] | None = None
) -> Path:
    """Put one version of a pipeline into a repository: a configuration and an empty version folder.

    Args:
        repository: the folder of models.
        name: of the pipeline and its folder.
        config: what goes into `config.pbtxt`; "" for none.
        version: the version's number.
        files: more files of its folder by name, e.g. labels, `config.yaml`.

    Returns:
        The pipeline's folder.
    """
    folder = repository / name
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    for file, text in {**({"config.pbtxt": config} if config else {}), **(files or {})}.items():
        (folder / file).write_text(text)
    return folder


def ensemble_config(
    steps: Sequence[tuple[str, Mapping[str, str], Mapping[str, str]]],
    inputs: Mapping[str, tuple[str, Sequence[int]]],
    outputs: Mapping[str, tuple[str, Sequence[int]]],
    more: str = "max_batch_size: 8",
) -> str:
    """`config.pbtxt` of an ensemble.

    Args:
        steps: model, input_map and output_map of each step.
        inputs, outputs: datatype ("TYPE_FP32") and dims by name.
        more: further fields.
    """

    def tensors(field: str, specs: Mapping[str, tuple[str, Sequence[int]]]) -> str:
        items = [f'{{ name: "{name}" data_type: {kind} dims: {list(dims)} }}' for name, (kind, dims) in specs.items()]
        return f"{field} [ {', '.join(items)} ]"

    def entries(field: str, pairs: Mapping[str, str]) -> str:
        return " ".join(f'{field} {{ key: "{key}" value: "{value}" }}' for key, value in pairs.items())

    parts = [
        f'{{ model_name: "{model}" model_version: -1 {entries("input_map", reads)} {entries("output_map", writes)} }}'
        for model, reads, writes in steps
    ]
    scheduling = f"ensemble_scheduling {{ step [ {', '.join(parts)} ] }}"
    return "\n".join(['platform: "ensemble"', more, tensors("input", inputs), tensors("output", outputs), scheduling])


def read_config_text(text: str, path: str) -> tuple[ModelConfig | None, list[Finding]]:
    """Read and check one configuration file, without its model.

    Args:
        text: what is in the file.
        path: its name, which ends in "config.pbtxt", "config.yaml" or "config.yml".

    Returns:
        The configuration (None if a finding is fatal) and all findings.
    """
    try:
        document = CONFIG_FILES[path.rpartition("/")[2]](text, path)
    except ConfigError as error:
        return None, error.findings
    return bind(document)
