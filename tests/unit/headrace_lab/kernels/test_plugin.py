"""The TensorRT plug-in without TensorRT: its content in a plan, and launches on a stream that is not ours."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from headrace.runtimes.cuda import driver
from headrace.runtimes.cuda.convolution_plugin import PLUGIN, PluginRefused, collect_refusals
from headrace.runtimes.cuda.driver import BorrowedStream
from headrace.runtimes.cuda.kernels.launching import copy_to_gpu
from headrace.runtimes.cuda.tensorrt import plugin_problem
from headrace_lab.kernels import algorithms
from headrace_lab.kernels import plugin as convolution_plugin
from headrace_lab.kernels.base import ConvShape, Epilogue, convolve
from headrace_lab.kernels.direct import DirectAlgorithm
from headrace_lab.kernels.implicit_gemm import ImplicitGemm
from headrace_lab.kernels.plugin import (
    Creator,
    PluginLayer,
    find_algorithm,
    plugin_class,
    plugin_digest,
    register,
    sealed,
)

from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_tensorrt_plugins import add_plugins

SHAPE = ConvShape(3, 8, 5, 4, 16, 3, 3, 1, 1)
EPILOGUE = Epilogue(bias=True, residual=True, relu=True)


def layer() -> PluginLayer:
    random = np.random.default_rng(1)
    weights = (random.standard_normal(SHAPE.weights_shape) / 8).astype(np.float16)
    return PluginLayer("direct", "", SHAPE, EPILOGUE, weights, random.standard_normal(SHAPE.k).astype(np.float32))


@pytest.fixture
def gpu(host_gpu: FakeCuda) -> Iterator[FakeCuda]:
    """A fake GPU with our kernels on the host."""
    yield host_gpu
    # As TensorRT does before it deletes them.
    for one in gc.get_objects():
        if isinstance(one, convolution_plugin._ConvolutionPlugin):
            one.destroy()
    gc.collect()


def plugin(trt: Any = None) -> Any:
    if trt is None:
        trt = ModuleType("tensorrt")
        add_plugins(trt)
    return plugin_class(trt)(layer(), trt.TensorRTPhase.RUNTIME)


class Description:
    def __init__(self, *dims: int) -> None:
        self.dims = dims


def test_a_layer_is_the_same_after_a_plan() -> None:
    written = layer()
    read = PluginLayer.from_bytes(written.to_bytes())
    assert replace(read, weights=0, bias=0) == replace(written, weights=0, bias=0)  # type: ignore[arg-type]
    np.testing.assert_array_equal(read.weights, written.weights)
    assert read.bias is not None
    np.testing.assert_array_equal(read.bias, written.bias)
    assert read.to_bytes() == written.to_bytes()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda body: b"rubbish", "cannot be read as format 1"),
        (lambda body: body.replace(b'"format": 1', b'"format": 2'), r"other kernels .* \(of another format\)"),
        (
            lambda body: body.replace(b'"version": "1"', b'"version": "7"'),
            "built with version '7' of the plug-in Headrace",
        ),
        (
            lambda body: body.replace(b'"plugin": "Head', b'"plugin": "Tail'),
            "built with the plug-in 'TailraceConvolution'",
        ),
        (lambda body: body[:-4], "with 2364 bytes of weights, its shape .* has 2368"),
        (lambda body: body.replace(b'"groups": 1', b'"groups": 3'), "cannot be read .* 3 groups do not divide 8"),
    ],
)
def test_content_that_does_not_fit_is_refused(change: Callable[[bytes], bytes], reason: str) -> None:
    with pytest.raises(PluginRefused, match=reason):
        PluginLayer.from_bytes(sealed(change(layer().to_bytes()[32:])))


@pytest.mark.parametrize("position", [0, 40, -1])
def test_damaged_content_is_refused(position: int) -> None:
    content = bytearray(layer().to_bytes())
    content[position] ^= 1
    with pytest.raises(PluginRefused, match="whose content differs from its checksum"):
        PluginLayer.from_bytes(bytes(content))


def fields_of_a_plan(trt: Any, content: bytes) -> list[Any]:
    return [trt.PluginField("content", np.frombuffer(content, np.int8), trt.PluginFieldType.INT8)]


def test_a_creator_reads_fields_whose_data_repeats_the_first_value() -> None:
    trt: Any = ModuleType("tensorrt")
    add_plugins(trt)
    fields = fields_of_a_plan(trt, layer().to_bytes())
    assert set(fields[0].data) == {fields[0].data[0]}
    with collect_refusals() as refusals:
        plugin = Creator(trt).create(fields, trt.TensorRTPhase.RUNTIME)
    assert not refusals
    np.testing.assert_array_equal(plugin.layer.weights, layer().weights)


def test_a_creator_reads_fields_whose_data_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    trt: Any = ModuleType("tensorrt")
    add_plugins(trt)
    (field,) = fields_of_a_plan(trt, layer().to_bytes())
    right = SimpleNamespace(name=field.name, data=np.frombuffer(layer().to_bytes(), np.int8), size=field.size)
    with collect_refusals() as refusals:
        plugin = Creator(trt).create([right], trt.TensorRTPhase.RUNTIME)
    assert not refusals
    assert plugin.layer.parameters == layer().parameters


def test_a_creator_refuses_fields_in_another_layout() -> None:
    trt: Any = ModuleType("tensorrt")
    add_plugins(trt)
    (field,) = fields_of_a_plan(trt, layer().to_bytes())
    field.__class__ = type("Renamed", (type(field),), {"name": "other"})
    with pytest.raises(PluginRefused, match="that this TensorRT's Python API cannot pass on"):
        convolution_plugin._field_bytes(field)


@pytest.mark.parametrize("old", [b'"version": "1"', b'"sources": "'])
def test_a_creator_refuses_unknown_versions_and_digests(old: bytes) -> None:
    trt: Any = ModuleType("tensorrt")
    add_plugins(trt)
    content = sealed(layer().to_bytes()[32:].replace(old, old[:-1] + b'0"' if old.endswith(b'1"') else old + b"0"))
    with collect_refusals() as refusals:
        plugin = Creator(trt).create(fields_of_a_plan(trt, content), trt.TensorRTPhase.RUNTIME)
    assert len(refusals) == 1
    assert "built with" in str(refusals[0])
    with pytest.raises(PluginRefused, match="has a refused layer"):
        plugin.open()


def test_content_of_other_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content = layer().to_bytes()
    monkeypatch.setattr(convolution_plugin, "sources_digest", lambda: "0" * 64)
    with pytest.raises(PluginRefused, match=r"was built with other kernels .* this Headrace has 000000000000"):
        PluginLayer.from_bytes(content)


def test_the_digest_is_of_sources_and_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {"conv1": layer().parameters}
    digest = plugin_digest(layers)
    assert plugin_problem(PLUGIN, "1", digest, layers) == ""
    assert digest != plugin_digest({"conv2": layer().parameters})
    monkeypatch.setattr(convolution_plugin, "sources_digest", lambda: "0" * 64)
    assert "other kernels" in plugin_problem(PLUGIN, "1", digest, layers)


def test_a_variant_is_found_by_the_text_in_the_plan() -> None:
    shape = ConvShape(64, 256, 14, 14, 256, 3, 3, 1, 1)
    for algorithm in ImplicitGemm().variants(shape):
        found = find_algorithm("implicit-gemm", algorithm.variant, shape)
        assert (found.name, found.variant) == ("implicit-gemm", algorithm.variant)
    with pytest.raises(
        PluginRefused, match=r"needs the convolution algorithm 'implicit-gemm' '1x1', this Headrace has"
    ):
        find_algorithm("implicit-gemm", "1x1", shape)


def test_a_launch_on_a_borrowed_stream_is_captured_and_right(gpu: FakeCuda) -> None:
    random = np.random.default_rng(2)
    x, residual = (random.standard_normal(shape).astype(np.float16) for shape in (SHAPE.x_shape, SHAPE.y_shape))
    y = np.full(SHAPE.y_shape, np.nan, np.float16)
    running = plugin()
    with driver.current(0):
        running.open()
        block, (x_address, r_address, y_address) = copy_to_gpu(0, [x, residual, y])
        live = set(gpu.live)
        gpu.captured = []
        shapes = [Description(2, SHAPE.c, SHAPE.h, SHAPE.w)]
        running.enqueue(shapes, [], [x_address, r_address], [y_address], 0, 4711)
        assert len(gpu.captured) == 1
        assert gpu.live == live, "enqueue allocates"
        work, gpu.captured = gpu.captured, None
        for step in work:
            step()
        result = np.frombuffer(bytes((fake_cuda.ctypes.c_char * y.nbytes).from_address(y_address)), np.float16)
        block.free()
    result = result.reshape(y.shape)
    expected = convolve(SHAPE, EPILOGUE, x, running.layer.weights, running.layer.bias, residual)
    np.testing.assert_allclose(result[:2], expected[:2], atol=0.01)
    assert np.isnan(result[2]).all(), "rows behind the batch are written"


def test_contexts_share_weights_unless_they_need_scratch_memory(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    trt = ModuleType("tensorrt")
    add_plugins(trt)
    with driver.current(0):
        first = plugin(trt)
        attached = [first.attach_to_context(None) for _ in range(3)]
        assert len({id(one.convolution) for one in attached}) == 1
        assert first.clone().convolution is None
        for one in attached:
            one.destroy()
        gc.collect()
        assert not gpu.live
        with_scratch = property(lambda self: 256)
        monkeypatch.setattr("headrace_lab.kernels.direct.TapsConvolution.workspace_bytes", with_scratch)
        attached = [first.attach_to_context(None) for _ in range(3)]
        assert len({id(one.convolution) for one in attached}) == 3


def test_a_destroyed_plugin_keeps_no_memory(gpu: FakeCuda) -> None:
    with driver.current(0):
        first = plugin()
        attached = [first.attach_to_context(None) for _ in range(2)]
        assert gpu.live
        attached[0].destroy()
        gc.collect()
        assert gpu.live, "another context runs with the shared weights"
        attached[1].destroy()
        gc.collect()
        assert not gpu.live
    assert attached[0].content == b""
    with pytest.raises(PluginRefused):
        attached[0].open()


def test_a_plugin_object_never_ends_before_the_process(gpu: FakeCuda) -> None:
    """The binding of TensorRT 10.6 would delete the C++ object a second time with it."""
    first = plugin()
    clones = [weakref.ref(first.clone()), weakref.ref(first.attach_to_context(None))]
    for clone in clones:
        one = clone()
        assert one is not None
        one.destroy()
        del one
    gc.collect()
    assert all(clone() is not None for clone in clones)


def test_kernels_of_pycuda_streams_do_not_run_on_borrowed_ones(gpu: FakeCuda) -> None:
    opened = DirectAlgorithm().open(0, SHAPE, np.float16, Epilogue(), layer().weights.astype(np.float32))
    with driver.current(0), pytest.raises(AssertionError, match="loaded outside of for_borrowed_streams"):
        opened.launch(BorrowedStream(4711), 16, 16)
    opened.close()


def test_the_plugin_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trt: Any = ModuleType("tensorrt")
    assert register(trt) is None
    add_plugins(trt)
    creator = register(trt)
    assert creator is not None
    assert register(trt) is creator
    assert list(trt.get_plugin_registry().creators) == [(PLUGIN, "1")]
    assert algorithms.ALGORITHMS
