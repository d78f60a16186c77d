"""Python models for tests: the subjects of the examples of Triton's python_backend, in our own words, and our own form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from headrace_model import protocol

ADD_SUB_CONFIG = """
backend: "python"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""

ADD_SUB = """
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.dtypes = [
            pb_utils.triton_string_to_numpy(pb_utils.get_output_config_by_name(config, name)["data_type"])
            for name in ("OUTPUT0", "OUTPUT1")
        ]

    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1"))
            outputs = [
                pb_utils.Tensor("OUTPUT0", (a + b).astype(self.dtypes[0])),
                pb_utils.Tensor("OUTPUT1", (a - b).astype(self.dtypes[1])),
            ]
            responses.append(pb_utils.InferenceResponse(output_tensors=outputs))
        return responses

    def finalize(self):
        print("cleaning up")
"""

_AUTO_COMPLETE = """
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        config = auto_complete_model_config.as_dict()
        present = [tensor["name"] for tensor in config["input"] + config["output"]]
        for name in ("INPUT0", "INPUT1"):
            if name not in present:
                auto_complete_model_config.add_input({"name": name, "data_type": "TYPE_FP32", "dims": [4]})
        for name in ("OUTPUT0", "OUTPUT1"):
            if name not in present:
                auto_complete_model_config.add_output({"name": name, "data_type": "TYPE_FP32", "dims": [4]})
        BATCHING
        return auto_complete_model_config
"""
_BATCHING = "auto_complete_model_config.set_max_batch_size(4); auto_complete_model_config.set_dynamic_batching()"
# Takes a second for each request, and queues one more.
NAPPING = """
import time

class Napping:
    def predict(self, batch):
        time.sleep(1)
        return {"Y": batch["X"]}
"""
NAPPING_CONFIG = """
backend: python
max_batch_size: 1
input: [{name: X, data_type: TYPE_FP32, dims: [16]}]
output: [{name: Y, data_type: TYPE_FP32, dims: [16]}]
dynamic_batching: {default_queue_policy: {max_queue_size: 1}}
"""


def _auto_complete(batching: str) -> str:
    return ADD_SUB.replace("    def initialize", _AUTO_COMPLETE.replace("BATCHING", batching) + "\n    def initialize")


AUTO_COMPLETE_BATCH = _auto_complete(_BATCHING)
AUTO_COMPLETE_NOBATCH = _auto_complete("auto_complete_model_config.set_max_batch_size(0)")

# Answers with one error for each code of TritonError; the input is the number of the code, 0 for no error.
ERRORS_CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "CODE" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "ECHO" data_type: TYPE_INT32 dims: [ 1 ] } ]
dynamic_batching { max_queue_delay_microseconds: 50000 }
"""
ERRORS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            code = request.inputs()[0].as_numpy()
            number = int(code[0, 0])
            if number == 99:
                raise RuntimeError("a secret of the model")
            error = pb_utils.TritonError("error number %d" % number, number) if number >= 0 else None
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("ECHO", code)], error))
        return responses
"""

# Returns the code of the error that a call of `errors` has.
CODES_CONFIG = """
backend: "python"
input [ { name: "CODE" data_type: TYPE_INT32 dims: [ 1, 1 ] } ]
output [ { name: "RECEIVED" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
CODES = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        calls = [pb_utils.InferenceRequest(model_name="errors", inputs=request.inputs()) for request in requests]
        codes = [call.exec().error().code() for call in calls]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("RECEIVED", np.array([int(code)]))]) for code in codes]
"""

INSTANCE_KIND_CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "FACTS" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
INSTANCE_KIND = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        responses = []
        for request in requests:
            facts = [
                self.args["model_instance_kind"], self.args["model_instance_device_id"], self.args["model_name"],
                self.args["model_version"], self.args["model_repository"], pb_utils.get_model_dir(),
                request.request_id(), request.parameters(), ",".join(request.requested_output_names()),
            ]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("FACTS", np.array(facts, dtype=np.object_))]))
        return responses
"""

OWN_FUNCTION = """
from headrace_model import Tensor, model

@model(max_batch_size=16)
def add(a: Tensor["fp32", 4], b: Tensor["fp32", 4]) -> {"sum": Tensor["fp32", 4], "rows": Tensor["int64", 1]}:
    rows = a[:, :1] * 0 + len(a)
    return {"sum": a + b, "rows": rows.astype("int64")}
"""

OWN_CLASS = """
class Words:
    def load(self, context):
        self.name = context.name

    def predict(self, batch):
        texts = [text.decode().upper() + self.name for text in batch["text"].reshape(-1)]
        import numpy as np
        return {"upper": np.array(texts, dtype=object).reshape(batch["text"].shape)}
"""
OWN_CLASS_CONFIG = """
max_batch_size: 8
input: [{name: text, data_type: string, dims: [1]}]
output: [{name: upper, data_type: string, dims: [1]}]
"""

DECOUPLED = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_model_transaction_policy({"decoupled": True})
        config.add_input({"name": "IN", "data_type": "TYPE_INT32", "dims": [1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]})
        return config

    def execute(self, requests):
        for request in requests:
            number = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            sender = request.get_response_sender()
            for _ in range(int(number[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", number)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def add_python_model(repository: Path, name: str, code: str, config: str = "") -> Path:
    """Write a Python model with one version, and return its folder.

    Args:
        repository: folder of models.
        name: name of the model.
        code: text of model.py.
        config: text of config.pbtxt, or of config.yaml if it has no "backend:" in the text format; "" for no file.
    """
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(code, encoding="utf-8")
    if config:
        suffix = "pbtxt" if 'backend: "' in config else "yaml"
        (folder / f"config.{suffix}").write_text(config, encoding="utf-8")
    return folder


BLS_CONFIG = """
backend: "python"
input [ { name: "MODEL" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""

BLS_SYNC = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            model = pb_utils.get_input_tensor_by_name(request, "MODEL").as_numpy()[0].decode()
            call = pb_utils.InferenceRequest(
                model_name=model,
                requested_output_names=["OUTPUT0", "OUTPUT1"],
                inputs=request.inputs()[1:] if model != "bls_sync" else request.inputs(),
                timeout=int(request.request_id() or 0),
            )
            response = call.exec()
            if response.has_error():
                error = response.error()
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(error.message(), error.code())))
            else:
                responses.append(pb_utils.InferenceResponse(response.output_tensors()))
        return responses
"""

BLS_ASYNC = """
import asyncio
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for request in requests:
            model = pb_utils.get_input_tensor_by_name(request, "MODEL").as_numpy()[0].decode()
            calls = [
                pb_utils.InferenceRequest(model_name=model, requested_output_names=[name], inputs=request.inputs()[1:])
                for name in ("OUTPUT0", "OUTPUT1")
            ]
            answers = await asyncio.gather(*[call.async_exec() for call in calls])
            for answer in answers:
                if answer.has_error():
                    raise pb_utils.TritonModelException(answer.error().message())
            tensors = [pb_utils.get_output_tensor_by_name(a, n) for a, n in zip(answers, ("OUTPUT0", "OUTPUT1"))]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""

# Loads, probes and unloads the model that it is given, and calls it in between.
BLS_CONTROL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            name = request.inputs()[0].as_numpy()[0].decode()
            states = [pb_utils.is_model_ready(name)]
            pb_utils.load_model(name)
            states.append(pb_utils.is_model_ready(name))
            pb_utils.unload_model(name)
            states.append(pb_utils.is_model_ready(name))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("STATES", np.array(states))]))
        return responses
"""
BLS_CONTROL_CONFIG = """
backend: "python"
input [ { name: "NAME" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "STATES" data_type: TYPE_BOOL dims: [ 3 ] } ]
"""

# Sleeps as many seconds as INPUT0 says.
SLEEPER = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = [tensor.as_numpy() for tensor in request.inputs()]
            time.sleep(float(a[0]))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", a), pb_utils.Tensor("OUTPUT1", b)]))
        return responses
"""
SLEEPER_CONFIG = ADD_SUB_CONFIG.replace("dims: [ 4 ]", "dims: [ -1 ]")

CUSTOM_METRICS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        requests = pb_utils.MetricFamily(
            name="example_requests", description="Requests that the model has served.", kind=pb_utils.MetricFamily.COUNTER
        )
        self.requests = requests.Metric(labels={"model_name": args["model_name"]})
        self.latest = pb_utils.MetricFamily("example_latest", "Latest input.", pb_utils.MetricFamily.GAUGE).Metric()
        sizes = pb_utils.MetricFamily("example_sizes", "Inputs.", pb_utils.MetricFamily.HISTOGRAM)
        self.sizes = sizes.Metric(buckets=[1, 10])

    def execute(self, requests):
        responses = []
        for request in requests:
            value = request.inputs()[0].as_numpy()
            self.requests.increment(1)
            self.latest.set(float(value[0]))
            self.sizes.observe(float(value[0]))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", value + self.requests.value())]))
        return responses
"""
CUSTOM_METRICS_CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""

# Calls the models of MODEL (separated by commas) one inside the other, after half a second.
BLS_RELAY = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            models, a, b = request.inputs()
            first, _, others = models.as_numpy()[0].decode().partition(",")
            time.sleep(float(request.request_id() or 0))
            inputs = [pb_utils.Tensor("MODEL", np.array([others], dtype=object))] if others else []
            call = pb_utils.InferenceRequest(
                model_name=first, requested_output_names=["OUTPUT0", "OUTPUT1"], inputs=[*inputs, a, b],
                request_id=request.request_id(), trace=request.trace(),
            )
            response = call.exec()
            if response.has_error():
                responses.append(pb_utils.InferenceResponse(error=response.error()))
            else:
                responses.append(pb_utils.InferenceResponse(response.output_tensors()))
        return responses
"""

# Waits until its request is cancelled, and prints that; at most 20 s.
WAITER = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        begun = time.monotonic()
        while not all(request.is_cancelled() for request in requests) and time.monotonic() - begun < 20:
            time.sleep(0.01)
        print("waiter: cancelled after %.2f s" % (time.monotonic() - begun))
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("nothing came", 4)) for _ in requests]
"""

# Makes as many calls as INPUT0 says, all at once, some of them in threads, and keeps all results until the end.
BLS_MANY = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        loop = asyncio.get_running_loop()
        responses = []
        for request in requests:
            model = request.inputs()[0].as_numpy()[0].decode()
            count, threads = int(request.inputs()[1].as_numpy()[0]), int(request.inputs()[2].as_numpy()[0])
            waits = []
            for number in range(count):
                a = pb_utils.Tensor("INPUT0", np.full(4, number, np.float32))
                b = pb_utils.Tensor("INPUT1", np.ones(4, np.float32))
                call = pb_utils.InferenceRequest(model_name=model, requested_output_names=["OUTPUT0"], inputs=[a, b])
                if number % 10 < threads:
                    waits.append(loop.run_in_executor(None, call.exec))
                else:
                    waits.append(call.async_exec())
            answers = await asyncio.gather(*waits)
            sums = np.array([answer.output_tensors()[0].as_numpy().mean() for answer in answers], np.float32)
            wrong = np.array([sum(value != number + 1 for number, value in enumerate(sums))], np.float32)
            outputs = [pb_utils.Tensor("OUTPUT0", sums), pb_utils.Tensor("OUTPUT1", wrong)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""

# Passes every argument of InferenceRequest, and returns what the called model has read and the error of a wrong call.
BLS_OPTIONS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.Tensor("X", np.zeros(1, np.float32))
            call = pb_utils.InferenceRequest(
                request_id="an id", correlation_id=0, requested_output_names=["FACTS"], model_name="instance_kind",
                model_version=1, inputs=[x], flags=0, timeout=0,
                preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 0),
                trace=request.trace(), parameters={"k": "v", "n": 3},
            )
            facts = [fact.decode() for fact in call.exec().output_tensors()[0].as_numpy()][-3:]
            errors = []
            for options in ({"model_version": 7}, {"requested_output_names": ["NONE"]}, {"model_name": "missing"}):
                error = pb_utils.InferenceRequest(**{"model_name": "instance_kind", "inputs": [x], **options}).exec().error()
                errors.append("%d %s" % (error.code(), error.message()))
            try:
                pb_utils.InferenceRequest(inputs=[x]).exec()
            except pb_utils.TritonModelException as error:
                errors.append(str(error))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("FACTS", np.array(facts + errors, dtype=object))]))
        return responses
"""

# Waits 0.2 s for a call of the model MODEL, then returns without it.
BLS_IMPATIENT = """
import asyncio
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for request in requests:
            model, a, b = request.inputs()
            name = model.as_numpy()[0].decode()
            call = pb_utils.InferenceRequest(model_name=name, requested_output_names=["OUTPUT0"], inputs=[a, b])
            try:
                await asyncio.wait_for(call.async_exec(), 0.2)
            except asyncio.TimeoutError:
                pass
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", a.as_numpy()),
                                                         pb_utils.Tensor("OUTPUT1", b.as_numpy())]))
        return responses
"""


def load_order(
    file: Path,
    inputs: Sequence[tuple[str, int]],
    outputs: Sequence[tuple[str, int]],
    memory_bytes: int = 0,
    responses: Mapping[str, object] = MappingProxyType({}),
    **args: str,
) -> Mapping[str, object]:
    """The order with which the process of an instance loads model `m`.

    Args:
        file: its `model.py`.
        inputs, outputs: name and datatype code of each tensor.
        memory_bytes: limit of its memory; 0 for none.
        responses: {"decoupled", "count", "bytes"} of a decoupled model.
        args: entries of `initialize`'s argument, besides the model's name and configuration.
    """
    return {
        "do": "load",
        "protocol": protocol.VERSION,
        "model": "m",
        "version": "1",
        "file": str(file),
        "form": "python",
        "config": {},
        "memory_bytes": memory_bytes,
        "responses": dict(responses),
        "inputs": [list(tensor) for tensor in inputs],
        "outputs": [list(tensor) for tensor in outputs],
        "args": {"model_name": "m", "model_config": "{}", **args},
    }


# Answers with its input while a file exists, and waits for it else.
_GATE = """
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        while not Path(%r).exists():
            time.sleep(0.005)
        tensors = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor)]) for tensor in tensors]
"""
_GATE_CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT64 dims: [ 1 ] } ]
parameters { key: "headrace.max_queue_wait_microseconds" value { string_value: "0" } }
"""


GATE_BODY = b'{"inputs": [{"name": "IN", "datatype": "INT64", "shape": [1], "data": [1]}]}'
"""A request for a `Gate` over HTTP."""


class Gate:
    """A model whose only instance holds a request for as long as a test wants: it is open at first.

    Args:
        repository: folder of models, into which it is written.
        name: name of the model.
        config: more of its configuration.
    """

    def __init__(self, repository: Path, name: str = "gate", config: str = "") -> None:
        self.repository = repository
        self._file = repository.parent / f"{name}.open"
        add_python_model(repository, name, _GATE % str(self._file), _GATE_CONFIG + config)
        self.open()

    def open(self) -> None:
        """Answer."""
        self._file.touch()

    def close(self) -> None:
        """Hold the next request."""
        self._file.unlink()
