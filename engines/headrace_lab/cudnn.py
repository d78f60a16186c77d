"""cuDNN through PyTorch, where it is installed: with its autotuner, without TF32; channels last, in float32 NCHW too.

PyTorch shares the GPU's primary context with Headrace. Its convolutions read the lab's buffers and run on the lab's stream, in
CUDA graphs as all candidates do. Outputs are PyTorch's own and rotate over as many blocks as the inputs.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from headrace.runtimes.cuda.driver import CudaStream, DeviceError

from headrace_lab.check import SEPARATE
from headrace_lab.inputs import DeviceOperands, HostOperands
from headrace_lab.layers import PLAIN
from headrace_lab.measure import RecordedLaunches, trial_us

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
        layouts = "NHWC, in FP32 the faster of NHWC and NCHW"
        return f"PyTorch {self.module.__version__}, cuDNN {version}, autotuner{plans}, no TF32, {layouts}"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run PyTorch's work on the lab's stream.

        Raises:
            DeviceError: PyTorch or cuDNN refuses.
        """
        try:
            with self.module.no_grad(), self.module.cuda.stream(self.stream):
                yield
        except RuntimeError as error:
            raise DeviceError(str(error).splitlines()[0]) from error

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
        layout: "NHWC" or "NCHW"; values in the lab's buffers are as random in either.

    Raises:
        DeviceError: PyTorch or cuDNN cannot run it.
    """

    # PyTorch requests float32 as the type of cuDNN's sums.
    half_sums = False

    def __init__(
        self, torch: Torch, host: HostOperands, operands: DeviceOperands, *, fused: bool, layout: str = "NHWC"
    ) -> None:
        epilogue = host.epilogue
        self.name = "cudnn" if epilogue == PLAIN else "cudnn-fused" if fused else SEPARATE
        self.variant = layout
        self.workspace_bytes: int | None = None
        self._is_last = layout == "NHWC"
        self._torch, self._host, self._operands, self._fused = torch, host, operands, fused
        module, itemsize = torch.module, host.dtype.itemsize
        dtype = module.float16 if itemsize == 2 else module.float32
        with torch.running():
            weights = module.from_numpy(host.weights).to(torch.device, dtype)
            self._weights = weights.permute(0, 3, 1, 2)
            if not self._is_last:
                self._weights = self._weights.contiguous()
            self._bias = module.from_numpy(host.bias).to(torch.device, dtype) if epilogue.bias else None
        self._sets: dict[int, tuple[Any, Any]] = {}
        self._output: Any = None

    def _set(self, index: int) -> tuple[Any, Any]:
        if index not in self._sets:
            shape, operands = self._host.shape, self._operands
            residual = self._view(operands.residual[index], shape.y_shape) if self._host.epilogue.residual else None
            self._sets[index] = self._view(operands.x[index], shape.x_shape), residual
        return self._sets[index]

    def _view(self, address: int, sizes: tuple[int, int, int, int]) -> Any:
        """Return a buffer of the lab as (n, c, h, w) in this candidate's layout."""
        n, height, width, channels = sizes
        if self._is_last:
            return self._torch.view(address, sizes, self._host.dtype.itemsize).permute(0, 3, 1, 2)
        return self._torch.view(address, (n, channels, height, width), self._host.dtype.itemsize)

    def _convolve(self, x: Any, residual: Any) -> Any:
        shape, epilogue, module = self._host.shape, self._host.epilogue, self._torch.module
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
        """Run once on the first set of activations, wait, and return the address of the output (n, out_h, out_w, k)."""
        shape, itemsize = self._host.shape, self._host.dtype.itemsize
        with self._torch.running():
            x, residual = self._set(0)
            if not self._is_last:
                # The values are those of NHWC.
                x = self._torch.view(self._operands.x[0], shape.x_shape, itemsize).permute(0, 3, 1, 2).contiguous()
            if not self._is_last and residual is not None:
                residual = self._torch.view(self._operands.residual[0], shape.y_shape, itemsize)
                residual = residual.permute(0, 3, 1, 2).contiguous()
            output = self._convolve(x, residual)
            # In memory as (n, h, w, c), also where PyTorch sees no difference between the layouts.
            self._output = output.permute(0, 2, 3, 1).contiguous()
            self._torch.stream.synchronize()
        return int(self._output.data_ptr())

    def capture(self, launches: int) -> RecordedLaunches:
        """Record launches that rotate over the sets of activations."""
        # Two runs before: the autotuner, and what a first launch allocates.
        with self._torch.running():
            self._convolve(*self._set(0))
            self._torch.stream.synchronize()
            graph = self._torch.module.cuda.CUDAGraph()
            outputs: deque[Any] = deque(maxlen=len(self._operands))
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for number in range(launches):
                    outputs.append(self._convolve(*self._set(number % len(self._operands))))
            finally:
                graph.capture_end()
        return _TorchReplay(self._torch, graph)

    def close(self) -> None:
        """Free all memory; all work must be done."""
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


def cudnn_candidates(
    torch: Torch, host: HostOperands, operands: DeviceOperands, stream: CudaStream
) -> list[CudnnCandidate | str]:
    """Return cuDNN's candidates for a layer: one without an epilogue, else separate operations and the fused kernel.

    In float32 each has the faster of the layouts NHWC and NCHW. A text in place of a candidate is the reason why there is none.
    """
    epilogue = host.epilogue
    kinds = [False, True] if epilogue.relu else [False]
    layouts = ("NHWC",) if host.dtype.itemsize == 2 else ("NHWC", "NCHW")
    result: list[CudnnCandidate | str] = []
    for fused in kinds:
        name = "cudnn-fused" if fused else SEPARATE if epilogue != PLAIN else "cudnn"
        found: list[tuple[float, int, CudnnCandidate]] = []
        error = ""
        for number, layout in enumerate(layouts):
            try:
                candidate = CudnnCandidate(torch, host, operands, fused=fused, layout=layout)
                candidate.run()
                found.append((trial_us(stream, candidate), number, candidate))
            except DeviceError as refusal:
                error = f"{name}: {refusal}"
        found.sort()
        for _, _, slower in found[1:]:
            slower.close()
        result.append(found[0][2] if found else error)
    return result
