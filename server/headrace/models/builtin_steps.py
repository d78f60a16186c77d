"""Opens the built-in steps of a pipeline: each has its own queue and instances, and is closed with its pipeline.

`decode_image` runs in the processes that `headrace.python.decoder_pool` has for all pipelines. Every other step runs on
threads of the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headrace.config.config_base import Problem
from headrace.config.documents import within
from headrace.config.machine import usable_cores
from headrace.config.model_folder import ModelFolder
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import ConfigError
from headrace.core.limits import BodyMemory
from headrace.core.request import BatchTimes, InferRequest, InferResponse
from headrace.core.tensor import ModelSpec
from headrace.inference.pipelines.graph import PipelineGraph, Step, run_rows
from headrace.inference.pipelines.steps.options import DecodeOptions, read_options
from headrace.inference.pipelines.yaml_steps import builtin_spec
from headrace.inference.scheduling.batching import CloseReason
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.models.loader import Loader
from headrace.models.registry import Registry
from headrace.observability.counters import BatchRecord, Recorder
from headrace.python.decoder_pool import DecoderPool, PooledDecoder
from headrace.runtimes.base import LoadedModel

# Steps that take microseconds, whose requests run as one batch; all others run each request alone.
_MERGED = ("softmax", "top_k")
# Larger inputs of such a step would block the event loop for more than 0.1 ms.
_SHORT_BYTES = 8192
# Steps that work on one row after the other, so that the rows of a request are spread over the instances.
_BY_ROW = ("decode_image", "resize")
# Options that name a file in the pipeline's folder.
_FILE_OPTIONS = {"tokenize": "file", "top_k": "labels"}


class PipelineMembers:
    """The versions that a pipeline calls: its built-in steps, and models of the registry.

    Args:
        registry: registry of the models.
        builtins: built-in steps by their private version.
    """

    def __init__(self, registry: Registry, builtins: Mapping[str, VersionHandle]) -> None:
        self._registry, self._builtins = registry, builtins

    def lease(self, name: str, version: str) -> VersionHandle:
        """Lease a version, "" for the latest; raises NotFound or Unavailable."""
        builtin = self._builtins.get(version)
        if builtin is not None and builtin.lease():
            return builtin
        return self._registry.lease(name, version)

    def serving(self, name: str, version: str) -> VersionHandle | None:
        """Return the version that serves now, without a lease; None if there is none."""
        return self._builtins.get(version) or self._registry.serving(name, version)


def open_builtin_steps(graph: PipelineGraph, folder: ModelFolder, loader: Loader) -> dict[str, VersionHandle]:
    """Open the built-in steps of a pipeline and return them by their private version.

    Raises:
        ConfigError: a file of a step is missing or invalid, or a library is not installed; nothing stays open.
    """
    handles: dict[str, VersionHandle] = {}
    try:
        for step in graph.steps:
            if step.builtin:
                handles[step.version] = _open_step(step, run_rows(graph, folder.config), folder, loader)
    except BaseException:
        for handle in handles.values():
            handle.close(None)
        raise
    return handles


def _open_step(step: Step, max_rows: int, folder: ModelFolder, loader: Loader) -> ModelHandle:
    _check_file(step, folder)
    spec = builtin_spec(step, max_rows)
    rows, merge = max(spec.max_batch_size, 1), step.builtin in _MERGED and spec.max_batch_size > 0
    instances = _instances(step)
    try:
        model = _load(step, folder, spec.max_batch_size > 0, instances, loader.decoders)
    except ConfigError as error:
        problems = [Problem((*step.loc, "builtin"), finding.message, finding.cure) for finding in error.findings]
        raise ConfigError([folder.finding(problem) for problem in problems]) from error
    # A server that runs nothing on the event loop does not run steps there.
    create = ShortStepHandle if step.builtin in _MERGED and loader.inline_bound_ns else ModelHandle
    handle = create(
        spec=replace(spec, name=f"{folder.config.name}.{step.name}"),
        policy=HandlePolicy(
            batch=BatchPolicy(max_rows=1 if step.builtin in _BY_ROW else rows, merge=merge),
            instances=instances,
            inline_bound_ns=loader.inline_bound_ns,
        ),
        model=model,
        mailbox=loader.mailbox,
        recorder=Recorder(loader.histograms),
        bodies=loader.bodies,
    )
    handle.start()
    return handle


class ShortStepHandle(ModelHandle):
    """A step of microseconds: small requests run on the event loop, in `compute` itself, others on the instance.

    To queue one, wake the instance's thread and return takes longer than the step, for the caller and in processor time.

    Args:
        spec, policy, model, mailbox, recorder, bodies: as for `ModelHandle`; executions of the model run on any thread.
    """

    def __init__(
        self,
        spec: ModelSpec,
        policy: HandlePolicy,
        model: LoadedModel,
        mailbox: Mailbox,
        recorder: Recorder,
        bodies: BodyMemory | None = None,
    ) -> None:
        super().__init__(spec, policy, model, mailbox, recorder, bodies=bodies)
        self._execution = model.execution(0)

    def compute(self, request: InferRequest) -> LoopCompletion:
        """Run or queue a request and return its completion; raises as `ModelHandle.compute`."""
        now_ns = self._clock()
        if request.size_bytes > _SHORT_BYTES or 0 < request.deadline_ns <= now_ns:
            return super().compute(request)
        reason, rows = CloseReason.SINGLE.value, request.rows
        try:
            outputs = self._execution.run(request.inputs)
        except Exception:
            self.recorder.failed_batch(reason)
            raise
        done_ns = self._clock()
        times = BatchTimes(now_ns, now_ns, done_ns, done_ns)
        total_ns, busy_ns = done_ns - request.received_ns, done_ns - now_ns
        record = BatchRecord(rows, rows, reason, times, [0], [total_ns], busy_ns, request.shape_key)
        self.recorder.record_batch(record)
        self.latency_table.observe(rows, busy_ns)
        self._cost_model.batch(busy_ns)
        self.used_ns = now_ns
        completion = LoopCompletion(self._mailbox)
        completion.claim(InferResponse(outputs, times, rows, reason))
        completion.wake()
        return completion


def _check_file(step: Step, folder: ModelFolder) -> None:
    option = _FILE_OPTIONS.get(step.builtin, "")
    name = getattr(read_options(step.builtin, step.options), option, "") if option else ""
    if name and not within(folder.path / name, folder.path):
        message = f"{name} is a link that leads out of the pipeline's folder"
        raise ConfigError(
            [folder.finding(Problem((*step.loc, "options", option), message, "copy the file into the folder"))]
        )


def _instances(step: Step) -> int:
    if step.builtin == "decode_image":
        options: DecodeOptions = read_options(step.builtin, step.options)
        return options.processes or max(usable_cores() // 2, 1)
    return 1 if step.builtin in _MERGED else max(usable_cores() // 2, 1)


def _load(step: Step, folder: ModelFolder, batched: bool, instances: int, decoders: DecoderPool) -> LoadedModel:
    if step.builtin == "decode_image":
        options: DecodeOptions = read_options(step.builtin, step.options)
        return PooledDecoder(decoders, step.options, batched, instances, float(options.timeout_s))
    # Imported here, so that servers without such pipelines do not load Pillow.
    from headrace.inference.pipelines.steps.execution import BuiltinBackend, parameters_of

    return BuiltinBackend().load(folder.path, instances, parameters_of(step.builtin, step.options, batched))
