"""Python models whose inputs lie in GPU memory: the records of a batch, regions that are dropped, and new processes."""

from __future__ import annotations

import gc
import os
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.core.completion import ThreadCompletion
from headrace.core.errors import BatchLost, Unavailable
from headrace.core.tensor import Array, IpcMemory, ResidentRows, as_input
from headrace.python.backend import PythonBackend, PythonExecution, PythonModel
from headrace.python.environments import own_interpreter
from headrace.python.outputs import ModelTensors, RequestWriter, SentRegions, SlotPool, prepare
from headrace.python.process import ProcessOptions
from headrace.python.python_models import program_command
from headrace.runtimes.base import InputRefused
from headrace.runtimes.members import BatchMember
from headrace_model import device, protocol
from headrace_model.channel import Frames
from headrace_model.protocol import HEADER
from headrace_model.requests import BatchReader
from headrace_model.slots import START, Slot

from tests.support.fake_ipc_driver import HANDLE_BYTES, install
from tests.support.python_models import load_order
from tests.support.serving import ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Python models need Linux")
FP32 = protocol.CODES["FP32"]
TENSORS = ModelTensors("m", (("x", FP32), ("z", FP32)), (("y", FP32),), True)
# Of the first input. 1 kills the process; the last column of the output is the number of open regions.
CODE = f"""
import os, sys
import numpy as np
import triton_python_backend_utils as pb_utils
sys.path.insert(0, {str(ROOT)!r})
from tests.support import fake_ipc_driver

driver = fake_ipc_driver.install()

class TritonPythonModel:
    def initialize(self, args):
        driver.devices = int(args["devices"])

    def execute(self, requests):
        responses = []
        for request in requests:
            x = request.inputs()[0]
            y = x.as_numpy().copy() if x.is_cpu() else fake_ipc_driver.host_array(x.to_dlpack()).copy()
            if y[0, 0] == 1:
                os.kill(os.getpid(), 9)
            y[:, 2] = not x.is_cpu()
            y[:, 3] = len(driver.sizes)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return responses
"""


class Owner:
    """Memory of the fake GPU with some values, as `headrace.runtimes.cuda.shared_memory.CudaRegion` owns it."""

    def __init__(self, values: Array) -> None:
        self.path = Path("/dev/shm", f"test-{uuid.uuid4().hex}")
        self.path.write_bytes(values.tobytes())
        self.ipc = IpcMemory(self.path.name.encode().ljust(HANDLE_BYTES, b"\0"), 0, 1 << 20)

    def rows(self, first: int, rows: int) -> Array:
        """Rows of four FP32 values."""
        values = self.ipc.address + 16 * first, 0, np.dtype(np.float32), (rows, 4)
        return as_input(ResidentRows(*values, self, lambda *_: pytest.fail("copied to the host")))

    def __del__(self) -> None:
        self.path.unlink()


def member(x: Array, **others: Array) -> BatchMember:
    values: dict[str, Any] = {"id": "", "parameters": {}, "outputs": (), "deadline_ns": 0, "priority": 0, "shapes": {}}
    return BatchMember(rows=len(x), **values, completion=ThreadCompletion(), inputs={"x": x, **others})


Open = Callable[..., PythonExecution]


@pytest.fixture
def execution(tmp_path: Path) -> Iterator[Open]:
    opened: list[PythonModel] = []

    def load(devices: int = 1) -> PythonExecution:
        file = tmp_path / "m" / "1" / "model.py"
        file.parent.mkdir(parents=True)
        file.write_text(CODE)
        order = load_order(file, [("x", FP32), ("z", FP32)], [("y", FP32)], devices=str(devices))
        options = ProcessOptions(program_command(own_interpreter()), order, 20.0, 1 << 12)
        opened.append(PythonBackend(TENSORS, lambda _: options, reads_device_rows=True).load(file, 1, {}))
        return opened[0].execution(0)

    yield load
    for model in opened:
        model.close()


def run(execution: PythonExecution, *members: BatchMember) -> list[Any]:
    execution.batch_arrays({}, sum(each.rows for each in members))
    results = execution.run_members({}, members)
    return [result["y"].tolist() if isinstance(result, dict) else result for result in results]


HOST = np.full((1, 4), 9, np.float32)


def test_a_process_opens_a_region_once_and_closes_it_when_it_is_dropped(execution: Open) -> None:
    python = execution()
    assert python.reads_device_rows
    owner = Owner(np.arange(16, dtype=np.float32))
    for _ in range(2):
        assert run(python, member(owner.rows(3, 1)), member(HOST), member(owner.rows(1, 2))) == [
            [[12, 13, 1, 1]],
            [[9, 9, 0, 1]],
            [[4, 5, 1, 1], [8, 9, 1, 1]],
        ]
    del owner
    gc.collect()
    until(lambda: run(python, member(HOST)) == [[[9, 9, 0, 0]]])


def test_the_next_process_opens_the_region_again(execution: Open) -> None:
    python = execution()
    owner = Owner(np.array([[5, 5, 5, 5], [1, 0, 0, 0]], np.float32))
    assert run(python, member(owner.rows(0, 1))) == [[[5, 5, 1, 1]]]
    with pytest.raises(BatchLost):
        run(python, member(owner.rows(1, 1)))
    assert run(python, member(owner.rows(0, 1))) == [[[5, 5, 1, 1]]]
    del owner
    gc.collect()
    assert run(python, member(HOST)) == [[[9, 9, 0, 0]]]


def test_a_region_is_dropped_between_a_batch_and_its_new_slot(execution: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    python = execution()
    owners = [Owner(np.arange(8, dtype=np.float32))]
    assert run(python, member(owners[0].rows(1, 1))) == [[[4, 5, 1, 1]]]
    connection = python.process.gate.wait_open()
    share = connection.frames.share

    def drop_and_share(*arguments: Any) -> None:
        owners.clear()
        gc.collect()
        share(*arguments)

    monkeypatch.setattr(connection.frames, "share", drop_and_share)
    held = python.run_members({"x": HOST}, [member(HOST)._replace(inputs={})])
    held += python.run_members({"x": HOST}, [member(HOST)._replace(inputs={})])  # in a new slot
    assert owners == []
    assert [result["y"].tolist() for result in held if isinstance(result, dict)][1] == [[9, 9, 0, 0]]


def test_a_request_fails_alone_where_its_memory_cannot_be_opened(execution: Open) -> None:
    python = execution()
    owner, gone = Owner(np.arange(8, dtype=np.float32)), Owner(np.arange(8, dtype=np.float32))
    gone.path.rename(f"{gone.path}-gone")
    first, lost, last = run(python, member(owner.rows(0, 1)), member(gone.rows(0, 1)), member(HOST))
    assert (first, last) == ([[0, 1, 1, 1]], [[9, 9, 0, 1]])
    assert isinstance(lost, InputRefused)
    assert "its owner must live and keep it allocated" in str(lost)
    Path(f"{gone.path}-gone").rename(gone.path)
    assert run(python, member(gone.rows(0, 1))) == [[[0, 1, 1, 2]]]


def test_a_process_without_a_gpu_refuses_such_requests(execution: Open) -> None:
    owner = Owner(np.arange(8, dtype=np.float32))
    lost, host = run(execution(devices=0), member(owner.rows(0, 1)), member(HOST))
    assert isinstance(lost, Unavailable)
    assert "the GPU cannot be used in the model's process (cuDeviceGet failed with the status 101" in str(lost)
    assert host == [[9, 9, 0, 0]]


def test_a_large_batch_is_sent_through_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_driver", device._driver)
    driver = install()
    lease = SlotPool("test", 1 << 12).take()
    values = np.arange(4 * 400, dtype=np.float32)
    owner = Owner(values)
    members = [member(owner.rows(row, 1) if row % 3 else np.full((1, 4), row, np.float32)) for row in range(400)]
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    frames = Frames(pair[0])
    batch = prepare(lease, {"z": HOST}, 400, batched=True)
    batch.arrays["z"][0][:] = 3
    body, flags = RequestWriter(TENSORS).write(batch, {"z": batch.arrays["z"][0]}, members, SentRegions(frames))
    assert flags & protocol.SPILLED
    frame = HEADER.pack(1, protocol.RUN, flags, 0, 7, 400, len(body)) + body
    received = BatchReader(["x", "z"], ["y"]).read(frame, Slot(os.dup(lease.slot.fd)))
    assert received.inputs["z"].tolist() == [[3, 3, 3, 3]] * 400
    rights = values.reshape(400, 4)
    for row, source in enumerate(received.separate["x"]):
        if row % 3:
            assert source.to_host().tolist() == rights[row : row + 1].tolist()
        else:
            assert source.tolist() == [[row] * 4]
    assert received.end >= START
    assert driver.opened == 1
    del received, source
    gc.collect()
    assert driver.sizes == {}
    device._primary_context.cache_clear()


def test_dropped_regions_wait_for_room_in_the_socket() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    frames, child = Frames(ours), Frames(theirs)
    regions = SentRegions(frames)
    numbers = []
    for _ in range(2000):
        memory = IpcMemory(bytes(64), 0, 0)
        assert protocol.REGION.unpack(regions.send(memory)) == (memory.number, 0, bytes(64))
        numbers.append(memory.number)
        del memory
    assert regions._unsent, "the socket took all"
    received: list[int] = []

    def read() -> None:
        theirs.setblocking(False)
        try:
            while child.receive():
                _version, kind, _flags, _slot, number, *_ = HEADER.unpack_from(child.buffer)
                assert kind == protocol.CLOSE
                received.append(number)
        except BlockingIOError:
            theirs.setblocking(True)

    while regions._unsent:
        read()
        last = IpcMemory(bytes(64), 0, 0)
        regions.send(last)
        numbers.append(last.number)
        del last
    read()
    assert sorted(received) == numbers
    assert not regions._numbers


def test_a_region_outlives_the_process_that_had_it() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    frames = Frames(ours)
    regions = SentRegions(frames)
    memories = [IpcMemory(bytes(64), 0, 0) for _ in range(2)]
    for memory in memories:
        regions.send(memory)
    del memory
    theirs.close()
    memories.pop()
    del frames
    memories.pop()
    gc.collect()
    assert not regions._numbers
