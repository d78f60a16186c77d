"""Machine that an artefact is built for: processor, cores, GPU, and versions of the libraries that run it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LIBRARIES = {"onnxruntime": "ONNX Runtime", "onnxruntime_cuda": "ONNX Runtime's CUDA provider", "tensorrt": "TensorRT"}
# ONNX Runtime comes as several packages; each installs the module `onnxruntime`.
_ONNXRUNTIME_PACKAGES = ("onnxruntime", "onnxruntime-gpu")

# Flags in /proc/cpuinfo for each capability, best first. AVX-512 is the subset that MLAS has kernels for.
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
    """Machine properties that an artefact depends on; an artefact serves on machines where all of them are equal.

    Attributes:
        target: "onnxruntime" or "tensorrt".
        version: version of the library, as far as artefacts depend on it: "1.31" of ONNX Runtime, "10.6.0" of TensorRT.
        device: "cpu", or the GPU's name, e.g. "NVIDIA H200".
        capability: the CPU's best instructions for INT8 ("avx512_vnni", "avx_vnni", "avx2", "neon_dot", ...), or the GPU's
            compute capability, e.g. "9.0".
        driver: major version of NVIDIA's driver; 0 on a CPU.
    """

    target: str
    version: str
    device: str
    capability: str
    driver: int = 0

    def __str__(self) -> str:
        """Describe the machine, e.g. "cpu avx512_vnni with ONNX Runtime 1.31", "NVIDIA H200 9.0 with TensorRT 10.6.0, driver
        550".
        """
        library = LIBRARIES.get(self.target, self.target)
        driver = f", driver {self.driver}" if self.driver else ""
        return f"{self.device} {self.capability} with {library} {self.version}{driver}"


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def cpu_capability() -> str:
    """Return this CPU's best instructions for INT8; of a mixed CPU, those of all its cores.

    Returns:
        "amx_int8", "avx512_vnni", "avx_vnni", "avx512", "avx2", "i8mm", "neon_dot" or "neon"; otherwise, or if the
        system does not list the CPU's features, the architecture ("x86_64").
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return _capability(text, platform.machine())


def has_vnni(capability: str) -> bool:
    """True if a CPU multiplies and sums INT8 in one instruction: VNNI and AMX, or ARM's dot products."""
    return capability in _DOT_PRODUCTS


def onnxruntime_machine() -> Machine:
    """Describe this machine for ONNX Runtime on the CPU; the library is not imported.

    Returns:
        The machine with major and minor version: patch releases do not change optimised graphs and kernels.
    """
    return Machine("onnxruntime", ".".join(onnxruntime_version().split(".")[:2]), "cpu", cpu_capability())


@lru_cache(maxsize=1)
def onnxruntime_version() -> str:
    """Return the full version of ONNX Runtime; "unknown" if it is not installed as a package."""
    for package in _ONNXRUNTIME_PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "unknown"


def _capability(cpuinfo: str, architecture: str) -> str:
    """Return the best capability that every core in the text of /proc/cpuinfo has."""
    cores = []
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip().lower() in ("flags", "features"):
            cores.append(frozenset(value.split()))
    features = frozenset.intersection(*cores) if cores else frozenset()
    for capability, required in (*_X86, *_ARM):
        if required <= features:
            return capability
    return architecture or "unknown"
