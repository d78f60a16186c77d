"""ONNX Runtime on the CPU: the default backend.

Threads: the machine's cores are divided among a model's instances, so that they do not compete. With one core each,
ONNX Runtime computes on the instance's own thread without a pool, and all instances share one session and its
weights. Pool threads do not spin: a spinning thread would take a core from the event loop.

Memory: a session keeps the memory of its largest batch in an arena. `_ArenaTrimmer` returns it once no large batch has run
for a while; to return it after every large batch would allocate it again for the next one, at some 3 GB/s. ONNX Runtime never
returns the first region of an arena, so a short run when the model is loaded makes it a small one.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import re
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnxruntime as ort

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import ConfigError, Finding
from headrace.core.heap import trim_heap
from headrace.core.tensor import BF16, BY_ORT_NAME, BYTES, Array, Datatype
from headrace.runtimes.base import Backend, Execution, InputRefused, LoadedModel

logger = logging.getLogger("headrace.onnxruntime")

# Inputs and outputs of a batch, in bytes, from which its memory is worth returning.
_LARGE_BYTES = 1 << 20
# Time without a large batch, in seconds, after which the memory is returned.
_IDLE_S = 1.0
# Inputs and outputs of that run, in bytes, at most: a file of 100 bytes may declare gigabytes.
_MAX_FIRST_RUN_BYTES = 1 << 30
# Time of the run that allocates the first region of the arena, in seconds; it ends after the node that runs then.
_FIRST_RUN_S = 0.05

_LEVELS = {
    "-1": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "1": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "2": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "0": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


# ONNX Runtime's message for a locale of StringNormalizer that is not installed.
_LOCALE = re.compile(r"Failed to construct locale with name:([A-Za-z0-9_.@-]+?):")
# Other messages of ONNX Runtime, each with ours and the cure, which have the groups of the expression and `{ort}`, its version.
_LOAD_ERRORS = (
    (
        re.compile(r"Unsupported model IR version: (?P<found>\d+), max supported IR version: (?P<most>\d+)"),
        "the file has ONNX IR version {found}, ONNX Runtime {ort} reads up to {most}",
        "set model.ir_version = {most} before saving it with onnx, or export it with an older onnx",
    ),
    (
        re.compile(
            r"Opset (?P<found>\d+) is under development.*domain (?P<domain>\S+) is till opset (?P<most>\d+)", re.DOTALL
        ),
        "the file has opset {found} of {domain}, ONNX Runtime {ort} runs up to {most}",
        "export it with opset_version={most}",
    ),
    (
        re.compile(r"No Op registered for (?P<name>\w+) with domain_version of (?P<found>\d+)"),
        "ONNX Runtime {ort} has no operator {name} in opset {found}",
        "correct the name of the operator, or export the model with another opset_version",
    ),
    (
        re.compile(r"(?P<domain>[\w.]+):(?P<name>\w+)\(-?\d+\) is not a registered function/op"),
        "the model has the operator {name} of the domain {domain}, a custom one, which ONNX Runtime {ort} does not have",
        "export the model without it; libraries of custom operators are not loaded",
    ),
)
# What precedes the reason in any other message.
_LOAD_PREFIX = re.compile(
    r"^\[ONNXRuntimeError\] : \d+ : \w+ : (?:Load model from \S+ failed:)?(?:\S+\.\w+:\d+ [^)]*\) )?"
)


class OnnxRuntimeBackend(Backend):
    """Loads ONNX files; see `headrace.runtimes.base.Backend`."""

    def load(self, file: Path, instances: int, parameters: dict[str, str]) -> OnnxRuntimeModel:
        """Open one session, or one for each instance if a session needs more than one thread.

        Args:
            file: an ONNX model.
            instances: number of executions.
            parameters: these parameters of Triton's ONNX Runtime backend are honoured: `intra_op_thread_count`,
                `inter_op_thread_count`, `execution_mode`, `enable_mem_arena`, `enable_mem_pattern`,
                `optimization_level`.
        """
        options = session_options(instances, parameters, file)
        shared = options.intra_op_num_threads == 1 and options.inter_op_num_threads <= 1
        try:
            sessions = [_open(file, options) for _ in range(1 if shared else instances)]
        except Exception as error:  # ONNX Runtime raises a dozen exception types of its own
            raise ConfigError([load_finding(file, error)]) from error
        if options.enable_cpu_mem_arena:
            for session in sessions:
                _allocate_first_region(session)
        return OnnxRuntimeModel([(session, _ArenaTrimmer(session)) for session in sessions])


class OnnxRuntimeModel(LoadedModel):
    """The sessions of one version; see `headrace.runtimes.base.LoadedModel`."""

    def __init__(self, sessions: list[tuple[ort.InferenceSession, _ArenaTrimmer]]) -> None:
        self._sessions = sessions

    def execution(self, index: int) -> OnnxRuntimeExecution:
        """Create instance `index` on its own session, or on the shared one."""
        return OnnxRuntimeExecution(*self._sessions[index % len(self._sessions)])

    def close(self) -> None:
        """Release the sessions."""
        for _, trimmer in self._sessions:
            trimmer.close()
        self._sessions.clear()


class _ArenaTrimmer:
    """Returns the memory of a session's large batches to the system, after `_IDLE_S` without one and without their outputs.

    Its thread starts with a large batch and ends once the memory is returned. An output may be in use for long after the batch:
    until it is encoded, or until a slow client has read it.

    Ownership: `_lock` guards `_thread` and `_outputs`; `_last_ns` is written by single steps of the interpreter.

    Args:
        session: of the model.
    """

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._last_ns = 0
        self._outputs: list[weakref.ref[Array]] = []

    def on_large_batch(self, outputs: Iterable[Array]) -> None:
        """Record that a large batch has run; any thread may call."""
        self._last_ns = monotonic_ns()
        with self._lock:
            self._outputs = [*self._live_outputs(), *map(weakref.ref, outputs)]
            if self._thread is None and not self._closed.is_set():
                thread = threading.Thread(target=self._main, name="memory of a model", daemon=True)
                with suppress(RuntimeError):  # the system starts no more threads: the next large batch tries again
                    thread.start()
                    self._thread = thread

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._closed.set()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _main(self) -> None:
        while True:
            if self._closed.wait(_IDLE_S):
                return
            with self._lock:
                self._outputs = self._live_outputs()
                if self._outputs or monotonic_ns() < self._last_ns + int(_IDLE_S * NS_PER_S):
                    continue
            self._trim()
            with self._lock:
                if monotonic_ns() < self._last_ns + int(_IDLE_S * NS_PER_S):
                    continue  # another large batch has run meanwhile
                self._thread = None
            return

    def _live_outputs(self) -> list[weakref.ref[Array]]:
        return [output for output in self._outputs if output() is not None]

    def _trim(self) -> None:
        """Shrink the arena at the end of a run, the only point at which ONNX Runtime does, of a run that computes nothing."""
        options = ort.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        options.terminate = True
        try:
            inputs = {node.name: _value(node, 0) for node in self._session.get_inputs()}
            self._session.run_with_ort_values([], inputs, options)
        except Exception as error:  # that of the terminated run, or of a session without an arena
            logger.debug("memory of a model was returned: %s", error)
        trim_heap()


class OnnxRuntimeExecution(Execution):
    """Runs a session; see `headrace.runtimes.base.Execution`."""

    any_thread = True

    def __init__(self, session: ort.InferenceSession, trimmer: _ArenaTrimmer) -> None:
        self._session = session
        self._trimmer = trimmer
        self._inputs = {node.name: BY_ORT_NAME[node.type] for node in session.get_inputs()}
        # Outputs that are not tensors (ZipMap's sequence of maps) are left out; the others are served.
        self._outputs = {
            node.name: BY_ORT_NAME[node.type] for node in session.get_outputs() if node.type in BY_ORT_NAME
        }
        self._names = list(self._outputs)
        # ONNX Runtime cannot pass bfloat16 as NumPy arrays: such models use OrtValues and bit patterns.
        self._by_value = BF16 in self._inputs.values() or BF16 in self._outputs.values()
        self._text_inputs = [name for name, datatype in self._inputs.items() if datatype is BYTES]
        self._text_outputs = [name for name, datatype in self._outputs.items() if datatype is BYTES]

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return all outputs; see `headrace.runtimes.base.Execution.run`."""
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
        size_bytes = 0
        for array in inputs.values():
            size_bytes += array.nbytes
        for array in arrays:
            size_bytes += array.nbytes
        if size_bytes >= _LARGE_BYTES:
            self._trimmer.on_large_batch(arrays)
        outputs: dict[str, Array] = dict(zip(self._names, arrays, strict=True))
        for name in self._text_outputs:
            outputs[name] = _to_bytes(outputs[name])
        return outputs

    def close(self) -> None:
        """Release the session."""
        del self._session

    def _run_values(self, inputs: dict[str, Array]) -> list[Array]:
        values = {name: _to_value(array, self._inputs[name]) for name, array in inputs.items()}
        results = self._session.run_with_ort_values(self._names, values)
        return [_to_array(value, self._outputs[name]) for name, value in zip(self._names, results, strict=True)]


def session_options(instances: int, parameters: dict[str, str], file: Path) -> ort.SessionOptions:
    """Create session options for `instances` that run at the same time on this machine.

    Raises:
        ConfigError: a parameter has a value that ONNX Runtime does not allow.
    """
    options = ort.SessionOptions()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    options.intra_op_num_threads = _count(parameters, "intra_op_thread_count", file) or max(1, cores // instances)
    options.inter_op_num_threads = _count(parameters, "inter_op_thread_count", file) or 1
    options.enable_cpu_mem_arena = _switch(parameters, "enable_mem_arena", "1", file)
    options.enable_mem_pattern = _switch(parameters, "enable_mem_pattern", "1", file)
    if _switch(parameters, "execution_mode", "0", file):
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    level = parameters.get("optimization_level", "0")
    if level not in _LEVELS:
        raise bad_parameter(file, "optimization_level", level, "-1, 0, 1 or 2")
    options.graph_optimization_level = _LEVELS[level]
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    # Failures are raised and logged by Headrace. ONNX Runtime's own lines can contain text of clients and bypass our
    # log format.
    options.log_severity_level = 4
    return options


def _open(file: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    for node in session.get_inputs():
        if node.type not in BY_ORT_NAME:
            raise ValueError(f"input '{node.name}' is a {node.type}; only dense tensors can be served")
    if not any(node.type in BY_ORT_NAME for node in session.get_outputs()):
        types = ", ".join(f"'{node.name}' is a {node.type}" for node in session.get_outputs())
        raise ValueError(f"no output is a dense tensor: {types}")
    return session


def _allocate_first_region(session: ort.InferenceSession) -> None:
    """Run the smallest batch, so that the first region of the arena has the size that it needs; at most for `_FIRST_RUN_S`.

    The region grows with the first allocation, and is kept until the session ends: the first request of a client could be for
    gigabytes. All values are 1, of which a model that creates tensors of a requested size makes small ones.
    """
    options = ort.RunOptions()
    timer = threading.Timer(_FIRST_RUN_S, setattr, (options, "terminate", True))
    try:
        nodes = (*session.get_inputs(), *session.get_outputs())
        sizes = [
            math.prod(_shape(node, 1)) * BY_ORT_NAME[node.type].size_bytes for node in nodes if node.type in BY_ORT_NAME
        ]
        if sum(sizes) > _MAX_FIRST_RUN_BYTES:
            raise ValueError("its inputs and outputs are too large")
        inputs = {node.name: _value(node, 1) for node in session.get_inputs()}
        timer.start()
        session.run_with_ort_values([node.name for node in session.get_outputs()], inputs, options)
    except (
        Exception
    ) as error:  # no thread, a terminated run, or a model that needs other values: the first request allocates
        logger.debug("the first run of a model failed: %s", error)
    finally:
        timer.cancel()


def load_finding(file: Path, error: Exception) -> Finding:
    """Return the finding for a file that ONNX Runtime does not load.

    Args:
        file: the model.
        error: error of ONNX Runtime.
    """
    text = str(error).replace(str(file), file.name)  # clients may read it: no paths of this machine
    locale = _LOCALE.search(text)
    for pattern, message, cure in _LOAD_ERRORS:
        if found := pattern.search(text):
            words = {**found.groupdict(), "ort": ort.__version__}
            return Finding(file.name, None, message.format(**words), cure.format(**words))
    if locale is None:
        message = f"ONNX Runtime cannot load the model: {' '.join(_LOAD_PREFIX.sub('', text).split())}"
        return Finding(file.name, None, message, "check it with onnx.checker")
    name = locale[1]
    language = name.partition(".")[0]
    message = f'a StringNormalizer node of the model needs the locale "{name}", which this machine does not have'
    cure = (
        f"install it (Debian, Ubuntu: apt-get install locales && localedef -i {language} -f UTF-8 {name}) and start the "
        'server again, or set the attribute locale of the node to "C.UTF-8"'
    )
    return Finding(file.name, None, message, cure)


def _count(parameters: dict[str, str], name: str, file: Path) -> int:
    text = parameters.get(name, "0")
    if not text.isdecimal() or int(text) > 1024:
        raise bad_parameter(file, name, text, "a number of threads from 0 to 1024")
    return int(text)


def _switch(parameters: dict[str, str], name: str, default: str, file: Path) -> bool:
    text = parameters.get(name, default)
    if text not in ("0", "1", "false", "true"):
        raise bad_parameter(file, name, text, "0 or 1")
    return text in ("1", "true")


def bad_parameter(file: Path, name: str, value: str, expected: str) -> ConfigError:
    """Return the error of a parameter with a value that its backend does not read."""
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


def _value(node: ort.NodeArg, size: int) -> ort.OrtValue:
    """Return a value for an input, with `size` in place of each free dimension; all elements are `size`, texts are empty."""
    datatype = BY_ORT_NAME[node.type]
    if datatype is BYTES:
        size = max(size, 1)  # ONNX Runtime's binding takes no array of objects without elements
    shape = _shape(node, size)
    if datatype is BYTES:
        return ort.OrtValue.ortvalue_from_numpy(np.full(shape, "", dtype=object))
    # Zeros take no memory until they are read, which the run that computes nothing does not.
    return _to_value((np.ones if size else np.zeros)(shape, datatype.dtype), datatype)


def _shape(node: ort.NodeArg, size: int) -> tuple[int, ...]:
    return tuple(each if isinstance(each, int) and each >= 0 else size for each in node.shape)


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
