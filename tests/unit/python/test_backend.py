"""Python models in processes: batches, errors of members, memory of outputs, deaths, hangs and cancellation."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.core.completion import ThreadCompletion
from headrace.core.errors import BatchLost, ConfigError, HeadraceError, ModelFailed, Unavailable
from headrace.core.tensor import Array
from headrace.python import backend
from headrace.python.backend import PythonBackend, PythonExecution, PythonModel
from headrace.python.environments import own_interpreter
from headrace.python.outputs import MAX_SLOTS, ModelTensors
from headrace.python.process import ProcessOptions
from headrace.python.python_models import program_command
from headrace.runtimes.base import ExecutionLost
from headrace.runtimes.members import BatchMember
from headrace.runtimes.processes import supervisor
from headrace_model import protocol

from tests.support.python_models import load_order
from tests.support.waiting import until

HEAD = "import os, sys, time\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n"
IDENTITY = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
# The first value of a request says what happens to it.
ACTIONS = """
class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]

    def execute(self, requests):
        responses = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            action = int(x[0, 0])
            if action == 1:
                os.kill(os.getpid(), 9)
            if action == 2:
                sys.exit(3)
            if action == 3:
                raise ValueError("a secret of the model")
            if action == 4:
                time.sleep(60)
            if action == 5:
                return []
            if action == 6:
                return None
            if action == 7:
                return ["text"] * len(requests)
            if action == 8:
                x = x.astype(np.float64)
            if action == 9:
                raise pb_utils.TritonModelException("for the client")
            if action == 10:
                x = x[:, :1]
            if action == 11:
                print("a line from", self.name)
                sys.stderr.write("an error line\\n")
            if action == 12:
                bytearray(4 << 30)
            if action == 13:
                while not request.is_cancelled():
                    time.sleep(0.01)
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("stopped", 7)))
                continue
            if action == 14:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("not this one", 3)))
                continue
            if action == 15:
                x = np.array([[float(os.getpid())] * 4], np.float32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + 1 if action == 16 else x)]))
        return responses
"""

Open = Callable[..., PythonModel]


@contextmanager
def opener(folder: Path) -> Iterator[Open]:
    """A function that opens Python models, which are closed at the end."""
    opened: list[PythonModel] = []

    def load(
        code: str,
        instances: int = 1,
        datatype: str = "FP32",
        batched: bool = True,
        limit_s: float = 20.0,
        memory_bytes: int = 0,
        outputs: tuple[str, ...] = ("y",),
    ) -> PythonModel:
        file = folder / f"m{len(opened)}" / "1" / "model.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(HEAD + code)
        kind = protocol.CODES[datatype]
        tensors = ModelTensors("m", (("x", kind),), tuple((name, kind) for name in outputs), batched)

        def options(index: int) -> ProcessOptions:
            order = load_order(file, tensors.inputs, tensors.outputs, memory_bytes, model_instance_name=f"m_{index}")
            return ProcessOptions(program_command(own_interpreter()), order, limit_s, 1 << 12, memory_bytes)

        model = PythonBackend(tensors, options).load(file, instances, {})
        opened.append(model)
        return model

    yield load
    for model in opened:
        model.close()


@pytest.fixture
def open_model(tmp_path: Path) -> Iterator[Open]:
    with opener(tmp_path) as load:
        yield load


@pytest.fixture(scope="module")
def acting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PythonExecution]:
    """An execution for actions that leave its process as it is."""
    with opener(tmp_path_factory.mktemp("acting")) as load:
        yield load(ACTIONS).execution(0)


def member(rows: int = 1, **values: Any) -> BatchMember:
    fields: dict[str, Any] = {"id": "", "parameters": {}, "outputs": (), "deadline_ns": 0, "priority": 0, "shapes": {}}
    return BatchMember(rows=rows, **{**fields, **values}, completion=ThreadCompletion())


def rows_of(*actions: int) -> Array:
    return np.array([[action, 2, 3, 4] for action in actions], np.float32)


def run(execution: PythonExecution, inputs: Array, members: list[BatchMember]) -> list[Any]:
    """Run a batch as the scheduler does: assembled in the memory of the execution."""
    arrays = execution.batch_arrays({"x": inputs}, len(inputs))
    if "x" in arrays:
        np.copyto(arrays["x"], inputs)
    return execution.run_members({"x": arrays.get("x", inputs)}, members)


def test_computed_outputs_of_several_members_are_joined(acting: PythonExecution) -> None:
    results = run(acting, rows_of(16, 16, 16), [member(), member(), member()])
    assert [result["y"].tolist() for result in results] == [[[17, 3, 4, 5]]] * 3


def test_text_and_a_model_without_batches(open_model: Open) -> None:
    execution = open_model(IDENTITY, datatype="BYTES", batched=False).execution(0)
    texts = np.array([b"one", b"", b"three" * 40_000], object)
    assert run(execution, texts, [member()])[0]["y"].tolist() == texts.tolist()
    execution = open_model(IDENTITY, batched=False).execution(0)
    assert run(execution, np.ones((2, 1), np.float32), [member()])[0]["y"].tolist() == [[1], [1]]


def test_large_batches_grow_the_memory_and_many_members_spill(open_model: Open) -> None:
    execution = open_model(ACTIONS).execution(0)
    inputs = np.zeros((4000, 300), np.float32)
    inputs[:, 0] = 16
    results = run(execution, inputs, [member(id=f"request {index}") for index in range(4000)])
    assert all(result["y"].shape == (1, 300) and result["y"][0, 0] == 17 for result in results)
    small = run(execution, rows_of(16), [member()])
    assert small[0]["y"].tolist() == [[17, 3, 4, 5]]


def test_outputs_stay_valid_while_later_batches_run(open_model: Open) -> None:
    execution = open_model(ACTIONS).execution(0)
    kept = []
    for number in range(3 * MAX_SLOTS):
        inputs = np.full((2, 4), 100 + number, np.float32)
        kept.append((number, run(execution, inputs, [member(2)])[0]["y"]))
    for number, array in kept:
        assert array.tolist() == [[100 + number] * 4] * 2
    del kept, array
    gc.collect()
    connection = execution.process.connection
    assert connection is not None
    assert len(connection.slots._slots) == MAX_SLOTS
    assert len(connection.slots._free) == MAX_SLOTS


def test_an_identity_model_copies_nothing_in_its_process(open_model: Open) -> None:
    execution = open_model(IDENTITY).execution(0)
    arrays = execution.batch_arrays({"x": rows_of(0)}, 3)
    arrays["x"][:] = rows_of(1, 2, 3)
    results = execution.run_members(arrays, [member(), member(), member()])
    arrays["x"][1, 0] = 50  # the output is a view of the same memory
    assert [result["y"][0, 0] for result in results] == [1, 50, 3]  # type: ignore[call-overload, index]


@pytest.mark.parametrize(
    ("action", "cause"), [(1, "killed by SIGKILL: is there enough memory?"), (2, "it ended with status 3")]
)
def test_a_death_fails_its_batch_and_the_next_process_serves(open_model: Open, action: int, cause: str) -> None:
    model = open_model(ACTIONS)
    execution = model.execution(0)
    with pytest.raises(BatchLost) as lost:
        run(execution, rows_of(0, action), [member(), member()])
    assert str(lost.value).endswith(f"which is not run again: {cause}")
    execution.wait_ready(lambda: False, lambda: None)
    assert run(execution, rows_of(0), [member()])[0]["y"].tolist() == rows_of(0).tolist()
    assert model.process_status.restarts == 1


def test_a_batch_of_sequences_runs_in_the_process_with_their_state_only(open_model: Open) -> None:
    execution = open_model(ACTIONS, limit_s=20.0).execution(0)
    assert not execution.renew_state()
    inputs = rows_of(0)
    assert len(run(execution, inputs, [member()])) == 1
    instance = execution.process
    dead = instance.connection
    assert dead is not None
    dead.child.kill("by the test")
    dead.child.ended.wait()
    until(lambda: instance.connection is not None)
    with pytest.raises(BatchLost, match="the state of its sequences with it"):
        run(execution, inputs, [member()])
    assert execution.renew_state()
    # The memory of the refused batch was not taken: the new process would wait for it.
    assert len(run(execution, inputs, [member()])) == 1
    assert not execution.renew_state()


def test_the_text_of_an_exception_stays_in_the_log(acting: PythonExecution, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelFailed, match="see the server log for the cause") as failure:
        run(acting, rows_of(3), [member()])
    assert "secret" not in str(failure.value)
    assert "ValueError: a secret of the model" in caplog.text
    assert failure.value.reference in caplog.text
    assert run(acting, rows_of(0), [member()])[0]["y"].shape == (1, 4)


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (5, "the model returned 0 responses for 2 requests"),
        (6, "the model returned nothing for 2 requests"),
        (7, "the model returned str in its list of responses"),
        (9, "for the client"),
    ],
)
def test_a_wrong_result_fails_the_batch_with_its_reason(acting: PythonExecution, action: int, text: str) -> None:
    with pytest.raises(ModelFailed, match=text):
        run(acting, rows_of(action, 0), [member(), member()])


def test_an_output_of_another_datatype_fails_its_member(acting: PythonExecution) -> None:
    first, second = run(acting, rows_of(8, 0), [member(), member()])
    assert isinstance(first, ModelFailed)
    assert "returned output 'y' as FP64, its configuration declares FP32" in str(first)
    assert isinstance(second, dict)


def test_members_may_have_outputs_of_different_shapes(acting: PythonExecution) -> None:
    first, second = run(acting, rows_of(10, 0), [member(), member()])
    assert (first["y"].shape, second["y"].shape) == ((1, 1), (1, 4))


def test_output_goes_to_the_log_with_the_name_of_the_instance(
    open_model: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    execution = open_model(ACTIONS).execution(0)
    run(execution, rows_of(11), [member()])
    until(lambda: "m#0: a line from m_0" in caplog.text and "m#0: an error line" in caplog.text)


def test_a_traceback_that_a_model_prints_is_an_error_of_the_log(
    open_model: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    open_model(
        IDENTITY + "    def finalize(self):\n        print('bye', flush=True)\n        raise ValueError('late')\n"
    ).close()
    lines = [
        (record.levelno, record.getMessage().partition(": ")[2])
        for record in caplog.records
        if "m#" in record.getMessage()
    ]
    (start,) = [number for number, (_, text) in enumerate(lines) if text.startswith("Traceback")]
    assert lines[start - 1] == (logging.INFO, "bye")
    assert {level for level, _ in lines[start:]} == {logging.ERROR}
    assert lines[-1] == (logging.ERROR, "ValueError: late")


def test_a_batch_above_the_memory_limit_fails_alone(open_model: Open) -> None:
    execution = open_model(ACTIONS, memory_bytes=1 << 30).execution(0)
    with pytest.raises(HeadraceError):
        run(execution, rows_of(12), [member()])
    assert run(execution, rows_of(0), [member()])[0]["y"].shape == (1, 4)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("x = 1\n", "has no model"),
        ("1 +\n", "SyntaxError"),
        (
            "import nothing_of_that_name\n",
            "ModuleNotFoundError: No module named 'nothing_of_that_name' (name the package of ",
        ),
        ("import json\njson.loads('{')\n", "(char 1), in decoder.py:"),
        (
            IDENTITY + "    def initialize(self, args):\n        raise KeyError('weights')\n",
            "initialize raised KeyError",
        ),
        (IDENTITY + "    def initialize(self, args):\n        sys.exit(4)\n", "initialize raised SystemExit: 4"),
        ("os.kill(os.getpid(), 9)\n", "its process died while it loaded the model: killed by SIGKILL"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_with_its_reason(open_model: Open, code: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_model(code)
    assert text in str(refused.value)


def test_the_line_of_an_error_in_the_file_is_named(open_model: Open) -> None:
    with pytest.raises(ConfigError) as refused:
        open_model("\n\nraise ValueError('here')\n")
    (finding,) = refused.value.findings
    assert (finding.path, finding.line) == ("m/1/model.py", 6)


def test_finalize_runs_at_the_end(open_model: Open, tmp_path: Path) -> None:
    marker = tmp_path / "finalized"
    model = open_model(IDENTITY + f"    def finalize(self):\n        open({str(marker)!r}, 'w').close()\n")
    model.close()
    assert marker.exists()


def test_a_model_may_import_files_beside_it(open_model: Open, tmp_path: Path) -> None:
    (tmp_path / "m0" / "1").mkdir(parents=True)
    (tmp_path / "m0" / "1" / "beside.py").write_text("FACTOR = 2\n")
    (tmp_path / "m0" / "shared.py").write_text("BONUS = 1\n")
    code = "from beside import FACTOR\nfrom shared import BONUS\nfrom . import beside\n" + IDENTITY
    execution = open_model(code).execution(0)
    assert run(execution, rows_of(0), [member()])[0]["y"].shape == (1, 4)


def test_signals_of_the_service_do_not_end_a_process_but_those_that_the_code_starts(open_model: Open) -> None:
    code = """
import multiprocessing, signal

class TritonPythonModel:
    def execute(self, requests):
        os.kill(os.getpid(), signal.SIGTERM)
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        time.sleep(0.3)
        worker.terminate()
        worker.join(60)
        x = np.full((1, 4), worker.exitcode, np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])]
"""
    execution = open_model(code).execution(0)
    assert run(execution, rows_of(0), [member()])[0]["y"][0, 0] == -signal.SIGTERM


def test_processes_that_the_code_has_started_end_with_it(open_model: Open, tmp_path: Path) -> None:
    code = f"""
import subprocess

class TritonPythonModel:
    def execute(self, requests):
        worker = subprocess.Popen(["sleep", "60"])
        open({str(tmp_path / "worker")!r}, "w").write(str(worker.pid))
        os.kill(os.getpid(), 9)
"""
    execution = open_model(code).execution(0)
    with pytest.raises(BatchLost):
        run(execution, rows_of(0), [member()])
    pid = int((tmp_path / "worker").read_text())
    until(lambda: not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text())


def test_a_process_that_holds_a_socket_of_a_dead_one_delays_nothing(open_model: Open) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        if os.fork() == 0:
            os.setsid()
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), 9)
"""
    execution = open_model(code).execution(0)
    started = time.monotonic()
    with pytest.raises(BatchLost, match="SIGKILL"):
        run(execution, rows_of(0), [member()])
    assert time.monotonic() - started < 10


def test_the_descriptors_of_a_dead_process_are_closed_without_the_collector(open_model: Open) -> None:
    execution = open_model(ACTIONS).execution(0)
    counts = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(BatchLost):
                run(execution, rows_of(1), [member()])
            run(execution, rows_of(0), [member()])
            counts.append(len(os.listdir("/proc/self/fd")))
    finally:
        gc.enable()
    assert counts[1:] == counts[:1] * 2


def test_a_model_that_hangs_while_it_finalizes_is_killed(open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CLOSE_GRACE_S", 0.3)
    model = open_model(IDENTITY + "    def finalize(self):\n        time.sleep(60)\n")
    started = time.monotonic()
    model.close()
    assert time.monotonic() - started < 10


def test_a_model_that_hangs_while_it_initializes_is_killed_and_refused(
    open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LOAD_LIMIT_S", 1.0)
    started = time.monotonic()
    with pytest.raises(ConfigError, match="it did not load the model within 1 s"):
        open_model(IDENTITY + "    def initialize(self, args):\n        time.sleep(60)\n")
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("end", ["sys.exit(5)", "raise ValueError('late')", "os._exit(6)", "os.kill(os.getpid(), 9)"])
def test_a_model_may_end_in_any_way_while_it_finalizes(
    open_model: Open, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    caplog.set_level(logging.INFO)
    model = open_model(IDENTITY + f"    def finalize(self):\n        {end}\n")
    model.close()
    assert "has died" not in caplog.text
    assert ("SystemExit: 5" in caplog.text) == ("exit(5)" in end)


def test_a_model_that_fails_in_one_instance_is_not_loaded(open_model: Open) -> None:
    code = IDENTITY + (
        "    def initialize(self, args):\n"
        "        if args['model_instance_name'] == 'm_0':\n"
        "            raise ValueError('no device')\n"
        "        time.sleep(60)\n"
    )
    started = time.monotonic()
    with pytest.raises(ConfigError, match="no device"):
        open_model(code, instances=2)
    assert time.monotonic() - started < 20


def test_later_restarts_pause_and_refuse_requests(open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PAUSES_S", (0.0, 600.0))
    model = open_model(ACTIONS)
    execution = model.execution(0)
    for _ in range(2):
        with pytest.raises(BatchLost):
            run(execution, rows_of(1), [member()])
    execution.wait_ready(lambda: False, lambda: None)  # returns, since the model refuses
    with pytest.raises(Unavailable, match="has died and is being started again"):
        run(execution, rows_of(0), [member()])
    assert model.process_status.refusal
    assert not model.process_status.up


def test_a_dead_supervisor_thread_ends_the_instance(open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    execution = open_model(ACTIONS).execution(0)

    def broken(*_arguments: object) -> float:
        raise SystemError("the supervisor's own fault")

    monkeypatch.setattr(supervisor.ProcessSupervisor, "_record_end", broken)
    with pytest.raises(BatchLost):
        run(execution, rows_of(1), [member()])
    execution.wait_ready(
        lambda: False, lambda: None
    )  # returns, so that the instance runs the next batch, which ends it
    with pytest.raises(ExecutionLost):
        run(execution, rows_of(0), [member()])


def test_a_process_that_sends_garbage_on_its_control_socket_is_replaced(open_model: Open) -> None:
    """The second message is garbage: it is read without a further read of the socket."""
    code = """
import struct

class TritonPythonModel:
    def execute(self, requests):
        if requests[0].inputs()[0].as_numpy()[0, 0] == 1:
            (control,) = [cell.cell_contents for cell in pb_utils.runtime.send.__closure__ if hasattr(cell.cell_contents, "end")]
            garbage = b"[" * 50_000
            control.end.sendall(struct.pack("<I", 2) + b"{}" + struct.pack("<I", len(garbage)) + garbage)
            time.sleep(60)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
    execution = open_model(code).execution(0)
    with pytest.raises(BatchLost):
        run(execution, rows_of(1), [member()])
    assert run(execution, rows_of(0), [member()])[0]["y"].shape == (1, 4)


def test_a_cancelled_task_in_the_model_fails_its_batch_only(open_model: Open) -> None:
    code = """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        if requests[0].inputs()[0].as_numpy()[0, 0] == 1:
            raise asyncio.CancelledError
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
    model = open_model(code)
    execution = model.execution(0)
    with pytest.raises(ModelFailed):
        run(execution, rows_of(1), [member()])
    assert run(execution, rows_of(0), [member()])[0]["y"].shape == (1, 4)
    assert model.process_status.restarts == 0


# Answers with a frame of its own making to a request whose first value is not 0; CRAFTED has the statements that send it.
HOSTILE = """
import struct
from headrace_model import protocol
from headrace_model.protocol import ALL_MEMBERS, COUNT, DONE, FAILED, HEADER, OUTPUT, SPILL, SPILLED, dims_struct


def answer(server, batch, slot, records=(), number=0, kind=DONE, count=1, flags=0, codes=bytes(1)):
    body = codes + COUNT.pack(len(records)) + b"".join(records)
    server._frames.send(kind, slot, number or batch, count, body, flags)


def output(offset, size, shape=(1, 4), code=11, index=0):
    return OUTPUT.pack(ALL_MEMBERS, index, code, len(shape), 0, offset, size) + dims_struct(len(shape)).pack(*shape)


class TritonPythonModel:
    def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        if x[0, 0] == 0:
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])]
        frame = sys._getframe()
        while type(frame.f_locals.get("self")).__name__ != "ModelServer":
            frame = frame.f_back
        server, batch, file = frame.f_locals["self"], requests[0]._batch, requests[0]._slot.fd
        CRAFTED
        time.sleep(60)
"""


# `test_outputs` has every frame that does not follow the protocol.
@pytest.mark.parametrize(
    "crafted",
    [
        "os.ftruncate(file, 1 << 62); answer(server, batch, 0, [output(1 << 61, 16)])",
        "os.ftruncate(file, 1 << 40); answer(server, batch, 0, [output(4096, 1 << 39, (1 << 35, 4))])",
        "answer(server, batch, 0, number=batch + 1)",
        "answer(server, batch, 3)",
        "answer(server, batch, 0, kind=protocol.RUN)",
        "server._frames.end.send(bytes(5))",
        "server._frames.end.send(bytes(40_000))",
        "server._frames.end.close()",
    ],
)
def test_a_process_that_answers_against_the_protocol_is_replaced(
    open_model: Open, crafted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_CLOSED_S", 0.2)
    model = open_model(HOSTILE.replace("CRAFTED", crafted))
    execution = model.execution(0)
    with pytest.raises(BatchLost):
        run(execution, rows_of(1), [member()])
    assert run(execution, rows_of(0), [member()])[0]["y"].tolist() == rows_of(0).tolist()
    assert model.process_status.restarts == 1


def test_an_answer_that_was_sent_twice_never_reaches_the_next_request(open_model: Open) -> None:
    """The second answer is in the socket before the next batch is sent."""
    crafted = (
        "answer(server, batch, 0, [output(4096, 16)]); answer(server, batch, 0, [output(4096, 16)]); time.sleep(60)"
    )
    model = open_model(HOSTILE.replace("CRAFTED", crafted))
    execution = model.execution(0)
    assert run(execution, rows_of(1), [member()])[0]["y"].tolist() == rows_of(1).tolist()
    with pytest.raises(BatchLost):
        run(execution, rows_of(0), [member()])
    assert run(execution, rows_of(0), [member()])[0]["y"].tolist() == rows_of(0).tolist()


def test_slots_are_free_again_after_batches_that_were_lost(open_model: Open) -> None:
    execution = open_model(ACTIONS, limit_s=0.2).execution(0)
    for action in (1, 4, 3, 5):
        with pytest.raises(HeadraceError):
            run(execution, rows_of(action), [member()])
    for _ in range(20):
        run(execution, rows_of(0), [member()])
    gc.collect()
    connection = execution.process.connection
    assert connection is not None
    assert len(connection.slots._slots) <= 2
