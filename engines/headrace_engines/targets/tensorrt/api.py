"""Adapter for TensorRT 10.x and 11.x: version differences, log, errors, progress, interrupts and timing cache.

TensorRT 11 has only strongly typed networks: the model defines the precisions. The flags for FP16 and INT8 and the INT8
calibrators no longer exist (TensorRT documentation, "Migrating from TensorRT 10.x to 11.x"). No other module checks the version.

The timing cache has TensorRT's measurements of kernels. It is valid for one GPU and one TensorRT; TensorRT rejects others
(IBuilderConfig.set_timing_cache).

Messages of TensorRT become errors with the ONNX node and the remedy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib.util
import logging
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from headrace.config.files import write_durably
from headrace.core.errors import HeadraceError, Unsupported
from headrace.runtimes.cuda import tensorrt
from headrace.runtimes.cuda.convolution_plugin import missing_plugin
from headrace_lab.kernels.plugin import Creator, register

from headrace_engines.errors import BuildError, NoKernelError
from headrace_engines.progress import Report

# Texts of libnvinfer 10 and 11; the name may hold dots, plus signs and braces.
_NO_KERNEL = re.compile(
    r"(?:Could not find any implementation for node|No supported formats for) (.+?)"
    r"(?P<workspace> due to insufficient workspace\b.*)?(?: due to .*)?\.?\)?\s*$"
)
_NO_MEMORY = re.compile(
    r"out of memory|OutOfMemory|insufficient memory|memory is insufficient|Requested size was", re.IGNORECASE
)
_TOO_LARGE = re.compile(
    r"volume exceeds|exceeds \(2\^31\)-1|maximum (?:supported )?element count|TENSOR_VOLUME"
    r"|larger than total memory|getTotalGlobalMem"
)
_SMALLER = "lower the largest shapes in optimization.profiles"
_OTHER_DEVICE = re.compile(
    r"incompatible device|not compatible with this version|expecting (?:compute|library version)"
)
_NAMES_SHOWN = 8
_QDQ = ("QuantizeLinear", "DequantizeLinear")
_QUANTIZED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(frozen=True, slots=True)
class ParserFault:
    """One error of the ONNX parser.

    Attributes:
        node: name of the ONNX node, or "#3" for the fourth node without a name; "" without a node.
        operator: e.g. "NonMaxSuppression".
        text: message of the parser.
        unsupported: True if TensorRT does not support the operator, or this use of it.
    """

    node: str
    operator: str
    text: str
    unsupported: bool


def node_label(model: onnx.ModelProto, index: int, name: str = "") -> str:
    """Return the name of a node, or its index in the graph."""
    nodes = model.graph.node
    if not name and 0 <= index < len(nodes):
        name = nodes[index].name
    return name or (f"#{index}" if index >= 0 else "")


def explain_parser(faults: Sequence[ParserFault], version: str) -> str:
    """Return the error message of a model that TensorRT cannot parse.

    Args:
        faults: errors of the parser, at least one.
        version: version of TensorRT.
    """
    unsupported = [fault for fault in faults if fault.unsupported and fault.node]
    if not unsupported:
        first = faults[0]
        where = f"node {first.node} ({first.operator}): " if first.node else ""
        cure = "check the model with onnx.checker and shape inference, or export it anew"
        return f"TensorRT {version} cannot read the ONNX model: {where}{first.text}: {cure}"
    unique = list({(fault.node, fault.operator): fault for fault in unsupported}.values())
    lines = [f"  node {f.node} ({f.operator}): {f.text}".rstrip(": ") for f in unique[:_NAMES_SHOWN]]
    if len(unique) > _NAMES_SHOWN:
        operators = sorted({fault.operator for fault in unique[_NAMES_SHOWN:]})
        lines.append(f"  and {len(unique) - _NAMES_SHOWN} more ({', '.join(operators)})")
    subject = "1 node is" if len(unique) == 1 else f"{len(unique)} nodes are"
    cure = "replace them by other ONNX operators, load a TensorRT plug-in for them, or build for ONNX Runtime"
    return "\n".join([f"{subject} not supported by TensorRT {version}; {cure}:", *lines])


def mentioned_nodes(text: str, names: Iterable[str]) -> list[str]:
    """Return the names that the text contains as whole words, in the given order."""
    return [name for name in names if name and re.search(rf"(?<![\w/])(?<!\w\.){re.escape(name)}(?![\w/]|\.\w)", text)]


def build_failure(
    errors: Collection[str], model: onnx.ModelProto, version: str, workspace_bytes: int | None, gpu: str
) -> BuildError:
    """Return the error of a failed build; a `NoKernelError` if other precisions of some layers may help.

    Args:
        errors: log of the builder, oldest first.
        model: ONNX model of the build.
        version: version of TensorRT.
        workspace_bytes: limit of the scratch memory; None without a limit.
        gpu: name of the GPU, for messages.
    """
    bound = "" if workspace_bytes is None else f" of {workspace_bytes >> 20} MiB"
    more_memory = f"{_SMALLER}, or close what else uses the GPU"
    if workspace_bytes is not None:
        more_memory = f"raise optimization.workspace_mb, {more_memory}"
    for error in reversed(list(errors)):
        match = _NO_KERNEL.search(error)
        if match is None:
            continue
        nodes = mentioned_nodes(match[1], [node.name for node in model.graph.node])
        layer = match[1] if len(match[1]) <= 200 else f"{match[1][:200]}..."
        if match["workspace"] and workspace_bytes is not None:
            failure = f"TensorRT {version} finds no kernel for {layer} within a workspace{bound}"
            return BuildError(f"{failure}: raise optimization.workspace_mb")
        named = f" (ONNX nodes {', '.join(nodes)})" if nodes else ""
        failure = f"TensorRT {version} finds no kernel for {layer}{named} on {gpu}"
        if any(_NO_MEMORY.search(other) or _TOO_LARGE.search(other) for other in errors):
            return BuildError(f"{failure}, it skipped kernels for lack of memory: {more_memory}")
        if any(node.op_type == "QuantizeLinear" for node in model.graph.node):
            listed = ", ".join(f'"{name}"' for name in _computing(model, nodes)) or "..."
            cure = f"keep it in floating point by optimization.calibration.keep: [{listed}]"
            return NoKernelError(f"{failure}: {cure}", _quantized(model, nodes))
        return NoKernelError(f"{failure}: take another precision, raise optimization.workspace_mb, or {_SMALLER}")
    if any(_NO_MEMORY.search(error) for error in errors):
        within = f" with a workspace{bound}" if bound else ""
        return BuildError(f"TensorRT {version} ran out of memory on {gpu}{within}: {more_memory}")
    large = next((error for error in errors if _TOO_LARGE.search(error)), None)
    if large is not None:
        return BuildError(f"TensorRT {version} cannot hold tensors this large ({large.strip()}): {_SMALLER}")
    return BuildError(f"TensorRT {version} cannot build the engine: {_last(errors)}")


def explain_open(errors: Collection[str], version: str, gpu: str) -> str:
    """Return the reason why a plan cannot be loaded, as the end of a sentence."""
    missing = missing_plugin(errors)
    if missing:
        return f"needs a plug-in, or a version of one, that this Headrace does not have: build it again ({missing})"
    if any(_OTHER_DEVICE.search(error) for error in errors):
        return f"was not built by TensorRT {version} on {gpu}: build it again on this machine ({_last(errors)})"
    if any(_NO_MEMORY.search(error) for error in errors):
        return f"does not fit into the memory of {gpu}: close what else uses the GPU ({_last(errors)})"
    return f"is no plan that TensorRT {version} can load: build it again ({_last(errors)})"


def _computing(model: onnx.ModelProto, names: Collection[str]) -> list[str]:
    """Return the convolutions and products among the nodes, without the nodes after them in a fused layer."""
    return [node.name for node in model.graph.node if node.name in names and node.op_type in _QUANTIZED]


def _quantized(model: onnx.ModelProto, names: Collection[str]) -> tuple[str, ...]:
    """Return the nodes that read the output of a DequantizeLinear."""
    dequantized = {node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    reading = [node for node in model.graph.node if node.op_type not in _QDQ and not dequantized.isdisjoint(node.input)]
    return tuple(node.name for node in reading if node.name in names)


def _last(errors: Collection[str]) -> str:
    return list(errors)[-1].strip() if errors else "it logged no error; try again with more free memory"


logger = logging.getLogger("headrace.tensorrt")
# The first version that is given convolutions in FP8: with 10.2 they are reported on Hopper, with 10.3 on Ada
# (github.com/NVIDIA/TensorRT, issues 3987 and 4081). Measured with 10.6 on an H200.
FP8_CONVOLUTIONS = (10, 2)
_MAX_ERRORS = 20
# A warning that may be why no kernel is left in the end.
_SHORTAGE = "memory is insufficient"


class Log:
    """TensorRT's messages, on their way to our log; errors are collected while a caller reports them itself.

    Attributes:
        raised: an interrupt that struck while a message was taken; no exception can pass through TensorRT.
    """

    def __init__(self) -> None:
        self._collecting: deque[str] | None = None
        self.raised: BaseException | None = None

    def take(self, severity: int, text: str) -> None:
        """One message; `severity` is 0 (internal error) to 4 (verbose), as in `ILogger.Severity`."""
        try:
            self._take(severity, text)
        except BaseException as error:
            self.raised = error

    def _take(self, severity: int, text: str) -> None:
        if severity >= 3:
            # A build logs hundreds of thousands of these.
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s", text)
        elif severity == 2:
            logger.info("%s", text)
            if self._collecting is not None and _SHORTAGE in text:
                self._collecting.append(text)
        elif self._collecting is None:
            logger.error("%s", text)
        else:
            logger.info("%s", text)
            self._collecting.append(text)

    @contextlib.contextmanager
    def collect(self) -> Iterator[deque[str]]:
        """Yield the errors and memory warnings logged in the block, oldest first, only the last ones if there are many.

        May be nested.
        """
        outer, self._collecting = self._collecting, deque(maxlen=_MAX_ERRORS)
        try:
            yield self._collecting
        finally:
            self._collecting = outer


class TensorRtApi:
    """One installed TensorRT.

    Attributes:
        trt: module `tensorrt`.
        version: version, e.g. "10.6.0".
        log: messages of TensorRT.
        logger: ILogger of all TensorRT objects; TensorRT uses the first one of a process, so there is only this one.
    """

    def __init__(self, trt: Any) -> None:
        self.trt = trt
        self.version = tensorrt.version(trt)
        self.log = Log()
        self.logger = tensorrt.make_logger(trt, self.log.take)

    @property
    def has_weak_typing(self) -> bool:
        """True if networks are weakly typed by default: TensorRT 10, not TensorRT 11."""
        return hasattr(self.trt.BuilderFlag, "INT8")

    @property
    def fp8_convolutions(self) -> bool:
        """True if convolutions run in FP8; else only products do, and convolutions stay FP16."""
        major, minor = (int(number) for number in self.version.split(".")[:2])
        return (major, minor) >= FP8_CONVOLUTIONS

    def builder(self, errors: Collection[str]) -> Any:
        """Return an IBuilder; `errors` collects the log. Without a GPU this ends the process: check for one before."""
        return self._create(self.trt.Builder, errors)

    def runtime(self, errors: Collection[str]) -> Any:
        """Return an IRuntime; `errors` collects the log. Without a GPU this ends the process: check for one before."""
        return self._create(self.trt.Runtime, errors)

    def _create(self, kind: Any, errors: Collection[str]) -> Any:
        try:
            return kind(self.logger)
        except TypeError as error:
            # The TypeError of the binding has no reason; the log has it.
            reason = "; ".join(errors) or str(error)
            raise BuildError(
                f"TensorRT {self.version} does not start: {reason}: check driver and free memory"
            ) from error

    def network(self, builder: Any) -> Any:
        """Return an empty strongly typed network; TensorRT 11 has no other ones and no flag for it."""
        if self.has_weak_typing:
            return builder.create_network(1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        return builder.create_network(0)

    def scratch_bytes(self, engine: Any) -> int:
        """Return the bytes of GPU memory that an execution context needs for activations."""
        return int(engine.device_memory_size_v2)

    def context(self, engine: Any, scratch: int, size_bytes: int) -> Any:
        """Return an IExecutionContext with scratch memory of the caller; None if other memory is missing.

        Args:
            engine: ICudaEngine.
            scratch: address of the memory; contexts that share it must not run at the same time.
            size_bytes: size of the memory, at least `scratch_bytes`.
        """
        context = engine.create_execution_context(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is not None and size_bytes:
            context.set_device_memory(scratch, size_bytes)
        return context

    def weights_bytes(self, engine: Any) -> int | None:
        """Return the bytes of GPU memory for weights; None if this TensorRT does not report them."""
        if not hasattr(engine, "get_engine_stat"):
            return None
        return int(engine.get_engine_stat(self.trt.EngineStat.TOTAL_WEIGHTS_SIZE))

    def load_plugins(self) -> Creator | None:
        """Register TensorRT's own plug-ins and ours; return the creator of ours, None if this TensorRT is too old for it."""
        tensorrt.load_plugins(self.trt, self.logger)
        return register(self.trt)


def load() -> TensorRtApi:
    """Return TensorRT of this machine, loaded on first use.

    Raises:
        BuildError: it is not installed or too old.
    """
    try:
        return _loaded(tensorrt.import_tensorrt("install it by NVIDIA's instructions, or use NVIDIA's container"))
    except Unsupported as error:
        raise BuildError(str(error)) from error


@functools.cache
def _loaded(trt: Any) -> TensorRtApi:
    return TensorRtApi(trt)


def lean_library(version: str) -> str:
    """Return the name of the library with TensorRT's lean runtime, which the builder copies into version-compatible plans."""
    return f"libnvinfer_lean.so.{version.partition('.')[0]}"


def load_lean_library(library: str) -> bool:
    """Load the lean runtime, so that TensorRT's builder finds it by its name; return False if it is not installed.

    It is searched in the paths of the dynamic linker, beside TensorRT's own library, and in NVIDIA's wheel.
    """
    folders = [path.parent for path in _mapped_files("libnvinfer.so")]
    wheel = importlib.util.find_spec("tensorrt_lean_libs")
    if wheel is not None:
        folders += map(Path, wheel.submodule_search_locations or ())
    for path in (library, *(str(folder / library) for folder in folders)):
        with contextlib.suppress(OSError):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return True
    return False


def _mapped_files(prefix: str) -> list[Path]:
    """Return the files of this process's memory map whose names begin with `prefix`."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = {Path(fields[5]) for line in lines if len(fields := line.split(None, 5)) == 6}
    return sorted(path for path in paths if path.name.startswith(prefix))


@contextlib.contextmanager
def as_build_error(subject: str) -> Iterator[None]:
    """Convert errors of `headrace` packages (no GPU, no memory) to a BuildError.

    Args:
        subject: file or activity, for the message.
    """
    try:
        yield
    except BuildError:
        raise
    except HeadraceError as error:
        raise BuildError(f"{subject}: {error}") from error


@dataclass(slots=True)
class _Phase:
    parent: str
    steps: int
    done: int = 0


class Interrupt:
    """Exception that stops a TensorRT call, stored until the call returns: exceptions cannot pass through TensorRT.

    Attributes:
        raised: the exception; None if there is none.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None

    def stop(self, error: BaseException) -> None:
        """Store an exception that stops the call; the first one is raised."""
        self.raised = self.raised or error

    def check(self) -> None:
        """Raise the stored exception, if any."""
        if self.raised is not None:
            raise self.raised


class BuildProgress(Interrupt):
    """Converts the nested phases of TensorRT's builder to one increasing share.

    TensorRT calls from its own threads, hence the lock. An exception in a callback, such as KeyboardInterrupt, stops the build.
    """

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report
        self._lock = threading.Lock()
        self._phases: dict[str, _Phase] = {}
        self._share = 0.0

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        """Start a phase within the current step of its parent."""
        with self._catching():
            self._phases[phase] = _Phase(parent or "", max(steps, 1))
            self._report_share(phase)

    def step(self, phase: str, number: int) -> bool:
        """Complete step `number`, from 0, of a phase; return False to stop the build."""
        with self._catching():
            if phase in self._phases:
                self._phases[phase].done = number + 1
                self._report_share(phase)
        return self.raised is None

    def finish(self, phase: str) -> None:
        """End a phase."""
        with self._catching():
            self._phases.pop(phase, None)

    @contextlib.contextmanager
    def _catching(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except BaseException as error:
            self.stop(error)

    def _report_share(self, phase: str) -> None:
        roots = [name for name, active in self._phases.items() if active.parent not in self._phases]
        share = max((self._done(name) for name in roots), default=0.0)
        self._share = max(self._share, min(share, 1.0))
        if self.raised is None:
            self._report(self._share, phase)

    def _done(self, name: str) -> float:
        phase = self._phases[name]
        inner = max((self._done(child) for child, active in self._phases.items() if active.parent == name), default=0.0)
        return (phase.done + min(inner, 1.0)) / phase.steps


@contextlib.contextmanager
def signals_deferred(stop: Interrupt) -> Iterator[None]:
    """Store exceptions of signal handlers in `stop` and raise them at the end of the block.

    Python handles a signal at the next function call of the main thread. In a TensorRT call that is a callback, mostly the
    logger's. TensorRT's bindings discard its exceptions: Ctrl-C and SIGTERM would be lost.
    """
    before: dict[int, Callable[[int, Any], Any]] = {}
    if threading.current_thread() is threading.main_thread():
        for number in map(int, (signal.SIGINT, signal.SIGTERM)):
            handler = signal.getsignal(number)
            if callable(handler):  # else the signal is ignored, or ends the process
                before[number] = handler

    def keep(number: int, frame: Any) -> None:
        try:
            before[number](number, frame)
        except BaseException as error:
            stop.stop(error)

    try:
        try:
            for number in before:
                signal.signal(number, keep)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    finally:
        # Also after another error: Ctrl-C takes precedence over errors of the model.
        stop.check()


def progress_monitor(trt: Any, progress: BuildProgress) -> Any:
    """Return an IProgressMonitor that reports to `progress`."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # the base class exists at run time only
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return progress.step(phase_name, step)

        def phase_finish(self, phase_name: str) -> None:
            progress.finish(phase_name)

    return Monitor()


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Replace a file at once, so that readers never see a part of it.

    Raises:
        BuildError: the disk is full, or the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, data)
    except OSError as error:
        cure = "free some space" if error.errno == errno.ENOSPC else "check the folder's owner and permissions"
        raise BuildError(f"{path} cannot be written ({error.strerror or error}): {cure}") from error


class TimingCache:
    """Timing cache in a file.

    Args:
        api: TensorRT.
        path: the file; None for no cache beyond one build.
    """

    def __init__(self, api: TensorRtApi, path: Path | None) -> None:
        self._api = api
        self._path = path

    def attach(self, config: Any) -> None:
        """Load the file into a build's config; a cache of another GPU or TensorRT is replaced by an empty one."""
        if self._path is None:
            return
        with self._api.log.collect():
            cache = self._read(config)
            if cache is not None and config.set_timing_cache(cache, False):
                return
            if cache is not None:
                logger.info("%s is of another GPU or another TensorRT: a new timing cache replaces it", self._path.name)
            config.set_timing_cache(config.create_timing_cache(b""), False)

    def save(self, config: Any) -> None:
        """Update the file after a build; a failure is only logged, since it costs only time of the next build."""
        if self._path is None:
            return
        with self._api.log.collect():
            cache = config.get_timing_cache()
            if cache is None:
                return
            # Another builder may have written meanwhile: merge its measurements.
            other = self._read(config)
            if other is not None:
                cache.combine(other, False)
            try:
                write_atomically(self._path, memoryview(cache.serialize()))
            except BuildError as error:
                logger.warning("the timing cache is not saved: %s", error)

    def _read(self, config: Any) -> Any:
        assert self._path is not None
        try:
            data = self._path.read_bytes()
        except OSError:
            return None
        if not data:
            return None
        try:
            return config.create_timing_cache(data)
        except Exception as error:  # the binding's exceptions share no other base
            logger.info("%s cannot be read, a new timing cache replaces it: %s", self._path.name, error)
            return None
