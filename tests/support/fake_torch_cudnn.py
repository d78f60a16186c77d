"""Imitates the part of PyTorch with which the lab runs cuDNN, in NumPy on the fake GPU's memory and streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from headrace_lab.kernels.base import ConvShape, Epilogue, convolve

from tests.support.convolutions import at_address
from tests.support.fake_streams import LateCuda


class FakeTorch(ModuleType):
    """The module `torch`; its work runs when the fake GPU's stream is waited for.

    Args:
        cuda: the fake GPU.

    Attributes:
        refused: operations that raise a RuntimeError.
        handle: of the current stream.
        calls: names of the operations that were queued, in order.
    """

    def __init__(self, cuda: LateCuda) -> None:
        super().__init__("torch")
        self.__version__ = "2.11"
        self.fake, self.refused, self.calls, self.handle = cuda, set[str](), list[str](), 0
        self.float16, self.float32, self.channels_last = np.float16, np.float32, "last"
        self.backends = SimpleNamespace(
            cudnn=SimpleNamespace(is_available=lambda: True, version=lambda: 90000, benchmark_limit=10),
            cuda=SimpleNamespace(matmul=SimpleNamespace()),
        )
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            stream=self._on,
            ExternalStream=self._stream,
            CUDAGraph=lambda: _Graph(self),
        )
        self.no_grad = contextlib.nullcontext

    @contextlib.contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        outer, self.handle = self.handle, stream.handle
        try:
            yield
        finally:
            self.handle = outer

    def _stream(self, handle: int, device: Any) -> Any:
        def synchronize() -> None:
            self.fake.advance(lambda: not self.fake.queues[handle])

        return SimpleNamespace(handle=handle, synchronize=synchronize)

    def device(self, kind: str, number: int) -> str:
        return f"{kind}:{number}"

    def queue(self, name: str, work: Callable[[], None]) -> None:
        """Queue an operation on the current stream."""
        if name in self.refused:
            raise RuntimeError(f"{name} is not supported\nmore lines")
        assert self.handle, "PyTorch's own stream is not the lab's"
        self.calls.append(name)
        self.fake.submit(work, self.handle)

    def from_numpy(self, array: np.ndarray) -> Tensor:
        return Tensor(self, array)

    def as_tensor(self, memory: Any, device: str) -> Tensor:
        interface = memory.__cuda_array_interface__
        assert interface["version"] == 3
        return Tensor(self, at_address(interface["data"][0], interface["shape"], interface["typestr"]))

    def randn(self, *sizes: int, device: str) -> Tensor:
        # Small: the rate of the products is not of interest here.
        return Tensor(self, np.ones((4, 4), np.float32))

    def empty_like(self, tensor: Tensor) -> Tensor:
        return Tensor(self, np.empty_like(tensor.array))

    def mm(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        self.queue("mm", lambda: np.copyto(out.array, left.array @ right.array))

    def conv2d(
        self, x: Tensor, weights: Tensor, bias: Tensor | None, stride: Any, pad: Any, dilation: Any, groups: int
    ) -> Tensor:
        return self._convolve("conv2d", Epilogue(bias=bias is not None), x, weights, bias, None, stride, pad, groups)

    def cudnn_convolution_relu(
        self, x: Tensor, weights: Tensor, bias: Tensor, stride: Any, pad: Any, dilation: Any, groups: int
    ) -> Tensor:
        epilogue = Epilogue(bias=True, relu=True)
        return self._convolve("cudnn_convolution_relu", epilogue, x, weights, bias, None, stride, pad, groups)

    def cudnn_convolution_add_relu(
        self, x: Tensor, weights: Tensor, z: Tensor, alpha: float, bias: Any, stride: Any, pad: Any, d: Any, groups: int
    ) -> Tensor:
        assert alpha == 1
        every = Epilogue(bias=True, residual=True, relu=True)
        return self._convolve("cudnn_convolution_add_relu", every, x, weights, bias, z, stride, pad, groups)

    def _convolve(
        self,
        name: str,
        epilogue: Epilogue,
        x: Tensor,
        weights: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        stride: Sequence[int],
        pad: Sequence[int],
        groups: int,
    ) -> Tensor:
        (n, c, h, w), (k, _, r, s) = x.array.shape, weights.array.shape
        shape = ConvShape(n, c, h, w, k, r, s, stride[0], pad[0], groups)
        result = np.empty(shape.y_shape, x.array.dtype).transpose(0, 3, 1, 2)
        b = None if bias is None else bias.array
        z = None if residual is None else residual.array.transpose(0, 2, 3, 1)

        def work() -> None:
            y = convolve(shape, epilogue, x.array.transpose(0, 2, 3, 1), weights.array.transpose(0, 2, 3, 1), b, z)
            result[...] = y.transpose(0, 3, 1, 2)

        self.queue(name, work)
        return Tensor(self, result)


class Tensor:
    """An array of NumPy whose operations are queued."""

    def __init__(self, torch: FakeTorch, array: np.ndarray) -> None:
        self._torch, self.array = torch, array

    def to(self, *options: Any) -> Tensor:
        return Tensor(self._torch, self.array.astype(options[-1]))

    def permute(self, *axes: int) -> Tensor:
        return Tensor(self._torch, self.array.transpose(axes))

    def contiguous(self) -> Tensor:
        target = np.empty(self.array.shape, self.array.dtype)
        self._torch.queue("contiguous", lambda: np.copyto(target, self.array))
        return Tensor(self._torch, target)

    def add_(self, other: Tensor) -> Tensor:
        self._torch.queue("add_", lambda: np.add(self.array, other.array, out=self.array))
        return self

    def relu_(self) -> Tensor:
        self._torch.queue("relu_", lambda: np.maximum(self.array, 0, out=self.array))
        return self

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)


class _Graph:
    def __init__(self, torch: FakeTorch) -> None:
        self._torch = torch
        self._work: list[Callable[[], None]] | None = None

    def capture_begin(self, capture_error_mode: str) -> None:
        assert self._torch.handle
        self._torch.fake.captured = []

    def capture_end(self) -> None:
        self._work, self._torch.fake.captured = self._torch.fake.captured, None

    def replay(self) -> None:
        assert self._work is not None, "the graph is gone"
        for work in self._work:
            self._torch.fake.submit(work, self._torch.handle)

    def reset(self) -> None:
        self._work = None
