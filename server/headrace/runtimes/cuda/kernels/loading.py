"""Compiles the kernels of a file with NVRTC, loads them on a GPU and launches them on a stream.

NVRTC is the run-time compiler of the CUDA toolkit (NVRTC documentation, "Basic Usage").
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.errors import Unsupported
from headrace.runtimes.cuda import driver
from headrace.runtimes.cuda.driver import BorrowedStream, CudaStream, DeviceError, check, loaded, succeeded
from headrace.runtimes.cuda.kernels.code_files import CodeFiles

_NAMES = ("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2")
# Library folders of the toolkit and of NVIDIA's wheels.
_TOOLKITS = ("cuda/lib64", "cuda/targets/*/lib")
_CURE = "install the CUDA toolkit, or NVIDIA's wheel of it: pip install nvidia-cuda-nvrtc-cu12"

_Key = tuple[str, str]
# Guards both dictionaries. Each source has a lock of its own: different sources compile in parallel, an equal one once.
_lock = threading.Lock()
_compiling: dict[_Key, threading.Lock] = {}
_compiled: dict[_Key, bytes] = {}
_files: CodeFiles | None = None


@contextlib.contextmanager
def keep_code(files: CodeFiles | None) -> Iterator[None]:
    """Read compiled code from files and write it there within the block, in all threads; None: compile in each process."""
    global _files
    before, _files = _files, files
    try:
        yield
    finally:
        _files = before


def compile_cuda(
    source: str, name: str, capability: tuple[int, int], options: Sequence[str] = (), *, own_instructions: bool = False
) -> bytes:
    """Compile a source for one GPU architecture, once in a process, or read its code from the files of `keep_code`.

    Args:
        source: CUDA C++; no headers are available.
        name: for the compiler's messages.
        capability: compute capability of the GPU, e.g. (9, 0).
        options: of the compiler, e.g. "-DCHANNELS=3".
        own_instructions: compile for this exact architecture, e.g. sm_90a, whose code runs on no other GPU.

    Returns:
        A cubin; PTX, which the driver translates, if the compiler is older than the GPU.

    Raises:
        Unsupported: there is no compiler, or it does not support this GPU.
        DeviceError: the source does not compile; has the compiler's messages.
    """
    library = find_library()
    architecture = _architecture(_architectures(library), capability)
    if own_instructions:
        if not architecture.startswith("sm_"):
            raise Unsupported(f"NVRTC is older than this GPU: it has no target sm_{capability[0]}{capability[1]}a")
        architecture += "a"
    key = hashlib.sha256("\0".join((source, *options)).encode()).hexdigest(), architecture
    with _lock:
        turn = _compiling.setdefault(key, threading.Lock())
    with turn:
        code = _compiled.get(key)
        if code is None:
            arguments = [f"--gpu-architecture={architecture}", "--std=c++17", *options]
            code = _compiled[key] = _read_or_compile(library, source, name, arguments)
    return code


def _read_or_compile(library: Any, source: str, name: str, arguments: Sequence[str]) -> bytes:
    if _files is None:
        return _compile(library, source, name, arguments)
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "reading NVRTC's version")
    key = (f"NVRTC {major.value}.{minor.value}", *arguments, source)
    code = _files.read(key)
    if code is None:
        code = _compile(library, source, name, arguments)
        _files.write(key, code)
    return code


@functools.cache
def find_library() -> Any:
    """Load NVRTC by its usual names.

    Raises:
        Unsupported: the library is not found.
    """
    for name in (*_NAMES, *map(str, library_files("libnvrtc.so*", "cuda_nvrtc/lib"))):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    raise Unsupported(f"NVRTC (libnvrtc.so), which compiles the kernels for the GPU, is not found: {_CURE}")


def library_files(name: str, wheel: str) -> Iterator[Path]:
    """Yield the files of a library in the CUDA toolkit and in NVIDIA's wheels.

    Args:
        name: pattern, e.g. "libnvrtc.so*".
        wheel: the library's folder in its own wheel, below `nvidia`; wheels of CUDA 13 share one folder.
    """
    for pattern in _TOOLKITS:
        yield from sorted(Path("/usr/local").glob(f"{pattern}/{name}"))
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations if wheels else None) or ():
        for pattern in (wheel, "cu1*/lib"):
            yield from sorted(Path(folder).glob(f"{pattern}/{name}"))


def _architectures(library: Any) -> list[int]:
    """Architectures that the compiler supports, e.g. [50, 52, ..., 90]."""
    count = ctypes.c_int()
    _check(library, library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "reading NVRTC's supported GPUs")
    supported = (ctypes.c_int * count.value)()
    _check(library, library.nvrtcGetSupportedArchs(supported), "reading NVRTC's supported GPUs")
    return sorted(supported)


def _architecture(supported: Sequence[int], capability: tuple[int, int]) -> str:
    """The GPU's own architecture (machine code), or the newest one before it (PTX)."""
    architecture = capability[0] * 10 + capability[1]
    if architecture in supported:
        return f"sm_{architecture}"
    older = [number for number in supported if number < architecture]
    if not older:
        raise Unsupported(
            f"NVRTC does not support GPUs of compute capability {capability[0]}.{capability[1]} any more: use an older one, "
            "e.g. pip install nvidia-cuda-nvrtc-cu12==12.6.85"
        )
    return f"compute_{older[-1]}"


def _compile(library: Any, source: str, name: str, arguments: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    result = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    _check(library, result, f"compiling {name}")
    try:
        options = (ctypes.c_char_p * len(arguments))(*(argument.encode() for argument in arguments))
        result = library.nvrtcCompileProgram(program, len(arguments), options)
        if result:
            text = _read(library, program, "ProgramLog").rstrip(b"\0\n").decode(errors="replace")
            raise DeviceError(f"{name} cannot be compiled by NVRTC ({' '.join(arguments)}): {text}")
        return _read(library, program, "CUBIN" if "=sm_" in arguments[0] else "PTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(library: Any, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"reading NVRTC's {what}")
    text = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, text), f"reading NVRTC's {what}")
    return text.raw


def _check(library: Any, result: int, doing: str) -> None:
    if result:
        text = library.nvrtcGetErrorString(result)
        raise DeviceError(f"{doing} failed ({text.decode(errors='replace')}): {_CURE}")


_FOLDER = Path(__file__).parent
HALF = _FOLDER / "half.cuh"
"""Header of every kernel file."""
# Default number of threads in a block.
THREADS = 256
# Dynamic shared memory that a kernel may use without a declaration (CUDA C++ Programming Guide, "Shared Memory").
_DEFAULT_SHARED_BYTES = 48 << 10


def read_source(file: str, headers: Sequence[str] = ()) -> str:
    """Return the text of a kernel file, of this folder or with its path, after `half.cuh` and the headers."""
    return "".join((_FOLDER / name).read_text(encoding="utf-8") for name in (str(HALF), *headers, file))


def compile_file(
    device: int, file: str, options: Mapping[str, int], headers: Sequence[str] = (), own_instructions: bool = False
) -> bytes:
    """Compile a kernel file for a GPU, whose context must be current.

    Args:
        device: number of the GPU.
        file: name of a file of this folder, or the path of another one.
        options: values of the file's macros.
        headers: names or paths of files that precede it.
        own_instructions: as for `compile_cuda`.

    Raises:
        Unsupported: there is no compiler for the GPU.
        DeviceError: the driver or the compiler refuses.
    """
    with check("reading the properties of the GPU"):
        capability = loaded().Device(device).compute_capability()
    text = [f"-D{name}={value}" for name, value in options.items()]
    specific = {"own_instructions": True} if own_instructions else {}
    return compile_cuda(read_source(file, headers), file, tuple(capability), text, **specific)


class Kernels:
    """The kernels of one file, loaded on a GPU.

    Args:
        device: number of the GPU.
        file: name of a file of this folder, or the path of another one.
        options: values of the file's macros.
        types: by kernel, the types of its arguments in `struct` notation.
        shared_bytes: by kernel, its dynamic shared memory; more than 48 KiB is allowed where the GPU has it.
        headers: names or paths of files that precede the kernels' file.

    Raises:
        Unsupported: there is no GPU, or no compiler for it.
        DeviceError: the driver or the compiler refuses.
    """

    def __init__(
        self,
        device: int,
        file: str,
        options: Mapping[str, int],
        types: Mapping[str, str],
        shared_bytes: Mapping[str, int] | None = None,
        headers: Sequence[str] = (),
    ) -> None:
        self._device = device
        self._shared_bytes = dict(shared_bytes or {})
        self._kernels: dict[str, Any] = {}
        with driver.current(device):
            code = compile_file(device, file, options, headers)
            with check(f"loading {file}"):
                self._module: Any = loaded().module_from_buffer(code)
                for name, arguments in types.items():
                    kernel = self._kernels[name] = self._module.get_function(name)
                    kernel.prepare(arguments)
                    if self._shared_bytes.get(name, 0) > _DEFAULT_SHARED_BYTES:
                        limit = loaded().function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
                        kernel.set_attribute(limit, self._shared_bytes[name])
            self._borrowed = (
                _DriverModule(code, file, types, self._shared_bytes) if getattr(_loading, "borrowed", False) else None
            )

    def launch(self, name: str, grid: tuple[int, ...], threads: int, stream: CudaStream, *arguments: int) -> None:
        """Queue a kernel; the device must be current.

        Args:
            name: of the kernel.
            grid: blocks in two or three dimensions.
            threads: of a block.
            stream: stream to queue on; a `BorrowedStream` only if the kernels were loaded in `for_borrowed_streams`.
            arguments: of the kernel.

        Raises:
            DeviceError: the driver refuses.
        """
        if isinstance(stream, BorrowedStream):
            assert self._borrowed is not None, "the kernels were loaded outside of for_borrowed_streams"
            self._borrowed.launch(name, grid, threads, stream, arguments)
            return
        with check(f"launching the kernel {name}"):
            shared = {"shared_size": self._shared_bytes[name]} if name in self._shared_bytes else {}
            self._kernels[name].prepared_async_call(grid, (threads, 1, 1), stream.stream, *arguments, **shared)

    def close(self) -> None:
        """Unload the kernels; all work must be done."""
        # PyCUDA unloads a module on the thread that drops it, if its device is current there.
        with driver.current(self._device):
            self._kernels.clear()
            self._module = None
            if self._borrowed is not None:
                self._borrowed.close()
                self._borrowed = None


_loading = threading.local()  # attribute `borrowed`: this thread is in `for_borrowed_streams`


@contextlib.contextmanager
def for_borrowed_streams() -> Iterator[None]:
    """Load the kernels that this thread opens in the block a second time, for streams that PyCUDA did not create."""
    outer = getattr(_loading, "borrowed", False)
    _loading.borrowed = True
    try:
        yield
    finally:
        _loading.borrowed = outer


_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
# CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE: the arguments are one block of memory.
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2


class _DriverModule:
    """Kernels loaded by the driver's library, which launches on any stream (CUDA driver API, `cuLaunchKernel`).

    Args:
        code: cubin or PTX.
        file: name for messages.
        types, shared_bytes: as for `Kernels`.
    """

    def __init__(self, code: bytes, file: str, types: Mapping[str, str], shared_bytes: Mapping[str, int]) -> None:
        self._cuda = driver.library()
        self._shared_bytes = shared_bytes
        self._types = types
        self._module = ctypes.c_void_p()
        self._functions: dict[str, ctypes.c_void_p] = {}
        succeeded(self._cuda.cuModuleLoadData(ctypes.byref(self._module), code), f"loading {file}")
        for name in types:
            function = self._functions[name] = ctypes.c_void_p()
            result = self._cuda.cuModuleGetFunction(ctypes.byref(function), self._module, name.encode())
            succeeded(result, f"loading the kernel {name} of {file}")
            if shared_bytes.get(name, 0) > _DEFAULT_SHARED_BYTES:
                result = self._cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes[name])
                succeeded(result, f"reserving shared memory for the kernel {name}")

    def launch(
        self, name: str, grid: tuple[int, ...], threads: int, stream: CudaStream, arguments: Sequence[Any]
    ) -> None:
        """Queue a kernel; arguments as for `Kernels.launch`."""
        # As PyCUDA packs them: native sizes and alignment.
        packed = struct.pack(self._types[name], *arguments)
        buffer, size = ctypes.c_char_p(packed), ctypes.c_size_t(len(packed))
        extra = (ctypes.c_void_p * 5)(
            *(_BUFFER_POINTER, ctypes.cast(buffer, ctypes.c_void_p)),
            *(_BUFFER_SIZE, ctypes.cast(ctypes.pointer(size), ctypes.c_void_p), None),
        )
        x, y, z = (*grid, 1, 1)[:3]
        shared = self._shared_bytes.get(name, 0)
        handle = ctypes.c_void_p(stream.handle)
        result = self._cuda.cuLaunchKernel(self._functions[name], x, y, z, threads, 1, 1, shared, handle, None, extra)
        if result:
            succeeded(result, f"launching the kernel {name}")

    def close(self) -> None:
        """Unload the kernels; their device must be current."""
        self._functions.clear()
        self._cuda.cuModuleUnload(self._module)


def is_half(dtype: npt.DTypeLike) -> int:
    """Value of the macro HALF for a dtype.

    Raises:
        ValueError: kernels do not support the dtype.
    """
    kind = np.dtype(dtype)
    if kind not in (np.float16, np.float32):
        raise ValueError(f"kernels read and write float32 and float16, not {kind}")
    return int(kind == np.float16)
