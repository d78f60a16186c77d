"""The list of convolution algorithms; a new one is one line here."""

from __future__ import annotations

from headrace.runtimes.cuda.kernels.convolution.depthwise import DepthwiseAlgorithm
from headrace.runtimes.cuda.kernels.convolution.direct import DirectAlgorithm
from headrace.runtimes.cuda.kernels.convolution.fft import FftAlgorithm
from headrace.runtimes.cuda.kernels.convolution.implicit_gemm import ImplicitGemm
from headrace.runtimes.cuda.kernels.convolution.implicit_gemm_hopper import ImplicitGemmHopper
from headrace.runtimes.cuda.kernels.convolution.resources import Algorithm
from headrace.runtimes.cuda.kernels.convolution.simt_gemm import TILES, SimtGemmAlgorithm
from headrace.runtimes.cuda.kernels.convolution.winograd import WinogradAlgorithm

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
