"""The list of convolution algorithms; a new one is one line here."""

from __future__ import annotations

from headrace_lab.kernels.depthwise import DepthwiseAlgorithm
from headrace_lab.kernels.direct import DirectAlgorithm
from headrace_lab.kernels.fft import FftAlgorithm
from headrace_lab.kernels.implicit_gemm import ImplicitGemm
from headrace_lab.kernels.implicit_gemm_hopper import ImplicitGemmHopper
from headrace_lab.kernels.resources import Algorithm
from headrace_lab.kernels.simt_gemm import TILES, SimtGemmAlgorithm
from headrace_lab.kernels.winograd import WinogradAlgorithm

ALGORITHMS: tuple[Algorithm, ...] = (
    DirectAlgorithm(),
    *map(SimtGemmAlgorithm, TILES),
    ImplicitGemm(),
    ImplicitGemmHopper(),
    WinogradAlgorithm(2),
    WinogradAlgorithm(4),
    FftAlgorithm(),
    DepthwiseAlgorithm(),
)
