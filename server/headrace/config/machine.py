"""What an artefact was made for: library, device, instructions. One built elsewhere may be slow, wrong, or not load at all."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_LIBRARIES = {"onnxruntime": "ONNX Runtime", "tensorrt": "TensorRT"}
# ONNX Runtime comes as several packages; each installs the module `onnxruntime`.
_ONNXRUNTIME_PACKAGES = ("onnxruntime", "onnxruntime-gpu")

# What /proc/cpuinfo must list for each capability, best first. AVX-512 is the subset that MLAS has kernels for.
_X86 = (
    ("amx_int8", {"amx_int8", "amx_tile"}),
    ("avx512_vnni", {"avx512_vnni"}),
    ("avx_vnni", {"avx_vnni"}),
    ("avx512", {"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    ("avx2", {"avx2"}),
)
_ARM = (("i8mm", {"i8mm"}), ("neon_dot", {"asimddp"}), ("neon", {"asimd"}))
_DOT_PRODUCTS = frozenset({"amx_int8", "avx512_vnni", "avx_vnni", "i8mm", "neon_dot"})


@dataclass(frozen=True, slots=True)
class Machine:
    """What an artefact depends on besides the model and the specification; it serves where all of this is the same.

    Attributes:
        target: "onnxruntime" or "tensorrt".
        version: of the library, as far as artefacts depend on it: "1.31" of ONNX Runtime, "10.6.0" of TensorRT.
        device: "cpu", or the GPU's name, e.g. "NVIDIA H200".
        capability: the CPU's best instructions for INT8 ("avx512_vnni", "avx_vnni", "avx2", "neon_dot", ...), or the GPU's
            compute capability, e.g. "9.0".
        driver: major version of NVIDIA's driver, 0 on a CPU.
    """

    target: str
    version: str
    device: str
    capability: str
    driver: int = 0

    def __str__(self) -> str:
        """For people, e.g. "cpu avx512_vnni with ONNX Runtime 1.31", "NVIDIA H200 9.0 with TensorRT 10.6.0, driver 550"."""
        library = _LIBRARIES.get(self.target, self.target)
        driver = f", driver {self.driver}" if self.driver else ""
        return f"{self.device} {self.capability} with {library} {self.version}{driver}"


@lru_cache(maxsize=1)
def cpu_capability() -> str:
    """This CPU's best instructions for INT8; of a mixed CPU, what all its cores have.

    Returns:
        "amx_int8", "avx512_vnni", "avx_vnni", "avx512", "avx2", "i8mm", "neon_dot" or "neon"; else, and where the system
        does not list the CPU's features, the architecture ("x86_64").
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return _capability(text, platform.machine())


def has_vnni(capability: str) -> bool:
    """True where a CPU multiplies and sums INT8 in one instruction: VNNI and AMX, the dot products of ARM."""
    return capability in _DOT_PRODUCTS


def onnxruntime_machine() -> Machine:
    """This machine as ONNX Runtime on its CPU sees it; the library is not imported.

    Returns:
        With major and minor version: patch releases keep optimised graphs and kernels.
    """
    return Machine("onnxruntime", _onnxruntime_version(), "cpu", cpu_capability())


def _onnxruntime_version() -> str:
    for package in _ONNXRUNTIME_PACKAGES:
        try:
            return ".".join(version(package).split(".")[:2])
        except PackageNotFoundError:
            continue
    return "unknown"


def _capability(cpuinfo: str, architecture: str) -> str:
    """The best of what every core in the text of /proc/cpuinfo has."""
    cores = []
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip().lower() in ("flags", "features"):
            cores.append(frozenset(value.split()))
    features = frozenset.intersection(*cores) if cores else frozenset()
    for capability, needed in (*_X86, *_ARM):
        if needed <= features:
            return capability
    return architecture or "unknown"
