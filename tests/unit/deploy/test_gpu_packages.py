"""The step of `make serve` that finds or installs TensorRT, with a fake driver and a folder of fake wheels."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.serving import ROOT

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "deploy" / "gpu_packages.py"
MODULES = {
    "tensorrt-cu12": {"tensorrt/__init__.py": "from tensorrt_bindings import __version__\n"},
    "tensorrt-cu12-bindings": {"tensorrt_bindings/__init__.py": "import tensorrt_libs\n__version__ = '10.16.1.11'\n"},
    "tensorrt-cu12-libs": {"tensorrt_libs/__init__.py": ""},
    "pycuda": {"pycuda/__init__.py": "VERSION_TEXT = '2026.1'\n", "pycuda/driver.py": "import pytools\n"},
    "pytools": {"pytools/__init__.py": ""},
    "nvidia-cuda-nvrtc-cu12": {"nvidia/cuda_nvrtc/lib/libnvrtc.so.12": ""},
    "nvidia-cuda-runtime-cu12": {"nvidia/cuda_runtime/include/cuda.h": ""},
    "wheel-stub": {"wheel_stub/__init__.py": ""},
}
# Stands for PyCUDA's setup.py: what it was configured with ends up in the module.
BACKEND = """
import pathlib, zipfile
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder, "pycuda-2026.1.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: pycuda\\nVersion: 2026.1\\n")
    return info.name
def build_wheel(folder, config_settings=None, metadata_directory=None):
    conf = {}
    exec(pathlib.Path("siteconf.py").read_text(), conf)
    assert pathlib.Path(conf["CUDA_INC_DIR"][0], "cuda.h").exists(), conf["CUDA_INC_DIR"]
    assert pathlib.Path(conf["CUDADRV_LIB_DIR"][0], "libcuda.so").exists()
    name = "pycuda-2026.1-py3-none-any.whl"
    info = "pycuda-2026.1.dist-info"
    with zipfile.ZipFile(pathlib.Path(folder, name), "w") as wheel:
        wheel.writestr("pycuda/__init__.py", "VERSION_TEXT = '2026.1 compiled'")
        wheel.writestr("pycuda/driver.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: pycuda\\nVersion: 2026.1\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""


@dataclass
class Machine:
    """A virtual environment, a folder of packages with their lock, and a driver's library.

    Attributes:
        folder: holds all of it.
        python: the environment's interpreter.
        driver: the library.
    """

    folder: Path
    python: Path
    driver: Path

    @property
    def packages(self) -> Path:
        return self.folder / "packages"

    @property
    def site(self) -> Path:
        (result,) = (self.folder / "venv" / "lib").glob("python3*/site-packages")
        return result

    def lock(self) -> None:
        """Write the lock of what is in the folder of packages."""
        lines = []
        for path in sorted(self.packages.iterdir()):
            name, version = re.match(r"(\w+)-([\d.]+\d)", path.name).groups()  # type: ignore[union-attr]
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            lines.append(f"{name.replace('_', '-')}=={version} \\\n    --hash=sha256:{digest}\n")
        (self.folder / "gpu.lock").write_text("".join(lines))

    def run(self, *options: str, env: Mapping[str, str] | None = None) -> str:
        """Run the step; what it prints."""
        words = [sys.executable, SCRIPT, "--python", self.python, "--lock", self.folder / "gpu.lock"]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.packages), "PIP_CONFIG_FILE": os.devnull}
        done = subprocess.run(
            [*map(str, words), "--driver", str(self.driver), *options],
            env=clean | index | dict(env or {}),
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    def imports(self, code: str) -> str:
        """Return the output of the environment."""
        done = subprocess.run([str(self.python), "-c", code], capture_output=True, text=True, timeout=60)
        return (done.stdout + done.stderr).strip()


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def wheel(folder: Path, name: str, version: str, files: Mapping[str, str]) -> Path:
    stem = f"{name.replace('-', '_')}-{version}"
    about = {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        record = ""
        for file, text in (files | about).items():  # type: ignore[operator]
            archive.writestr(file, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
            record += f"{file},sha256={digest},{len(text)}\n"
        archive.writestr(f"{stem}.dist-info/RECORD", record + f"{stem}.dist-info/RECORD,,\n")
    return path


def source_of_pycuda(folder: Path) -> None:
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: pycuda\nVersion: 2026.1\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": BACKEND,
    }
    with tarfile.open(folder / "pycuda-2026.1.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"pycuda-2026.1/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """Makes a driver's library by its CUDA error code and its number of GPUs."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("driver")

    def made(code: int, gpus: int) -> Path:
        path = folder / f"libcuda-{code}-{gpus}.so.1"
        source = f'extern "C" int cuInit(unsigned) {{ return {code}; }}\n'
        source += f'extern "C" int cuDeviceGetCount(int *count) {{ *count = {gpus}; return 0; }}\n'
        words = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
        subprocess.run(words, input=source, text=True, check=True, timeout=60)
        return path

    return made


@pytest.fixture
def machine(tmp_path: Path, driver: Callable[[int, int], Path]) -> Machine:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    made = Machine(tmp_path, tmp_path / "venv" / "bin" / "python", driver(0, 1))
    made.packages.mkdir()
    made.lock()
    return made


def fill(machine: Machine, *without: str) -> None:
    """Put all packages but some into the folder, and into the lock."""
    for name, files in MODULES.items():
        if name not in without:
            version = {"pycuda": "2026.1"}.get(name, "10.16.1.11")
            wheel(machine.packages, name, version, files)
    machine.lock()


def test_without_a_driver_nothing_is_printed_or_installed(machine: Machine) -> None:
    fill(machine)
    assert machine.run("--driver", str(machine.folder / "libcuda.so.1")) == ""
    assert list(machine.site.iterdir()) == []


@pytest.mark.parametrize(("code", "gpus", "why"), [(999, 1, "does not start (CUDA error 999)"), (0, 0, "has no GPU")])
def test_a_broken_driver_is_reported(
    machine: Machine, driver: Callable[[int, int], Path], code: int, gpus: int, why: str
) -> None:
    fill(machine)
    printed = machine.run("--driver", str(driver(code, gpus)))
    assert printed.splitlines() == [printed.strip()]
    assert why in printed
    assert "nvidia-smi" in printed
    assert list(machine.site.iterdir()) == []


def test_an_installed_environment_is_not_changed(machine: Machine) -> None:
    for files in MODULES.values():
        write(machine.site, files)
    before = sorted(machine.site.rglob("*"))
    printed = machine.run()
    assert printed.startswith("GPU: PyCUDA 2026.1, TensorRT 10.16.1.11, NVRTC ")
    assert [path for path in sorted(machine.site.rglob("*")) if "__pycache__" not in str(path)] == before


def test_tensorrt_of_the_base_interpreter_is_linked_and_nothing_beside_it(machine: Machine) -> None:
    dist = machine.folder / "dist-packages"
    for files in MODULES.values():
        write(dist, files)
    write(dist, {"tensorrt_libs/__init__.py": "import numpy, helper\n", "numpy/__init__.py": "version = 'old'\n"})
    write(dist, {"helper.py": "", "fastapi/__init__.py": "", "pycuda.libs/libboost.so": ""})
    write(machine.site, {"numpy/__init__.py": "version = 'locked'\n"})
    base = machine.folder / "base-python"
    base.write_text(f'#!/bin/sh\nPYTHONPATH="{dist}" exec "{sys._base_executable}" "$@"\n')  # type: ignore[attr-defined]
    base.chmod(0o755)
    printed = machine.run("--base", str(base))
    assert f"GPU: TensorRT 10.16.1.11 of {base} is used\n" in printed
    assert printed.splitlines()[-1].startswith("GPU: PyCUDA 2026.1, TensorRT 10.16.1.11, NVRTC ")
    assert machine.imports("import tensorrt, pycuda.driver, numpy; print(numpy.version)") == "locked"
    assert "No module named 'fastapi'" in machine.imports("import fastapi")
    # Python keeps the bytecode of a linked module there, where it may write bytecode.
    links = {path.name for path in (machine.folder / "venv" / "gpu").iterdir()} - {"__pycache__"}
    assert links == {
        "tensorrt",
        "tensorrt_bindings",
        "tensorrt_libs",
        "helper.py",
        "pycuda",
        "pycuda.libs",
        "pytools",
        "nvidia",
    }

    shutil.rmtree(dist)
    assert "GPU: PyCUDA is not there" in machine.run("--base", str(base)), (
        "links to what is gone must not be counted on"
    )


def test_from_a_folder_of_wheels_everything_is_installed(machine: Machine) -> None:
    fill(machine)
    printed = machine.run()
    assert "GPU: installing TensorRT 10.16.1.11" in printed
    assert printed.splitlines()[-1].startswith("GPU: PyCUDA 2026.1, TensorRT 10.16.1.11, NVRTC ")
    assert machine.imports("import tensorrt, pycuda.driver; print(tensorrt.__version__)") == "10.16.1.11"
    assert "installing" not in machine.run(env={"PIP_FIND_LINKS": str(machine.folder)}), "it is installed once"


def test_without_wheels_one_sentence_names_the_remedy(machine: Machine) -> None:
    fill(machine)
    for path in machine.packages.glob("tensorrt*"):
        path.unlink()
    message = machine.run().splitlines()[-1]
    assert message.startswith("GPU: TensorRT is not there, because no package for Python 3.")
    assert "the models are served on the CPU. To cure it: " in message
    assert f"{machine.python} -m pip install --find-links FOLDER_OF_WHEELS tensorrt-cu12==10.16.1.11" in message


def test_a_package_other_than_the_locked_one_is_refused(machine: Machine) -> None:
    fill(machine)
    wheel(machine.packages, "tensorrt-cu12", "10.16.1.11", {"tensorrt/__init__.py": "raise SystemExit('another')"})
    assert "GPU: TensorRT is not there" in machine.run()
    assert "No module named 'tensorrt'" in machine.imports("import tensorrt")


def test_without_a_compiler_one_sentence_names_the_remedy(machine: Machine) -> None:
    fill(machine, "pycuda")
    source_of_pycuda(machine.packages)
    machine.lock()
    message = machine.run(env={"PATH": str(machine.folder)}).splitlines()[-1]
    assert message.startswith("GPU: PyCUDA is not there, because it is compiled and there is no C++ compiler; ")
    assert message.endswith("To cure it: apt-get install g++, then make serve")
    assert "No module named 'tensorrt'" in machine.imports("import tensorrt"), "gigabytes that nothing can use"


def test_pycuda_is_compiled_with_the_headers_of_a_wheel_and_the_drivers_library(machine: Machine) -> None:
    fill(machine, "pycuda")
    source_of_pycuda(machine.packages)
    machine.lock()
    assert machine.run().splitlines()[-1].startswith("GPU: PyCUDA 2026.1 compiled, TensorRT 10.16.1.11, NVRTC ")


def test_the_lock_contains_the_packages_of_the_extra_below_tensorrt_11() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extra = set(project["project"]["optional-dependencies"]["gpu"])
    assert extra <= set(project["dependency-groups"]["gpu-packages"])
    locked = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements" / "gpu.lock").read_text(), re.M))
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in extra} <= set(locked)  # type: ignore[index]
    tensorrt = {version for name, version in locked.items() if name.startswith("tensorrt")}
    assert len(tensorrt) == 1
    assert 10 <= int(tensorrt.pop().split(".")[0]) < 11


def test_make_serve_installs_it_first_unless_gpu_is_0() -> None:
    done = subprocess.run(["make", "-n", "serve"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert re.search(r"gpu_packages\.py.*headrace serve", done.stdout, re.S)
    words = ["make", "-n", "gpu-packages", "GPU=0"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert '[ "0" = 0 ] ||' in done.stdout


def test_make_fills_an_environment_that_has_no_pip_with_that_of_python(tmp_path: Path) -> None:
    python, made = tmp_path / "python", tmp_path / "venv"
    lacks_ensurepip = 'case "$*" in *"-m venv --without-pip"*) ;; *"-m venv"*) exit 1 ;; esac'
    python.write_text(f'#!/bin/sh\n{lacks_ensurepip}\nexec "{sys._base_executable}" "$@"\n')  # type: ignore[attr-defined]
    python.chmod(0o755)
    words = ["make", f"PYTHON={python}", f"VENV={made}"]
    subprocess.run([*words, str(made / "bin" / "python")], cwd=ROOT, capture_output=True, timeout=60, check=True)
    done = subprocess.run([*words, "-n", str(made / ".serve")], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert f"{python} -m pip --python {made}/bin/python" in done.stdout
