"""TensorRT on NVIDIA GPUs: plans, one engine a GPU that all instances share, batches that overlap.

Importing this needs neither TensorRT nor a GPU; making a `TensorRtBackend` does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from server.backends.tensorrt_api import installed, load
from server.backends.tensorrt_dock import Placement
from server.backends.tensorrt_execution import TensorRtExecution
from server.backends.tensorrt_plan import Plan, Tensor, refused
from server.backends.tensorrt_stages import Joined, Stage
from server.core.errors import ConfigError, Finding, HeadraceError, Unsupported
from server.core.ledger import Account, Kind, NoRoom, Reservation
from server.cuda import device as gpus
from server.cuda.driver import DeviceError, OutOfDeviceMemory, current
from server.cuda.memory import Allocator, booked

# What the loader tells beside the parameters of a configuration: rows in a batch, and the GPU of each instance, by commas.
MAX_BATCH_SIZE = "headrace.max_batch_size"
GPUS = "headrace.gpus"

# One batch is staged while one computes and one comes back.
_DEPTH = 3
_MOST_DEPTH = 8

logger = logging.getLogger("headrace.tensorrt")


def gpu_count() -> int:
    """How many GPUs there are."""
    return gpus.count()


class TensorRtBackend:
    """Loads plans; see `server.backends.base.Backend`.

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
            parameters: of the model's configuration: `cuda_graphs` (1 or 0) and `pipeline_depth` (batches under way in an
                instance) are heeded; and `MAX_BATCH_SIZE` and `GPUS`.
            account: in which the memory is booked; None: nobody counts.
        """
        graphs, depth = parameters.get("cuda_graphs", "1"), parameters.get("pipeline_depth", str(_DEPTH))
        if graphs not in ("0", "1"):
            raise refused(file.name, f"parameter 'cuda_graphs' is '{graphs}'", "write 1 or 0")
        if not depth.isdecimal() or not 2 <= int(depth) <= _MOST_DEPTH:
            raise refused(file.name, f"parameter 'pipeline_depth' is '{depth}'", f"write 2 to {_MOST_DEPTH}")
        told = parameters.get(GPUS, "")
        devices = [int(number) for number in told.split(",")] if told else [0] * instances
        max_rows = int(parameters.get(MAX_BATCH_SIZE, "0"))
        placements = [Placement(device, max_rows, int(depth), graphs == "1") for device in devices]
        try:
            content = file.read_bytes()
        except OSError as error:
            raise refused(file.name, f"cannot be read: {error.strerror}", "build it with `headrace build`") from error
        return TensorRtModel(file.name, content, placements, account)


class TensorRtModel:
    """The engines of one version; see `server.backends.base.LoadedModel`.

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
        self._weights: list[Reservation | None] = []
        self._lock = threading.Lock()  # guards _told: instances open in threads of their own
        self._told = False
        try:
            for device in sorted({placement.device for placement in placements}):
                allocator = Allocator(device, account)
                weights = allocator.reservation(Kind.WEIGHTS)
                with booked(weights, len(content)):
                    self._plans[device] = _deserialised(name, content, allocator)
                self._weights.append(weights)
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
            return TensorRtExecution(self._plans[placement.device], placement, self._tell, stages)
        except ConfigError:
            raise
        except OutOfDeviceMemory as error:
            cure = "serve fewer models or instances, or lower max_batch_size"
            raise NoRoom(self._name, f"cannot be run: {error}", cure, placement.device) from error
        except HeadraceError as error:
            cure = "serve fewer models or instances, or lower max_batch_size"
            raise refused(self._name, f"cannot be run: {error}", cure) from error

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
        for device, plan in self._plans.items():
            with current(device):
                plan.close()
        self._plans.clear()
        for weights in self._weights:
            if weights is not None:
                weights.release()
        self._weights.clear()

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


def _deserialised(name: str, content: bytes, allocator: Allocator) -> Plan:
    device = allocator.gpu
    try:
        here = installed(device)
        with current(device):
            return Plan(load(), content, name, here, allocator)
    except ConfigError:
        raise
    except HeadraceError as error:
        cure = "name GPUs that are there in instance_group, or close what else uses them"
        raise refused(name, f"cannot be loaded on GPU {device}: {error}", cure) from error
