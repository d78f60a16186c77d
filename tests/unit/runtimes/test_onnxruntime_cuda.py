"""The CUDA provider's backend against a GPU that does its work late, and sessions that compute on the host.

`tests/gpu/test_onnxruntime_cuda.py` has the same on a GPU.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from headrace.core.errors import ConfigError, HeadraceError, ModelFailed
from headrace.core.ledger import HOST, Ledger, NoRoom
from headrace.core.tensor import BY_ORT_NAME, PINNED
from headrace.runtimes import onnxruntime_cuda as backend
from headrace.runtimes.base import ExecutionLost
from headrace.runtimes.onnxruntime_cuda import OnnxRuntimeCudaBackend
from headrace.runtimes.overlapped import is_overlapped
from headrace.runtimes.tensorrt.backend import GPUS, MAX_BATCH_SIZE

from tests.support.cuda_provider import FakeProvider, answers, features, install_provider, launched, opened, saved
from tests.support.fake_streams import LateCuda
from tests.support.kernels_on_host import install_host_kernels
from tests.support.models import affine, optional_bias, ramp, scores, sum_difference, transposed, unbatched
from tests.support.random_models import sample
from tests.support.resident_rows import HostOwner, resident
from tests.support.waiting import on_threads


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch, cuda: LateCuda) -> Iterator[FakeProvider]:
    yield install_provider(monkeypatch)
    gc.collect()  # a stream goes with its object, which the traceback of an expected error may still hold
    assert cuda.depth == 0, "a context was left current"
    assert not cuda.live, "memory was not given back"
    assert not cuda.queues, "a stream was not given back"


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: LateCuda) -> None:
    install_host_kernels(monkeypatch, cuda)


def same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        np.testing.assert_array_equal(actual[name], array)


def test_the_answers_are_those_of_the_cpu(provider: FakeProvider, tmp_path: Path) -> None:
    for model, inputs in (
        (affine(), features(5)),
        (scores(), {"X": np.random.default_rng(1).random((3, 5), np.float32)}),
    ):
        path = saved(tmp_path, model)
        with opened(path) as execution:
            for _ in range(3):
                same(execution.run(inputs), answers(path, inputs))


@pytest.mark.parametrize("seed", range(12))
def test_random_models_in_batches_of_any_size(provider: FakeProvider, tmp_path: Path, seed: int) -> None:
    chosen = sample(seed)
    path = saved(tmp_path, chosen.model)
    rng = np.random.default_rng(seed)
    with opened(path) as execution:
        for rows in (1, 8, 3, 8, 2):
            inputs = {"X": rng.standard_normal((rows, chosen.width)).astype(np.float32)}
            try:
                expected = answers(path, inputs)
            except Exception:
                with pytest.raises(RuntimeError, match="Error in execution"):
                    execution.run(inputs)
                continue
            same(execution.run(inputs), expected)


def test_batches_overlap_and_come_back_in_order(provider: FakeProvider, tmp_path: Path) -> None:
    path = saved(tmp_path, affine())
    with opened(path) as execution:
        assert is_overlapped(execution)
        assert execution.prompt
        under_way: list[tuple[Any, dict[str, Any]]] = []
        for number in range(20):
            inputs = features(1 + number % 8, number)
            under_way.append((launched(execution, inputs, len(inputs["X"])), inputs))
            if len(under_way) == execution.depth or number == 19:
                while under_way:
                    batch, inputs = under_way.pop(0)
                    same(execution.finish(batch), answers(path, inputs))


def test_outputs_belong_to_the_caller(provider: FakeProvider, tmp_path: Path) -> None:
    with opened(saved(tmp_path, affine())) as execution:
        first = execution.run(features(4, 1))["Y"]
        kept = first.copy()
        for seed in range(2, 8):
            execution.run(features(4, seed))
        np.testing.assert_array_equal(first, kept)


def test_shapes_that_grow_and_outputs_of_any_size(provider: FakeProvider, tmp_path: Path) -> None:
    path = saved(tmp_path, ramp())
    with opened(path, 0) as execution:
        for count in (3, 1000, 0, 5):
            inputs = {"COUNT": np.array([count], np.int64)}
            same(execution.run(inputs), answers(path, inputs))
    path = saved(tmp_path, transposed())
    (node,) = ort.InferenceSession(str(path)).get_inputs()
    with opened(path, 0) as execution:
        assert not execution.prompt, "begin may allocate memory"
        for size in (2, 40, 1):
            shape = tuple(size + axis if isinstance(length, str) else length for axis, length in enumerate(node.shape))
            inputs = {node.name: np.random.default_rng(0).random(shape, np.float32)}
            same(execution.run(inputs), answers(path, inputs))


@pytest.mark.parametrize("number", [1, 9, 10, 16, 7, 2])
def test_every_type_goes_through_as_its_bits(provider: FakeProvider, tmp_path: Path, number: int) -> None:
    x, y = (onnx.helper.make_tensor_value_info(name, number, ["n", 4]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    with opened(saved(tmp_path, model)) as execution:
        dtype = execution._inputs["x"].dtype
        values = np.arange(12).reshape(3, 4).astype(dtype)
        np.testing.assert_array_equal(execution.run({"x": values})["y"], values)


def test_a_model_without_a_batch_dimension_and_two_inputs(provider: FakeProvider, tmp_path: Path) -> None:
    for model, max_rows in ((unbatched(), 0), (sum_difference(), 8)):
        path = saved(tmp_path, model)
        inputs = {}
        for node in ort.InferenceSession(str(path)).get_inputs():
            shape = tuple(length if isinstance(length, int) else 2 for length in node.shape)
            inputs[node.name] = np.ones(shape, BY_ORT_NAME[node.type].dtype)
        with opened(path, max_rows) as execution:
            same(execution.run(inputs), answers(path, inputs))


def test_an_optional_input_may_be_absent(provider: FakeProvider, tmp_path: Path) -> None:
    path = saved(tmp_path, optional_bias())
    x = np.ones((2, 3), np.float32)
    with opened(path) as execution:
        assert not execution.prompt
        np.testing.assert_array_equal(execution.run({"X": x})["Y"], x + 100)
        bias = np.full((2, 3), 7, np.float32)
        np.testing.assert_array_equal(execution.run({"X": x, "BIAS": bias})["Y"], x + 7)


def test_the_session_runs_on_the_instance_s_stream(provider: FakeProvider, tmp_path: Path) -> None:
    with opened(saved(tmp_path, affine()), gpu_mem_limit="1000000", cudnn_conv_algo_search="2") as execution:
        assert provider.options == [
            {
                "device_id": "0",
                "user_compute_stream": str(execution._computing.handle),
                "arena_extend_strategy": "kSameAsRequested",
                "cudnn_conv_algo_search": "DEFAULT",
                "gpu_mem_limit": "1000000",
            }
        ]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("gpu_mem_limit", "lots", "a number of bytes"),
        ("cudnn_conv_algo_search", "FAST", "HEURISTIC"),
        ("arena_extend_strategy", "2", "kSameAsRequested"),
        ("pipeline_depth", "1", "2 to 8"),
    ],
)
def test_wrong_parameters(provider: FakeProvider, tmp_path: Path, name: str, value: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"parameter '{name}' is '{value}'.*{allowed}"):
        OnnxRuntimeCudaBackend().load(saved(tmp_path, affine()), 1, {name: value})


def test_each_instance_has_its_gpu_and_its_stream(provider: FakeProvider, cuda: LateCuda, tmp_path: Path) -> None:
    cuda.devices = 2
    path = saved(tmp_path, affine())
    parameters = {MAX_BATCH_SIZE: "8", GPUS: "0,1,1"}
    with closing(OnnxRuntimeCudaBackend().load(path, 3, parameters)) as model:
        executions = [model.execution(index) for index in range(3)]
        assert [options["device_id"] for options in provider.options] == ["0", "1", "1"]
        assert len({options["user_compute_stream"] for options in provider.options}) == 3

        def work(index: int) -> None:
            for number in range(20):
                inputs = features(1 + number % 8, 100 * index + number)
                same(executions[index].run(inputs), answers(path, inputs))

        on_threads(work, range(3))
        for execution in executions:
            execution.close()


def test_memory_is_booked_and_given_back(provider: FakeProvider, cuda: LateCuda, tmp_path: Path) -> None:
    path, ledger = saved(tmp_path, affine()), Ledger()
    account = ledger.account("m", "1")
    parameters = {MAX_BATCH_SIZE: "8", "gpu_mem_limit": "5000"}
    with (
        closing(OnnxRuntimeCudaBackend().load(path, 1, parameters, account)) as model,
        closing(model.execution(0)) as execution,
    ):
        execution.run(features(8))
        held = {holding.kind.value: holding.size_bytes for holding in account.holdings() if holding.gpu == 0}
        assert held["weights"] == 5000, "the limit of the arena"
        assert held["buffers"] == 3 * 8 * 16 * 4
        assert account.reserved_bytes()[HOST] > 3 * 8 * 16 * 4
    assert account.reserved_bytes() == {}


def test_a_model_without_room_is_refused_and_leaves_nothing(provider: FakeProvider, tmp_path: Path) -> None:
    path, ledger = saved(tmp_path, affine()), Ledger()
    ledger.set_limit(0, 100)
    account = ledger.account("m", "1")
    with closing(OnnxRuntimeCudaBackend().load(path, 1, {MAX_BATCH_SIZE: "8"}, account)) as model:
        with pytest.raises(NoRoom):
            model.execution(0)
        assert account.reserved_bytes() == {}
        assert not provider.options, "nothing was loaded"


def test_a_gpu_without_memory_is_no_room(provider: FakeProvider, tmp_path: Path) -> None:
    provider.failure = backend.OutOfDeviceMemory("full")
    with (
        closing(OnnxRuntimeCudaBackend().load(saved(tmp_path, affine()), 1, {MAX_BATCH_SIZE: "8"})) as model,
        pytest.raises(NoRoom, match="full"),
    ):
        model.execution(0)


def test_texts_are_refused_by_name(provider: FakeProvider, tmp_path: Path) -> None:
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.STRING, ["n", 4]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    with (
        closing(OnnxRuntimeCudaBackend().load(saved(tmp_path, model), 1, {MAX_BATCH_SIZE: "8"})) as loaded,
        pytest.raises(ConfigError, match=r"input 'x' is a tensor\(string\)"),
    ):
        loaded.execution(0)


def test_a_batch_that_does_not_fit_the_model_fails_alone(provider: FakeProvider, tmp_path: Path) -> None:
    path = saved(tmp_path, affine())
    with opened(path) as execution:
        with pytest.raises(ModelFailed, match="takes the inputs X, the batch has Z"):
            execution.begin({"Z": np.zeros((1, 16), np.float32)}, 1)
        with pytest.raises(ModelFailed, match="takes 'X' as float32, the batch has float64"):
            execution.begin({"X": np.zeros((1, 16))}, 1)
        for _ in range(2 * execution.depth):  # no slot is lost
            with pytest.raises(Exception, match="Error in execution"):
                execution.run({"X": np.zeros((1, 17), np.float32)})
        same(execution.run(features(2)), answers(path, features(2)))


class _Failing:
    """A session whose runs fail."""

    def __init__(self, session: Any, text: str) -> None:
        self._session = session
        self.text = text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any) -> None:
        if self.text:
            raise RuntimeError(self.text)
        self._session.run_with_iobinding(binding)


def test_a_full_gpu_fails_the_batch_and_a_broken_gpu_ends_the_instance(
    provider: FakeProvider, cuda: LateCuda, tmp_path: Path
) -> None:
    path = saved(tmp_path, affine())
    with opened(path) as execution:
        session = execution._session = _Failing(execution._session, "")
        session.text = "BFCArena::AllocateRawInternal: Failed to allocate memory for requested buffer of size 1"
        with pytest.raises(HeadraceError, match="GPU 0 has no memory left for model"):
            execution.run(features(2))
        session.text = "Error in execution: a node failed"
        with pytest.raises(RuntimeError, match="a node failed"):
            execution.run(features(2))
        session.text = ""
        same(execution.run(features(2)), answers(path, features(2)))
        batch = launched(execution, features(2), 2)

        def fail(_: Any) -> None:
            cuda.broken = True
            raise RuntimeError("CUDA failure 700: an illegal memory access was encountered")

        session.run_with_iobinding = fail  # type: ignore[method-assign]
        with pytest.raises(ExecutionLost, match="GPU 0 has failed"):
            execution.finish(batch)
        cuda.broken = False


def test_a_discarded_batch_frees_its_slot(provider: FakeProvider, tmp_path: Path) -> None:
    with opened(saved(tmp_path, affine())) as execution:
        for _ in range(3 * execution.depth):
            execution.discard(execution.begin(features(3), 3))
        assert len(execution._free) == execution.depth


@pytest.mark.usefixtures("kernels")
def test_resident_rows_are_read_by_the_gpu(provider: FakeProvider, cuda: LateCuda, tmp_path: Path) -> None:
    cuda.devices = 2
    path = saved(tmp_path, affine())
    rng = np.random.default_rng(0)
    with opened(path) as execution:
        under_way: list[tuple[Any, dict[str, Any], list[HostOwner]]] = []
        for number in range(30):
            inputs = features(1 + number % 8, number)
            x = inputs["X"]
            batch = execution.begin(inputs, len(x))
            assert batch.device == 0
            owners, at = [], 0
            while at < len(x):
                count = min(int(rng.integers(1, 4)), len(x) - at)
                if rng.random() < 0.7:
                    values = resident(x[at : at + count], int(rng.choice([PINNED, 0, 1])))
                    owners.append(values.owner)
                    batch.resident_inputs.append(("X", at, values))
                else:
                    batch.inputs["X"][at : at + count] = x[at : at + count]
                at += count
            execution.launch(batch)
            under_way.append((batch, inputs, owners))
            if len(under_way) == execution.depth or number == 29:
                while under_way:
                    batch, inputs, owners = under_way.pop(0)
                    same(execution.finish(batch), answers(path, inputs))
                    assert not any(owner.copies for owner in owners), "nothing is copied by the host"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("kernels")
def test_an_aligned_tensor_on_the_gpu_is_bound_where_it_lies(provider: FakeProvider, tmp_path: Path) -> None:
    path = saved(tmp_path, affine())
    memory = np.zeros(4096, np.uint8)
    start = -memory.ctypes.data % 256
    with opened(path) as execution:
        for offset, is_bound in ((0, True), (64, False)):
            inputs = features(4, offset)
            values = memory[start + offset : start + offset + 4 * 64].view(np.float32).reshape(4, 16)
            values[:] = inputs["X"]
            batch = execution.begin(inputs, 4)
            rows = resident(values, 0)
            assert rows.address == values.ctypes.data
            batch.resident_inputs.append(("X", 0, rows))
            owner = weakref.ref(rows.owner)
            del rows
            execution.launch(batch)
            assert (batch.state.in_place == {"X": values.ctypes.data}) is is_bound
            gc.collect()
            assert owner() is not None, "the GPU may still read it"
            same(execution.finish(batch), answers(path, inputs))
            del batch
            gc.collect()
            assert owner() is None


def test_a_package_without_the_provider_is_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    backend.provider_problem.cache_clear()
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(ConfigError, match="has no CUDA provider: install Headrace's extra 'gpu-onnx'"):
        OnnxRuntimeCudaBackend()
    backend.provider_problem.cache_clear()


def test_missing_cuda_libraries_are_named(monkeypatch: pytest.MonkeyPatch, cuda: LateCuda, tmp_path: Path) -> None:
    backend.provider_problem.cache_clear()
    monkeypatch.setattr(ort, "get_available_providers", lambda: [backend.PROVIDER, "CPUExecutionProvider"])
    monkeypatch.setattr(ort, "set_default_logger_severity", lambda level: None)
    monkeypatch.setattr(ort, "cuda_version", "13.0", raising=False)
    opened_names: list[str] = []

    def refuse(name: str) -> None:
        opened_names.append(name)
        if "cublasLt" in name:
            raise OSError("cannot open shared object file")

    monkeypatch.setattr(backend.ctypes, "CDLL", refuse)
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    for name in ("libcudart.so.12", "libcudart.so.13", "libcublas.so.13"):
        (folder / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    problem = backend.provider_problem()
    backend.provider_problem.cache_clear()
    assert problem.startswith("the libraries libcublasLt of CUDA 13.0 cannot be loaded: install Headrace's extra")
    assert str(folder / "libcudart.so.13") in opened_names
    assert str(folder / "libcudart.so.12") not in opened_names
    assert "libcurand.so.10" in opened_names
    assert "libcufft.so.12" in opened_names


def test_a_session_that_the_provider_does_not_serve_is_refused(tmp_path: Path) -> None:
    """ONNX Runtime opens sessions on the CPU, with no more than a line on standard error, if it cannot load the provider."""
    path = saved(tmp_path, affine())
    if backend.PROVIDER in ort.get_available_providers():
        pytest.skip("the CUDA provider is here")
    with pytest.raises(ConfigError, match="cannot use its CUDA provider"):
        backend.open_session(path, ort.SessionOptions(), {"device_id": "0"})
