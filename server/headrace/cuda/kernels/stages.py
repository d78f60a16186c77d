"""Pictures and classes as stages of a model's way over a GPU; the contract is `headrace.backends.tensorrt.plan.GpuStage`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.cuda.driver import CudaStream
from headrace.cuda.kernels.launching import Classifier, PictureScaler, Preprocessor
from headrace.pipelines.recipe import ImageRecipe

Sizes = tuple[int, ...]
Launch = Callable[[CudaStream, int, int, Sequence[int]], None]


@dataclass(frozen=True)
class PictureStage:
    """uint8 pixels to the tensor that a model takes.

    Attributes:
        tensor: the model's input, and what callers call the pixels.
        recipe: how.
        dtype: of the tensor, float32 or float16.
    """

    tensor: str
    recipe: ImageRecipe
    dtype: np.dtype[Any]

    @property
    def row(self) -> Sizes:
        """Shape of one picture's tensor."""
        return self.recipe.shape[1:]

    @property
    def client_tensors(self) -> Mapping[str, tuple[np.dtype[Any], Sizes]]:
        """The pixels, by name: element type and shape of one picture."""
        return {self.tensor: (np.dtype(np.uint8), self.recipe.pixels)}

    def open(self, device: int) -> _Pictures:
        """The kernel on a GPU.

        Raises:
            Unsupported: no GPU, or no compiler for it.
            DeviceError: the driver refuses.
        """
        return _Pictures(picture_kernel(device, self.recipe, self.dtype))


@dataclass(frozen=True)
class ClassStage:
    """Scores to the best classes, or to probabilities.

    Attributes:
        tensor: the model's output.
        dtype: of the scores, float32 or float16.
        row: shape of one row of scores.
        classes: in a row.
        softmax: give probabilities in place of scores.
        top_k: how many classes, 0: probabilities of all.
        scores: what callers call the best classes' scores.
        numbers: what they call their numbers.
    """

    tensor: str
    dtype: np.dtype[Any]
    row: Sizes
    classes: int
    softmax: bool
    top_k: int
    scores: str
    numbers: str

    @property
    def client_tensors(self) -> Mapping[str, tuple[np.dtype[Any], Sizes]]:
        """What callers get, by name: element type and shape of one row, in the order in which `_Classes.launch` takes them."""
        if not self.top_k:
            return {self.tensor: (np.dtype(np.float32), self.row)}
        shape = (self.top_k,)
        return {self.scores: (np.dtype(np.float32), shape), self.numbers: (np.dtype(np.int32), shape)}

    def open(self, device: int) -> _Classes:
        """The kernel on a GPU; raises as `PictureStage.open` does."""
        return _Classes(Classifier(device, self.classes, self.dtype, self.softmax, self.top_k))


def picture_kernel(device: int, recipe: ImageRecipe, dtype: npt.DTypeLike) -> Preprocessor | PictureScaler:
    """What is fastest for a recipe; raises as both do."""
    kind = PictureScaler if PictureScaler.fits(recipe) else Preprocessor
    return kind(device, recipe, dtype)


class _Pictures:
    def __init__(self, kernel: Preprocessor | PictureScaler) -> None:
        self._kernel = kernel

    def launch(self, stream: CudaStream, source: int, rows: int, targets: Sequence[int]) -> None:
        self._kernel.launch(stream, source, rows, targets[0])

    @property
    def fetch(self) -> Launch | None:
        # Who resizes reads pixels several times: they had better be on the GPU.
        return self._fetch if isinstance(self._kernel, PictureScaler) else None

    def _fetch(self, stream: CudaStream, addresses: int, rows: int, targets: Sequence[int]) -> None:
        assert isinstance(self._kernel, PictureScaler), "only this one fetches"
        self._kernel.launch_each(stream, addresses, rows, targets[0])

    def close(self) -> None:
        self._kernel.close()


class _Classes:
    def __init__(self, kernel: Classifier) -> None:
        self._kernel = kernel

    def launch(self, stream: CudaStream, source: int, rows: int, targets: Sequence[int]) -> None:
        self._kernel.launch(stream, source, rows, *targets)

    @property
    def fetch(self) -> None:
        return None

    def close(self) -> None:
        self._kernel.close()
