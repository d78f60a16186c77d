"""Pipelines whose steps run on real GPUs: their tensors stay there between the steps, and are copied from one to another."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from headrace.runtimes.cuda.driver import CudaStream, current
from headrace.runtimes.cuda.memory import DeviceBuffer, PinnedBuffer, read_gpu, upload
from headrace.runtimes.cuda.peers import peer_copy

from tests.support import gpu_pipeline_cases as cases
from tests.support.exported_memory import export
from tests.support.gpu_marks import gpu_marks
from tests.support.serving import Server, serving

pytestmark = gpu_marks(180, "fastapi", "uvicorn")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("pipelines")
    with serving(cases.make_repository(folder), folder, *cases.OPTIONS) as started:
        yield started
        assert "Traceback" not in started.text, started.text


def test_answers_are_those_of_the_models_one_after_the_other(server: Server) -> None:
    cases.check_same_as_one_after_the_other(server)


def test_a_model_is_loaded_anew_under_load(server: Server) -> None:
    cases.check_unloading(server)


def test_outputs_in_cuda_shared_memory(server: Server) -> None:
    cases.check_outputs_in_a_region(server, export)


@pytest.mark.usefixtures("two_gpus")
def test_steps_on_two_gpus(tmp_path: Path) -> None:
    with serving(cases.make_repository(tmp_path, cases.TWO_GPUS), tmp_path, *cases.OPTIONS) as started:
        cases.check_same_as_one_after_the_other(started)
        for gpu in (0, 1):  # of the region: instances of `first` on both GPUs write to it, those of `second` on GPU 1
            cases.check_outputs_in_a_region(started, partial(export, gpu=gpu), gpu)
        cases.check_unloading(started)
    for words in ("Traceback", "no copies from GPU"):
        assert words not in started.text, started.text


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_copies_between_two_gpus(source: int, target: int) -> None:
    copy = peer_copy(source, target)
    assert copy is not None, "the log says why"
    rng = np.random.default_rng(0)
    for size_bytes in (1, 7, 4096, 1 << 24):
        sent, block, received = PinnedBuffer(), DeviceBuffer(), DeviceBuffer()
        with current(source):
            sent.reserve(size_bytes)
            values = sent.view((size_bytes,), np.dtype(np.uint8))
            values[:] = rng.integers(256, size=size_bytes, dtype=np.uint8)
            block.reserve(size_bytes)
            stream = CudaStream()
            upload(block, values, stream)
            stream.synchronize()
        with current(target):
            received.reserve(size_bytes)
            stream = CudaStream()
            copy.queue(received.address, block.address, size_bytes, stream)
            stream.synchronize()
        np.testing.assert_array_equal(read_gpu(target, received.address, size_bytes), values)
        with current(target):
            received.free()
        with current(source):
            block.free()
            sent.free()
