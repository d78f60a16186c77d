"""Loads a model version: from the model's folder, a version and its serving plan to a running `ModelHandle`."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import cast

from headrace_model.protocol import MAX_MEMBERS

from headrace.config.auto_complete import contradictions
from headrace.config.digests import onnx_digest
from headrace.config.documents import refuse
from headrace.config.machine import Machine
from headrace.config.manifest import Stamp
from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import ModelFolder
from headrace.config.onnx_model import read_signature
from headrace.config.ragged_rules import is_ragged
from headrace.config.serving_plan import (
    CUDA_RUNTIME,
    GPU_RUNTIMES,
    PYTHON_RUNTIMES,
    GpuRuntime,
    ServingPlan,
    engine_folder,
    serving_plan,
)
from headrace.config.tensor_config import row_bytes_of
from headrace.core.clock import NS_PER_S
from headrace.core.completion import Mailbox
from headrace.core.errors import ConfigError, Finding, Unsupported
from headrace.core.ledger import CPU, MemoryAccount, NoRoom
from headrace.core.limits import BodyMemory
from headrace.core.sequence_state import StateTensor
from headrace.inference.caching.response_caches import ResponseCaches
from headrace.inference.pipelines.execution import Steps, steps_of
from headrace.inference.scheduling.joining import RaggedLayout
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import (
    HandlePolicy,
)
from headrace.inference.scheduling.sequences.directory import SequenceDirectory
from headrace.inference.scheduling.sequences.sequence_handle import SequenceHandle
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.models.accounted_model import AccountedModel, HostMemory, cpu_batch_size, file_id
from headrace.models.batch_proofs import BatchProofs
from headrace.models.command_queue import CommandQueue
from headrace.models.gpu_model_cache import GpuModelCache, OnChange, ignore_change
from headrace.models.idle_tasks import IdleTasks
from headrace.models.integrity.verified_copy import ModelVerifier
from headrace.models.measuring import MeasuringTurns
from headrace.models.sequence_policy import state_tensors
from headrace.models.trials import ModelTrials, trial_order
from headrace.models.version_loads import VersionLoads
from headrace.models.version_policies import handle_policy, model_spec, ragged_policy
from headrace.models.warmup import LatencyFile, LatencyStore, make_warmups
from headrace.observability.counters import Recorder
from headrace.observability.custom_metrics import CustomMetrics
from headrace.python.decoder_pool import DecoderPool
from headrace.python.environments import Environments
from headrace.python.model_calls import ModelCalls
from headrace.python.python_models import folder_digest, open_python_model
from headrace.runtimes.base import Backend, LoadedModel
from headrace.runtimes.cuda import devices as gpus
from headrace.runtimes.cuda.driver import lost_gpus
from headrace.runtimes.isolated.backend import IsolatedBackend
from headrace.runtimes.isolated.child import AccountedBackend, create_backend

# Names of accuracy figures in a stamp -> labels in the log.
_ACCURACY_LABELS = {
    "top1_agreement": "top-1 agreement with FP32",
    "accuracy": "accuracy",
    "reference_accuracy": "accuracy in FP32",
}


def check_engine(plan: ServingPlan, config: ModelConfig) -> None:
    """Check that an ONNX engine has the inputs and outputs of the configuration, and no external files.

    Raises:
        ConfigError: they differ.
    """
    if plan.artefact is None or plan.artefact.suffix != ".onnx":
        return
    name = plan.artefact.name
    problems = contradictions(config, read_signature(plan.artefact, name))
    if problems:
        raise ConfigError([Finding(name, None, problem.message, problem.cure) for problem in problems])


def describe_stamp(stamp: Stamp) -> str:
    """Describe precision and accuracy of an engine for the log, e.g. "int8, top-1 agreement with FP32 99.1 %"."""
    accuracy = stamp.accuracy or {}
    measured = [
        f"{words} {100 * value:.1f} %"
        for name, words in _ACCURACY_LABELS.items()
        if isinstance(value := accuracy.get(name), float | int) and not isinstance(value, bool)
    ]
    return ", ".join([stamp.precision, *measured])


def version_parameters(plan: ServingPlan, devices: Sequence[int]) -> dict[str, str | float | bool]:
    """Return the metadata of a version: runtime, device, precision and artefact that serve it, and the facts of its engine.

    Args:
        plan: the serving plan.
        devices: GPU number of each instance; empty on the CPU.
    """
    numbers = ",".join(map(str, sorted(set(devices))))
    placement: dict[str, str | float | bool] = {
        "headrace.runtime": plan.runtime,
        "headrace.device": f"GPU {numbers}" if devices else "CPU",
        "headrace.precision": plan.served_precision,
        "headrace.artefact": plan.file.name,
    }
    if plan.not_on_gpu:
        placement["headrace.not_on_gpu"] = plan.not_on_gpu
    if plan.not_on_tensorrt:
        placement["headrace.not_on_tensorrt"] = plan.not_on_tensorrt
    return placement if plan.stamp is None else {**placement, **engine_parameters(plan.stamp)}


def engine_parameters(stamp: Stamp) -> Mapping[str, str | float | bool]:
    """Return the metadata of the engine that serves a model; each name begins with "engine."."""
    accuracy = stamp.accuracy or {}
    parameters: dict[str, str | float | bool] = {
        "engine.file": stamp.artefact,
        "engine.precision": stamp.precision,
        "engine.below_accuracy_bar": stamp.forced,
    }
    if stamp.version_compatible:
        parameters["engine.version_compatible"] = True
    if stamp.forced:
        parameters["engine.refusal"] = "; ".join(stamp.refusal)
    for name in (*_ACCURACY_LABELS, "cosine"):
        value = accuracy.get(name)
        if isinstance(value, float | int):
            parameters[f"engine.{name}"] = value
    return parameters


# Entry points of the backends by name; `create_backend` imports their libraries.
FACTORIES = {
    "onnxruntime": "headrace.runtimes.onnxruntime:OnnxRuntimeBackend",
    CUDA_RUNTIME: "headrace.runtimes.onnxruntime_cuda:OnnxRuntimeCudaBackend",
    "tensorrt": "headrace.runtimes.tensorrt.backend:TensorRtBackend",
}


def isolated(runtime: str, config: ModelConfig) -> IsolatedBackend:
    """Create a backend that loads the model in a child process.

    Args:
        runtime: name of the backend that runs in the child process.
        config: the complete configuration.
    """
    return IsolatedBackend(
        config.name,
        FACTORIES[runtime],
        config.isolation_timeout_s,
        row_bytes_of((*config.model_input, *config.model_output)) * max(config.max_batch_size, 1),
        config.isolation_memory_limit or 0,
    )


# Tries a file with the instances, parameters and account of its load.
_TryFile = Callable[[int, dict[str, str], MemoryAccount | None], None]

logger = logging.getLogger("headrace.loader")


def open_backend(name: str) -> Backend:
    """Create a backend by its name in the configuration; imports its library.

    Raises:
        ConfigError: this machine has no backend of that name.
    """
    if name in FACTORIES:
        return create_backend(FACTORIES[name])
    cure = "write backend: onnxruntime, or write fallback: onnxruntime and put the ONNX file beside the engine"
    raise refuse("config", None, f"backend '{name}' is not available on this machine", cure)


@dataclass(frozen=True, slots=True)
class Loader:
    """Creates handles of model versions.

    Attributes:
        mailbox: delivers completions to the event loop.
        histograms: record latency histograms.
        on_dead: called with (model, version, remaining instances) when an instance dies.
        on_restart: called with (model, version, live instances) when an instance has been restarted.
        on_first_use: called with the handle of a version that began evicted, on its first request; must not wait.
        backend: returns a backend by name.
        gpu_model_cache: models in GPU memory.
        gpu_memory_fraction: share of each GPU's memory for all versions together, 0 to 1.
        profile_s: maximum time in seconds to measure each version before it serves; 0 measures nothing.
        latency_store: stored latency tables; None stores nothing.
        state: the state folder with engines of read-only model folders; None if there is none.
        inline_bound_ns: see `headrace.inference.scheduling.policy.HandlePolicy`.
        bodies: counts requests in the front ends; None without front ends.
        interpreters: chooses the interpreters of Python models; None for the server's own.
        calls: receives calls of Python models to other models; None without them.
        metrics: receives the custom metrics of Python models; None drops them.
        allow_python_uploads: load requests may contain files or configurations that are run as code.
        response_caches: creates the response cache of a version; None if the server has none.
        decoders: processes that decode images for pipelines.
        measuring: turns of the measurements of loads that run side by side.
        heap_lock: held by a load under a budget of host memory that reads how much the heap grows.
        sequences: versions with live sequences.
        verifier: checks the files of models before they are loaded.
        trials: tries files in a helper process before their first load; None loads them at once.
        proofs: proves the batch sizes of versions; None proves nothing.
        idle_tasks: work on models while the server is idle.
    """

    mailbox: Mailbox
    histograms: bool = True
    on_dead: Callable[[str, str, int], None] = lambda _name, _version, _left: None
    on_restart: Callable[[str, str, int], None] = lambda _name, _version, _living: None
    on_first_use: Callable[[VersionHandle], None] = lambda _handle: None
    backend: Callable[[str], Backend] = open_backend
    gpu_model_cache: GpuModelCache = field(default_factory=GpuModelCache)
    gpu_memory_fraction: float = 0.9
    profile_s: float = 0.0
    latency_store: LatencyStore | None = None
    state: Path | None = None
    inline_bound_ns: int = 0
    bodies: BodyMemory | None = None
    interpreters: Environments | None = None
    allow_python_uploads: bool = False
    calls: ModelCalls | None = None
    metrics: CustomMetrics | None = None
    response_caches: ResponseCaches | None = None
    decoders: DecoderPool = field(default_factory=DecoderPool)
    measuring: MeasuringTurns = field(default_factory=MeasuringTurns)
    heap_lock: threading.Lock = field(default_factory=threading.Lock)
    sequences: SequenceDirectory = field(default_factory=SequenceDirectory)
    verifier: ModelVerifier = field(default_factory=ModelVerifier)
    trials: ModelTrials | None = None
    proofs: BatchProofs | None = None
    idle_tasks: IdleTasks = field(default_factory=IdleTasks)

    @property
    def commands(self) -> CommandQueue:
        """Commands of the control thread."""
        return self.idle_tasks.commands

    def plan(self, folder: ModelFolder, version: int) -> ServingPlan:
        """Choose the runtime and the file of a version.

        Args:
            folder: the model's folder.
            version: version number.

        Raises:
            ConfigError: no runtime on this machine can run it, or its file cannot be read.
        """
        gpu = GpuRuntime(self._tensorrt_machine, gpus.is_visible, self._cuda_problem, _plugin_problem)
        return serving_plan(folder, version, gpu, self.engines(folder.path, version))

    def check_interpreters(self, folder: ModelFolder, versions: Sequence[int]) -> None:
        """Check that the interpreters of a Python model exist.

        Args:
            folder: the model's folder.
            versions: version numbers.

        Raises:
            EnvironmentPending: the environment of a version is being installed.
            ConfigError: the environment of a version cannot be made.
        """
        if self.interpreters is not None and folder.config.backend in PYTHON_RUNTIMES:
            for version in versions:
                self.interpreters.python_for(folder, version)

    def engines(self, model: Path, version: int) -> Path | None:
        """Return the folder for engines of a version whose own folder is read-only; None without a state folder.

        Args:
            model: the model's folder.
            version: version number.
        """
        return None if self.state is None else engine_folder(self.state.expanduser(), model, version)

    def is_lazy(self, config: ModelConfig, plan: ServingPlan) -> bool:
        """Return True for a version that its first request loads: the CPU runs it, under a budget of host memory.

        Args:
            config: the complete configuration.
            plan: the serving plan.
        """
        on_cpu = plan.runtime not in GPU_RUNTIMES and plan.runtime not in PYTHON_RUNTIMES
        return on_cpu and not config.keep_loaded and CPU in self.gpu_model_cache.ledger.limits

    def load(
        self,
        folder: ModelFolder,
        version: int,
        plan: ServingPlan,
        is_lazy: bool = False,
        on_change: OnChange = ignore_change,
    ) -> ModelHandle:
        """Read the file of the plan, start the instances and warm them up; evicts other models if memory is short.

        A model that names no GPUs has no instances on those that have no room for it even then.

        Args:
            folder: the model's folder.
            version: version number.
            plan: the serving plan.
            is_lazy: return an evicted version, which its first request loads; see `is_lazy`.
            on_change: see `CachedModel.on_change`.

        Raises:
            NoRoom: it does not fit into the memory of a GPU, or into the budget of host memory.
            ConfigError: the version cannot be served from this file; has the reason.
        """
        if is_lazy:
            return self._load(folder, version, plan, is_lazy, on_change)
        may_choose = not any(group.gpus for group in folder.config.instance_group)
        while True:
            try:
                load = partial(self._load, folder, version, plan, is_lazy, on_change)
                return self.gpu_model_cache.load(load, f"{folder.config.name}/{version}")
            except NoRoom as error:
                config = self._without_gpu(folder.config, error.gpu) if may_choose and error.others else None
                if config is None:
                    raise
                logger.warning("model %s has no instances on GPU %d: %s", config.name, error.gpu, error)
                folder = replace(folder, config=config)

    def _without_gpu(self, config: ModelConfig, gpu: int) -> ModelConfig | None:
        from headrace.models.gpu_backend import without_gpu

        return without_gpu(config, gpu)

    def _load(
        self, folder: ModelFolder, version: int, plan: ServingPlan, is_lazy: bool, on_change: OnChange
    ) -> ModelHandle:
        config, begun_ns = folder.config, self.gpu_model_cache.clock()
        warmups, states = [] if is_lazy else make_warmups(config, folder.path), state_tensors(config, folder.path)
        check_engine(plan, config)
        original = file_id(plan.file)
        digest = cache(lambda: _artefact_digest(folder, version, plan))
        open_model = partial(self._open, folder, version, plan, digest)
        model = None if is_lazy else open_model()
        handle = self._create_handle(folder, version, plan, model, states)
        on_gpu = model is not None and bool(model.devices)
        loads = VersionLoads(
            folder,
            plan.file,
            handle,
            open_model,
            lambda: self._latency_file(folder, plan, digest, handle.policy.instances),
            config if on_gpu else config.model_copy(update={"max_batch_size": cpu_batch_size(config)}),
            0 if is_lazy else int(self.profile_s * NS_PER_S),
            original,
            self.measuring,
            self.idle_tasks,
        )
        if model is not None:
            loads.start(model, warmups)
        if plan.runtime in PYTHON_RUNTIMES and self.calls is not None:
            handle.callee_revision = partial(self.calls.revision, f"{config.name}/{version}")
        self.open_cache(handle, folder, lambda: f"{plan.runtime} {digest()}")
        idle_ns = int((config.unload_after_s or 0) * NS_PER_S)
        if model is None:
            self.gpu_model_cache.add_evicted(handle, {CPU: original[0]}, loads.reopen, on_change, idle_ns)
        else:
            is_pinned, account = config.keep_loaded, model.account
            self.gpu_model_cache.add(handle, account, is_pinned, loads.reopen, begun_ns, on_change, idle_ns)
        return handle

    def _create_handle(
        self,
        folder: ModelFolder,
        version: int,
        plan: ServingPlan,
        model: AccountedModel | None,
        states: tuple[StateTensor, ...],
    ) -> ModelHandle:
        """Create the handle of a version; `model` is None if the version begins evicted, on the CPU."""
        config, devices = folder.config, () if model is None else model.devices
        policy = handle_policy(config, on_gpu=bool(devices))
        if policy.sequences is not None:
            policy = replace(policy, sequences=replace(policy.sequences, states=states))
        if plan.runtime in PYTHON_RUNTIMES:
            max_rows = min(policy.batch.max_rows, MAX_MEMBERS)
            batch, reads_ids = replace(policy.batch, max_rows=max_rows), plan.runtime == "python"
            policy = replace(policy, by_member=True, reads_ids=reads_ids, batch=batch)
        # Requests of different shapes are joined in host memory.
        is_joined = policy.ragged is not None or policy.padding is not None
        # Or cut; the way into and out of the GPU's memory may be at fault.
        is_joined = is_joined or (model is not None and (bool(model.verdict.allowed) or model.verdict.alone))
        residents = frozenset[int]() if model is None or is_joined else model.resident_devices
        spec = replace(model_spec(folder, version), resident_devices=residents)
        spec = replace(spec, parameters=version_parameters(plan, devices))
        instances = policy.instances if model is None else model.instances
        handle = self._handle_class(policy)(
            spec=spec,
            policy=replace(policy, instances=instances, inline_bound_ns=self.inline_bound_ns),
            model=model,
            mailbox=self.mailbox,
            recorder=Recorder(self.histograms),
            on_dead=partial(self._instance_died, config.name, str(version), devices),
            on_wanted=self._request_load,
            on_first_use=self.on_first_use,
            on_back=lambda alive: self.on_restart(config.name, str(version), alive),
            bodies=self.bodies,
        )
        if isinstance(handle.layout, RaggedLayout) and model is not None:
            handle.layout.ranges = model.shape_ranges
        return handle

    def _instance_died(self, name: str, number: str, devices: Collection[int], remaining: int) -> None:
        """Report an instance that died; after the failure of a GPU, end all instances there, and load the version elsewhere."""
        self.on_dead(name, number, remaining)
        lost = lost_gpus()
        if lost:
            self.gpu_model_cache.end_on(lost)
            if devices and not remaining and lost.issuperset(devices):
                self.gpu_model_cache.add_lost(name)
                self.commands.wake()

    def _request_load(self, handle: VersionHandle) -> None:
        """Let the control thread load an evicted version for which a request waits."""
        if self.gpu_model_cache.request(handle):
            self.commands.wake()

    def _handle_class(self, policy: HandlePolicy) -> Callable[..., ModelHandle]:
        return ModelHandle if policy.sequences is None else partial(SequenceHandle, directory=self.sequences)

    def open_cache(self, handle: VersionHandle, folder: ModelFolder, artefact: Callable[[], str]) -> None:
        """Create the response cache of a version, if the server and the configuration have one.

        Args:
            handle: the version, before it is published.
            folder: the model's folder.
            artefact: returns the digest of the files that serve the version.
        """
        config, caches = folder.config, self.response_caches
        if caches is not None and caches.is_shared:
            labels = [[name, *each] for name, each in sorted(folder.labels.items())]
            parts = [version("headrace"), artefact(), config.model_dump_json(exclude_defaults=True), labels]
            handle.digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        if config.response_cache is None or not config.response_cache.enable:
            return
        if caches is None:
            message = (
                "model %s: response_cache.enable has no effect: the server has no cache, start it with --cache-config"
            )
            logger.warning(message, config.name)
        elif handle.policy.preserve_ordering:
            message = (
                "model %s: response_cache.enable has no effect with preserve_ordering: hits would overtake requests"
            )
            logger.warning(message, config.name)
        else:
            handle.cache = caches.open(handle, config)

    def _latency_file(
        self, folder: ModelFolder, plan: ServingPlan, digest: Callable[[], str], instances: int
    ) -> LatencyFile | None:
        if self.latency_store is None:
            return None
        return self.latency_store.file_for(folder.config, digest(), plan.runtime, instances)

    def _open(self, folder: ModelFolder, version: int, plan: ServingPlan, digest: Callable[[], str]) -> AccountedModel:
        """Load the model into memory, charge it to its memory account, and prove its batch sizes."""
        with self.measuring.working():
            model = self._open_model(folder, version, plan, partial(self._try_file, folder, plan, digest))
            if self.proofs is None:
                return model
            try:
                ragged = ragged_policy(folder.config)
                layout = None if ragged is None else RaggedLayout(ragged, model_spec(folder, version))
                self.proofs.prove(folder, version, plan, digest, model, layout)
                return model
            except BaseException:
                model.close()
                raise

    def _open_model(self, folder: ModelFolder, version: int, plan: ServingPlan, try_file: _TryFile) -> AccountedModel:
        config, residents, devices = folder.config, frozenset[int](), list[int]()
        account = self.gpu_model_cache.ledger.account(config.name, str(version), config.gpu_memory_budget)
        steps = steps_of(config, folder.labels)
        try:
            if plan.runtime in GPU_RUNTIMES:
                devices, model, steps = self._on_gpus(plan, folder, steps, account, try_file)
                instances = len(devices)
                # Images that the CPU prepares must be in host memory.
                residents = model.resident_devices if steps.pixels is None else residents
            elif plan.runtime in PYTHON_RUNTIMES:
                instances = handle_policy(config).instances
                model = open_python_model(folder, version, plan, instances, self.interpreters, self.calls, self.metrics)
            else:
                instances = handle_policy(config).instances
                try_file(instances, dict(config.parameters), None)
                model = self._load_on_cpu(plan, config, instances, account)
            return AccountedModel(model, account, instances, residents, tuple(devices), config, steps)
        except BaseException:
            account.close()
            raise

    def _load_on_cpu(
        self, plan: ServingPlan, config: ModelConfig, instances: int, account: MemoryAccount
    ) -> LoadedModel:
        backend = self._create_backend(plan.runtime, config)
        if CPU not in account.ledger.limits:
            return backend.load(plan.file, instances, dict(config.parameters))
        is_isolated = config.isolation == "process"
        # The heap grows by all loads at once, so those that read its size take turns.
        with nullcontext() if is_isolated else self.heap_lock:
            memory = HostMemory(account, plan.file, is_isolated)
            model = backend.load(plan.file, instances, dict(config.parameters))
            try:
                memory.settle()
            except BaseException:
                model.close()
                raise
        return model

    def _try_file(
        self,
        folder: ModelFolder,
        plan: ServingPlan,
        digest: Callable[[], str],
        instances: int,
        parameters: dict[str, str],
        account: MemoryAccount | None,
    ) -> None:
        """Try a file that has not run on this machine in a helper process.

        Raises:
            NoRoom: it does not fit into the memory of a GPU.
            ConfigError: it ends its process, or exceeds the limit of time or memory.
        """
        if self.trials is None:
            return
        rows = folder.config.max_batch_size if plan.runtime in GPU_RUNTIMES else cpu_batch_size(folder.config)
        backend: dict[str, object] = {"factory": FACTORIES[plan.runtime], "file": str(plan.file)}
        backend |= {"instances": instances, "parameters": parameters}
        order = partial(trial_order, folder, rows, backend, account)
        self.trials.check(folder.config, plan, digest(), order)

    def _on_gpus(
        self,
        plan: ServingPlan,
        folder: ModelFolder,
        steps: Steps,
        account: MemoryAccount,
        try_file: _TryFile,
    ) -> tuple[list[int], LoadedModel, Steps]:
        from headrace.models.gpu_backend import (
            backend_parameters,
            check_tensors,
            devices_of,
            join_steps,
            keep_states,
            memory_bytes,
        )
        from headrace.runtimes.tensorrt.backend import TensorRtModel

        config, devices = folder.config, devices_of(folder.config)
        host_code = plan.stamp is not None and plan.stamp.version_compatible
        backend = self._create_backend(plan.runtime, config)
        parameters = backend_parameters(config, devices, host_code=host_code)
        if not backend.books_memory:
            try_file(len(devices), parameters, None)
            return devices, backend.load(plan.file, len(devices), parameters), steps
        for device in set(devices).intersection(range(gpus.count())):  # the backend reports missing GPUs
            self.gpu_model_cache.ledger.set_limit(device, int(memory_bytes(device) * self.gpu_memory_fraction))
        try_file(len(devices), parameters, account)
        model = cast(AccountedBackend, backend).load(plan.file, len(devices), parameters, account)
        try:
            if plan.runtime == "tensorrt":
                check_tensors(model, config, plan.file.name)
            if isinstance(model, TensorRtModel):
                keep_states(model, config, folder.path)
            if isinstance(model, TensorRtModel) and not is_ragged(config):  # kernels of steps take rows
                steps = join_steps(model, config, steps)
        except BaseException:
            model.close()
            raise
        return devices, model, steps

    def _create_backend(self, runtime: str, config: ModelConfig) -> Backend:
        """Create the backend, in this process or in a child process of the model."""
        if config.isolation == "process":
            return isolated(runtime, config)
        return self.backend(runtime)

    def _cuda_problem(self) -> str:
        """Return the reason why ONNX Runtime's CUDA provider cannot run here; "" if it can."""
        try:
            self.backend(CUDA_RUNTIME)
        except ConfigError as error:
            return error.findings[0].message
        return ""

    def _tensorrt_machine(self) -> Machine:
        """Describe this machine's first GPU for TensorRT.

        Raises:
            Unsupported, ConfigError: there is no GPU or no TensorRT.
        """
        try:
            self.backend("tensorrt")
        except ConfigError as error:
            if isinstance(error.__cause__, Unsupported):
                raise error.__cause__ from None
            raise
        from headrace.models.gpu_backend import tensorrt_machine

        return tensorrt_machine()


def _plugin_problem(name: str, version: str, digest: str, layers: Mapping[str, str]) -> str:
    """Return the reason why an engine with a plug-in does not run with this Headrace; "" if it does."""
    from headrace.runtimes.tensorrt.plan import plugin_problem

    return plugin_problem(name, version, digest, layers)


def _artefact_digest(folder: ModelFolder, version: int, plan: ServingPlan) -> str:
    """Return the SHA-256, in hex, of the files that serve a version."""
    if plan.runtime in PYTHON_RUNTIMES:
        return folder_digest(folder, version)
    return plan.stamp.artefact_sha256 if plan.stamp is not None else onnx_digest(plan.file)
