"""Compiles our CUDA kernels for the host, where the fake driver launches them: block after block, a block's threads in turns.

What it shows is that the kernels' arithmetic, indices and synchronisation are right; not what a GPU's compiler makes of them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from headrace.core.errors import Unsupported
from headrace.runtimes.cuda.kernels import loading

from tests.support.fake_cuda import DriverError, FakeCuda

# What is compiled, for all sessions: the name is a digest of source and options.
_CACHE = Path(__file__).resolve().parents[2] / "build" / "host_kernels"
# Light headers and no threads of the system: a kernel is compiled and run in a fraction of a second. A block's threads take
# turns at every barrier, in one order and then in the other: a barrier that is missing gives wrong results every time.
# The headers are compiled once: they take most of the time of a kernel.
_INCLUDES = """
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
"""
_COMPILER = ("g++", "-std=c++20", "-O1", "-w", "-fPIC")
_LIBRARY = ("-shared", "-fno-gnu-unique", "-xc++")
_PRELUDE = """
#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define ON_HOST
struct Index { unsigned x, y, z; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static Index threadIdx, blockIdx, blockDim, gridDim;
static Context the_block, each_thread[1024];
static void __syncthreads() { switch_context(&each_thread[threadIdx.x], &the_block); }
template <class T> static T __shfl_xor_sync(unsigned, T mine, int mask) {
    static T all[1024];
    all[threadIdx.x] = mine;
    __syncthreads();
    const T found = all[threadIdx.x ^ mask];
    __syncthreads();
    return found;
}
static void __threadfence() {}
static int min(int a, int b) { return a < b ? a : b; }
static int atomicAdd(int *to, int more) { const int before = *to; *to += more; return before; }
static int __float_as_int(float f) { int i; std::memcpy(&i, &f, 4); return i; }
static float __int_as_float(unsigned i) { float f; std::memcpy(&f, &i, 4); return f; }
static void copy_16_bytes_async(void *to, const void *from, bool valid) {
    valid ? std::memcpy(to, from, 16) : std::memset(to, 0, 16);
}
static void copy_4_bytes_async(void *to, const void *from, bool valid) {
    valid ? std::memcpy(to, from, 4) : std::memset(to, 0, 4);
}
static void commit_copies() {}
static void wait_for_oldest_copies() {}
static void wait_for_all_copies() {}
static unsigned short to_half(float f) { _Float16 h = f; unsigned short u; std::memcpy(&u, &h, 2); return u; }
static float from_half(unsigned short u) { _Float16 h; std::memcpy(&h, &u, 2); return h; }
"""
# `swapcontext` saves the signals too, by a system call: on x86-64 the stack and the registers that a call preserves are enough.
_CONTEXTS = """
#ifdef __x86_64__
struct Context { void *stack; };
extern "C" void switch_context(Context *from, const Context *to) __attribute__((visibility("hidden")));
asm(".text\\n.hidden switch_context\\n.globl switch_context\\n.type switch_context, @function\\nswitch_context:\\n"
    "push %rbp\\n push %rbx\\n push %r12\\n push %r13\\n push %r14\\n push %r15\\n mov %rsp, (%rdi)\\n"
    "mov (%rsi), %rsp\\n pop %r15\\n pop %r14\\n pop %r13\\n pop %r12\\n pop %rbx\\n pop %rbp\\n ret\\n");
static void begin_context(Context *context, char *memory, size_t bytes, void (*body)()) {
    void **top = (void **)(memory + bytes) - 2;
    *top = (void *)body;
    context->stack = top - 6;
}
#else
#include <ucontext.h>
using Context = ucontext_t;
static void switch_context(Context *from, const Context *to) { swapcontext(from, to); }
static void begin_context(Context *context, char *memory, size_t bytes, void (*body)()) {
    getcontext(context);
    context->uc_stack.ss_sp = memory;
    context->uc_stack.ss_size = bytes;
    context->uc_link = nullptr;
    makecontext(context, body, 0);
}
#endif
"""
# A function of the kernels' files, and those of them whose body is the GPU's assembler: the prelude has their equals.
_FUNCTION = re.compile(r"^__device__ inline (?:[^\n]*\}\n|.*?^\}\n)", re.DOTALL | re.MULTILINE)
# The functions of convolution/tensor_cores.cuh. A copy to shared memory happens when its thread waits for it, and until then
# the place has NaNs: a kernel that reads too early, or copies into a tile that is still read, gives wrong results.
_TENSOR_CORES = """
alignas(1024) static unsigned char dynamic_shared[232448];
struct Copy { unsigned to; const void *from; int bytes; };
static std::vector<std::vector<Copy>> copies[1024];
static unsigned shared_address(const void *memory) { return (unsigned)((const unsigned char *)memory - dynamic_shared); }
static void copy_16_bytes(unsigned to, const void *from, int bytes) {
    auto &groups = copies[threadIdx.x];
    if (groups.empty()) groups.emplace_back();
    if (to % 16 || to + 16 > sizeof dynamic_shared || (bytes && (size_t)from % 16)) std::abort();
    std::memset(dynamic_shared + to, 0x7e, 16);
    groups.back().push_back({to, from, bytes});
}
static void end_copies() {
    if (copies[threadIdx.x].empty()) copies[threadIdx.x].emplace_back();
    copies[threadIdx.x].emplace_back();
}
template <int PENDING> static void wait_for_copies() {
    auto &groups = copies[threadIdx.x];
    while (groups.size() > PENDING + 1) {
        for (const Copy &copy : groups.front()) {
            std::memset(dynamic_shared + copy.to, 0, 16);
            std::memcpy(dynamic_shared + copy.to, copy.from, copy.bytes);
        }
        groups.erase(groups.begin());
    }
}
static void load_matrices(unsigned (&to)[4], unsigned row) {
    static unsigned rows[1024];
    rows[threadIdx.x] = row;
    __syncthreads();
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x - lane;
    for (unsigned matrix = 0; matrix < 4; ++matrix)
        std::memcpy(&to[matrix], dynamic_shared + rows[warp + matrix * 8 + lane / 4] + lane % 4 * 4, 4);
    __syncthreads();
}
struct Fragments { float a[8], b[4]; };
static void multiply_add(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    static Fragments all[1024];
    Fragments &mine = all[threadIdx.x];
    for (int i = 0; i < 8; ++i) mine.a[i] = from_half((unsigned short)(a[i / 2] >> i % 2 * 16));
    for (int i = 0; i < 4; ++i) mine.b[i] = from_half((unsigned short)((i / 2 ? b1 : b0) >> i % 2 * 16));
    __syncthreads();
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x - lane;
    for (int e = 0; e < 4; ++e) {
        const unsigned row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        for (unsigned k = 0; k < 16; ++k) {
            const float left = all[warp + row % 8 * 4 + k % 8 / 2].a[k / 8 * 4 + row / 8 * 2 + k % 2];
            sums[e] += left * all[warp + column * 4 + k % 8 / 2].b[k / 8 * 2 + k % 2];
        }
    }
    __syncthreads();
}
"""
_LAUNCH = """
struct Any {
    unsigned long long bits;
    template <class T> operator T *() const { return (T *)bits; }
    operator int() const { return (int)bits; }
    operator unsigned long long() const { return bits; }
};
static void *the_body;
static bool ended[1024];
template <class Body> static void one_thread() {
    (*static_cast<Body *>(the_body))();
    ended[threadIdx.x] = true;
    __syncthreads();
}
template <class Body> static void together(unsigned threads, Body &body) {
    const size_t stack_bytes = 1 << 16;
    static char *stacks = static_cast<char *>(std::malloc(1024 * stack_bytes));
    the_body = &body;
    for (unsigned t = 0; t < threads; ++t) {
        ended[t] = false;
        begin_context(&each_thread[t], stacks + t * stack_bytes, stack_bytes, one_thread<Body>);
    }
    for (unsigned turn = 0, done = 0; !done; ++turn) {
        for (unsigned n = 0; n < threads; ++n) {
            threadIdx = {turn % 2 ? threads - 1 - n : n, 0, 0};
            switch_context(&the_block, &each_thread[threadIdx.x]);
            done += ended[threadIdx.x];
        }
        if (done % threads) {
            std::fprintf(stderr, "%u of %u threads of a block passed a barrier\\n", threads - done, threads);
            std::abort();
        }
    }
}
template <class Body> static void each(unsigned gx, unsigned gy, unsigned threads, bool barriers, Body body) {
    gridDim = {gx, gy, 1};
    blockDim = {threads, 1, 1};
    for (unsigned y = 0; y < gy; ++y)
        for (unsigned x = 0; x < gx; ++x) {
            blockIdx = {x, y, 0};
            if (barriers) { together(threads, body); continue; }
            for (unsigned t = 0; t < threads; ++t) { threadIdx = {t, 0, 0}; body(); }
        }
}
"""


class HostKernels:
    """Stands for the compiler and for a module of kernels.

    Args:
        cuda: where launches are submitted.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def compile_cuda(
        self,
        source: str,
        name: str,
        capability: tuple[int, int],
        options: Sequence[str] = (),
        *,
        own_instructions: bool = False,
    ) -> bytes:
        """As `headrace.runtimes.cuda.kernels.loading.compile_cuda`; gives the path of a shared library."""
        if own_instructions:
            raise Unsupported(f"{name} needs instructions of a GPU that the host cannot stand for: run it on the GPU")
        source = _FUNCTION.sub(lambda function: "" if "asm" in function[0] else function[0], source)
        text = [_CONTEXTS, _PRELUDE, _TENSOR_CORES if "ON_HOST" in source else "", source, _LAUNCH]
        together = str("__syncthreads" in source).lower()
        for kernel, declared in re.findall(r"__global__ void (\w+)\(([^)]*)\)", source):
            count = declared.count(",") + 1
            used = ", ".join(f"unsigned long long a{n}" for n in range(count))
            handed = ", ".join(f"Any{{a{n}}}" for n in range(count))
            body = f"each(gx, gy, t, {together}, [&] {{ {kernel}({handed}); }});"
            text.append(f'extern "C" void run_{kernel}(unsigned gx, unsigned gy, unsigned t, {used}) {{ {body} }}\n')
            types = "".join("P" if "*" in one else "Q" if "long" in one else "i" for one in declared.split(","))
            text.append(f'extern "C" const char *types_{kernel}() {{ return "{types}"; }}\n')
        headers = _compiled(".h.gch", _INCLUDES, "-xc++-header")
        library = _compiled(".so", "".join(text), *_LIBRARY, "-include", str(headers.with_suffix("")), *options)
        return str(library).encode()

    def module_from_buffer(self, code: bytes) -> Any:
        """As PyCUDA's."""
        return _Module(ctypes.CDLL(code.decode()), self._cuda)


def _compiled(suffix: str, text: str, *options: str) -> Path:
    """The file that the compiler makes of a text, or has made of it with these options before."""
    digest = hashlib.sha256("\0".join([text, *options]).encode()).hexdigest()[:16]
    result = _CACHE / f"{digest}{suffix}"
    if not result.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        part = _CACHE / f"{digest}.{os.getpid()}"  # another process may compile it too
        subprocess.run([*_COMPILER, *options, "-o", part, "/dev/stdin"], input=text, text=True, check=True, timeout=100)
        part.replace(result)
    return result


def install_host_kernels(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    """Compile the kernels of the fake driver for the host from now on; skips the test where there is no compiler.

    Args:
        monkeypatch: of the test; the fake driver is installed.
        cuda: where launches are submitted.
    """
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    host = HostKernels(cuda)
    monkeypatch.setattr(loading, "compile_cuda", host.compile_cuda)
    monkeypatch.setattr(sys.modules["pycuda.driver"], "module_from_buffer", host.module_from_buffer, raising=False)


class _Module:
    def __init__(self, library: ctypes.CDLL, cuda: FakeCuda) -> None:
        self._library = library
        self._cuda = cuda

    def get_function(self, name: str) -> _Function:
        return _Function(getattr(self._library, f"run_{name}"), self._cuda)


class _Function:
    def __init__(self, run: Any, cuda: FakeCuda) -> None:
        self._run = run
        self._cuda = cuda
        self._types = ""
        self._shared_bytes = 48 << 10

    def set_attribute(self, attribute: str, value: int) -> None:
        """As PyCUDA's; the only attribute is the largest dynamic shared memory."""
        assert attribute == "shared bytes"
        assert value <= 227 << 10
        self._shared_bytes = value

    def prepare(self, types: str) -> None:
        assert set(types) <= set("Pi"), types
        self._types = types

    def prepared_async_call(
        self,
        grid: tuple[int, int],
        block: tuple[int, int, int],
        stream: Any,
        *arguments: int,
        shared_size: int = 0,
    ) -> None:
        assert shared_size <= self._shared_bytes
        assert len(arguments) == len(self._types)
        assert all(type(argument) is int for argument in arguments), arguments
        if not (0 < grid[0] < 1 << 31 and 0 < grid[1] < 1 << 16):  # sizes of a CUDA grid
            raise DriverError("cuLaunchKernel failed: invalid argument")
        handed = [ctypes.c_ulonglong(argument) for argument in arguments]
        self._cuda.submit(lambda: self._run(*map(ctypes.c_uint, (*grid, block[0])), *handed), stream.handle)


class StandInModule:
    """Stands for a loaded module; its kernels cannot be launched."""

    def get_function(self, name: str) -> StandInModule:
        return self

    def prepare(self, types: str) -> None:
        """As PyCUDA's."""

    def set_attribute(self, attribute: Any, value: int) -> None:
        """As PyCUDA's."""


def _has_nvrtc() -> bool:
    try:
        loading.find_library()
    except Unsupported:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not _has_nvrtc(), reason="needs NVRTC, but no GPU: pip install nvidia-cuda-nvrtc-cu12")
