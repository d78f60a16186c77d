"""Decoupled Python models for tests: the subjects of the examples of Triton's python_backend, in our own words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace.core.completion import Mailbox
from headrace.core.request import InferRequest
from headrace.core.response_stream import MAX_RESPONSE_BYTES, MAX_RESPONSES, ResponseStream
from headrace.core.tensor import BY_NAME, Array, ModelSpec, TensorSpec
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy
from headrace.observability.counters import Recorder
from headrace.python.backend import PythonBackend, PythonModel
from headrace.python.environments import own_interpreter
from headrace.python.outputs import ModelTensors
from headrace.python.process import ProcessOptions
from headrace.python.python_models import program_command
from headrace_model import protocol

from tests.support.python_models import load_order

HEAD = """
import gc, json, os, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def value(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

def answer(*values, **parameters):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(values, np.int32))], parameters=parameters or None)
"""

REPEAT_CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: True }
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
        { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
# Sends each element of IN as a response, DELAY milliseconds after the one before, from a thread; `execute` returns after
# WAIT milliseconds. `finalize` waits for all threads.
REPEAT = (
    HEAD
    + """
class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        if not pb_utils.using_decoupled_model_transaction_policy(config):
            raise pb_utils.TritonModelException("this model needs decoupled: true")
        self.running = 0
        self.changed = threading.Condition()

    def execute(self, requests):
        for request in requests:
            with self.changed:
                self.running += 1
            arrays = [value(request, name) for name in ("IN", "DELAY")]
            threading.Thread(target=self.repeat, args=(request.get_response_sender(), *arrays), daemon=True).start()
            time.sleep(int(value(request, "WAIT")[0]) / 1000)
        return None

    def repeat(self, sender, values, delays):
        for index, (element, delay) in enumerate(zip(values, delays)):
            time.sleep(int(delay) / 1000)
            tensors = [pb_utils.Tensor("OUT", np.array([element], np.int32)),
                       pb_utils.Tensor("IDX", np.array([index], np.uint32))]
            sender.send(pb_utils.InferenceResponse(tensors))
        sender.send(flags=FINAL)
        with self.changed:
            self.running -= 1
            self.changed.notify_all()

    def finalize(self):
        with self.changed:
            self.changed.wait_for(lambda: not self.running)
        print("all threads of repeat have ended")
"""
)

SQUARE_CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: True }
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
# Sends the number IN as many times as it says, from a thread for each request: none for 0.
SQUARE = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            args = request.get_response_sender(), value(request, "IN")
            threading.Thread(target=self.square, args=args, daemon=True).start()
        return None

    def square(self, sender, number):
        for _ in range(int(number[0])):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", number)]))
        sender.send(flags=FINAL)
"""
)


def decoupled_spec(inputs: Mapping[str, str], batched: bool = False, decoupled: bool = True) -> ModelSpec:
    """Return the spec of a model with the given inputs (name: datatype), vectors of any size, and the output OUT."""
    batch = (-1,) if batched else ()
    tensors = {name: TensorSpec(name, BY_NAME[datatype], (*batch, -1)) for name, datatype in inputs.items()}
    outputs = {"OUT": TensorSpec("OUT", BY_NAME["INT32"], (*batch, -1))}
    return ModelSpec("m", "1", "python", tensors, outputs, 8 if batched else 0, decoupled=decoupled)


def open_decoupled(
    folder: Path,
    code: str,
    spec: ModelSpec,
    *,
    max_open: int = 256,
    limit_s: float = 60.0,
    bounds: tuple[int, int] = (MAX_RESPONSES, MAX_RESPONSE_BYTES),
) -> PythonModel:
    """Start the process of a model with one instance.

    Args:
        folder: an empty folder.
        code: its model.py, after `HEAD`.
        spec: its tensors.
        max_open: open requests, above which the instance takes no further batch.
        limit_s: limit of a batch in seconds.
        bounds: number and bytes of the responses of a request that the process may send ahead.
    """
    file = folder / "1" / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text(HEAD + code if HEAD not in code else code)

    def codes(tensors: Mapping[str, TensorSpec]) -> tuple[tuple[str, int], ...]:
        return tuple((tensor.name, protocol.CODES[tensor.datatype.name]) for tensor in tensors.values())

    tensors = ModelTensors(
        "m", codes(spec.inputs), codes(spec.outputs), spec.max_batch_size > 0, spec.decoupled, max_open
    )
    responses = {"decoupled": spec.decoupled, "count": bounds[0], "bytes": bounds[1]}
    config = '{"model_transaction_policy": {"decoupled": true}}' if spec.decoupled else "{}"
    order = load_order(file, tensors.inputs, tensors.outputs, responses=responses, model_config=config)
    options = ProcessOptions(program_command(own_interpreter()), order, limit_s, 1 << 12)
    return PythonBackend(tensors, lambda _index: options).load(file, 1, {})


def decoupled_handle(
    mailbox: Mailbox, model: PythonModel, spec: ModelSpec, recorder: Recorder | None = None
) -> ModelHandle:
    """Return a started handle on a Python model; owns the model."""
    policy = HandlePolicy(batch=BatchPolicy(max(spec.max_batch_size, 1)), by_member=True)
    handle = ModelHandle(spec, policy, model, mailbox, recorder or Recorder())
    handle.start()
    return handle


def stream_request(
    mailbox: Mailbox, inputs: Mapping[str, Array], rows: int = 1, **fields: object
) -> tuple[InferRequest, ResponseStream]:
    """Return a request with a stream, and the stream."""
    stream = ResponseStream(mailbox)
    request = InferRequest(
        inputs=dict(inputs),
        rows=rows,
        shape_key=None,
        received_ns=1,
        responses=stream,
        **fields,  # type: ignore[arg-type]
    )
    return request, stream


# Does what IN says, in threads: pairs of an action and a number.
ACTIONS = """
class TritonPythonModel:
    def initialize(self, args):
        self.sent = self.cancelled = 0
        self.kept = []
        self.errors = []
        self.gate = threading.Event()

    def execute(self, requests):
        for request in requests:
            action, number = (int(element) for element in value(request, "IN").reshape(-1)[:2])
            if action == 20:
                raise ValueError("a secret of the model")
            if action == 21:
                return [answer(1)] * len(requests)
            if action in (22, 23, 24):
                self.act(request, request.get_response_sender(), action - 20, number)
            elif action:
                args = request, request.get_response_sender(), action, number
                threading.Thread(target=self.act, args=args, daemon=True).start()
        return None

    def act(self, request, sender, action, number):
        if action == 1:  # counts up to number
            self.count(sender, number)
            sender.send(flags=FINAL)
        elif action == 2:  # the last response has the flag
            self.count(sender, number - 1)
            sender.send(answer(number - 1, last=True), flags=FINAL)
        elif action == 3:  # an error in the middle
            self.count(sender, number)
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("after %d" % number, 3)))
            sender.send(answer(99), flags=FINAL)
        elif action == 4:  # no final flag
            self.count(sender, number)
        elif action == 5:  # the process ends
            self.count(sender, number)
            os.kill(os.getpid(), 9)
        elif action == 6:  # until it is cancelled
            self.count(sender, number)
            while not (sender.is_cancelled() and request.is_cancelled()):
                time.sleep(0.001)
            self.cancelled += 1
            sender.send(answer(1))
            sender.send(flags=FINAL)
        elif action == 7:  # the state of the model
            threads = sum("responses" in thread.name for thread in threading.enumerate())
            sender.send(answer(self.sent, self.cancelled, len(self.errors), threads, errors=" ".join(self.errors)), flags=FINAL)
        elif action == 8:  # after the final flag
            sender.send(answer(1), flags=FINAL)
            for flags in (0, FINAL):
                try:
                    sender.send(answer(2), flags)
                except pb_utils.TritonModelException as error:
                    self.errors.append(str(error))
        elif action == 9:  # four threads
            def count(start):
                for element in range(number):
                    sender.send(answer(start + element))
            threads = [threading.Thread(target=count, args=(start * 1000,)) for start in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            sender.send(flags=FINAL)
        elif action == 10:  # its input, once the gate is open
            self.gate.wait()
            sender.send(answer(*value(request, "IN").reshape(-1)), flags=FINAL)
        elif action == 11:
            self.gate.set()
            sender.send(flags=FINAL)
        elif action == 12:  # large responses
            for element in range(4):
                sender.send(answer(*[element] * number))
                self.sent += 1
            sender.send(flags=FINAL)
        elif action == 13:  # of another datatype
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.float32))]))
            sender.send(answer(1), flags=FINAL)
        elif action == 14:  # without the output
            sender.send(pb_utils.InferenceResponse([]), flags=FINAL)
        elif action == 15:  # kept
            self.kept.append(sender)
            sender.send(answer(1))
        elif action == 16:  # ends those that are kept
            for other in self.kept:
                other.send(flags=FINAL)
            self.kept.clear()
            sender.send(flags=FINAL)

    def count(self, sender, number):
        for element in range(number):
            sender.send(answer(element))
            self.sent += 1
"""

ACTIONS_CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: True }
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] } ]
"""

# Sum of the responses of `square`: called once and waited for, or twice at once. Sums are INT64, NumPy's default, where the
# configuration has INT32.
SUM_CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
SUM_ONCE = (
    HEAD
    + """
def square(number):
    number = pb_utils.Tensor("IN", number)
    return pb_utils.InferenceRequest(model_name="square", inputs=[number], requested_output_names=["OUT"])

def total(responses):
    total = np.array([0])
    for response in responses:
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        total += pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()
    return total

class TritonPythonModel:
    def execute(self, requests):
        sums = [total(square(value(request, "IN")).exec(decoupled=True)) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SUM", sum)]) for sum in sums]
"""
)
SUM_TWICE = (
    SUM_ONCE.partition("class ")[0]
    + """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        (request,) = requests
        calls = [square(value(request, "IN")).async_exec(decoupled=True) for _ in range(2)]
        sums = [total(responses) for responses in await asyncio.gather(*calls)]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SUM", sum(sums))])]
"""
)

# Calls MODEL with IN, COUNT times, and drops each iterator after TAKE responses; returns their elements, and the errors' texts.
CALLER = (
    HEAD
    + """
class TritonPythonModel:
    async def execute(self, requests):
        return [await self.call(request) for request in requests]

    async def call(self, request):
        name, (count, take) = value(request, "MODEL")[0].decode(), value(request, "COUNT_TAKE")
        found, errors = [], []
        for number in range(count):
            call = pb_utils.InferenceRequest(
                model_name=name, inputs=[pb_utils.Tensor("IN", value(request, "IN"))], requested_output_names=["OUT"]
            )
            responses = await call.async_exec(decoupled=True) if number % 2 else call.exec(decoupled=True)
            assert isinstance(responses, pb_utils.ResponseIterator)
            for index, response in enumerate(responses):
                if response.has_error():
                    errors.append(f"{response.error().code()} {response.error().message()}")
                else:
                    found.append(response.output_tensors()[0].as_numpy())
                if index + 1 == take:
                    break
        out = np.concatenate([np.zeros(0, np.int32), *found])
        texts = np.array(errors, dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out), pb_utils.Tensor("ERRORS", texts)])
"""
)
CALLER_CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "MODEL" data_type: TYPE_STRING dims: [ 1 ] }, { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] },
        { name: "COUNT_TAKE" data_type: TYPE_INT32 dims: [ 2 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "ERRORS" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
