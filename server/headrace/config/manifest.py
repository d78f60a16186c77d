"""Files beside a model: artefacts built from it, `build.json` with a stamp for each artefact, and published layer times.

<model>/<version>/model.onnx                       the source, never modified
<model>/<version>/model.<key12>.onnx | .plan       an artefact
<model>/<version>/build.json                       {"format": 1, "builds": [stamp, ...]}, at most one stamp a machine
<model>/<version>/layers.json                      layer times, written by `headrace inspect --publish`; for display only

A stamp holds digests of the ONNX file with its tensors and of the configuration (`digests`), and the machine (`machine`). An
artefact built elsewhere may be slow, wrong, or fail to load. An artefact serves where its stamp fits the model, the
configuration and the machine (`choose`); otherwise `model.onnx` serves.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, NoReturn, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from headrace.config.digests import display_path, fits_config, onnx_digest
from headrace.config.documents import refuse
from headrace.config.files import locked_folder, write_durably
from headrace.config.machine import Machine
from headrace.config.model_config import ModelConfig
from headrace.core.errors import ConfigError
from headrace.core.response_bodies import LayerTimes

LAYERS_FILE = "layers.json"
FORMAT: Final = 1
# A layer takes about 300 bytes; a larger file is not a layer report.
MAX_BYTES = 4 << 20

_CURE = "write it again with `headrace inspect MODEL --publish`, or remove the file"
_Time = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """One step of a built engine.

    Attributes:
        name: name in the engine.
        kind: operator, e.g. "Conv", "CaskConvolution".
        nodes: names of its ONNX nodes, in order; empty for steps that the builder added (reformats).
        precision: precision of its arithmetic, e.g. "int8", "fp16", "fp32".
        tactic: name of the kernel; "" if the engine does not report it.
        time_us: mean time of one execution, in microseconds.
        share: share of the time of all layers, 0..1.
    """

    name: str
    kind: str
    nodes: tuple[str, ...]
    precision: str
    tactic: str
    time_us: _Time
    share: _Time


@dataclass(frozen=True, slots=True)
class LayerReport:
    """An engine and its layers, with times; the content of `layers.json`.

    Attributes:
        format: version of the file format.
        model: name of the model.
        version: number of the version.
        artefact: name of the opened file.
        precision: precision of the engine; "" for the model's ONNX file.
        machine: machine of the measurement.
        reason: reason why `artefact` is the model's ONNX file; "" for a built engine.
        shapes: shapes of the inputs by name, batch dimension included.
        rows: rows of the batch.
        median_us: median time of one execution without the profiler, in microseconds.
        p99_us: 99th percentile of it.
        rows_per_s: rows a second without the profiler.
        total_us: time of all layers under the profiler, which adds time to each layer, most to small ones.
        layers: layers in order.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1]
    model: str
    version: int
    artefact: str
    precision: str
    machine: Machine
    reason: str
    shapes: dict[str, tuple[int, ...]]
    rows: Annotated[int, Field(ge=0)]
    median_us: _Time
    p99_us: _Time
    rows_per_s: _Time
    total_us: _Time
    layers: tuple[MeasuredLayer, ...]

    def to_json(self) -> LayerTimes:
        """Return plain data for clients; the machine as text."""
        return cast(LayerTimes, asdict(self) | {"machine": str(self.machine)})


def read_layers(folder: Path) -> LayerReport | None:
    """Read the layer report in a version's folder; None if there is none.

    Raises:
        ConfigError: the file cannot be read, or is not a layer report.
    """
    name = display_path(folder / LAYERS_FILE)
    content = _content(folder / LAYERS_FILE, name, MAX_BYTES, _CURE)
    if content is None:
        return None
    try:
        return _layers_adapter().validate_json(content)
    except ValidationError as error:
        location = ".".join(map(str, error.errors(include_url=False)[0]["loc"]))[:80]
        raise refuse(name, None, f"is not a layer report ({location or 'JSON'})", _CURE) from None


@cache
def _layers_adapter() -> TypeAdapter[LayerReport]:
    return TypeAdapter(LayerReport)


STAMP_FILE = "build.json"
RECIPE_FILE = "recipe.json"
# A stamp takes a few kilobytes; a larger file is not a stamp file.
MAX_STAMP_BYTES = 1 << 20

_ARTEFACT = re.compile(r"model\.[0-9a-f]{12}\.(onnx|plan)")
# A missing artefact may just have been replaced: the stamp was read before, and a second read has the new one. More than two
# reads only happen while builders publish in a loop.
_MAX_READS = 10
_MISSING = "is missing"
_REBUILD = "build the model again with `headrace build`, or remove the file"

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
Seconds = Annotated[float, Field(ge=0)]
Scalar = str | bool | int | float | None


# Names of fields in `build.json` that differ from those here: the file format stays.
_STORED_NAMES = {"requested": "asked"}


@dataclass(frozen=True, slots=True)
class BatchTiming:
    """Speed of an engine at one batch size, with inputs in the engine's memory and an idle machine.

    Attributes:
        rows: rows of the batch.
        median_us: median time of one execution in microseconds.
        p99_us: 99th percentile of it in microseconds.
        rows_per_s: sustained rows a second, back to back.
    """

    rows: Annotated[int, Field(ge=0)]
    median_us: Annotated[float, Field(ge=0)]
    p99_us: Annotated[float, Field(ge=0)]
    rows_per_s: Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class PluginUse:
    """Plug-in of ours in a TensorRT engine; an engine is served only with the same one.

    Attributes:
        name: name of the plug-in.
        version: its version.
        digest: SHA-256, in hex, of the sources of its kernels and of the parameters in `layers`.
        layers: by name of the ONNX node, algorithm, variant, shape and epilogue.
    """

    name: str
    version: str
    digest: Digest
    layers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Stamp:
    """Description of an artefact. Digests are SHA-256 in hex.

    Attributes:
        key: key in the store; its first 12 digits are in the artefact's name.
        artefact: name of the artefact's file.
        artefact_sha256: `onnx_digest` of the artefact.
        size_bytes: size of the file.
        onnx_sha256: `onnx_digest` of the model it was built from.
        config_digest: digest of the configuration it was built for.
        spec_digest: digest of the build specification; only builders can compute it.
        precision: precision of the artefact.
        requested: requested precision, e.g. "best".
        overridden: `requested` comes from the command line, not from the configuration.
        machine: machine that it was built on and for.
        accuracy: accuracy against the FP32 model, by name; None if nothing was measured, a value None if it is not finite.
        forced: published although it misses its accuracy bar.
        refusal: missed accuracy bars, in sentences.
        kept: nodes left in floating point.
        timings: times by batch size.
        seconds: duration of the build.
        built_with: versions of the libraries, by name.
        sparse_weights: a TensorRT engine of an earlier version, with kernels for 2:4 sparse weights.
        version_compatible: the engine holds TensorRT's lean runtime and runs with later TensorRT versions of the same major
            version; loading it runs that code.
        plugins: plug-ins of ours in a TensorRT engine.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    key: Digest
    artefact: str
    artefact_sha256: Digest
    size_bytes: Annotated[int, Field(ge=0)]
    onnx_sha256: Digest
    config_digest: Digest
    spec_digest: Digest
    precision: str
    requested: Annotated[str, Field(alias=_STORED_NAMES["requested"])]
    overridden: bool
    machine: Machine
    accuracy: Mapping[str, Scalar] | None = None
    forced: bool = False
    refusal: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    timings: tuple[BatchTiming, ...] = ()
    seconds: Seconds = 0.0
    built_with: Mapping[str, str] = field(default_factory=dict)
    sparse_weights: bool = False
    version_compatible: bool = False
    plugins: tuple[PluginUse, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data; accuracy values that are not finite become None, as JSON cannot express them."""
        document = {_STORED_NAMES.get(name, name): value for name, value in asdict(self).items()}
        document["accuracy"] = _finite(self.accuracy)
        for name in ("sparse_weights", "version_compatible", "plugins"):
            # Earlier versions refuse unknown fields.
            if not document[name]:
                del document[name]
        return document

    @staticmethod
    def from_json(value: object, where: str = STAMP_FILE) -> Stamp:
        """Create a stamp from plain data of any origin.

        Args:
            value: JSON data; tuples may replace lists.
            where: name of the data in the error.

        Raises:
            ConfigError: the data is not a stamp; has the reason.
        """
        if isinstance(value, dict) and isinstance(value.get("accuracy"), Mapping):
            value = {**value, "accuracy": _finite(value["accuracy"])}
        try:
            stamp = _adapter().validate_json(json.dumps(value))
        except ValidationError as error:
            _refuse(where, "; ".join(_describe_problem(problem) for problem in error.errors(include_url=False)[:3]))
        except (TypeError, ValueError, RecursionError) as error:
            _refuse(where, f"has a value that is not JSON: {error}")
        if not is_artefact_name(stamp.artefact) or stamp.artefact.split(".")[1] != stamp.key[:12]:
            _refuse(where, f"{stamp.artefact!r:.80} is not the name of an artefact with the key {stamp.key[:12]}...")
        return stamp


@dataclass(frozen=True, slots=True)
class ArtefactMatch:
    """The artefact to serve of a version, or the reason why there is none.

    Attributes:
        stamp: stamp of the artefact; None for `model.onnx` itself.
        path: path of the artefact; None for `model.onnx` itself.
        reason: why no artefact serves; "" if one does.
    """

    stamp: Stamp | None
    path: Path | None
    reason: str


def artefact_name(key: str, suffix: str) -> str:
    """Return the file name of an artefact; "" if the key or suffix is invalid."""
    name = f"model.{key[:12]}{suffix}"
    return name if _ARTEFACT.fullmatch(name) else ""


def is_artefact_name(name: str) -> bool:
    """True if a file is named like an artefact."""
    return _ARTEFACT.fullmatch(name) is not None


def read_stamps(folder: Path) -> list[Stamp]:
    """Read the stamps in a version's folder; empty if nothing was built, or only a demo model's own stamp exists.

    Raises:
        ConfigError: `build.json` cannot be read, is not a stamp file, or has an unknown format.
    """
    path = folder / STAMP_FILE
    name = display_path(path)
    content = _content(path, name)
    if content is None:
        return []
    try:
        document = json.loads(content, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        _refuse(name, "is not JSON, or truncated")
    if not isinstance(document, dict):
        _refuse(name, "is not a JSON object")
    if "recipe" in document and "builds" not in document:
        return []
    if document.get("format") != FORMAT:
        message = f"has format {document.get('format')!r:.40}, this version reads {FORMAT}"
        raise refuse(name, None, message, f"update Headrace, or {_REBUILD}")
    builds = document.get("builds")
    if not isinstance(builds, list):
        _refuse(name, "has no list of builds")
    return [Stamp.from_json(build, f"{name} (build {number})") for number, build in enumerate(builds, 1)]


def write_stamp(folder: Path, stamp: Stamp) -> None:
    """Add a stamp to a version's folder atomically; it replaces the one for the same machine.

    An unreadable `build.json` is replaced. An unchanged file is not written, so that no watcher sees a change.

    Raises:
        ConfigError: the stamp is invalid, or the folder cannot be written.
    """
    try:
        with locked_folder(folder):
            add_stamp(folder, stamp)
    except OSError as error:
        cure = "check the folder's permissions and the room on its disk"
        raise refuse(display_path(folder / STAMP_FILE), None, f"cannot be written: {error.strerror}", cure) from error


def add_stamp(folder: Path, stamp: Stamp) -> None:
    """`write_stamp` for callers that hold the folder's lock.

    Raises:
        ConfigError: the stamp is invalid.
        OSError: the folder cannot be written.
    """
    Stamp.from_json(stamp.to_json())
    path = folder / STAMP_FILE
    try:
        stamps = read_stamps(folder)
    except ConfigError:
        stamps = []
    _preserve_recipe(path)
    other_stamps = [old for old in stamps if old.machine != stamp.machine]
    builds = [each.to_json() for each in (*other_stamps, stamp)]
    content = (json.dumps({"format": FORMAT, "builds": builds}, indent=2, allow_nan=False) + "\n").encode()
    if len(content) > MAX_STAMP_BYTES:
        cure = "remove the file: it is written again for this machine alone"
        raise refuse(display_path(path), None, f"would be larger than {MAX_STAMP_BYTES} bytes", cure)
    if path.is_symlink() or not path.is_file() or path.read_bytes() != content:
        write_durably(path, content)


def choose(
    stamps: Sequence[Stamp], folder: Path, onnx_sha256: str, config: ModelConfig | str, machine: Machine
) -> ArtefactMatch:
    """Choose the artefact to serve on a machine.

    Args:
        stamps: stamps of the folder.
        folder: folder of the version.
        onnx_sha256: digest of the present model.
        config: the present complete configuration; or its digest, to ignore a precision written since the build.
        machine: this machine.
    """
    if not stamps:
        return ArtefactMatch(None, None, "no engine is built")
    stamp = next((stamp for stamp in stamps if stamp.machine == machine), None) or _compatible(stamps, machine)
    if stamp is None:
        machines = ", ".join(str(stamp.machine) for stamp in stamps)
        return ArtefactMatch(None, None, f"built for {machines}; this is {machine}")
    if stamp.onnx_sha256 != onnx_sha256:
        return ArtefactMatch(None, None, "built from another model.onnx")
    fits = stamp.config_digest == config if isinstance(config, str) else stamp_fits(stamp, config)
    if not fits:
        return ArtefactMatch(None, None, f"built for another configuration (precision {stamp.requested})")
    path = folder / stamp.artefact
    problem = artefact_problem(path, stamp.size_bytes, stamp.artefact_sha256)
    return ArtefactMatch(None, None, problem) if problem else ArtefactMatch(stamp, path, "")


def runs_on(stamp: Stamp, machine: Machine) -> bool:
    """True if a stamp's engine runs on a machine: it was built for it, or for an earlier TensorRT and is version compatible.

    Version-compatible engines run with the TensorRT of their build and with later ones of the same major version (TensorRT
    documentation, "Version Compatibility"). GPU and driver must be the same in any case.
    """
    if stamp.machine == machine:
        return True
    if not stamp.version_compatible or replace(stamp.machine, version=machine.version) != machine:
        return False
    built, here = _numbers(stamp.machine.version), _numbers(machine.version)
    return bool(built and here) and built[0] == here[0] and built <= here


def _compatible(stamps: Sequence[Stamp], machine: Machine) -> Stamp | None:
    """Return the stamp of the latest TensorRT among version-compatible engines that run on a machine; None without one."""
    fitting = [stamp for stamp in stamps if runs_on(stamp, machine)]
    return max(fitting, key=lambda stamp: _numbers(stamp.machine.version), default=None)


def _numbers(version_text: str) -> tuple[int, ...]:
    """Return the numbers of a version; () if a part is not a number."""
    parts = version_text.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def stamp_fits(stamp: Stamp, config: ModelConfig) -> bool:
    """True if a stamp's artefact was built for a configuration; see `fits_config`."""
    return fits_config(stamp.config_digest, stamp.requested, config)


def choose_from_folder(folder: Path, onnx_sha256: str, config: ModelConfig | str, machine: Machine) -> ArtefactMatch:
    """Choose from the stamps in a folder, also while a builder publishes there; an invalid `build.json` becomes a reason."""
    choice = ArtefactMatch(None, None, "")
    for _ in range(_MAX_READS):
        try:
            stamps = read_stamps(folder)
        except ConfigError as error:
            return ArtefactMatch(None, None, f"{error.findings[0].path} {error.findings[0].message}")
        choice = choose(stamps, folder, onnx_sha256, config, machine)
        if not choice.reason.endswith(_MISSING):
            break
    return choice


def artefact_problem(path: Path, size_bytes: int, sha256: str) -> str:
    """Compare an artefact's file with its stamp; returns the difference, "" if there is none.

    Args:
        path: the file; links are not followed.
        size_bytes: expected size.
        sha256: expected `onnx_digest`; "" to compare only the size.
    """
    try:
        state = path.lstat()
        if not stat.S_ISREG(state.st_mode):
            return f"{path.name} is a link or no file"
        if state.st_size != size_bytes:
            return f"{path.name} has been changed: it has {state.st_size} bytes, {size_bytes} were built"
        if sha256 and onnx_digest(path) != sha256:
            return f"{path.name} has been changed: its digest is another one"
    except FileNotFoundError:
        return f"{path.name} {_MISSING}"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return f"{path.name} {_MISSING}"
        changed = "" if isinstance(error.__cause__, OSError) else "has been changed: "
        return f"{path.name} {changed}{error.findings[0].message}"
    return ""


def _preserve_recipe(path: Path) -> None:
    """Link a demo model's own stamp, which once had this name, to its present name: it has the recipe of the model."""
    with suppress(ConfigError, ValueError, RecursionError, FileExistsError):
        content = _content(path, path.name)
        document = None if content is None else json.loads(content)
        if isinstance(document, dict) and "recipe" in document and "builds" not in document:
            os.link(path, path.with_name(RECIPE_FILE), follow_symlinks=False)


def _content(path: Path, name: str, max_bytes: int = MAX_STAMP_BYTES, cure: str = _REBUILD) -> bytes | None:
    """Return the content of a file, at most `max_bytes`; None if there is none. Follows no link and does not block on a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise refuse(name, None, "is not a file", cure)
            content = stream.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        raise refuse(name, None, "is a folder", cure) from None
    except OSError as error:
        if path.is_symlink():
            raise refuse(name, None, "cannot be read: it is a link, which is not followed", cure) from None
        raise refuse(name, None, f"cannot be read: {error.strerror}", "check the file's permissions") from None
    if len(content) > max_bytes:
        raise refuse(name, None, f"is larger than {max_bytes} bytes", cure)
    return content


def _finite(values: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if values is None:
        return None
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}


def _describe_problem(problem: Mapping[str, Any]) -> str:
    # Without the parts that pydantic adds for members of a union.
    location = ".".join(str(part)[:60] for part in problem["loc"] if part not in ("str", "bool", "int", "float"))
    return f"{location or 'it'}: {problem['msg']}"


def _refuse(where: str, message: str) -> NoReturn:
    raise refuse(where, None, message, _REBUILD)


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


@cache
def _adapter() -> TypeAdapter[Stamp]:
    return TypeAdapter(Stamp)
