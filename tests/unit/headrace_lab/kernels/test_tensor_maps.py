"""Tensor maps: the numbers that the driver's encoder is called with."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from headrace.runtimes.cuda.driver import DeviceError
from headrace_lab.kernels import tensor_maps
from headrace_lab.kernels.tensor_maps import encode_tiles, encode_windows


class Encoder:
    """The driver's library as far as maps need it; fills a map with the number of the call.

    Attributes:
        calls: name and arguments, arrays as lists.
        result: of the next calls.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []
        self.result = 0

    def __getattr__(self, name: str) -> Any:
        def encode(target: ctypes.c_void_p, *arguments: Any) -> int:
            values = [list(a) if isinstance(a, ctypes.Array) else getattr(a, "value", a) for a in arguments]
            self.calls.append((name, values))
            assert target.value is not None
            assert target.value % 64 == 0, "the driver refuses a map at another address"
            ctypes.memset(target.value, len(self.calls), 128)
            return self.result

        return encode

    def cuGetErrorName(self, result: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Encoder:
    encoder = Encoder()
    monkeypatch.setattr(tensor_maps, "library", lambda: encoder)
    monkeypatch.setattr("headrace.runtimes.cuda.driver.library", lambda: encoder)
    return encoder


def test_boxes_of_a_tensor(encoder: Encoder) -> None:
    assert encode_tiles(4096, (72, 9, 136), (64, 1, 128)).bytes[:] == [1] * 128
    assert encode_tiles(4096, (72, 50), (64, 128)).bytes[:] == [2] * 128
    (name, weights), (_, pixels) = encoder.calls
    assert name == "cuTensorMapEncodeTiled"
    #                  float16, rank, address, sizes, bytes from row to row, box, every element
    assert weights[:7] == [6, 3, 4096, [72, 9, 136], [144, 1296], [64, 1, 128], [1, 1, 1]]
    assert weights[7:] == [0, 3, 3, 0]  # not interleaved, swizzled by 128 bytes, 256 bytes for L2, zeros outside
    assert pixels[:7] == [6, 2, 4096, [72, 50], [144], [64, 128], [1, 1]]


def test_windows_of_a_convolution(encoder: Encoder) -> None:
    encode_windows(8192, (40, 8, 9, 2), (5, 3), 2, 1, 128)
    ((name, arguments),) = encoder.calls
    assert name == "cuTensorMapEncodeIm2col"
    assert arguments[:5] == [6, 4, 8192, [40, 8, 9, 2], [80, 640, 5760]]
    # The first taps of the windows lie in [-1, 8 + 1 - 4) and [-1, 9 + 1 - 2).
    assert arguments[5:10] == [[-1, -1], [-3, -1], 64, 128, [1, 2, 2, 1]]


def test_the_drivers_refusal_names_the_tensor(encoder: Encoder) -> None:
    encoder.result = 1
    with pytest.raises(DeviceError, match=r"sizes \(72, 50\) failed .*CUDA_ERROR_INVALID_VALUE"):
        encode_tiles(8, (72, 50), (64, 128))
    with pytest.raises(DeviceError, match=r"sizes \(8, 4, 4, 1\), window \(3, 3\)"):
        encode_windows(8, (8, 4, 4, 1), (3, 3), 1, 1, 64)
