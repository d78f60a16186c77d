"""TensorRT on NVIDIA GPUs: plans, one engine a GPU that all instances share, batches that overlap.

Importing this needs neither TensorRT nor a GPU; making a `TensorRtBackend` does.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from headrace.backends.tensorrt.api import installed, load
from headrace.backends.tensorrt.dock import Placement
from headrace.backends.tensorrt.execution import TensorRtExecution
from headrace.backends.tensorrt.plan import Plan, Tensor, refused
from headrace.backends.tensorrt.stages import Joined, Stage
from headrace.core.errors import ConfigError, Finding, HeadraceError, Unsupported
from headrace.core.ledger import Account, Kind, NoRoom, Reservation
from headrace.cuda import device as gpus
from headrace.cuda.driver import DeviceError, OutOfDeviceMemory, current
from headrace.cuda.kernels.rows import RowGather
from headrace.cuda.memory import Allocator, booked

# What the loader tells beside the parameters of a configuration: rows in a batch, and the GPU of each instance, by commas.
MAX_BATCH_SIZE = "headrace.max_batch_size"
GPUS = "headrace.gpus"

# One batch is staged while one computes and one comes back.
_DEPTH = 3
_MOST_DEPTH = 8
# Whether the host spins while it waits for a flight.
_WAITS: dict[str, bool | None] = {"auto": None, "spin": True, "sleep": False}

logger = logging.getLogger("headrace.tensorrt")


def gpu_count() -> int:
    """How many GPUs there are."""
    return gpus.count()


class TensorRtBackend:
    """Loads plans; see `headrace.backends.base.Backend`.

    Raises:
        ConfigError: there is no GPU or no TensorRT; says what to install.
    """

    def __init__(self) -> None:
        try:
            # The GPU is looked for first: TensorRT ends the process when it is started without one.
            installed()
        except Unsupported as error:
            message = f"backend 'tensorrt' is not available on this machine: {error}"
            cure = "write backend: onnxruntime, or fallback: onnxruntime with the ONNX file beside"
            raise ConfigError([Finding("config", None, message, cure)]) from error

    def load(
        self, file: Path, instances: int, parameters: dict[str, str], account: Account | None = None
    ) -> TensorRtModel:
        """Deserialise a plan once on each GPU.

        Args:
            file: the plan.
            instances: how many executions will be asked for.
            parameters: of the model's configuration, as docs/configuration.md has them; and `MAX_BATCH_SIZE` and `GPUS`.
            account: in which the memory is booked; None: nobody counts.
        """
        told = parameters.get(GPUS, "")
        devices = [int(number) for number in told.split(",")] if told else [0] * instances
        placements = [_placement(file.name, device, parameters) for device in devices]
        try:
            content = file.read_bytes()
        except OSError as error:
            raise refused(file.name, f"cannot be read: {error.strerror}", "build it with `headrace build`") from error
        return TensorRtModel(file.name, content, placements, account)


def _placement(file: str, device: int, parameters: dict[str, str]) -> Placement:
    """Where and how an instance runs.

    Raises:
        ConfigError: a parameter makes no sense.
    """
    graphs, depth = parameters.get("cuda_graphs", "1"), parameters.get("pipeline_depth", str(_DEPTH))
    one_graph, wait = parameters.get("one_graph_rows", "auto"), parameters.get("wait", "auto")
    if graphs not in ("0", "1"):
        raise refused(file, f"parameter 'cuda_graphs' is '{graphs}'", "write 1 or 0")
    if not depth.isdecimal() or not 2 <= int(depth) <= _MOST_DEPTH:
        raise refused(file, f"parameter 'pipeline_depth' is '{depth}'", f"write 2 to {_MOST_DEPTH}")
    if one_graph != "auto" and not one_graph.isdecimal():
        raise refused(file, f"parameter 'one_graph_rows' is '{one_graph}'", "write auto, or a number of rows")
    if wait not in _WAITS:
        raise refused(file, f"parameter 'wait' is '{wait}'", f"write one of {', '.join(_WAITS)}")
    return Placement(
        device=device,
        max_rows=int(parameters.get(MAX_BATCH_SIZE, "0")),
        depth=int(depth),
        graphs=graphs == "1",
        one_graph_rows=None if one_graph == "auto" else int(one_graph),
        spins=_WAITS[wait],
    )


class TensorRtModel:
    """The engines of one version; see `headrace.backends.base.LoadedModel`.

    Args:
        name: of the plan's file.
        content: of it.
        placements: of the instances.
        account: in which the memory is booked; None: nobody counts. A plan is taken to need as much as its file is long.

    Raises:
        NoRoom: the account has no room.
        ConfigError: the plan is foreign or broken, or does not fit into memory.
    """

    def __init__(self, name: str, content: bytes, placements: list[Placement], account: Account | None = None) -> None:
        self._name = name
        self._placements = placements
        self._plans: dict[int, Plan] = {}
        self._stages: dict[int, dict[str, Joined]] = {}
        self._gathers: dict[int, RowGather] = {}
        self._weights: list[Reservation | None] = []
        self._lock = threading.Lock()  # guards _told: instances open in threads of their own
        self._told = False
        digest = hashlib.sha256(content).digest()
        try:
            for device in sorted({placement.device for placement in placements}):
                allocator = Allocator(device, account)
                weights = allocator.reservation(Kind.WEIGHTS)
                with booked(weights, len(content)):
                    self._plans[device] = _deserialised(name, content, digest, allocator)
                self._weights.append(weights)
            self._open_gathers()
        except BaseException:
            self.close()
            raise

    def join(self, stages: Sequence[Stage]) -> str:
        """Let the GPUs do these before and behind the plan; called once, before any execution is asked for.

        Returns:
            Why they cannot: then all is as if nobody had asked. "" if they do.
        """
        try:
            for device in self._plans:
                joined = self._stages[device] = {}
                for stage in stages:
                    joined[stage.tensor] = Joined(stage, stage.open(device))
        except (Unsupported, DeviceError) as error:
            self._part()
            return str(error)
        return ""

    def execution(self, index: int) -> TensorRtExecution:
        """Instance `index` on its GPU.

        Raises:
            ConfigError: the GPU has no room for it, or the plan does not take the model's batches.
        """
        placement = self._placements[index]
        try:
            stages = self._stages.get(placement.device)
            gather = self._gathers.get(placement.device)
            return TensorRtExecution(self._plans[placement.device], placement, self._tell, stages, gather)
        except ConfigError:
            raise
        except OutOfDeviceMemory as error:
            cure = "serve fewer models or instances, or lower max_batch_size"
            raise NoRoom(self._name, f"cannot be run: {error}", cure, placement.device) from error
        except HeadraceError as error:
            cure = "serve fewer models or instances, or lower max_batch_size"
            raise refused(self._name, f"cannot be run: {error}", cure) from error

    @property
    def resident_devices(self) -> frozenset[int]:
        """Numbers of the GPUs whose flights take resident rows: all, or none where the kernel cannot be had."""
        return frozenset(self._gathers)

    @property
    def profile(self) -> dict[int, float]:
        """By rows the microseconds that a batch of a bucket keeps a GPU busy; empty until an instance is open, if ever."""
        choice = next(iter(self._plans.values())).choice
        return {} if choice is None else {n: t.replay_us for n, t in choice.timings.items() if n in choice.buckets}

    @property
    def inputs(self) -> Sequence[Tensor]:
        """What the plan takes."""
        return next(iter(self._plans.values())).inputs

    @property
    def outputs(self) -> Sequence[Tensor]:
        """What it gives."""
        return next(iter(self._plans.values())).outputs

    def close(self) -> None:
        """Give the GPUs' memory back."""
        self._part()
        self._close_gathers()
        for device, plan in self._plans.items():
            with current(device):
                plan.close()
        self._plans.clear()
        for weights in self._weights:
            if weights is not None:
                weights.release()
        self._weights.clear()

    def _open_gathers(self) -> None:
        try:
            for device in self._plans:
                self._gathers[device] = RowGather(device)
        except (Unsupported, DeviceError) as error:
            self._close_gathers()
            logger.debug("%s takes no rows from where they lie on the GPU: %s", self._name, error)

    def _close_gathers(self) -> None:
        while self._gathers:
            self._gathers.popitem()[1].close()

    def _part(self) -> None:
        for device, joined in self._stages.items():
            with current(device):
                while joined:
                    joined.popitem()[1].work.close()
        self._stages.clear()

    def _tell(self, reason: str) -> None:
        with self._lock:
            told, self._told = self._told, True
        if not told:
            logger.warning("%s runs without CUDA graphs, it cannot be captured: %s", self._name, reason)


def _deserialised(name: str, content: bytes, digest: bytes, allocator: Allocator) -> Plan:
    device = allocator.gpu
    try:
        here = installed(device)
        with current(device):
            return Plan(load(), content, digest, name, here, allocator)
    except ConfigError:
        raise
    except HeadraceError as error:
        cure = "name GPUs that are there in instance_group, or close what else uses them"
        raise refused(name, f"cannot be loaded on GPU {device}: {error}", cure) from error
