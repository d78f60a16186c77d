"""The algorithms without a GPU: a list with their papers and supported shapes, and the errors of their NumPy references."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence

import numpy as np
from headrace_engines.errors import CallError
from headrace_engines.report import Heading, narrow_table, print_text
from rich.console import Console

from headrace_lab.candidates import families, variants_for
from headrace_lab.check import SampledReference, sample
from headrace_lab.inputs import HostOperands, host_operands
from headrace_lab.kernels.base import ConvShape, convolve
from headrace_lab.kernels.resources import Algorithm
from headrace_lab.layers import PLAIN, ConvLayer
from headrace_lab.page import work_name
from headrace_lab.results import DTYPES

# Shapes of the list, by the heading of their column; the GPU is one of compute capability 9.0.
_EXAMPLES = {
    "1x1": ConvShape(8, 64, 56, 56, 256, 1, 1),
    "3x3": ConvShape(8, 64, 56, 56, 64, 3, 3, 1, 1),
    "3x3 /2": ConvShape(8, 128, 56, 56, 128, 3, 3, 2, 1),
    "7x7 c 3": ConvShape(8, 3, 224, 224, 64, 7, 7, 2, 3),
    "15x15": ConvShape(8, 64, 56, 56, 64, 15, 15, 1, 7),
    "depthwise": ConvShape(8, 64, 56, 56, 64, 3, 3, 1, 1, 64),
    "8 groups": ConvShape(8, 64, 56, 56, 64, 3, 3, 1, 1, 8),
}
_CAPABILITY = (9, 0)
_PAPERS = {
    "direct": "definition; Goodfellow et al., Deep Learning, 2016, ch. 9",
    "simt-gemm": "Chetlur et al., cuDNN, 2014",
    "implicit-gemm": "Chetlur et al., cuDNN, 2014; PTX ISA, mma.sync",
    "implicit-gemm-hopper": "Chetlur et al., cuDNN, 2014; PTX ISA, wgmma and TMA",
    "winograd-f2": "Lavin, Gray, Fast Algorithms for CNNs, 2015",
    "winograd-f4": "Lavin, Gray, Fast Algorithms for CNNs, 2015",
    "fft": "Mathieu, Henaff, LeCun, Fast Training through FFTs, 2014",
    "depthwise": "definition; Howard et al., MobileNets, 2017",
}
# Operations of a reference that take some seconds with NumPy.
_MAX_FLOPS = 4_000_000_000


def show_list(console: Console, algorithms: Iterable[Algorithm]) -> None:
    """Print the algorithms with a line of description, paper, number of variants, and dtypes for some shapes."""
    headings = [
        Heading("algorithm"),
        Heading("description", wraps=True, rank=1),
        Heading("paper", wraps=True, rank=2),
        Heading("variants", number=True, rank=3),
        *map(Heading, _EXAMPLES),
    ]
    rows = []
    notes: list[str] = []
    for name, variants in families(algorithms).items():
        module = inspect.getmodule(type(variants[0]))
        description = inspect.cleandoc((module.__doc__ if module else "") or "").split("\n\n")[0].split("\n")[0]
        support = [_support(variants, shape) for shape in _EXAMPLES.values()]
        rows.append([name, description.rstrip(":."), _PAPERS.get(name, ""), _count(variants), *support])
        every = (
            (variant, shape, dtype) for variant in variants for shape in _EXAMPLES.values() for dtype in DTYPES.values()
        )
        reasons = {variant.refusal(shape, dtype, _CAPABILITY) for variant, shape, dtype in every}
        notes += [f"{name}: {reason}" for reason in sorted(reasons) if _is_missing_library(reason)]
    title = "Convolution algorithms, and the types of example shapes that they support on compute capability 9.0"
    console.print(narrow_table(title, headings, rows, console.width))
    for note in notes:
        print_text(console, note)


def _is_missing_library(reason: str) -> bool:
    """True for a reason of this machine, which is not one of the algorithm."""
    return "install" in reason


def _count(variants: Sequence[Algorithm]) -> str:
    return "by shape" if any(variant.variant == "auto" for variant in variants) else str(len(variants))


def _support(variants: Sequence[Algorithm], shape: ConvShape) -> str:
    names = [
        name
        for name, dtype in DTYPES.items()
        if any(not variant.refusal(shape, dtype, _CAPABILITY) for variant in variants)
    ]
    return " ".join(names) or "-"


def show_references(
    console: Console,
    layers: Sequence[ConvLayer],
    batches: Sequence[int],
    precisions: Sequence[str],
    algorithms: Iterable[Algorithm],
) -> int:
    """Run the NumPy references on the CPU, print their errors against float64, and return the number of wrong results.

    Raises:
        CallError: a shape is too large for NumPy.
    """
    shapes = [(layer, layer.at(n)) for layer in layers for n in batches]
    large = next((shape for _, shape in shapes if shape.flops > _MAX_FLOPS), None)
    if large is not None:
        raise CallError(
            f"--reference computes with NumPy, and {large} has {large.flops / 1e9:.1f} GFLOP: at most "
            f"{_MAX_FLOPS / 1e9:.0f} are allowed, write a smaller --shape or --batch"
        )
    rows = []
    wrong = 0
    groups = families(algorithms)
    for layer, shape in shapes:
        for precision in precisions:
            for epilogue in dict.fromkeys((PLAIN, layer.epilogue)):
                host = host_operands(shape, DTYPES[precision], epilogue, 7)
                for variants in groups.values():
                    cells, is_wrong = _reference(host, variants)
                    wrong += is_wrong
                    layer_text, work = f"{layer.name} n {shape.n}", work_name(epilogue)
                    rows.append([layer_text, precision, work, variants[0].name, *cells])
    headings = (
        Heading("layer"),
        Heading("type"),
        Heading("work", rank=3),
        Heading("algorithm"),
        Heading("max error", number=True),
        Heading("mean error", number=True, rank=2),
        Heading("share of bound", number=True),
        Heading("result", wraps=True),
    )
    console.print(narrow_table("NumPy references against float64", headings, rows, console.width))
    return wrong


def _reference(host: HostOperands, variants: Sequence[Algorithm]) -> tuple[list[str], bool]:
    """Cells of one row, and True if the result is wrong."""
    shape, epilogue = host.shape, host.epilogue
    refusals = [(v, v.refusal(shape, host.dtype, _CAPABILITY)) for v in variants_for(variants, shape)]
    # A reference needs no library of the GPU.
    usable = [variant for variant, reason in refusals if not reason or _is_missing_library(reason)]
    if not usable:
        return ["", "", "", f"not supported: {variants[0].refusal(shape, host.dtype, _CAPABILITY)}"], False
    bias = host.bias if epilogue.bias else None
    x = host.x_at(np.arange(math.prod(shape.x_shape))).reshape(shape.x_shape).astype(host.dtype)
    residual = None
    if epilogue.residual:
        residual = host.residual_at(np.arange(math.prod(shape.y_shape))).reshape(shape.y_shape).astype(host.dtype)
    result = usable[0].reference(shape, host.dtype, epilogue, x, host.weights, bias, residual)
    exact = convolve(shape, epilogue, x, host.weights, bias, residual)
    reference = SampledReference(host, sample(host, 1))
    errors = reference.errors(usable[0].name, lambda pixels: result[pixels[:, 0], pixels[:, 1], pixels[:, 2]])
    # All elements for the error, the sampled pixels for the bound.
    difference = np.abs(result.astype(np.float64) - exact)
    is_right = errors.is_right and bool((difference <= reference.limit(usable[0].name)).all())
    numbers = [f"{difference.max():.2e}", f"{difference.mean():.2e}", f"{errors.worst_share:.3f}"]
    return [*numbers, "right" if is_right else "WRONG"], not is_right
