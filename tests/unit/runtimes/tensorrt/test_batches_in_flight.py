"""Launching of batches: in one graph or in three streams, with rows that the GPU reads where they lie, by a measured table."""

from __future__ import annotations

import gc
import logging
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.core.tensor import PINNED, is_resident
from headrace.inference.pipelines.recipe import ImageRecipe
from headrace.runtimes.cuda.driver import DeviceError
from headrace.runtimes.cuda.kernels import launching
from headrace.runtimes.cuda.kernels.launching import ClassStage, PictureStage
from headrace.runtimes.tensorrt import buffers
from headrace.runtimes.tensorrt import tuning as tensorrt_tuning
from headrace.runtimes.tensorrt.backend import GPUS, MAX_BATCH_SIZE, TensorRtBackend
from headrace.runtimes.tensorrt.contexts import PreparedContext
from headrace_engines.targets.base import ShapeRange, TargetSpec
from onnx import helper

from tests.support import kernel_reference as reference
from tests.support.fake_streams import LateCuda
from tests.support.kernels_on_host import install_host_kernels
from tests.support.resident_rows import HostOwner, read, resident
from tests.support.tensorrt_case import build, opened, right, rows

NO_OWNER = "a host copy was requested from an owner"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, cuda: LateCuda) -> None:
    cuda.devices = 2
    install_host_kernels(monkeypatch, cuda)


def parameters_of(one_graph_rows: str = "auto", max_rows: int = 8, **parameters: str) -> dict[str, str]:
    return {MAX_BATCH_SIZE: str(max_rows), "one_graph_rows": one_graph_rows, **parameters}


def mixed(execution: Any, x: np.ndarray[Any, Any], seed: int, blank: float = np.nan) -> tuple[Any, list[HostOwner]]:
    """A flight some of whose rows are resident, in ones and in pairs; not launched yet."""
    rng = np.random.default_rng(seed)
    batch = execution.begin({"x": x[:1]}, len(x))
    assert batch.device == 0
    batch.inputs["x"][:] = blank
    owners = []
    at = 0
    while at < len(x):
        count = min(int(rng.integers(1, 3)), len(x) - at)
        if rng.random() < 0.7:
            values = resident(x[at : at + count], int(rng.choice([PINNED, 0, 1])))
            owners.append(values.owner)
            batch.resident_inputs.append(("x", at, values))
        else:
            batch.inputs["x"][at : at + count] = x[at : at + count]
        at += count
    rng.shuffle(batch.resident_inputs)
    return batch, owners


@pytest.mark.usefixtures("trt", "kernels")
@pytest.mark.parametrize("parameters", [{}, {"cuda_graphs": "0"}])
@pytest.mark.parametrize("one_graph_rows", ["0", "2", "8"])
def test_rows_are_read_in_place(tmp_path: Path, one_graph_rows: str, parameters: dict[str, str]) -> None:
    with opened(build(tmp_path), parameters_of(one_graph_rows, **parameters)) as execution:
        under_way: list[tuple[Any, Any, list[HostOwner]]] = []
        for number in range(40):
            x = rows(1 + number % 8, number)
            batch, owners = mixed(execution, x, number)
            execution.launch(batch)
            under_way.append((batch, x, owners))
            if len(under_way) == execution.depth or number == 39:
                while under_way:
                    batch, x, owners = under_way.pop(0)
                    np.testing.assert_array_equal(execution.finish(batch)["y"], right(x))
                    assert not any(owner.copies for owner in owners), NO_OWNER


@pytest.mark.usefixtures("trt", "kernels")
def test_rows_of_a_gpu_without_copies_pass_through_the_host(
    cuda: LateCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.wrong_peer_copies = True
    x = rows(8)
    with opened(build(tmp_path), parameters_of("2")) as execution:
        for count in range(1, 9):
            batch = execution.begin({"x": x}, count)
            batch.inputs["x"][:] = np.nan
            parts = [resident(x[at : at + 1], 1 if at % 3 else 0) for at in range(count)]
            batch.resident_inputs += [("x", at, part) for at, part in enumerate(parts)]
            execution.launch(batch)
            np.testing.assert_array_equal(execution.finish(batch)["y"], right(x[:count]))
            assert [bool(part.owner.copies) for part in parts] == [bool(at % 3) for at in range(count)]
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.getMessage().startswith(
        "no copies from GPU 1 to GPU 0, tensors pass through the host: the bytes differ"
    )


@pytest.mark.usefixtures("trt", "kernels")
@pytest.mark.parametrize("device", [PINNED, 1])
def test_the_memory_is_referenced_until_the_batch_has_finished(tmp_path: Path, device: int) -> None:
    def launched(execution: Any) -> tuple[Any, weakref.ref[HostOwner]]:
        x = rows(3)
        batch = execution.begin({"x": x}, 3)
        batch.resident_inputs.append(("x", 0, resident(x, device)))
        owner = weakref.ref(batch.resident_inputs[0][2].owner)
        execution.launch(batch)
        return batch, owner

    with opened(build(tmp_path), parameters_of()) as execution:
        batch, owner = launched(execution)
        execution.finish(batch)
        del batch
        assert owner() is None, "it is released when the batch has finished"
        owner = launched(execution)[1]  # its execution ends
        gc.collect()
        assert owner() is not None, "the GPU may still read it"
    assert owner() is None


def sums(element: int = onnx.TensorProto.FLOAT, width: int = 5) -> onnx.ModelProto:
    """z = a + b, [n, width]."""
    a, b, z = (helper.make_tensor_value_info(name, element, ["n", width]) for name in "abz")
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["z"], name="add")], "sums", [a, b], [z])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.usefixtures("trt", "kernels")
@pytest.mark.parametrize("one_graph_rows", ["0", "8"])
def test_one_of_two_inputs_is_resident(tmp_path: Path, one_graph_rows: str) -> None:
    order = TargetSpec("fp32", (ShapeRange(dict.fromkeys("ab", ((1, 5), (8, 5), (8, 5)))),))
    with opened(build(tmp_path, sums(), order), parameters_of(one_graph_rows)) as execution:
        for count in (1, 3, 8):
            a, b = np.random.default_rng(count).random((2, count, 5), np.float32)
            batch = execution.begin({"a": a, "b": b}, count)
            batch.inputs["a"][:] = a
            batch.resident_inputs.append(("b", 0, resident(b, 0)))
            execution.launch(batch)
            np.testing.assert_array_equal(execution.finish(batch)["z"], a + b)


@pytest.mark.usefixtures("trt")
def test_without_the_kernel_batches_have_no_resident_rows(tmp_path: Path) -> None:
    with closing(TensorRtBackend().load(build(tmp_path), 1, parameters_of())) as model:
        assert model.resident_devices == frozenset()
        with closing(model.execution(0)) as execution:
            batch = execution.begin({"x": rows(1)}, 1)
            assert batch.device is None
            execution.discard(batch)


@pytest.mark.usefixtures("trt", "kernels")
def test_a_small_batch_is_one_call(cuda: LateCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.runtimes.cuda import driver

    calls: list[str] = []
    library = driver.library()
    launch = library.cuGraphLaunch
    monkeypatch.setattr(library, "cuGraphLaunch", lambda *a: calls.append("graph") or launch(*a), raising=False)
    import pycuda.driver

    for name in ("memcpy_htod_async", "memcpy_dtoh_async"):
        real = getattr(pycuda.driver, name)
        monkeypatch.setattr(pycuda.driver, name, lambda *a, real=real: calls.append("copy") or real(*a))
    with opened(build(tmp_path), parameters_of("4")) as execution:
        calls.clear()
        execution.run({"x": rows(3)})
        assert calls == ["graph"]
        calls.clear()
        execution.run({"x": rows(5)})
        assert sorted(calls) == ["copy", "copy", "graph"]


@pytest.mark.usefixtures("trt")
@pytest.mark.parametrize(
    ("wait", "spins"), [("auto", [True, False]), ("spin", [True, True]), ("sleep", [False, False])]
)
def test_waits_spin_or_sleep(tmp_path: Path, wait: str, spins: list[bool]) -> None:
    with opened(build(tmp_path), parameters_of("2", wait=wait)) as execution:
        result = []
        for count in (2, 8):
            x = rows(count)
            batch = execution.begin({"x": x}, count)
            batch.inputs["x"][:] = x
            execution.launch(batch)
            buffer_slot = batch.state.slot
            result.append(buffer_slot.finished is buffer_slot.copied_out[True])
            np.testing.assert_array_equal(execution.finish(batch)["y"], right(x))
        assert result == spins


# The table


@pytest.mark.usefixtures("trt")
def test_faster_buckets_are_kept(cuda: LateCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cuda.row_us = 0.1  # 8 rows take hardly longer than one
    with (
        caplog.at_level(logging.DEBUG, "headrace"),
        closing(TensorRtBackend().load(build(tmp_path), 1, parameters_of())) as model,
    ):
        assert model.buckets_us() == {}
        with closing(model.execution(0)) as execution:
            assert execution._resources.tuning_result.buckets == (1, 8)
            assert model.buckets_us() == pytest.approx({1: 50.1, 8: 50.8}, abs=0.01)
            for count in range(1, 9):
                np.testing.assert_array_equal(execution.run({"x": rows(count)})["y"], right(rows(count)))
    assert "8 rows 51 us (plain 151)" in caplog.text
    assert "[2 rows 50 us]" in caplog.text


@pytest.mark.usefixtures("trt")
def test_batches_that_are_faster_as_they_are(cuda: LateCuda, trt: Any, tmp_path: Path) -> None:
    cuda.row_us, cuda.enqueue_us = 1000.0, 0.0  # padding is dear, a launch costs nothing
    with opened(build(tmp_path), parameters_of()) as execution:
        assert execution._resources.tuning_result.exact == {3, 5, 6, 7}
        contexts, live, graphs = trt.state.contexts, set(cuda.live), set(cuda.graphs)
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 5, 3):
            batch = execution.begin({"x": rows(count)}, count)
            assert batch.state.context.rows == count
            execution.discard(batch)
            np.testing.assert_array_equal(execution.run({"x": rows(count)})["y"], right(rows(count)))
        assert (trt.state.contexts, cuda.live, cuda.graphs) == (contexts, live, graphs), (
            "all of it is there from the start"
        )


@pytest.mark.usefixtures("trt")
def test_one_graph_is_for_those_that_lose_nothing_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[int] = []

    def fair(whole_us: float, staged_us: float) -> bool:
        probes.append(1)
        return len(probes) < 3

    monkeypatch.setattr(tensorrt_tuning, "costs_little_more", fair)
    with opened(build(tmp_path), parameters_of(), instances=2) as executions:
        for execution in executions:
            assert execution._resources.tuning_result.one_graph == {1, 2}
            for count in range(1, 9):
                np.testing.assert_array_equal(execution.run({"x": rows(count)})["y"], right(rows(count)))
    assert len(probes) == 3, "the second instance reuses the result of the first"


PICTURES = ImageRecipe(by="server", crop=(5, 7), mean=(120.0, 110.0, 100.0), std=(60.0, 50.0, 40.0))
FLOAT = np.dtype(np.float32)


def flat() -> onnx.ModelProto:
    """y = x, [n, 105] of [n, 3, 5, 7]; z = 2 * y."""
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3, 5, 7])
    y, z = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 105]) for name in "yz")
    nodes = [
        helper.make_node("Flatten", ["x"], ["y"], name="flat"),
        helper.make_node("Add", ["y", "y"], ["z"], name="add"),
    ]
    return helper.make_model(
        helper.make_graph(nodes, "flat", [x], [y, z]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )


@pytest.mark.usefixtures("trt", "kernels")
@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("one_graph_rows", ["0", "8"])
def test_few_images_are_prepared_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_graph_rows: str, refused: bool
) -> None:
    monkeypatch.setattr(launching, "THREADS", 32)
    fetched: list[int] = []
    real = launching.PictureScaler.launch_each

    def launch_each(kernel: Any, stream: Any, addresses: int, count: int, to: int) -> None:
        if refused:
            raise DeviceError("this cannot be captured")
        fetched.append(count)
        real(kernel, stream, addresses, count, to)

    monkeypatch.setattr(launching.PictureScaler, "launch_each", launch_each)
    order = TargetSpec("fp32", (ShapeRange({"x": ((1, 3, 5, 7), (8, 3, 5, 7), (8, 3, 5, 7))}),))
    stages = [PictureStage("x", PICTURES, FLOAT), ClassStage("y", FLOAT, (105,), 105, False, 3, "best", "numbers")]
    with closing(TensorRtBackend().load(build(tmp_path, flat(), order), 1, parameters_of(one_graph_rows))) as model:
        assert model.attach_stages(stages) == ""
        with closing(model.execution(0)) as execution:
            few = [] if refused or one_graph_rows == "0" else [1, 2, 4]
            assert sorted(set(fetched)) == few, "captured for all berths, and never launched outside of a graph"
            fetched.clear()
            for number, count in enumerate((1, 2, 3, 4, 5, 8, 1)):
                sent = np.random.default_rng(number).integers(0, 256, (count, 5, 7, 3), dtype=np.uint8)
                batch, owners = mixed(execution, sent, number, 0xA5)
                execution.launch(batch)
                result = execution.finish(batch)
                assert not any(owner.copies for owner in owners), NO_OWNER
                tensor = reference.prepare(sent, PICTURES, FLOAT).reshape(count, -1)
                best, numbers = reference.rank(tensor, 3, False)
                np.testing.assert_array_equal(result["numbers"], numbers)
                np.testing.assert_array_equal(result["best"], best)
                np.testing.assert_array_equal(result["z"], 2 * tensor)
            assert not fetched


@pytest.mark.usefixtures("trt", "kernels")
@pytest.mark.parametrize("refused", [False, True])
def test_one_graph_for_those_that_are_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    monkeypatch.setattr(tensorrt_tuning, "costs_little_more", lambda whole_us, staged_us: False)
    probes: list[float] = []
    monkeypatch.setattr(
        tensorrt_tuning, "is_faster", lambda whole_us, staged_us: probes.append(whole_us) or len(probes) < 3
    )
    flown: list[int] = []
    fly = PreparedContext.launch_batch_graph
    monkeypatch.setattr(
        PreparedContext, "launch_batch_graph", lambda lane, gathered: flown.append(lane.rows) or fly(lane, gathered)
    )
    with opened(build(tmp_path), parameters_of()) as execution:
        assert (
            execution._resources.tuning_result.one_graph,
            execution._resources.tuning_result.one_graph_when_idle,
        ) == (frozenset(), {1, 2})
        assert execution.prompt
        assert min(probes) > 0
        if refused:
            for lane in execution._resources._contexts.values():
                lane.drop_batch_graphs()
        for seed, order in enumerate(np.random.default_rng(3).integers(1, 9, (40, 3))):
            flown.clear()
            batches = []
            for number, count in enumerate(map(int, order)):
                x = rows(count, seed + number)
                batch, owners = mixed(execution, x, seed) if seed % 2 else (execution.begin({"x": x}, count), [])
                if not owners:
                    batch.inputs["x"][:] = x
                execution.launch(batch)
                batches.append((batch, x, owners))
                expected = [] if order[0] > 2 or refused else [order[0]]
                assert flown == expected, "only the first of them runs alone"
                assert (batch.state.slot.finished is batch.state.slot.copied_out[True]) == (
                    not number and bool(expected)
                )
            for batch, x, _ in batches:
                np.testing.assert_array_equal(execution.finish(batch)["y"], right(x))


@pytest.mark.usefixtures("trt")
@pytest.mark.parametrize("one_graph_rows", ["auto", "8"])
def test_a_batch_that_cannot_be_captured_preserves_the_graphs_of_the_engine(
    cuda: LateCuda,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    one_graph_rows: str,
) -> None:
    def refuse(*_: object) -> None:
        raise DeviceError("copies cannot be captured")

    monkeypatch.setattr(PreparedContext, "_record_batch", refuse)
    with (
        caplog.at_level(logging.WARNING, "headrace"),
        opened(build(tmp_path), parameters_of(one_graph_rows)) as execution,
    ):
        assert len(cuda.graphs) == 4 * execution.depth
        np.testing.assert_array_equal(execution.run({"x": rows(3)})["y"], right(rows(3)))
    assert not caplog.records


@pytest.mark.usefixtures("trt")
def test_a_capture_that_was_spoilt_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spoilt: list[int] = []
    real = PreparedContext.capture

    def capture(lane: PreparedContext, stream: Any) -> None:
        spoilt.append(1)
        if len(spoilt) == 3:
            raise DeviceError("a buffer was freed meanwhile")
        real(lane, stream)

    monkeypatch.setattr(PreparedContext, "capture", capture)
    with caplog.at_level(logging.WARNING, "headrace"), opened(build(tmp_path), parameters_of("0")) as execution:
        assert execution._resources.graphs
    assert not caplog.records


# --- Outputs that stay on the GPU ---------------------------------------------------------------------------------------


def kept(execution: Any, x: np.ndarray[Any, Any]) -> Any:
    """Run a batch whose output may stay on the GPU; the output."""
    batch = execution.begin({"x": x}, len(x))
    batch.inputs["x"][:] = x
    batch.resident_outputs = frozenset({"y"})
    execution.launch(batch)
    return execution.finish(batch)["y"]


@pytest.mark.usefixtures("trt", "kernels")
@pytest.mark.parametrize("parameters", [{}, {"cuda_graphs": "0"}])
@pytest.mark.parametrize("one_graph_rows", ["0", "2", "8"])
def test_outputs_stay_on_the_gpu(tmp_path: Path, one_graph_rows: str, parameters: dict[str, str]) -> None:
    """Their values are right while later batches run, whatever batches without them run in between."""
    with opened(build(tmp_path), parameters_of(one_graph_rows, **parameters)) as execution:
        held: list[tuple[Any, np.ndarray[Any, Any]]] = []
        for number in range(40):
            x = rows(1 + number % 8, number)
            y = kept(execution, x)
            assert is_resident(y)
            assert (y.shape, y.dtype, y.device) == ((len(x), 2), np.float32, 0)
            held.append((y, right(x)))
            np.testing.assert_array_equal(execution.run({"x": x})["y"], right(x))
            for values, expected in held:
                np.testing.assert_array_equal(read(values), expected)
                np.testing.assert_array_equal(np.asarray(values), expected)
            if len(held) == 4:
                del held[number % 4], values, y


@pytest.mark.usefixtures("trt", "kernels")
@pytest.mark.parametrize("one_graph_rows", ["0", "8"])
@pytest.mark.parametrize("copied_bytes", [1 << 20, 1])
@pytest.mark.parametrize(("gpu", "peer_access"), [(0, True), (1, True), (1, False)])
def test_outputs_are_inputs_of_another_model(
    cuda: LateCuda,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_graph_rows: str,
    copied_bytes: int,
    gpu: int,
    peer_access: bool,
) -> None:
    """Small tensors, and such that are copied because they are large."""
    monkeypatch.setattr(buffers, "_COPIED_BYTES", copied_bytes)
    cuda.peer_access = peer_access
    (tmp_path / "sums").mkdir()
    order = TargetSpec("fp32", (ShapeRange(dict.fromkeys("ab", ((1, 2), (8, 2), (8, 2)))),))
    second = build(tmp_path / "sums", sums(width=2), order)
    with (
        opened(build(tmp_path), parameters_of(one_graph_rows)) as first,
        opened(second, parameters_of(one_graph_rows) | {GPUS: str(gpu)}) as execution,
    ):
        for count in range(1, 9):
            cuda.peer_copies.clear()
            x, b = rows(count, count), rows(count, 50 + count)[:, :2]
            y = kept(first, x)
            batch = execution.begin({"a": y, "b": b}, count)
            batch.inputs["b"][:] = b
            batch.resident_inputs += [("a", row, y[row : row + 1]) for row in range(count)]
            del y
            execution.launch(batch)
            np.testing.assert_array_equal(execution.finish(batch)["z"], right(x) + b)
            # The first one tests the pair. Rows that follow each other are one copy.
            assert cuda.peer_copies[-1:] == [(0, 1, count * 8)][:gpu]
            assert len(cuda.peer_copies) == (1 + (count == 1)) * gpu
        assert cuda.accesses == ({(1, 0)} if gpu and peer_access else set())


@pytest.mark.usefixtures("trt", "kernels")
def test_large_outputs_that_stay_are_not_copied_to_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of the whole batch would copy them."""
    launched: list[bool] = []
    real = PreparedContext.launch_batch_graph

    def launch(context: PreparedContext, gathered: bool) -> None:
        launched.append(gathered)
        real(context, gathered)

    monkeypatch.setattr(PreparedContext, "launch_batch_graph", launch)
    with opened(build(tmp_path), parameters_of("8")) as execution:
        kept(execution, rows(2))
        assert launched == [False]
        monkeypatch.setattr(buffers, "_COPIED_BYTES", 2 * 2 * 4)
        y = kept(execution, rows(2))
        assert launched == [False]
        np.testing.assert_array_equal(read(y), right(rows(2)))
        kept(execution, rows(1))
        assert launched == [False, False]


@pytest.mark.usefixtures("trt", "kernels")
def test_without_memory_for_them_outputs_are_copied(cuda: LateCuda, tmp_path: Path) -> None:
    with opened(build(tmp_path), parameters_of()) as execution:
        held = [kept(execution, rows(2, number)) for number in range(10)]
        assert [is_resident(y) for y in held] == [True] * 8 + [False] * 2
        np.testing.assert_array_equal(held[8], right(rows(2, 8)))
        held.clear()
        assert is_resident(kept(execution, rows(2)))
    with opened(build(tmp_path), parameters_of()) as execution:
        first = kept(execution, rows(2))
        cuda.room_bytes = 0
        second = kept(execution, rows(2))
        assert (is_resident(first), is_resident(second)) == (True, False)
        del first
        assert is_resident(kept(execution, rows(2))), "the block of the first is free"


@pytest.mark.usefixtures("trt", "kernels")
def test_outputs_outlive_the_model(cuda: LateCuda, tmp_path: Path) -> None:
    with opened(build(tmp_path), parameters_of()) as execution:
        y, unused = kept(execution, rows(3)), kept(execution, rows(1))
        del unused
    np.testing.assert_array_equal(np.asarray(y), right(rows(3)))
    assert len(cuda.device_blocks) == 1
    del y  # the fixture checks that its memory is given back
    assert not cuda.device_blocks
