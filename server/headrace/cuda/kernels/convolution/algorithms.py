"""The list of convolution algorithms; a new one is one line here."""

from __future__ import annotations

from headrace.cuda.kernels.convolution.base import Algorithm
from headrace.cuda.kernels.convolution.direct import DirectAlgorithm
from headrace.cuda.kernels.convolution.implicit_gemm import ImplicitGemm
from headrace.cuda.kernels.convolution.simt_gemm import TILES, SimtGemmAlgorithm

ALGORITHMS: tuple[Algorithm, ...] = (
    DirectAlgorithm(),
    *map(SimtGemmAlgorithm, TILES),
    ImplicitGemm(),
)
