"""cuDNN as a candidate, with an imitation of PyTorch on a fake GPU: layouts, epilogues, graphs, refusals."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
from headrace.runtimes.cuda import driver
from headrace.runtimes.cuda.driver import CudaStream
from headrace_lab.check import SampledReference, sample
from headrace_lab.conv import read_pixels
from headrace_lab.cudnn import CudnnCandidate, Torch, cudnn_candidates, load_torch
from headrace_lab.inputs import DeviceOperands, HostOperands, host_operands
from headrace_lab.kernels.base import ConvShape, Epilogue
from headrace_lab.measure import time_rounds, trial_us
from headrace_lab.roofline import measure_roofline

from tests.support.fake_gpu import cuda
from tests.support.fake_streams import LateCuda
from tests.support.fake_torch_cudnn import FakeTorch

__all__ = ["cuda"]
SHAPE = ConvShape(2, 4, 6, 5, 8, 3, 3, 1, 1)
ALL = Epilogue(bias=True, residual=True, relu=True)


@pytest.fixture
def torch(cuda: LateCuda, monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    module = FakeTorch(cuda)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def stream(cuda: LateCuda) -> Iterator[CudaStream]:
    with driver.current(0):
        stream = CudaStream()
        yield stream
        stream.synchronize()


def loaded(stream: CudaStream) -> Torch:
    result = load_torch(0, stream)
    assert isinstance(result, Torch)
    return result


@pytest.mark.parametrize("epilogue", [Epilogue(), Epilogue(bias=True), Epilogue(bias=True, relu=True), ALL], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_results_are_right_in_each_layout_and_with_each_epilogue(
    dtype: str, epilogue: Epilogue, torch: FakeTorch, stream: CudaStream
) -> None:
    host = host_operands(SHAPE, dtype, epilogue, 3)
    operands = DeviceOperands(host, 4096, stream)
    reference = SampledReference(host, sample(host, 1))
    try:
        for fused in (False, True) if epilogue.relu else (False,):
            for layout in ("NHWC", "NCHW"):
                candidate = CudnnCandidate(loaded(stream), host, operands, fused=fused, layout=layout)
                address = candidate.run()
                errors = reference.errors(
                    candidate.name, lambda p, at=address: read_pixels(at, SHAPE.y_shape, np.dtype(dtype), p)
                )
                assert errors.is_right, (candidate.name, layout)
                candidate.close()
    finally:
        operands.close()


def opened(torch: Torch, host: HostOperands, operands: DeviceOperands, stream: CudaStream) -> dict[str, str]:
    """Layout or reason of each candidate, by name."""
    result = {}
    for candidate in cudnn_candidates(torch, host, operands, stream):
        if isinstance(candidate, str):
            name, _, reason = candidate.partition(": ")
            result[name] = reason
        else:
            result[candidate.name] = candidate.variant
    return result


def test_refused_kernels_are_named_with_the_first_line(torch: FakeTorch, stream: CudaStream) -> None:
    host = host_operands(SHAPE, "float16", ALL, 3)
    operands = DeviceOperands(host, 4096, stream)
    try:
        assert opened(loaded(stream), host, operands, stream) == {"cudnn-unfused": "NHWC", "cudnn-fused": "NHWC"}
        torch.refused.add("cudnn_convolution_add_relu")
        assert opened(loaded(stream), host, operands, stream) == {
            "cudnn-unfused": "NHWC",
            "cudnn-fused": "cudnn_convolution_add_relu is not supported",
        }
    finally:
        operands.close()


def test_separate_operations_are_all_timed(torch: FakeTorch, cuda: LateCuda, stream: CudaStream) -> None:
    host = host_operands(SHAPE, "float32", ALL, 3)
    operands = DeviceOperands(host, 4096, stream)
    try:
        candidates = [c for c in cudnn_candidates(loaded(stream), host, operands, stream) if not isinstance(c, str)]
        unfused, fused = time_rounds(stream, candidates, [trial_us(stream, c) for c in candidates], 3)
        # Convolution with bias, residual, ReLU.
        assert unfused.median_us == pytest.approx(3 * cuda.work_us)
        assert fused.median_us == pytest.approx(cuda.work_us)
    finally:
        operands.close()


def test_settings_of_the_baseline(torch: FakeTorch, stream: CudaStream) -> None:
    description = loaded(stream).description
    assert torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32
    assert "cuDNN 90000, autotuner over up to 10 plans" in description


def test_ceilings_are_measured_with_the_copy_and_products(torch: FakeTorch, cuda: LateCuda, stream: CudaStream) -> None:
    roofline = measure_roofline(loaded(stream), ("fp16", "fp32"), stream, 1 << 20)
    assert roofline.bytes_per_s == pytest.approx(2 * (1 << 20) / cuda.work_us * 1e6)
    assert roofline.flops_per_s["fp16"] == pytest.approx(2 * 8192**3 / cuda.work_us * 1e6)
    assert set(roofline.flops_per_s) == {"fp16", "fp32"}
    assert not measure_roofline(None, ("fp16",), stream, 1 << 20).flops_per_s


def test_without_pytorch_or_its_gpu_there_is_a_reason(
    cuda: LateCuda, stream: CudaStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "PyTorch cannot be imported" in str(load_torch(0, stream))
    module = FakeTorch(cuda)
    module.cuda.is_available = lambda: False
    monkeypatch.setitem(sys.modules, "torch", module)
    assert "has no CUDA or no cuDNN here" in str(load_torch(0, stream))
