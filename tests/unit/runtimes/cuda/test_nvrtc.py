"""The run-time compiler, against a fake of its library; and, where there is one, the real one on our kernels."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from headrace.core.errors import Unsupported
from headrace.runtimes.cuda.driver import DeviceError
from headrace.runtimes.cuda.kernels import loading
from headrace.runtimes.cuda.kernels.code_files import CodeFiles
from headrace_lab.kernels import implicit_gemm, implicit_gemm_hopper
from headrace_lab.kernels.resources import FOLDER

from tests.support.kernels_on_host import needs_nvrtc


class FakeLibrary:
    """NVRTC as far as we call it; the "code" it makes is its options."""

    def __init__(self) -> None:
        self.compiled: list[bytes] = []
        self.programs: dict[int, bytes] = {}
        self.made: dict[str, bytes] = {}
        self.version = 13, 0

    def nvrtcGetNumSupportedArchs(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 3
        return 0

    def nvrtcGetSupportedArchs(self, actual: Any) -> int:  # noqa: N802
        actual[:] = [80, 90, 100]
        return 0

    def nvrtcVersion(self, major: Any, minor: Any) -> int:  # noqa: N802
        major._obj.value, minor._obj.value = self.version
        return 0

    def nvrtcCreateProgram(self, program: Any, source: bytes, name: bytes, *headers: Any) -> int:  # noqa: N802
        program._obj.value = len(self.compiled) + 1
        self.programs[program._obj.value] = source
        return 0

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:  # noqa: N802
        source = self.programs[program.value]
        self.compiled.append(source)
        text = b" ".join(options) + b"\0"
        self.made = {"CUBIN": b"cubin " + text, "PTX": b"ptx " + text, "ProgramLog": b"line 1: wrong\n\0"}
        return 6 if b"wrong" in source else 0

    def nvrtcDestroyProgram(self, program: Any) -> int:  # noqa: N802
        del self.programs[program._obj.value]
        return 0

    def nvrtcGetErrorString(self, result: int) -> bytes:  # noqa: N802
        return b"NVRTC_ERROR"

    def __getattr__(self, name: str) -> Any:
        what = name.removeprefix("nvrtcGet").removesuffix("Size")

        def size(program: Any, actual: Any) -> int:
            actual._obj.value = len(self.made[what])
            return 0

        def read(program: Any, text: Any) -> int:
            ctypes.memmove(text, self.made[what], len(self.made[what]))
            return 0

        return size if name.endswith("Size") else read


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary()
    monkeypatch.setattr(loading, "find_library", lambda: fake)
    monkeypatch.setattr(loading, "_compiled", {})
    return fake


def test_code_is_compiled_once_for_each_source_option_and_gpu(library: FakeLibrary) -> None:
    code = loading.compile_cuda("a", "a.cu", (9, 0), ["-DX=1"])
    assert code == b"cubin --gpu-architecture=sm_90 --std=c++17 -DX=1\0"
    assert loading.compile_cuda("a", "a.cu", (9, 0), ["-DX=1"]) is code
    assert len(library.compiled) == 1
    for other in (("a", "a.cu", (9, 0), ["-DX=2"]), ("b", "a.cu", (9, 0)), ("a", "a.cu", (8, 0), ["-DX=1"])):
        loading.compile_cuda(*other)  # type: ignore[arg-type]
    assert len(library.compiled) == 4
    assert not library.programs


def test_code_of_an_earlier_process_is_read(
    library: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = CodeFiles(tmp_path)

    def compiled(*arguments: Any) -> bytes:
        monkeypatch.setattr(loading, "_compiled", {})  # as in a new process
        with loading.keep_code(files):
            return loading.compile_cuda(*arguments)

    code = compiled("a", "a.cu", (9, 0), ["-DX=1"])
    assert compiled("a", "a.cu", (9, 0), ["-DX=1"]) == code
    assert len(library.compiled) == 1
    for other in (("a", "a.cu", (9, 0), ["-DX=2"]), ("b", "a.cu", (9, 0)), ("a", "a.cu", (8, 0), ["-DX=1"])):
        compiled(*other)
    assert len(library.compiled) == 4
    library.version = 13, 1
    compiled("a", "a.cu", (9, 0), ["-DX=1"])
    assert len(library.compiled) == 5
    monkeypatch.setattr(loading, "_compiled", {})
    loading.compile_cuda("a", "a.cu", (9, 0), ["-DX=1"])
    assert len(library.compiled) == 6


def test_a_gpu_newer_than_the_compiler_gets_ptx(library: FakeLibrary) -> None:
    assert loading.compile_cuda("a", "a.cu", (9, 9)).startswith(b"ptx --gpu-architecture=compute_90")


def test_a_gpu_unsupported_by_the_compiler_is_an_error(library: FakeLibrary) -> None:
    with pytest.raises(Unsupported, match=r"compute capability 7\.0 any more"):
        loading.compile_cuda("a", "a.cu", (7, 0))


def test_the_compilers_words_are_handed_on(library: FakeLibrary) -> None:
    with pytest.raises(DeviceError, match=r"a\.cu cannot be compiled .*: line 1: wrong$"):
        loading.compile_cuda("wrong", "a.cu", (9, 0))
    assert not library.programs


def test_without_a_compiler_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(index: str) -> Any:
        raise OSError(index)

    monkeypatch.setattr(ctypes, "CDLL", nothing)
    loading.find_library.cache_clear()
    with pytest.raises(Unsupported, match=r"libnvrtc\.so.* is not found: install the CUDA toolkit"):
        loading.find_library()
    loading.find_library.cache_clear()


@needs_nvrtc
def test_the_kernels_compile() -> None:
    folder = Path(loading.__file__).parent
    options = {
        "pictures.cu": ("-DCHANNELS=3", "-DPLANAR=1", "-DPRECISION_BITS=22"),
        "copies.cu": ("-DCHANNELS=3", "-DPLANAR=1", "-DDIVIDES=0", "-DTHREADS=256"),
        "classes.cu": ("-DTHREADS=256", "-DCLASSES=1000"),
    }
    for file in ("pictures.cu", "copies.cu", "rows.cu", "classes.cu"):
        source = (folder / "half.cuh").read_text() + (folder / file).read_text()
        for half in (0, 1):
            for capability in ((8, 0), (9, 0)):
                code = loading.compile_cuda(source, file, capability, [f"-DHALF={half}", *options.get(file, ())])
                assert code.startswith(b"\x7fELF")


@needs_nvrtc
def test_the_matrix_product_compiles() -> None:
    headers = [f"{FOLDER}/{name}.cuh" for name in ("elements", "gemm_epilogue", "tensor_cores")]
    source = loading.read_source(f"{FOLDER}/implicit_gemm.cu", headers)
    for tile in implicit_gemm.TILES:
        options = ["-DHALF=1", "-DBIAS=1", "-DRESIDUAL=1", "-DRELU=1", f"-DBM={tile.bm}", f"-DBN={tile.bn}"]
        options += [f"-DBK={tile.bk}", f"-DSTAGES={tile.stages}"]
        options += [f"-DWARPS_M={tile.warps_m}", f"-DWARPS_N={tile.warps_n}"]
        assert loading.compile_cuda(source, "implicit_gemm.cu", (8, 0), options).startswith(b"\x7fELF")


@needs_nvrtc
def test_the_matrix_product_of_hopper_compiles() -> None:
    headers = [f"{FOLDER}/{name}.cuh" for name in ("elements", "gemm_epilogue", "hopper")]
    source = loading.read_source(f"{FOLDER}/implicit_gemm_hopper.cu", headers)
    for number, tile in enumerate(implicit_gemm_hopper.TILES):
        options = ["-DHALF=1", "-DBIAS=1", "-DRESIDUAL=1", "-DRELU=1", f"-DBM={tile.bm}", f"-DBN={tile.bn}"]
        options += [f"-DCONSUMERS={tile.warpgroups}", f"-DSTAGES={tile.stages}", f"-DBLOCKS={tile.blocks}"]
        options += [f"-DSPLITS={1 << number % 4}", f"-DPOINTWISE={number % 2}"]
        code = loading.compile_cuda(source, "implicit_gemm_hopper.cu", (9, 0), options, own_instructions=True)
        assert code.startswith(b"\x7fELF")
