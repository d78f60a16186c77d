"""Installs TensorRT, PyCUDA and NVRTC in an environment on a machine with an NVIDIA driver; the first step of `make serve`.

    .venv/bin/python deploy/gpu_packages.py

Uses the TensorRT that is installed, in the environment or beside the Python that the environment was made from. Installs
what is missing from requirements/gpu.lock, whose hashes pip checks. Prints one sentence, with the command that cures it,
where something cannot be installed. The exit status is 0 in every case: the server then serves on the CPU.

It does not install onnxruntime-gpu (ONNX Runtime's CUDA provider). That package and `onnxruntime`, which the locks have,
install the same module. The commands in docs/gpu.md, "ONNX Runtime's CUDA provider", replace one by the other. `make serve`
leaves it in place, except when it installs the lock anew.

Needs only the standard library. docs/gpu.md, "Installing", describes it for users.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DRIVER = "libcuda.so.1"
# pip must not wait for minutes where no index can be reached.
PIP_OPTIONS = ("--disable-pip-version-check", "--retries", "1", "--timeout", "20")
PROBE_TIMEOUT_S = 120.0
LINKS_FOLDER, LINKS_FILE = "gpu", "headrace_gpu.pth"

# The line of pip's output that has the reason of a failure.
_REASON = re.compile(
    r"(ERROR|error|[\w.]*Error|[\w:/. ]*fatal error): (?!subprocess-exited|metadata-gen|Failed building)"
)

# Imports a module and prints its version and the top-level modules that came with it, with their places.
_IMPORT_PROBE = """
import importlib, json, os, sys
before = set(sys.modules)
module = importlib.import_module(sys.argv[1])
top = sys.argv[1].partition(".")[0]
places = {}
for name in sorted({name.partition(".")[0] for name in set(sys.modules) - before} | {top}):
    found = sys.modules.get(name)
    if name in sys.stdlib_module_names or found is None:
        continue
    folders = list(getattr(found, "__path__", ()))
    place = folders[0] if folders else getattr(found, "__file__", None)
    if place and os.path.exists(place):
        places[name] = os.path.abspath(place)
version = getattr(module, "__version__", None) or getattr(sys.modules[top], "VERSION_TEXT", "")
print(json.dumps({"version": str(version), "places": places}))
"""

# Prints the location of NVRTC: a name that the loader finds, a toolkit, or NVIDIA's wheels.
_NVRTC_PROBE = """
import ctypes, glob, importlib.util, json, os
places = {}
for name in ("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", *sorted(glob.glob("/usr/local/cuda/lib64/libnvrtc.so*"))):
    try:
        ctypes.CDLL(name)
    except OSError:
        continue
    print(json.dumps({"version": name, "places": {}}))
    break
else:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        found = sorted(glob.glob(folder + "/cuda_nvrtc/lib/libnvrtc.so*") + glob.glob(folder + "/cu1*/lib/libnvrtc.so*"))
        if found:
            print(json.dumps({"version": found[0], "places": {"nvidia": os.path.abspath(folder)}}))
            break
    else:
        raise SystemExit("libnvrtc.so is not there")
"""

PROBES = {
    "PyCUDA": ("-c", _IMPORT_PROBE, "pycuda.driver"),
    "TensorRT": ("-c", _IMPORT_PROBE, "tensorrt"),
    "NVRTC": ("-c", _NVRTC_PROBE),
}


class Missing(Exception):
    """A package cannot be installed.

    Attributes:
        reason: why, as the end of a sentence.
        cure: the command, or what else to do.
    """

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(reason)
        self.reason, self.cure = reason, cure


class Environment:
    """A virtual environment and what can be imported in it.

    Args:
        python: its interpreter.
        bases: interpreters whose packages may be used: the one that it was made from, and the one that the user names.
        lock: file with the versions and hashes of what may be installed.
        driver: file or name of the driver's library, e.g. "libcuda.so.1".
    """

    def __init__(self, python: Path, bases: list[Path], lock: Path, driver: str) -> None:
        self.python, self.bases, self.lock, self.driver = python, bases, lock, driver
        self.root = python.parent.parent
        # An environment may have no pip of its own; that of another interpreter fills it then.
        has_pip = importlib.util.find_spec("pip") is not None
        self._pip = [sys.executable if has_pip else str(bases[0]), "-m", "pip", "--python", str(python)]

    def probe(self, component: str, interpreter: Path | None = None) -> dict[str, object] | None:
        """Version and places of a component, or None where it cannot be imported.

        Args:
            component: a key of `PROBES`.
            interpreter: which one imports it; the environment's by default.
        """
        try:
            done = subprocess.run(
                [str(interpreter or self.python), *PROBES[component]],
                capture_output=True,
                text=True,
                timeout=PROBE_TIMEOUT_S,
                cwd=self.root,  # a folder of the caller's must not be imported from
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            return None
        found: dict[str, object] = json.loads(lines[-1])
        return found

    def link(self, places: dict[str, str]) -> list[Path]:
        """Make modules of the base interpreter importable, and nothing else that lies beside them.

        The environment's own packages come first on its path, so that locked versions stay the ones that are imported.

        Args:
            places: top-level modules and their folders or files.

        Returns:
            The links that were made.
        """
        made = []
        folder = self.root / LINKS_FOLDER
        folder.mkdir(exist_ok=True)
        for name, place in places.items():
            if self._has(name):
                continue
            source = Path(place)
            # Compiled packages keep bundled libraries in a folder beside them, found relative to themselves.
            for part in (source, source.with_name(f"{source.name}.libs"), source.with_name("nvidia")):
                link = folder / part.name
                if part.exists() and not (part.name == "nvidia" and self._has("nvidia")):
                    link.unlink(missing_ok=True)
                    link.symlink_to(part)
                    made.append(link)
        (self._site_packages() / LINKS_FILE).write_text(f"{folder}\n")
        return made

    def unlink_stale(self) -> None:
        """Remove links whose targets are gone."""
        folder = self.root / LINKS_FOLDER
        for link in folder.iterdir() if folder.is_dir() else ():
            if link.is_symlink() and not link.exists():
                link.unlink()

    def pip(self, *words: str, cwd: Path | None = None) -> None:
        """Run pip for the environment.

        Raises:
            Missing: pip fails; with the line that has the reason.
        """
        done = subprocess.run([*self._pip, *words], capture_output=True, text=True, cwd=cwd)
        if done.returncode:
            lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            reasons = [line for line in lines if _REASON.match(line)] or lines[-1:] or ["pip failed"]
            raise Missing(reasons[0].removeprefix("ERROR:").strip().rstrip("."), "")

    def requirements(self, folder: Path, *patterns: str) -> Path:
        """A requirements file with those packages of the lock whose names match."""
        blocks = [block for block in re.split(r"\n(?=\S)", self.lock.read_text()) if _matches(block, patterns)]
        file = folder / "requirements.txt"
        file.write_text("\n".join(blocks) + "\n")
        return file

    def locked(self, package: str) -> str:
        """The version of a package in the lock, e.g. "10.16.1.11"."""
        found = re.search(rf"^{re.escape(package)}==(\S+)", self.lock.read_text(), re.M)
        return found[1] if found else "?"

    def _has(self, name: str) -> bool:
        words = ["-c", "import importlib.util as u, sys; sys.exit(u.find_spec(sys.argv[1]) is None)", name]
        return subprocess.run([str(self.python), *words], cwd=self.root, capture_output=True).returncode == 0

    def _site_packages(self) -> Path:
        words = ["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        done = subprocess.run([str(self.python), *words], capture_output=True, text=True, check=True)
        return Path(done.stdout.strip())


def _matches(block: str, patterns: tuple[str, ...]) -> bool:
    name = re.match(r"[\w.-]+", block)
    return name is not None and any(re.fullmatch(pattern, name[0]) for pattern in patterns)


def driver_error(library: str) -> str | None:
    """Return the reason why the NVIDIA driver cannot be used; None if it can, "" without a driver.

    Args:
        library: file or name of the driver's library.
    """
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        if Path("/proc/driver/nvidia/version").exists() and library == DRIVER:
            return f"there is an NVIDIA driver, but its library {library} is not: a container needs `--gpus all`"
        return ""
    code = cuda.cuInit(0)
    count = ctypes.c_int()
    if code == 0:
        code = cuda.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return f"the NVIDIA driver does not start (CUDA error {code}): check that `nvidia-smi` lists a GPU"
    return None if count.value else "the NVIDIA driver has no GPU: check that `nvidia-smi` lists one"


def install_pycuda(env: Environment, folder: Path) -> None:
    """Install PyCUDA, which is compiled unless the index or a folder of wheels has a wheel.

    Args:
        env: the environment.
        folder: an empty folder for downloads and compilation.

    Raises:
        Missing: no package, no compiler, or it does not compile.
    """
    helpers = env.requirements(folder, r"(?!tensorrt|pycuda|nvidia-cuda-nvrtc|wheel-stub).*")
    hashed = ("--require-hashes", "--no-deps")
    env.pip("install", *PIP_OPTIONS, *hashed, "-r", str(helpers))
    wanted = env.requirements(folder, "pycuda")
    env.pip("download", *PIP_OPTIONS, *hashed, "--no-build-isolation", "-r", str(wanted), "-d", str(folder))
    wheels = [str(path) for path in folder.glob("*.whl")]
    if wheels:
        return env.pip("install", *PIP_OPTIONS, "--no-deps", "--no-index", *wheels)
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++").split()[0], "g++", "c++")):
        raise Missing("it is compiled and there is no C++ compiler", "apt-get install g++, then make serve")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        cure = f"apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev, then make serve"
        raise Missing("it is compiled and Python's headers (Python.h) are not there", cure)
    archive = next(folder.glob("*.tar.gz"), None)
    if archive is None:
        raise Missing(f"{env.lock} does not name it", "make lock, then make serve")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    (project,) = (path.parent for path in folder.glob("*/PKG-INFO"))
    # The linker looks for the name without a number, which comes with the CUDA toolkit only.
    library = folder / "lib" / "libcuda.so"
    library.parent.mkdir()
    library.symlink_to(_file_of(env.driver))
    headers = sorted(str(path) for path in (env._site_packages() / "nvidia").glob("*/include"))
    settings = {"CUDA_INC_DIR": headers, "CUDADRV_LIB_DIR": [str(library.parent)], "CUDA_ENABLE_CURAND": False}
    settings |= {"CUDART_LIB_DIR": [], "CURAND_LIB_DIR": []}
    (project / "siteconf.py").write_text("".join(f"{name} = {value!r}\n" for name, value in settings.items()))
    print("GPU: compiling PyCUDA, a minute or two", flush=True)
    return env.pip("install", *PIP_OPTIONS, "--no-deps", "--no-index", "--no-build-isolation", str(project))


def install_tensorrt(env: Environment, folder: Path) -> None:
    """Install TensorRT from the lock.

    Args:
        env: the environment.
        folder: an empty folder for requirements files.

    Raises:
        Missing: there are no wheels for this machine, or they cannot be fetched.
    """
    hashed = ("--require-hashes", "--no-deps", "--no-build-isolation")
    for patterns in (("wheel-stub",), ("nvidia-cuda-runtime-.*", "tensorrt.*")):
        file = env.requirements(folder, *patterns)
        env.pip("install", *PIP_OPTIONS, *hashed, "-r", str(file))


def install_nvrtc(env: Environment, folder: Path) -> None:
    """Install NVRTC from the lock.

    Args:
        env: the environment.
        folder: an empty folder for the requirements file.

    Raises:
        Missing: there is no wheel for this machine, or it cannot be fetched.
    """
    file = env.requirements(folder, "nvidia-cuda-nvrtc-.*")
    env.pip("install", *PIP_OPTIONS, "--require-hashes", "--no-deps", "-r", str(file))


def _file_of(library: str) -> Path:
    """The file of a library that is loaded in this process."""
    if os.path.isabs(library):
        return Path(library)
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.rpartition(" ")[2]
        if f"/{library.partition('.so')[0]}.so" in name:
            return Path(name)
    return Path(library)


INSTALL = {"PyCUDA": install_pycuda, "TensorRT": install_tensorrt, "NVRTC": install_nvrtc}
PACKAGES = {"PyCUDA": "pycuda", "TensorRT": "tensorrt-cu12", "NVRTC": "nvidia-cuda-nvrtc-cu12"}


def provide(env: Environment, component: str) -> dict[str, object]:
    """Make a component importable in the environment: as it is, linked from the base interpreter, or installed.

    Args:
        env: the environment.
        component: a key of `PROBES`.

    Returns:
        Its version and places.

    Raises:
        Missing: none of the three ways works.
    """
    found = env.probe(component)
    if found is not None:
        return found
    for base in env.bases:
        outside = env.probe(component, base)
        if outside is None:
            continue
        places = outside["places"]
        assert isinstance(places, dict)
        links = env.link(places)
        found = env.probe(component)
        if found is not None:
            print(f"GPU: {component} {found['version']} of {base} is used", flush=True)
            return found
        for link in links:  # made for another version of Python, for example
            link.unlink()
    package = PACKAGES[component]
    version = env.locked(package)
    print(f"GPU: installing {component} {version} (make serve GPU=0 leaves it out)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            INSTALL[component](env, Path(folder))
        except Missing as error:
            if error.cure:
                raise
            machine = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {platform.machine()}"
            cure = f"{env.python} -m pip install --find-links FOLDER_OF_WHEELS {package}=={version}, then make serve"
            raise Missing(f"no package for {machine} could be installed ({error.reason})", cure) from error
    found = env.probe(component)
    if found is None:
        module = "libnvrtc.so" if component == "NVRTC" else PROBES[component][-1]
        raise Missing("it is installed and cannot be loaded", f'{env.python} -c "import {module}" shows the error')
    return found


def main(arguments: list[str] | None = None) -> int:
    """Provide what the GPU needs, print what was done or what is missing; always 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="interpreter of the environment")
    parser.add_argument(
        "--base", type=Path, action="append", default=[], help="another interpreter whose TensorRT may be used"
    )
    parser.add_argument("--lock", type=Path, default=ROOT / "requirements" / "gpu.lock")
    parser.add_argument("--driver", default=DRIVER, metavar="LIBRARY", help="the NVIDIA driver's library")
    options = parser.parse_args(arguments)
    wrong = driver_error(options.driver)
    if wrong is not None:
        if wrong:
            print(f"GPU: {wrong}. The models are served on the CPU.", flush=True)
        return 0
    bases = list(dict.fromkeys([*options.base, Path(getattr(sys, "_base_executable", sys.executable))]))
    env = Environment(options.python.absolute(), bases, options.lock, options.driver)
    env.unlink_stale()
    versions = []
    for component in PROBES:
        try:
            versions.append(f"{component} {provide(env, component)['version']}")
        except Missing as error:
            need = (
                "kernels of Headrace do not run on the GPU"
                if component == "NVRTC"
                else "the models are served on the CPU"
            )
            print(
                f"GPU: {component} is not there, because {error.reason}; {need}. To cure it: {error.cure}", flush=True
            )
            break
    else:
        print(f"GPU: {', '.join(versions)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
