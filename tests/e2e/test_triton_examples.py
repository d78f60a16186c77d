"""Triton's example scripts, repeated with its clients on models of the same names.

The scripts are in `src/python/examples` of the repository triton-inference-server/client. Each test names those whose requests
and checks it makes. Not here: sequences, decoupled models and CUDA shared memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.model_config_pb2 as mc
import tritonclient.http as triton_http
from onnx import TensorProto, helper
from tritonclient import utils
from tritonclient.utils import InferenceServerException, shared_memory

from loadtest.onnx_models import onnx_model
from tests.support import models
from tests.support.serving import Server, serving

SIMPLE = """
max_batch_size: 8
input [ {{ name: "INPUT0" data_type: {0} dims: [ 16 ] }}, {{ name: "INPUT1" data_type: {0} dims: [ 16 ] }} ]
output [ {{ name: "OUTPUT0" data_type: {0} dims: [ 16 ] }}, {{ name: "OUTPUT1" data_type: {0} dims: [ 16 ] }} ]
"""
IDENTITY = """
max_batch_size: 8
input [ {{ name: "INPUT0" data_type: {0} dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0" data_type: {0} dims: [ -1 ] }} ]
"""
IMAGES = """
max_batch_size: 4
input [ { name: "data_0" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 32, 32 ] } ]
output [ { name: "fc6_1" data_type: TYPE_FP32 dims: [ 10 ] label_filename: "labels.txt" } ]
"""
LABELS = "".join(f"class {index}\n" for index in range(10))
IN0 = np.arange(16, dtype=np.int32).reshape(1, 16)
IN1 = np.full((1, 16), -1, np.int32)


def simple(kind: int, through: int = 0) -> Any:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, all (batch, 16); computed as INT32 where `through` says so."""
    nodes, names = [], ["INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1"]
    inner = [f"{name}_INT32" if through else name for name in names]
    if through:
        nodes = [helper.make_node("Cast", [names[index]], [inner[index]], to=through) for index in (0, 1)]
    nodes += [helper.make_node("Add", inner[:2], inner[2:3]), helper.make_node("Sub", inner[:2], inner[3:])]
    if through:
        nodes += [helper.make_node("Cast", [inner[index]], [names[index]], to=kind) for index in (2, 3)]
    shape = ("batch", 16)
    return onnx_model(nodes, dict.fromkeys(names[:2], (kind, shape)), dict.fromkeys(names[2:], (kind, shape)))


def images() -> Any:
    """fc6_1 (batch, 10): channel means of data_0 (batch, 3, 32, 32) in different weights."""
    weights = {"W": np.random.default_rng(0).standard_normal((3, 10)).astype(np.float32)}
    nodes = [
        helper.make_node("GlobalAveragePool", ["data_0"], ["means"]),
        helper.make_node("Flatten", ["means"], ["flat"]),
        helper.make_node("MatMul", ["flat", "W"], ["fc6_1"]),
    ]
    fp32 = TensorProto.FLOAT
    return onnx_model(nodes, {"data_0": (fp32, ("batch", 3, 32, 32))}, {"fc6_1": (fp32, ("batch", 10))}, weights)


def build(folder: Path) -> Path:
    int32, int8, text = TensorProto.INT32, TensorProto.INT8, TensorProto.STRING
    models.add_model(folder, "simple", simple(int32), config=SIMPLE.format("TYPE_INT32"))
    models.add_model(folder, "simple_int8", simple(int8, int32), config=SIMPLE.format("TYPE_INT8"))
    models.add_model(folder, "simple_string", simple(text, int32), config=SIMPLE.format("TYPE_STRING"))
    names = ("INPUT0", "OUTPUT0")
    for name, kind in (("simple_identity", "BYTES"), ("custom_identity_int32", "INT32")):
        config = IDENTITY.format("TYPE_STRING" if kind == "BYTES" else "TYPE_INT32")
        models.add_model(folder, name, models.identity(kind, names=names), config=config)
    models.add_model(folder, "densenet_onnx", images(), config=IMAGES, files={"labels.txt": LABELS})
    return folder


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("stock")
    options = ("--model-control", "explicit", "--load-model", "*", "--allow-model-override", "--allow-client-shm")
    with serving(build(folder / "models"), folder, *options, "--id", "triton") as running:
        yield running
        assert "Traceback" not in running.text


@pytest.fixture(params=["http", "grpc"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    return {"http": triton_http, "grpc": triton_grpc}[request.param]


@pytest.fixture
def client(module: ModuleType, stock: Server) -> Iterator[Any]:
    with module.InferenceServerClient(stock.address if module is triton_http else stock.grpc_address) as connected:
        yield connected


def inputs_of(module: ModuleType, arrays: Sequence[np.ndarray], datatype: str, binary: Sequence[bool]) -> list[Any]:
    inputs = []
    for index, (array, as_binary) in enumerate(zip(arrays, binary, strict=True)):
        options = {"binary_data": as_binary} if module is triton_http else {}
        tensor = module.InferInput(f"INPUT{index}", list(array.shape), datatype)
        inputs.append(tensor.set_data_from_numpy(array, **options))
    return inputs


def outputs_of(module: ModuleType, binary: Sequence[bool]) -> list[Any]:
    return [
        module.InferRequestedOutput(f"OUTPUT{index}", **({"binary_data": flag} if module is triton_http else {}))
        for index, flag in enumerate(binary)
    ]


def check(result: Any, in0: np.ndarray = IN0, in1: np.ndarray = IN1) -> None:
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), in0 + in1)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), in0 - in1)


def field(value: Any, name: str) -> Any:
    """Of a dictionary (HTTP) or a message (gRPC)."""
    return value[name] if isinstance(value, dict) else getattr(value, name)


# simple_http_infer_client.py, simple_grpc_infer_client.py


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_infer(client: Any, module: ModuleType, compression: str | None) -> None:
    inputs = inputs_of(module, [IN0, IN1], "INT32", [False, True])
    if module is triton_http:
        options: dict[str, Any] = {
            "query_params": {"test_1": 1, "test_2": 2},
            "request_compression_algorithm": compression,
            "response_compression_algorithm": compression,
        }
    else:
        options = {"compression_algorithm": compression, "client_timeout": 30}
    for outputs in (outputs_of(module, [True, False]), None):
        result = client.infer("simple", inputs, outputs=outputs, headers={"test": "1"}, **options)
        check(result)
        assert result.get_response()
    assert len(field(client.get_inference_statistics(model_name="simple"), "model_stats")) == 1
    with pytest.raises(InferenceServerException) as caught:
        client.infer("wrong_model_name", inputs)
    assert caught.value.message().startswith("Request for unknown model")


# simple_http_async_infer_client.py, simple_grpc_async_infer_client.py


# simple_http_aio_infer_client.py, simple_grpc_aio_infer_client.py


# simple_*_health_metadata.py; metadata with the server's name need --id triton


def test_health_and_metadata(client: Any, module: ModuleType) -> None:
    extra: dict[str, Any] = (
        {"query_params": {"test_1": 1, "test_2": 2}}
        if module is triton_http
        else {"headers": {"test": "1", "dummy": "2"}}
    )
    assert client.is_server_live(**extra)
    assert client.is_server_ready()
    assert client.is_model_ready("simple")
    assert field(client.get_server_metadata(), "name") == "triton"
    assert field(client.get_model_metadata("simple", **extra), "name") == "simple"
    with pytest.raises(InferenceServerException) as caught:
        client.get_model_metadata("wrong_model_name")
    assert "Request for unknown model" in caught.value.message()
    config = client.get_model_config("simple")
    assert field(config if module is triton_http else config.config, "name") == "simple"


# simple_*_string_infer_client.py


def as_text(array: np.ndarray) -> np.ndarray:
    return np.array([str(item).encode() for item in array.reshape(-1)], dtype=object).reshape(array.shape)


def test_strings(client: Any, module: ModuleType) -> None:
    ones = np.ones((1, 16), np.int32)
    inputs = inputs_of(module, [as_text(IN0), as_text(ones)], "BYTES", [True, False])
    result = client.infer("simple_string", inputs, outputs=outputs_of(module, [True, False]))
    actual = [[int(item) for item in result.as_numpy(name)[0]] for name in ("OUTPUT0", "OUTPUT1")]
    np.testing.assert_array_equal(actual, [(IN0 + ones)[0], (IN0 - ones)[0]])


@pytest.mark.parametrize("binary", [True, False])
def test_strings_with_null_characters(client: Any, module: ModuleType, binary: bool) -> None:
    for array in (
        np.array([b"he\x00llo"] * 16, dtype=object).reshape(1, 16),
        np.array([b"\x00\x01\x02\x03"] * 16, dtype=np.bytes_).reshape(1, 16),
    ):
        inputs = inputs_of(module, [array], "BYTES", [binary])
        result = client.infer("simple_identity", inputs, outputs=outputs_of(module, [binary]))
        items = [item if isinstance(item, bytes) else str(item).encode() for item in result.as_numpy("OUTPUT0")[0]]
        assert items == array[0].tolist()


# simple_*_shm_client.py, reuse_infer_objects_client.py


# simple_*_shm_string_client.py


def test_strings_through_shared_memory(client: Any, module: ModuleType) -> None:
    client.unregister_system_shared_memory()
    ones = np.ones((1, 16), np.int32)
    content = {
        "input0": as_text(IN0),
        "input1": as_text(ones),
        "output0": as_text(IN0 + ones),
        "output1": as_text(IN0 - ones),
    }
    handles, inputs, outputs = {}, [], []
    for name, array in content.items():
        serialized = utils.serialize_byte_tensor(array)
        size = utils.serialized_byte_size(serialized)
        key = f"/stock_text_{name}_{module.__name__.rpartition('.')[2]}_{os.getpid()}"
        handles[name] = shared_memory.create_shared_memory_region(name, key, size)
        client.register_system_shared_memory(name, key, size)
        if name.startswith("input"):
            shared_memory.set_shared_memory_region(handles[name], [serialized])
            inputs.append(module.InferInput(name.upper(), [1, 16], "BYTES"))
            inputs[-1].set_shared_memory(name, size)
        else:
            outputs.append(module.InferRequestedOutput(name.upper()))
            outputs[-1].set_shared_memory(name, size)
    try:
        result = client.infer("simple_string", inputs, outputs=outputs)
        for name in ("output0", "output1"):
            output = result.get_output(name.upper())
            dtype, shape = utils.triton_to_np_dtype(field(output, "datatype")), field(output, "shape")
            actual = shared_memory.get_contents_as_numpy(handles[name], dtype, shape)
            assert actual.reshape(-1).tolist() == content[name].reshape(-1).tolist()
    finally:
        client.unregister_system_shared_memory()
        for handle in handles.values():
            shared_memory.destroy_shared_memory_region(handle)


# simple_*_model_control.py


def test_model_control(client: Any, module: ModuleType) -> None:
    index = client.get_model_repository_index()
    assert len(index if module is triton_http else index.models) == 6
    client.load_model("simple")
    assert client.is_model_ready("simple")
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("simple", config='"parameters": {"config": {{"max_batch_size": "16"}}}')
    assert "failed to load" in caught.value.message()
    client.load_model("simple", config='{"max_batch_size":"16"}')
    config = client.get_model_config("simple")
    assert field(config if module is triton_http else config.config, "max_batch_size") == 16
    client.unload_model("simple")
    assert not client.is_model_ready("simple")
    with pytest.raises(InferenceServerException, match="Invalid file path"):
        client.load_model("simple", config="{}", files={"file:" + "A" * 256: b"a"})
    assert client.is_server_live()
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("wrong_model_name")
    assert "failed to load" in caught.value.message()
    client.load_model("simple")
    assert client.is_model_ready("simple")


# memory_growth_test.py


# simple_grpc_keepalive_client.py, simple_grpc_custom_args_client.py


def test_channel_options(stock: Server) -> None:
    keepalive = triton_grpc.KeepAliveOptions(
        keepalive_time_ms=2**31 - 1,
        keepalive_timeout_ms=20_000,
        keepalive_permit_without_calls=False,
        http2_max_pings_without_data=2,
    )
    options = [
        ("grpc.max_send_message_length", 1 << 20),
        ("grpc.max_receive_message_length", 1 << 20),
        ("grpc.keepalive_time_ms", 2**31 - 1),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", False),
        ("grpc.http2.max_pings_without_data", 2),
        ("grpc.dns_enable_srv_queries", 1),
    ]
    for arguments in ({"keepalive_options": keepalive}, {"channel_args": options}):
        with triton_grpc.InferenceServerClient(stock.grpc_address, **arguments) as client:
            inputs = inputs_of(triton_grpc, [IN0, IN1], "INT32", [True, True])
            check(client.infer("simple", inputs, headers={"test": "1"}))


# grpc_explicit_int_content_client.py, grpc_explicit_int8_content_client.py, grpc_explicit_byte_content_client.py


# image_client.py, grpc_image_client.py


def test_images_with_classes(client: Any, module: ModuleType) -> None:
    metadata, config = client.get_model_metadata("densenet_onnx"), client.get_model_config("densenet_onnx")
    config = config if module is triton_http else config.config
    (tensor,), (output,) = field(metadata, "inputs"), field(metadata, "outputs")
    assert (field(output, "datatype"), list(field(output, "shape"))) == ("FP32", [-1, 10])
    assert field(config, "max_batch_size") == 4
    format_ = field(field(config, "input")[0], "format")
    assert (mc.ModelInput.Format.Value(format_) if module is triton_http else format_) == mc.ModelInput.FORMAT_NCHW
    batch = np.random.default_rng(1).random((3, 3, 32, 32), np.float32)
    sent = module.InferInput(field(tensor, "name"), list(batch.shape), field(tensor, "datatype"))
    sent.set_data_from_numpy(batch)
    output_request = module.InferRequestedOutput(field(output, "name"), class_count=2)
    result = client.infer("densenet_onnx", [sent], request_id="1", outputs=[output_request]).as_numpy("fc6_1")
    assert result.shape == (3, 2)
    for row in result:
        for item in row:
            score, index, label = (item.decode() if isinstance(item, bytes) else item).split(":")
            assert label == f"class {index}"
            float(score)
