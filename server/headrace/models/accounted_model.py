"""A loaded model together with the account of its memory, and the bytes that a model takes of the host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headrace.config.model_config import ModelConfig
from headrace.config.onnx_model import external_files
from headrace.core.heap import heap_bytes
from headrace.core.ledger import CPU, Kind, MemoryAccount
from headrace.inference.pipelines.execution import Steps
from headrace.inference.scheduling.batch_proof import BatchVerdict
from headrace.inference.scheduling.proven_sizes import ProvenSizes
from headrace.inference.scheduling.reshaping import ReshapingExecution
from headrace.inference.scheduling.row_sampler import RowSampler
from headrace.inference.scheduling.sequences.controls import ControlledExecution
from headrace.models.sequence_policy import sequence_policy
from headrace.runtimes.base import Execution, HasProcessStatus, LoadedModel

logger = logging.getLogger("headrace.model")

# Host memory of a session of ONNX Runtime and of its instance besides the weights, in bytes, as measured with small models.
_SESSION_BYTES = 256 << 10
# Host memory of a child process with ONNX Runtime besides the model, in bytes.
_PROCESS_BYTES = 64 << 20
# Growth of the heap during a load that is believed, as a multiple of the expected bytes: requests allocate meanwhile, too.
_MAX_GROWTH = 4


def file_id(file: Path) -> tuple[int, int, int]:
    """Return size in bytes, modification time in nanoseconds and inode of a file; zeros if it cannot be read."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ino


def free_bytes() -> int | None:
    """Return the free memory of the machine and the container in bytes; None if the system does not report it."""
    available_bytes = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available_bytes.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10)
    with suppress(OSError, ValueError):
        control = Path("/sys/fs/cgroup")
        available_bytes.append(
            int((control / "memory.max").read_text()) - int((control / "memory.current").read_text())
        )
    return min(available_bytes, default=None)


class HostMemory:
    """Reserves the host memory of one model around its load: first what its files need, then what the heap has grown by.

    Args:
        account: account of the model.
        file: the model's file; its external tensors count, too.
        is_isolated: True if the model runs in a child process, whose heap is not visible.

    Raises:
        NoRoom: the model does not fit into the budget of host memory.
        ConfigError: the file cannot be read.
    """

    def __init__(self, account: MemoryAccount, file: Path, is_isolated: bool) -> None:
        files = [file, *(file.parent / location for location in external_files(file, file.name))]
        base_bytes = _PROCESS_BYTES if is_isolated else _SESSION_BYTES
        self._expected_bytes = base_bytes + sum(file_id(each)[0] for each in files)
        self._reservation = account.reservation(CPU, Kind.WEIGHTS, self._expected_bytes)
        self._limit_bytes = account.ledger.limits.get(CPU, self._expected_bytes)
        self._heap_bytes = None if is_isolated else heap_bytes()

    def settle(self) -> None:
        """Reserve the growth of the heap since the construction, if it is more; call it once the model is loaded.

        Raises:
            NoRoom: the model does not fit into the budget beside the others.
        """
        now_bytes = None if self._heap_bytes is None else heap_bytes()
        if now_bytes is None or self._heap_bytes is None:
            return
        growth_bytes = min(now_bytes - self._heap_bytes, _MAX_GROWTH * self._expected_bytes, self._limit_bytes)
        if growth_bytes > self._expected_bytes:
            self._reservation.resize(growth_bytes)


@dataclass(eq=False)
class AccountedModel(LoadedModel):
    """A model, the steps around its executions, and the account of its memory, which is closed with it.

    Attributes:
        inner: the model.
        account: account of its memory.
        instances: number of executions.
        resident_devices: GPUs that read inputs in place, without a copy to the host.
        devices: GPU number of each instance; empty on the CPU.
        config: complete configuration, for `reshape`.
        steps: preprocessing and postprocessing on the CPU.
        verdict: which batch sizes are proven; more of them may be while the model is idle.
        prove: tests sizes that are left, and a row of `sampler`, on an instance's execution until its second argument returns
            True, and changes `verdict`; returns True if the executions must be opened again for that. None if it is not tested.
        has_left: True if sizes are left to be tested.
        sampler: takes rows of batches for `prove`; None for none.
        row_differences: rows that had other outputs when they ran again alone.
        on_closed: called after the model is closed, e.g. to store its latency table.
    """

    inner: LoadedModel
    account: MemoryAccount
    instances: int
    # `field()`: the defaults of `LoadedModel` are no defaults of the constructor.
    resident_devices: frozenset[int] = field()
    devices: tuple[int, ...] = field()
    config: ModelConfig
    steps: Steps
    verdict: BatchVerdict = field(default_factory=BatchVerdict)
    prove: Callable[[Execution, Callable[[], bool]], bool] | None = None
    has_left: bool = False
    sampler: RowSampler | None = None
    row_differences: int = 0
    on_closed: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        inner = self.inner
        self.inputs, self.outputs, self.shape_ranges = inner.inputs, inner.outputs, inner.shape_ranges
        self.buckets_us, self.run_rows, self.probes = inner.buckets_us, inner.run_rows, inner.probes
        self.run_unpadded, self.detach_states = inner.run_unpadded, inner.detach_states

    @property
    def process(self) -> HasProcessStatus | None:
        """That of the model."""
        return self.inner.process

    def execution(self, index: int) -> Execution:
        """Create instance `index` with the steps around it; see `headrace.runtimes.base.LoadedModel`."""
        execution = served_execution(self.inner.execution(index), self.config, self.steps)
        if self.verdict.allowed:
            return ProvenSizes(execution, lambda: self.verdict, self.config.sequence_batching is not None)
        return execution

    @property
    def max_rows(self) -> int:
        """Most rows of a batch on the model's device; 0 without a batch dimension."""
        return self.config.max_batch_size if self.devices else cpu_batch_size(self.config)

    def close(self) -> None:
        """Close the model and its account."""
        try:
            self.inner.close()
        except Exception as error:  # of the driver on a GPU that has failed, whose memory ends with the process
            logger.error("the memory of model %s is not freed: %r", self.config.name, error)
        self.account.close()
        for callback in self.on_closed:
            callback()
        self.prove = self.sampler = None  # which refer to the model: its memory is freed at once
        self.on_closed.clear()


def cpu_batch_size(config: ModelConfig) -> int:
    """Return the maximum rows of a batch on the CPU; 0 without a batch dimension."""
    bound = config.cpu_max_batch_size
    return config.max_batch_size if bound is None else min(config.max_batch_size, bound)


def served_execution(execution: Execution, config: ModelConfig, steps: Steps) -> Execution:
    """Return an execution of a model with all that the configuration puts around it, as clients see it.

    Args:
        execution: runs the model itself.
        config: complete configuration.
        steps: preprocessing and postprocessing on the CPU.
    """
    sequences = sequence_policy(config, 1)
    if sequences is not None and (sequences.controls or sequences.states):
        batched = config.max_batch_size > 0
        execution = ControlledExecution(execution, sequences.controls, batched, sequences.states)
    return steps.around(_reshaped(execution, config))


def _reshaped(execution: Execution, config: ModelConfig) -> Execution:
    inputs = {tensor.name: tensor.reshape.shape for tensor in config.input if tensor.reshape is not None}
    outputs = {tensor.name: tensor.dims for tensor in config.output if tensor.reshape is not None}
    if not inputs and not outputs:
        return execution
    return ReshapingExecution(execution, inputs, outputs, config.max_batch_size > 0)
