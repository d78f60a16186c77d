"""cuDNN through PyTorch, where it is installed: with its autotuner, channels last, without TF32.

PyTorch shares the GPU's primary context with Headrace. Its convolutions read the lab's buffers and run on the lab's stream, in
CUDA graphs as all candidates do. Outputs are PyTorch's own and rotate over as many blocks as the inputs.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from headrace.cuda.driver import CudaStream

from headrace_engines.lab.inputs import DeviceOperands, HostOperands
from headrace_engines.lab.measure import RecordedLaunches

_TYPES = {2: "<f2", 4: "<f4"}


class Torch:
    """PyTorch with cuDNN on one GPU.

    Args:
        module: the module `torch`.
        device: number of the GPU.
        stream: stream of the convolutions.
    """

    def __init__(self, module: Any, device: int, stream: CudaStream) -> None:
        self.module = module
        self.device = module.device("cuda", device)
        module.backends.cudnn.benchmark = True
        module.backends.cudnn.allow_tf32 = False
        module.backends.cuda.matmul.allow_tf32 = False
        self.stream = module.cuda.ExternalStream(stream.handle, device=self.device)

    @property
    def description(self) -> str:
        """Versions of PyTorch and cuDNN and the settings, for reports."""
        version = self.module.backends.cudnn.version()
        limit = getattr(self.module.backends.cudnn, "benchmark_limit", None)
        plans = "" if limit is None else f" over up to {limit} plans" if limit else " over all plans"
        return f"PyTorch {self.module.__version__}, cuDNN {version}, autotuner{plans}, channels last, no TF32"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run PyTorch's work on the lab's stream."""
        with self.module.no_grad(), self.module.cuda.stream(self.stream):
            yield

    def view(self, address: int, shape: Sequence[int], itemsize: int) -> Any:
        """Return a tensor on memory of the GPU."""
        return self.module.as_tensor(_Memory(address, tuple(shape), _TYPES[itemsize]), device=self.device)


class _Memory:
    """Describes memory of the GPU by the CUDA array interface, version 3."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def load_torch(device: int, stream: CudaStream) -> Torch | str:
    """Return PyTorch with cuDNN, or the reason why it cannot be used."""
    try:
        module = import_module("torch")
    except ImportError as error:
        return f"PyTorch cannot be imported ({error}): install torch to measure cuDNN"
    if not module.cuda.is_available() or not module.backends.cudnn.is_available():
        return f"PyTorch {module.__version__} has no CUDA or no cuDNN here: install a CUDA build of torch"
    return Torch(module, device, stream)


class CudnnCandidate:
    """A convolution by cuDNN.

    Args:
        torch: PyTorch.
        host: operands of the layer.
        operands: the same on the GPU.
        fused: cuDNN's kernel with bias, residual and ReLU in place of separate operations.

    Raises:
        RuntimeError: PyTorch or cuDNN cannot run it.
    """

    def __init__(self, torch: Torch, host: HostOperands, operands: DeviceOperands, *, fused: bool) -> None:
        epilogue = host.epilogue
        is_plain = not (epilogue.bias or epilogue.residual or epilogue.relu)
        self.name = "cudnn" if is_plain else "cudnn-fused" if fused else "cudnn-unfused"
        self.variant = ""
        self.workspace_bytes: int | None = None
        self._torch, self._host, self._operands, self._fused = torch, host, operands, fused
        module, itemsize = torch.module, host.dtype.itemsize
        dtype = module.float16 if itemsize == 2 else module.float32
        with torch.running():
            weights = module.from_numpy(host.weights).to(torch.device, dtype)
            self._weights = weights.permute(0, 3, 1, 2)
            self._bias = module.from_numpy(host.bias).to(torch.device, dtype) if epilogue.bias else None
        self._sets: dict[int, tuple[Any, Any]] = {}
        self._output: Any = None

    def _set(self, index: int) -> tuple[Any, Any]:
        if index not in self._sets:
            shape, itemsize, operands = self._host.shape, self._host.dtype.itemsize, self._operands
            x = self._torch.view(operands.x[index], shape.x_shape, itemsize).permute(0, 3, 1, 2)
            residual = None
            if self._host.epilogue.residual:
                residual = self._torch.view(operands.residual[index], shape.y_shape, itemsize).permute(0, 3, 1, 2)
            self._sets[index] = x, residual
        return self._sets[index]

    def _convolve(self, index: int) -> Any:
        shape, epilogue, module = self._host.shape, self._host.epilogue, self._torch.module
        x, residual = self._set(index)
        geometry = [shape.stride] * 2, [shape.pad] * 2, [1, 1], shape.groups
        if self._fused:
            if residual is None:
                return module.cudnn_convolution_relu(x, self._weights, self._bias, *geometry)
            return module.cudnn_convolution_add_relu(x, self._weights, residual, 1.0, self._bias, *geometry)
        y = module.conv2d(x, self._weights, self._bias, *geometry)
        if residual is not None:
            y.add_(residual)
        return y.relu_() if epilogue.relu else y

    def run(self) -> int:
        """See `Candidate.run`."""
        with self._torch.running():
            self._output = self._convolve(0).contiguous(memory_format=self._torch.module.channels_last)
            self._torch.stream.synchronize()
        return int(self._output.data_ptr())

    def capture(self, launches: int) -> RecordedLaunches:
        """See `Candidate.capture`."""
        # Two runs before: the autotuner, and what a first launch allocates.
        with self._torch.running():
            self._convolve(0)
            self._torch.stream.synchronize()
            graph = self._torch.module.cuda.CUDAGraph()
            outputs: deque[Any] = deque(maxlen=len(self._operands))
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for number in range(launches):
                    outputs.append(self._convolve(number % len(self._operands)))
            finally:
                graph.capture_end()
        return _TorchReplay(self._torch, graph)

    def close(self) -> None:
        """See `Candidate.close`."""
        self._output = self._weights = self._bias = None
        self._sets.clear()


class _TorchReplay:
    def __init__(self, torch: Torch, graph: Any) -> None:
        self._torch, self._graph = torch, graph

    def launch(self) -> None:
        with self._torch.running():
            self._graph.replay()

    def close(self) -> None:
        self._graph.reset()


def cudnn_candidates(torch: Torch, host: HostOperands, operands: DeviceOperands) -> list[CudnnCandidate | str]:
    """Return cuDNN's candidates for a layer: one without an epilogue, else separate operations and the fused kernel.

    A text in place of a candidate is the reason why it cannot be used.
    """
    epilogue = host.epilogue
    kinds = [False, True] if epilogue.relu else [False]
    result: list[CudnnCandidate | str] = []
    for fused in kinds:
        name = "cudnn-fused" if fused else "cudnn-unfused" if epilogue.bias else "cudnn"
        try:
            candidate = CudnnCandidate(torch, host, operands, fused=fused)
            candidate.run()
            result.append(candidate)
        except RuntimeError as error:
            result.append(f"{name}: {str(error).splitlines()[0]}")
    return result
