from __future__ import annotations

from importlib import metadata

import pytest
from headrace.config import machine
from headrace.config.machine import Machine, cpu_capability, has_vnni, onnxruntime_machine

INTEL = "processor\t: {n}\nvendor_id\t: GenuineIntel\nflags\t\t: fpu sse4_2 {flags}\nvmx flags\t: ept\nbugs\t\t: spectre_v1\n\n"
AVX512 = "avx2 avx512f avx512bw avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "capability", "vnni"),
    [
        (f"{AVX512} avx512_vnni amx_tile amx_int8 avx_vnni", "amx_int8", True),
        (f"{AVX512} avx512_vnni amx_int8", "avx512_vnni", True),
        (f"{AVX512} avx512_vnni avx_vnni", "avx512_vnni", True),
        ("avx2 avx_vnni", "avx_vnni", True),
        (AVX512, "avx512", False),
        ("avx2 avx512f", "avx2", False),
        ("avx2", "avx2", False),
        ("avx", "x86_64", False),
    ],
)
def test_an_x86_has_the_best_of_its_flags(flags: str, capability: str, vnni: bool) -> None:
    assert machine._capability(INTEL.format(n=0, flags=flags), "x86_64") == capability
    assert has_vnni(capability) is vnni


@pytest.mark.parametrize(
    ("features", "capability", "dot"),
    [
        ("fp asimd asimddp i8mm", "i8mm", True),
        ("fp asimd asimddp", "neon_dot", True),
        ("fp asimd", "neon", False),
        ("fp", "aarch64", False),
    ],
)
def test_an_arm_has_the_best_of_its_features(features: str, capability: str, dot: bool) -> None:
    text = f"processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: {features}\nCPU part\t: 0xd0c\n"
    assert machine._capability(text, "aarch64") == capability
    assert has_vnni(capability) is dot


def test_a_mixed_cpu_has_what_all_its_cores_have() -> None:
    text = INTEL.format(n=0, flags="avx2 avx_vnni") + INTEL.format(n=1, flags="avx2")
    assert machine._capability(text, "x86_64") == "avx2"


@pytest.mark.parametrize("text", ["", "flags", "flags :", "\0\0:\n:::"])
def test_without_a_list_of_features_the_architecture_counts(text: str) -> None:
    assert machine._capability(text, "arm64") == "arm64"
    assert machine._capability(text, "") == "unknown"


def test_the_onnxruntime_version_is_major_and_minor(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    assert onnxruntime_machine() == Machine(
        "onnxruntime", ".".join(onnxruntime.__version__.split(".")[:2]), "cpu", cpu_capability()
    )

    def other_package(name: str) -> str:
        if name != "onnxruntime-gpu":
            raise metadata.PackageNotFoundError(name)
        return "1.22.4"

    monkeypatch.setattr(machine, "version", other_package)
    monkeypatch.setattr(machine, "onnxruntime_version", machine.onnxruntime_version.__wrapped__)
    assert onnxruntime_machine().version == "1.22"


def test_a_machine_reads_well() -> None:
    assert str(Machine("onnxruntime", "1.31", "cpu", "avx2")) == "cpu avx2 with ONNX Runtime 1.31"
    gpu = Machine("tensorrt", "10.6.0", "NVIDIA H200", "9.0", 550)
    assert str(gpu) == "NVIDIA H200 9.0 with TensorRT 10.6.0, driver 550"
