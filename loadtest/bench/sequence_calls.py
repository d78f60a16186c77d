"""Requests of sequences beside stateless requests of the same model, in this process.

    python -m loadtest.bench.sequence_calls processor --seconds 4
    python -m loadtest.bench.sequence_calls throughput --seconds 4

No network: 32 callers on one event loop call a `ModelHandle` in a closed loop, each in a sequence of its own on one of 32 slots
(strategy "direct"). `processor` has a model that sleeps 1 ms for a batch: the processor time is that of the data plane and the
callers. `throughput` has a network of about 3 ms for 32 rows in ONNX Runtime, with the control inputs START and READY.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import headrace
import numpy as np
import uvloop
from headrace.core.completion import Mailbox
from headrace.core.request import InferRequest, SequenceFields
from headrace.core.tensor import BY_NAME, FP32, ModelSpec, TensorSpec
from headrace.observability.counters import Recorder
from headrace.scheduling.handle import ModelHandle
from headrace.scheduling.policy import BatchPolicy, ControlTensor, HandlePolicy, QueueLimits, SequencePolicy
from headrace.scheduling.sequences.directory import SequenceDirectory
from headrace.scheduling.sequences.handle import SequenceHandle
from onnx import TensorProto, helper

from loadtest.bench.clocked import Sleeping
from loadtest.bench.dataplane import Device
from loadtest.bench.inprocess import pinned
from loadtest.callers import Answered, Callers
from loadtest.onnx_models import onnx_model
from loadtest.protocol import Array
from loadtest.servers import ROOT

SLOTS = 32
_WARM_UP_S = 0.05
_STRETCHES = 40
_WIDTH = 768
_LAYERS = 6
_CONTROLS = """
sequence_batching {
  direct { }
  control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] },
                  { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } ] } ]
}
"""


class SequenceCallers(Callers):
    """Callers of which those with the same inputs, the same object, continue one sequence."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._sequences: dict[int, SequenceFields] = {}

    def _request(self, inputs: dict[str, Array]) -> InferRequest:
        request = super()._request(inputs)
        request.sequence = self._sequences.get(id(inputs))
        if request.sequence is None:
            number = len(self._sequences) + 1
            self._sequences[id(inputs)] = SequenceFields(number)
            request.sequence = SequenceFields(number, True)
        return request


def network(with_controls: bool) -> bytes:
    """Y = tanh of matrices of X, FP32 (batch, 16); with controls times READY, plus zero times START."""
    generator = np.random.default_rng(0)
    sizes = [16, *[_WIDTH] * (_LAYERS - 1), 16]
    nodes, weights, name = [], {}, "X"
    for index in range(_LAYERS):
        shape = (sizes[index], sizes[index + 1])
        weights[f"W{index}"] = (generator.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        nodes.append(helper.make_node("MatMul", [name, f"W{index}"], [f"M{index}"]))
        name = f"M{index}"
    fp32 = TensorProto.FLOAT
    inputs: dict[str, tuple[int, tuple[str | int, ...]]] = {"X": (fp32, ("batch", 16))}
    if with_controls:
        inputs |= {"START": (fp32, ("batch", 1)), "READY": (fp32, ("batch", 1))}
        weights["zero"] = np.zeros((1,), np.float32)
        nodes += [
            helper.make_node("Mul", ["START", "zero"], ["nothing"]),
            helper.make_node("Mul", [name, "READY"], ["ready"]),
            helper.make_node("Add", ["ready", "nothing"], ["sum"]),
        ]
        name = "sum"
    nodes.append(helper.make_node("Tanh", [name], ["Y"]))
    model = onnx_model(nodes, inputs, {"Y": (fp32, ("batch", 16))}, weights)
    content: bytes = model.SerializeToString()
    return content


def write_repository(folder: Path) -> None:
    """Write the network without and with sequences."""
    threads = 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }'
    for name, batching in (("stateless", "dynamic_batching { }"), ("sequences", _CONTROLS)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1/model.onnx").write_bytes(network(name == "sequences"))
        (folder / name / "config.pbtxt").write_text(f"max_batch_size: {SLOTS}\n{batching}\n{threads}\n")


def _handles() -> dict[str, ModelHandle]:
    """Return handles of a model that sleeps, without and with sequences; they are not started."""
    spec = ModelSpec(
        "sleeper",
        "1",
        "none",
        {"x": TensorSpec("x", BY_NAME["FP32"], (-1, 16))},
        {"scores": TensorSpec("scores", FP32, (-1, 1))},
        SLOTS,
    )
    model, mailbox = Sleeping(Device(1_000_000, 0, depth=1)), Mailbox(asyncio.get_running_loop())
    batch, limits = BatchPolicy(SLOTS), QueueLimits(max_count=1 << 20)
    plain = HandlePolicy(batch, limits)
    controls = tuple(ControlTensor(kind, kind, FP32, False, True) for kind in ("START", "READY"))
    rules = SequencePolicy(slots=SLOTS, max_rows=SLOTS, idle_ns=1 << 60, controls=controls)
    stateful = HandlePolicy(batch, limits, sequences=rules)
    return {
        "stateless": ModelHandle(spec, plain, model, mailbox, Recorder()),
        "sequences": SequenceHandle(spec, stateful, model, mailbox, Recorder(), directory=SequenceDirectory()),
    }


async def _alternate(
    handles: dict[str, ModelHandle], output: tuple[str, tuple[int, ...]], seconds: float, in_flight: int = 1
) -> dict[str, list[Answered]]:
    """Measure the handles in turn, in short stretches."""
    input_name = next(iter(handles["stateless"].spec.inputs))
    result: dict[str, list[Answered]] = {name: [] for name in handles}
    for number in range(_STRETCHES):
        for name in sorted(handles, reverse=number % 2 == 0):
            rows = [{input_name: np.full((1, 16), 1 + row, np.float32)} for row in range(SLOTS)]
            callers = (SequenceCallers if name == "sequences" else Callers)(handles[name], rows * in_flight, output)
            result[name].append(await callers.run(_WARM_UP_S, seconds / _STRETCHES))
    return result


async def processor(folder: Path, seconds: float) -> dict[str, float]:
    """Measure a model that sleeps: processor time of a request in us, callers included, and rows of a batch."""
    handles = _handles()
    for handle in handles.values():
        await asyncio.to_thread(handle.start)
    samples = await _alternate(handles, ("scores", (1, 1)), seconds)
    for handle in handles.values():
        handle.drain_sequences()
        await asyncio.to_thread(handle.close, 10.0)
    return _summary(samples)


async def throughput(folder: Path, seconds: float) -> dict[str, float]:
    """Measure the network: requests a second, and rows of a batch."""
    write_repository(folder)
    async with headrace.Server(folder, state_dir="") as server:
        registry = server._running().registry
        handles = {name: cast("ModelHandle", registry.lease(name, "")) for name in ("stateless", "sequences")}
        samples = await _alternate(handles, ("Y", (1, 16)), seconds, in_flight=2)
        for handle in handles.values():
            handle.release()
    return _summary(samples)


def _summary(samples: dict[str, list[Answered]]) -> dict[str, float]:
    """Medians over the stretches; ratios are those of neighbouring stretches."""
    result: dict[str, float] = {}
    for name, values in samples.items():
        result[f"{name}_us"] = statistics.median(each.cores / each.per_s * 1e6 for each in values)
        result[f"{name}_hz"] = statistics.median(each.per_s for each in values)
        result[f"{name}_rows"] = statistics.median(each.mean_rows for each in values)
    pairs = list(zip(samples["sequences"], samples["stateless"], strict=True))
    result["processor_ratio"] = statistics.median(
        ours.cores / ours.per_s / (theirs.cores / theirs.per_s) for ours, theirs in pairs
    )
    result["rate_ratio"] = statistics.median(ours.per_s / theirs.per_s for ours, theirs in pairs)
    return result


KINDS = {"processor": processor, "throughput": throughput}


def in_fresh_process(kind: str, seconds: float, cpus: tuple[int, ...] | None) -> dict[str, float]:
    """Measure in a process of its own, on these cores; raises subprocess.CalledProcessError if it fails."""
    command = [*pinned(cpus), sys.executable, "-m", "loadtest.bench.sequence_calls", kind, "--seconds", str(seconds)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Start from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args(arguments)
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # as the server has it
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(uvloop.run(KINDS[options.kind](Path(folder), options.seconds))))


if __name__ == "__main__":
    main()
