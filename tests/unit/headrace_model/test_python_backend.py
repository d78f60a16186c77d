"""The module `triton_python_backend_utils`, as the examples of Triton's python_backend use it."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from headrace_model import device, metrics
from headrace_model import python_backend as pb_utils
from headrace_model.slots import Slot

from tests.support.device_capsules import capsule


@pytest.fixture
def sent() -> Iterator[list[dict[str, Any]]]:
    messages: list[dict[str, Any]] = []
    before = pb_utils.runtime.send
    pb_utils.runtime.send = messages.append
    yield messages
    pb_utils.runtime.send = before


def test_tensors_of_a_request_are_found_by_name() -> None:
    array = np.arange(4, dtype=np.float32)
    request = pb_utils.InferenceRequest([pb_utils.Tensor("a", array), pb_utils.Tensor("b", array + 1)], "r7")
    tensor = pb_utils.get_input_tensor_by_name(request, "b")
    assert tensor is not None
    assert tensor.as_numpy()[0] == 1
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype(), tensor.is_cpu()) == ("b", [4], 11, True)
    assert pb_utils.get_input_tensor_by_name(request, "c") is None
    assert request.request_id() == "r7"
    response = pb_utils.InferenceResponse([pb_utils.Tensor("out", array)])
    assert pb_utils.get_output_tensor_by_name(response, "out") is response.output_tensors()[0]
    assert not response.has_error()


def test_texts_may_be_bytes_as_in_tritons_binding(sent: list[dict[str, Any]]) -> None:
    array = np.zeros(1, np.float32)
    tensor = pb_utils.Tensor(b"a", array)
    request = pb_utils.InferenceRequest([tensor], b"r", b"s", [b"out", "more"], b"m", parameters=b'{"a": 1}')
    assert (request.request_id(), request.correlation_id(), request.model_name()) == ("r", "s", "m")
    assert request.requested_output_names() == ["out", "more"]
    assert pb_utils.get_input_tensor_by_name(request, b"a") is pb_utils.get_input_tensor_by_name(request, "a") is tensor
    assert pb_utils.get_output_tensor_by_name(pb_utils.InferenceResponse([tensor]), b"a") is tensor
    assert pb_utils.TritonError(b"no").message() == "no"
    pb_utils.Logger.log_info(b"text")
    assert sent == [{"log": ["info", "text"]}]


def test_a_tensor_needs_an_array() -> None:
    with pytest.raises(TypeError, match=r"Tensor 'a' needs a numpy\.ndarray, not list"):
        pb_utils.Tensor("a", [1.0])


def test_parameters_of_a_request_are_json_text_without_the_servers_own() -> None:
    request = pb_utils.InferenceRequest(parameters={"k": 3})
    assert json.loads(request.parameters()) == {"k": 3}
    request._parameters = {"k": True, "headrace.calls": "a/1"}
    assert json.loads(request.parameters()) == {"k": True}
    assert json.loads(pb_utils.InferenceRequest(parameters='{"x": "y"}').parameters()) == {"x": "y"}
    with pytest.raises(pb_utils.TritonModelException, match="texts, numbers and booleans"):
        pb_utils.InferenceRequest(parameters={"k": [1]})


def test_parameters_of_a_response_are_json_text() -> None:
    assert pb_utils.InferenceResponse([]).parameters() == "{}"
    assert pb_utils.InferenceResponse([], None, {}).parameters() == "{}"
    for given in ({"a": "b", "n": 2**63 - 1, "f": 0.5, "ok": False}, '{"a": 1}'):
        text = pb_utils.InferenceResponse([], parameters=given).parameters()
        assert json.loads(text) == (given if isinstance(given, dict) else json.loads(given))


@pytest.mark.parametrize(
    "given",
    [
        {"a": None},
        {"a": [1]},
        {1: 2},
        {"a": 2**63},
        {"a": float("nan")},
        {"a": "\ud800"},
        {"\ud800": 1},
        [1],
        {"a": "x" * 65536},
    ],
)
def test_wrong_parameters_of_a_response_are_refused(given: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="parameters"):
        pb_utils.InferenceResponse([], parameters=given)


def test_a_request_is_cancelled_once_its_flag_is_set() -> None:
    request = pb_utils.InferenceRequest()
    assert not request.is_cancelled()
    slot = Slot.create("test", 1)
    request._slot, request._member = slot, 3
    assert not request.is_cancelled()
    slot.cancel(3)
    assert request.is_cancelled()


@pytest.mark.parametrize(
    ("number", "name"),
    list(enumerate((
        "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED",
    ))),
)  # fmt: skip
def test_every_code_of_an_error(number: int, name: str) -> None:
    error = pb_utils.TritonError("no", getattr(pb_utils.TritonError, name))
    assert (error.code(), error.message(), str(error)) == (number, "no", "no")
    assert pb_utils.InferenceResponse(error=error).error() is error


def test_wrong_errors_are_refused() -> None:
    assert pb_utils.TritonError("no").code() == 1
    for code in (-1, 8, "NOT_FOUND", True):
        with pytest.raises(pb_utils.TritonModelException, match="one of its constants"):
            pb_utils.TritonError("no", code)  # type: ignore[arg-type]
    with pytest.raises(pb_utils.TritonModelException, match="error is a TritonError, not str"):
        pb_utils.InferenceResponse([], "no")  # type: ignore[arg-type]


def test_datatypes_have_their_numpy_types() -> None:
    assert pb_utils.triton_string_to_numpy("TYPE_FP32") is np.float32
    assert pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    assert pb_utils.triton_string_to_numpy("TYPE_BOOL") is np.bool_
    for code in range(1, 14):
        assert pb_utils.numpy_to_triton_type(pb_utils.triton_to_numpy_type(code)) == code
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13


def test_texts_round_trip() -> None:
    array = np.array([[b"a\0", "ä"], [b"", b"xyz"]], dtype=np.object_)
    encoded = pb_utils.serialize_byte_tensor(array)
    assert encoded is not None
    assert pb_utils.deserialize_bytes_tensor(encoded).tolist() == [b"a\0", "ä".encode(), b"", b"xyz"]
    assert pb_utils.serialize_byte_tensor(np.array([], dtype=np.object_)) is None


def test_configurations_are_searched_by_name() -> None:
    config = {"input": [{"name": "a", "dims": [1]}], "output": [{"name": "b", "dims": [2]}]}
    assert pb_utils.get_input_config_by_name(config, "a") == {"name": "a", "dims": [1]}
    assert pb_utils.get_output_config_by_name(config, "b") == {"name": "b", "dims": [2]}
    assert pb_utils.get_output_config_by_name(config, "a") is None
    assert not pb_utils.using_decoupled_model_transaction_policy(config)


def test_dlpack_shares_memory_in_both_directions() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    there = np.from_dlpack(pb_utils.Tensor("a", array))  # type: ignore[arg-type]
    assert np.shares_memory(there, array)
    for source in (array, pb_utils.Tensor("a", array).to_dlpack()):
        tensor = pb_utils.Tensor.from_dlpack("b", source)
        assert tensor.name() == "b"
        assert np.shares_memory(tensor.as_numpy(), array)


class OnDevice:
    """An object of a framework whose tensor is on a device."""

    def __init__(self, array: Any, kind: int) -> None:
        self.capsule = capsule(array.ctypes.data, array.shape, array.dtype, (kind, 0))
        self.device = kind, 0

    def __dlpack__(self) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class FakeDriver:
    """Imitates libcuda: the memory of its GPU is that of the process."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.status = 0

    def cuMemcpyDtoH_v2(self, target: Any, source: Any, size: Any) -> int:  # noqa: N802
        self.calls.append("copy")
        ctypes.memmove(target.value, source.value, size.value)
        return self.status

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments: self.calls.append(name) or 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    device._primary_context.cache_clear()
    monkeypatch.setattr(device, "_driver", lambda: fake)
    return fake


@pytest.mark.parametrize("is_capsule", [False, True])
def test_a_tensor_of_a_gpu_is_copied_when_it_leaves_the_process(driver: FakeDriver, is_capsule: bool) -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    source = OnDevice(array, device.CUDA)
    tensor = pb_utils.Tensor.from_dlpack("a", source.capsule if is_capsule else source)
    assert (tensor.name(), tensor.is_cpu(), tensor.shape(), tensor.triton_dtype()) == ("a", False, [2, 3], 9)
    assert tensor.to_dlpack() is source.capsule
    assert tensor.__dlpack_device__() == (2, 0)
    with pytest.raises(pb_utils.TritonModelException, match="in the memory of a GPU: use to_dlpack"):
        tensor.as_numpy()
    assert driver.calls == []
    for _ in range(2):
        np.testing.assert_array_equal(tensor._array, array)
    assert not np.shares_memory(tensor._array, array)
    names = ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuCtxSynchronize", "copy"]
    assert driver.calls == [*names, "cuCtxPopCurrent_v2"]


def test_errors_of_the_driver_are_named(driver: FakeDriver) -> None:
    tensor = pb_utils.Tensor.from_dlpack("a", OnDevice(np.ones(3, np.float32), device.CUDA))
    driver.status = 700
    with pytest.raises(device.DlpackError, match="cuMemcpyDtoH failed with the status 700 of CUDA"):
        _ = tensor._array
    assert driver.calls[-1] == "cuCtxPopCurrent_v2"


def test_tensors_of_a_gpu_with_gaps_are_refused() -> None:
    array = np.ones((2, 4), np.float32)
    gaps = capsule(array.ctypes.data, (2, 2), array.dtype, strides=(4, 1))
    with pytest.raises(pb_utils.TritonModelException, match=r"tensor 'a': .* must be contiguous"):
        pb_utils.Tensor.from_dlpack("a", gaps)
    dense = capsule(array.ctypes.data, (2, 4), array.dtype, strides=(4, 1))
    assert pb_utils.Tensor.from_dlpack("a", dense).shape() == [2, 4]


def test_tensors_of_other_devices_are_refused() -> None:
    with pytest.raises(pb_utils.TritonModelException, match="on a device of the kind 10: move it to the CPU"):
        pb_utils.Tensor.from_dlpack("a", OnDevice(np.ones(3, np.float32), 10))


def test_a_capsule_that_is_used_is_refused() -> None:
    used = np.ones(3).__dlpack__()
    pb_utils.Tensor.from_dlpack("a", used)
    with pytest.raises(pb_utils.TritonModelException, match="a DLPack capsule that nothing has used"):
        pb_utils.Tensor.from_dlpack("a", used)


def test_the_log_gets_levels(sent: list[dict[str, Any]]) -> None:
    logger = pb_utils.Logger
    logger.log_info("a")
    logger.log_warn("b")
    logger.log_error("c")
    logger.log_verbose("d")
    logger.log("e")
    logger.log("f", logger.ERROR)
    levels = ["info", "warning", "error", "verbose", "info", "error"]
    assert [message["log"] for message in sent] == [[level, text] for level, text in zip(levels, "abcdef")]  # noqa: B905 - also run on 3.8


@pytest.mark.parametrize(("name", "reason"), [("RawData", "as_numpy"), ("NoSuchName", "docs/")])
def test_other_names_are_refused_with_a_reason(name: str, reason: str) -> None:
    with pytest.raises(AttributeError, match=f"triton_python_backend_utils.{name} is not served here: .*{reason}"):
        getattr(pb_utils, name)


def test_calls_need_a_server() -> None:
    request = pb_utils.InferenceRequest(model_name="m")
    with pytest.raises(pb_utils.TritonModelException, match="requests that execute has received"):
        request.get_response_sender()
    with pytest.raises(pb_utils.TritonModelException, match="while the model is served"):
        request.exec()


def test_release_flags_are_for_requests_of_the_running_execute(monkeypatch: pytest.MonkeyPatch) -> None:
    again = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
    request = pb_utils.InferenceRequest()
    with pytest.raises(pb_utils.TritonModelException, match="requests of the running execute"):
        request.set_release_flags(again)
    request._batch = 3
    monkeypatch.setattr(pb_utils.runtime, "batch", 3)
    with pytest.raises(pb_utils.TritonModelException, match="RELEASE_RESCHEDULE, and the model is not iterative"):
        request.set_release_flags(again)
    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
    monkeypatch.setattr(pb_utils.runtime, "is_iterative", True)
    request.set_release_flags(again)
    assert request._release_flags == again == 2
    with pytest.raises(pb_utils.TritonModelException, match="not 5"):
        request.set_release_flags(5)
    monkeypatch.setattr(pb_utils.runtime, "batch", 4)
    with pytest.raises(pb_utils.TritonModelException, match="requests of the running execute"):
        request.set_release_flags(again)


def test_changes_of_metrics_are_summed_up_until_they_are_sent(
    sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "PAUSE_S", 3600.0)
    family = pb_utils.MetricFamily(name="requests", description="Requests.", kind=pb_utils.MetricFamily.COUNTER)
    counter = family.Metric(labels={"b": "2", "a": "1"})
    assert family.Metric({"a": "1", "b": "2"}) is counter
    for value in (1, 2.5):
        counter.increment(value)
    gauge = pb_utils.MetricFamily("load", "Load.", pb_utils.MetricFamily.GAUGE).Metric()
    gauge.set(5)
    gauge.increment(-1)
    histogram = pb_utils.MetricFamily("size", "Size.", pb_utils.MetricFamily.HISTOGRAM).Metric(buckets=[1, 2])
    histogram.observe(1.5)
    pb_utils.runtime.metrics.flush()
    assert (counter.value(), gauge.value()) == (3.5, 4.0)
    (message,) = [message["metric"] for message in sent]
    assert ["requests", "counter", "Requests."] in message["families"]
    assert ["size", "buckets", "1.0,2.0"] in message["families"]
    assert message["changes"] == [
        ["add", "requests", {"a": "1", "b": "2"}, 3.5],
        ["set", "load", {}, 4.0],
        ["observe", "size", {}, [1.5]],
    ]
    pb_utils.runtime.metrics.flush()
    assert len(sent) == 1


def test_wrong_uses_of_metrics_are_refused() -> None:
    family = pb_utils.MetricFamily("c", "C.", pb_utils.MetricFamily.COUNTER)
    counter = family.Metric()
    for call in (lambda: counter.increment(-1), lambda: counter.set(1), lambda: counter.increment(float("nan"))):
        with pytest.raises(ValueError, match=r"counter|finite"):
            call()
    with pytest.raises(ValueError, match="histogram"):
        family.Metric({"x": "1"}, buckets=[1])
    with pytest.raises(ValueError, match="kind is"):
        pb_utils.MetricFamily("c", "C.", "summary")


def test_a_configuration_is_completed_but_not_contradicted() -> None:
    config = pb_utils.ModelConfig({"name": "m", "input": [{"name": "a", "data_type": "TYPE_FP32"}]})
    config.add_input({"name": "a", "data_type": "TYPE_FP32", "dims": (4,)})
    config.add_output({"name": "b", "data_type": "TYPE_FP32", "dims": [4]})
    config.set_max_batch_size(8)
    config.set_dynamic_batching()
    assert config.as_dict() == {
        "name": "m",
        "input": [{"name": "a", "data_type": "TYPE_FP32", "dims": [4]}],
        "output": [{"name": "b", "data_type": "TYPE_FP32", "dims": [4]}],
        "max_batch_size": 8,
        "dynamic_batching": {},
    }
    with pytest.raises(
        ValueError, match="data_type TYPE_FP32 in the configuration, auto_complete_config sets TYPE_INT32"
    ):
        config.add_input({"name": "a", "data_type": "TYPE_INT32", "dims": [4]})
    with pytest.raises(ValueError, match="has no data_type, dims"):
        config.add_output({"name": "c"})
    with pytest.raises(ValueError, match=r"unknown property dim$"):
        config.add_output({"name": "c", "data_type": "TYPE_FP32", "dims": [1], "dim": [1]})
    with pytest.raises(ValueError, match="has max_batch_size 8, auto_complete_config sets 4"):
        config.set_max_batch_size(4)
    config.set_model_transaction_policy({"decoupled": False})
    config.set_model_transaction_policy({"decoupled": True})
    assert pb_utils.using_decoupled_model_transaction_policy(config.as_dict())
    with pytest.raises(ValueError, match="has decoupled: true, auto_complete_config sets false"):
        config.set_model_transaction_policy({"decoupled": False})
    with pytest.raises(ValueError, match="has the property decoupled only, not other"):
        config.set_model_transaction_policy({"other": True})
