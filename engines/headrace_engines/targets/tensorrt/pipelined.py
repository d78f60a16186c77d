"""A plan with buffers for several batches, whose copies and executions are queued on streams of the caller.

One context runs all batches, one after the other; the addresses of a batch are set before its execution is queued.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.runtimes.cuda.driver import CudaStream

from headrace_engines.errors import BuildError
from headrace_engines.targets.base import Array
from headrace_engines.targets.tensorrt.api import TensorRtApi
from headrace_engines.targets.tensorrt.engine import EngineTensor, TensorRtEngine


@dataclass(frozen=True, slots=True)
class BatchSlot:
    """Buffers of one batch, by name of the tensor."""

    inputs: dict[str, EngineTensor]
    outputs: dict[str, EngineTensor]

    def close(self) -> None:
        """Free the buffers."""
        for tensor in (*self.inputs.values(), *self.outputs.values()):
            tensor.close()


class PipelinedPlan(TensorRtEngine):
    """An engine with several batch slots; the caller makes the GPU current (`headrace.runtimes.cuda.driver.current`).

    Args:
        api: TensorRT.
        path: file of the plan.
        device: number of the GPU.

    Raises:
        BuildError: as for `TensorRtEngine`.
    """

    def __init__(self, api: TensorRtApi, path: Path, device: int) -> None:
        self._slots: list[BatchSlot] = []
        super().__init__(api, path, None, device)

    def open_slots(self, inputs: Mapping[str, Array], count: int) -> list[BatchSlot]:
        """Run a batch, and allocate slots for batches of its shapes.

        Raises:
            BuildError: the shapes are in no profile, or the plan has outputs of unknown shape.
        """
        outputs = self.run(inputs)
        with self._working("allocating the batches of"):
            for tensor in self._outputs:
                if -1 in tuple(self._context.get_tensor_shape(tensor.name)):
                    raise BuildError(f"{self._name} has an output of unknown shape, {tensor.name}: use another model")
            for _ in range(count):
                slot = BatchSlot(
                    {t.name: EngineTensor(t.name, t.dtype, t.shape, on_host=t.on_host) for t in self._inputs},
                    {t.name: EngineTensor(t.name, t.dtype, t.shape, on_host=t.on_host) for t in self._outputs},
                )
                self._slots.append(slot)
                for name, tensor in slot.inputs.items():
                    tensor.stage(inputs[name])
                for name, tensor in slot.outputs.items():
                    tensor.expect(outputs[name].shape)
        return self._slots

    def queue_inputs(self, slot: BatchSlot, stream: CudaStream) -> None:
        """Queue the copies of a slot's inputs to the GPU."""
        for tensor in slot.inputs.values():
            tensor.send(stream)

    def queue_run(self, slot: BatchSlot, stream: CudaStream) -> None:
        """Queue an execution on a slot's buffers.

        Raises:
            BuildError: TensorRT refuses it.
        """
        for tensor in (*slot.inputs.values(), *slot.outputs.values()):
            self._context.set_tensor_address(tensor.name, tensor.address)
        if not self._context.execute_async_v3(stream.handle):
            raise BuildError(f"{self._name} failed on the GPU: see the log of TensorRT")

    def queue_outputs(self, slot: BatchSlot, stream: CudaStream) -> None:
        """Queue the copies of a slot's outputs to the host."""
        for tensor in slot.outputs.values():
            tensor.fetch(stream)

    def close(self) -> None:
        """Free all resources; may be called again."""
        if self._slots:
            with self._working("closing"):
                for slot in self._slots:
                    slot.close()
                self._slots = []
        super().close()
