"""ONNX Runtime on the CPU: the embedded default.

Threads: the machine's cores are divided among a model's instances, so that they never fight. One core each means that ONNX
Runtime computes on the instance's own thread without a pool; then all instances share one session and with it the weights.
Pool threads do not spin: a spinning thread would take the core from the event loop.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import onnxruntime as ort

from server.backends.base import InputRefused
from server.core.errors import ConfigError, Finding
from server.core.tensor import BF16, BY_ORT_NAME, BYTES, Array, Datatype

PLATFORM = "onnxruntime_onnx"

_LEVELS = {
    "-1": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "1": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "2": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "0": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


class OnnxRuntimeBackend:
    """Loads ONNX files; see `server.backends.base.Backend`."""

    def load(self, file: Path, instances: int, parameters: dict[str, str]) -> OnnxRuntimeModel:
        """Open one session, or one an instance where a session needs more than one thread.

        Args:
            file: an ONNX model.
            instances: how many executions will be asked for.
            parameters: those Triton's ONNX Runtime backend knows: `intra_op_thread_count`, `inter_op_thread_count`,
                `execution_mode`, `enable_mem_arena`, `enable_mem_pattern`, `optimization_level` are heeded.
        """
        options = session_options(instances, parameters, file)
        shared = options.intra_op_num_threads == 1 and options.inter_op_num_threads <= 1
        try:
            sessions = [_open(file, options) for _ in range(1 if shared else instances)]
        except Exception as error:  # ONNX Runtime raises a dozen types of its own
            text = str(error).replace(str(file), file.name)  # callers may read it: no paths of this machine
            cure = "check it with onnx.checker"
            finding = Finding(file.name, None, f"ONNX Runtime cannot load the model: {text}", cure)
            raise ConfigError([finding]) from error
        return OnnxRuntimeModel(sessions)


class OnnxRuntimeModel:
    """The sessions of one version; see `server.backends.base.LoadedModel`."""

    def __init__(self, sessions: list[ort.InferenceSession]) -> None:
        self._sessions = sessions

    def execution(self, index: int) -> OnnxRuntimeExecution:
        """Instance `index` on its own session, or on the shared one."""
        return OnnxRuntimeExecution(self._sessions[index % len(self._sessions)])

    def close(self) -> None:
        """Drop the sessions."""
        self._sessions.clear()


class OnnxRuntimeExecution:
    """Runs a session; see `server.backends.base.Execution`."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._inputs = {node.name: BY_ORT_NAME[node.type] for node in session.get_inputs()}
        self._outputs = {node.name: BY_ORT_NAME[node.type] for node in session.get_outputs()}
        self._names = list(self._outputs)
        # ONNX Runtime hands no bfloat16 to NumPy, so such models go by OrtValues and bit patterns.
        self._by_value = BF16 in self._inputs.values() or BF16 in self._outputs.values()
        self._text_inputs = [name for name, datatype in self._inputs.items() if datatype is BYTES]
        self._text_outputs = [name for name, datatype in self._outputs.items() if datatype is BYTES]

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """All outputs; see `server.backends.base.Execution.run`."""
        if self._text_inputs:
            inputs = {name: _to_text(name, a) if name in self._text_inputs else a for name, a in inputs.items()}
        try:
            arrays = self._run_values(inputs) if self._by_value else self._session.run(self._names, inputs)
        except Exception as error:
            # The binding's exception types share no base class but carry the status in their name.
            if type(error).__name__ == "InvalidArgument":
                raise InputRefused(
                    "the model refused the values of the request (ONNX Runtime: invalid argument)"
                ) from error
            raise
        outputs: dict[str, Array] = dict(zip(self._names, arrays, strict=True))
        for name in self._text_outputs:
            outputs[name] = _to_bytes(outputs[name])
        return outputs

    def close(self) -> None:
        """Let go of the session."""
        del self._session

    def _run_values(self, inputs: dict[str, Array]) -> list[Array]:
        values = {name: _to_value(array, self._inputs[name]) for name, array in inputs.items()}
        results = self._session.run_with_ort_values(self._names, values)
        return [_to_array(value, self._outputs[name]) for name, value in zip(self._names, results, strict=True)]


def session_options(instances: int, parameters: dict[str, str], file: Path) -> ort.SessionOptions:
    """Session settings for `instances` that run at the same time on this machine.

    Raises:
        ConfigError: a parameter is not what ONNX Runtime takes.
    """
    options = ort.SessionOptions()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    options.intra_op_num_threads = _count(parameters, "intra_op_thread_count", file) or max(1, cores // instances)
    options.inter_op_num_threads = _count(parameters, "inter_op_thread_count", file) or 1
    options.enable_cpu_mem_arena = parameters.get("enable_mem_arena", "1") != "0"
    options.enable_mem_pattern = parameters.get("enable_mem_pattern", "1") != "0"
    if parameters.get("execution_mode", "0") == "1":
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    level = parameters.get("optimization_level", "0")
    if level not in _LEVELS:
        raise _bad_parameter(file, "optimization_level", level, "-1, 0, 1 or 2")
    options.graph_optimization_level = _LEVELS[level]
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    # What fails raises, and is told by us: its own lines are ones that any client can have written, past our formatter.
    options.log_severity_level = 4
    return options


def _open(file: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    for node in (*session.get_inputs(), *session.get_outputs()):
        if node.type not in BY_ORT_NAME:
            raise ValueError(f"'{node.name}' is a {node.type}; only dense tensors can be served")
    return session


def _count(parameters: dict[str, str], name: str, file: Path) -> int:
    text = parameters.get(name, "0")
    if not text.isdecimal() or int(text) > 1024:
        raise _bad_parameter(file, name, text, "a number of threads from 0 to 1024")
    return int(text)


def _bad_parameter(file: Path, name: str, value: str, expected: str) -> ConfigError:
    return ConfigError(
        [Finding(file.parent.parent.name, None, f"parameter '{name}' is '{value}'", f"write {expected}")]
    )


def _to_text(name: str, array: Array) -> Array:
    text = np.empty(array.shape, dtype=object)
    try:
        text.reshape(-1)[:] = [item.decode("utf-8") for item in array.reshape(-1).tolist()]
    except UnicodeDecodeError as error:
        raise InputRefused(
            f"input '{name}': ONNX text must be UTF-8, byte {error.start} of an element is not"
        ) from error
    return text


def _to_bytes(array: Array) -> Array:
    data = np.empty(array.shape, dtype=object)
    data.reshape(-1)[:] = [str(item).encode("utf-8") for item in array.reshape(-1).tolist()]
    return data


def _to_value(array: Array, datatype: Datatype) -> ort.OrtValue:
    if datatype is BF16:
        contiguous = np.ascontiguousarray(array)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(contiguous, BF16.onnx_number)
    return ort.OrtValue.ortvalue_from_numpy(array)


def _to_array(value: ort.OrtValue, datatype: Datatype) -> Array:
    if datatype is not BF16:
        array: Array = value.numpy()
        return array
    shape = tuple(value.shape())
    size_bytes = int(np.prod(shape, dtype=np.int64)) * BF16.size_bytes
    if size_bytes == 0:
        return np.empty(shape, BF16.dtype)
    raw = ctypes.string_at(value.data_ptr(), size_bytes)
    return np.frombuffer(raw, BF16.dtype).reshape(shape)
