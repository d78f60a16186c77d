"""Iterative models for tests: a counter that sends a number with each step, and one with a single response after all steps."""

from __future__ import annotations

from pathlib import Path

from tests.support.python_models import add_python_model
from tests.support.sequence_models import controls

# Sends COUNT - 1, ... 1, 0, one with each step, as Triton's test of iterative sequences. A parameter changes it: `step_ms` is the
# time of a batch, `fail_at` a number that fails, `raise_at` one that fails its whole batch, `kill_at` the process, `pad` bytes.
# The state is found by the correlation id; a step of a state that is another's fails an assertion.
COUNTER = """
import json
import os
import time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
AGAIN = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

class TritonPythonModel:
    def initialize(self, args):
        self.states = {}
        self.is_decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))

    def execute(self, requests):
        time.sleep(max(json.loads(request.parameters()).get("step_ms", 0) for request in requests) / 1000)
        for identity in [i for i, (sender, _, _) in self.states.items() if sender and sender.is_cancelled()]:
            print("counter: cancelled", flush=True)
            del self.states[identity]
        return [self.step(request, len(requests)) for request in requests]

    def step(self, request, batch):
        options = json.loads(request.parameters())
        count, start, end, corrid = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0, 0]
            for name in ("COUNT", "START", "END", "CORRID")
        )
        corrid = corrid.decode() if isinstance(corrid, bytes) else int(corrid)
        assert corrid == request.correlation_id() and request.flags() == int(start) and not end
        sender = request.get_response_sender() if self.is_decoupled else None
        if start:
            self.states[corrid] = sender, int(count), request.request_id()
        sender, left, request_id = self.states[corrid]
        assert request_id == request.request_id()
        left -= 1
        if left == options.get("kill_at"):
            os.kill(os.getpid(), 9)
        if left == options.get("raise_at"):
            raise pb_utils.TritonModelException("the batch failed")
        error = None
        if left == options.get("fail_at"):
            error = pb_utils.TritonError("number %d failed" % left, pb_utils.TritonError.INVALID_ARG)
        is_last = left == 0 or error is not None
        response = None
        if sender is not None or is_last:
            tensors = [
                pb_utils.Tensor("NUMBER", np.array([[left]], np.int32)),
                pb_utils.Tensor("BATCH", np.array([[batch]], np.int32)),
                pb_utils.Tensor("PAD", np.array([[b"x" * options.get("pad", 0)]], object)),
            ]
            response = pb_utils.InferenceResponse(tensors, error)
        if sender is not None:
            sender.send(response, flags=FINAL if is_last else 0)
        if is_last:
            del self.states[corrid]
            return None if sender is not None else response
        self.states[corrid] = sender, left, request_id
        request.set_release_flags(AGAIN)
        return None
"""


def counter_config(
    strategy: str = "oldest { max_candidate_sequences: 8 }",
    id_type: str = "TYPE_UINT64",
    is_decoupled: bool = True,
    batch: int = 8,
    more: str = "",
) -> str:
    """Return the configuration of the counter."""
    return f"""
backend: "python"
max_batch_size: {batch}
model_transaction_policy {{ decoupled: {str(is_decoupled).lower()} }}
input [ {{ name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] }}, {{ name: "BATCH" data_type: TYPE_INT32 dims: [ 1 ] }},
         {{ name: "PAD" data_type: TYPE_STRING dims: [ 1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
sequence_batching {{ iterative_sequence: true {strategy} {controls(id_type)} }}
{more}
"""


def add_counter(repository: Path, name: str, **options: object) -> Path:
    """Write a counter, and return its folder; options as in `counter_config`."""
    return add_python_model(repository, name, COUNTER, counter_config(**options))  # type: ignore[arg-type]
