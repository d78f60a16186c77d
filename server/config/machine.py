"""What an artefact was made for: library, device, instructions. One built elsewhere may be slow, wrong, or not load at all."""

from __future__ import annotations

from dataclasses import dataclass


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
