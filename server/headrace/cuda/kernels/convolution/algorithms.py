"""The list of convolution algorithms; a new one is one line here."""

from __future__ import annotations

from headrace.cuda.kernels.convolution.depthwise import DepthwiseAlgorithm
from headrace.cuda.kernels.convolution.direct import DirectAlgorithm
from headrace.cuda.kernels.convolution.fft import FftAlgorithm
from headrace.cuda.kernels.convolution.implicit_gemm import ImplicitGemm
from headrace.cuda.kernels.convolution.implicit_gemm_hopper import ImplicitGemmHopper
from headrace.cuda.kernels.convolution.resources import Algorithm
from headrace.cuda.kernels.convolution.simt_gemm import TILES, SimtGemmAlgorithm
from headrace.cuda.kernels.convolution.winograd import WinogradAlgorithm

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
