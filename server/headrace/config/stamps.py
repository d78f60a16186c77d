"""What lies beside a model: artefacts built from it, and `build.json`, which tells what each of them is and for which machine.

<model>/<version>/model.onnx                       the source, never touched
<model>/<version>/model.<key12>.onnx | .plan       an artefact
<model>/<version>/build.json                       {"format": 1, "builds": [stamp, ...]}, at most one stamp a machine

An artefact is served where its stamp fits the model, the configuration and the machine (`choose`), else `model.onnx` is.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from headrace.config.digests import config_digest, fits_config, onnx_digest, shown_file
from headrace.config.document import refuse
from headrace.config.durable import locked_folder, write_durably
from headrace.config.machine import Machine
from headrace.core.errors import ConfigError
from headrace.core.model_config import ModelConfig

__all__ = [
    "STAMP_FILE",
    "Choice",
    "Stamp",
    "Timing",
    "artefact_name",
    "artefact_problem",
    "choose",
    "choose_in",
    "config_digest",
    "is_artefact_name",
    "onnx_digest",
    "put_stamp",
    "read_stamps",
    "stamp_fits",
    "write_stamp",
]

STAMP_FILE = "build.json"
RECIPE_FILE = "recipe.json"
FORMAT = 1
# A stamp takes a few kilobytes; a file larger than this is something else.
MAX_STAMP_BYTES = 1 << 20

_ARTEFACT = re.compile(r"model\.[0-9a-f]{12}\.(onnx|plan)")
# An artefact that is not there may just have been replaced: the stamp was read before, and a second look finds the new one.
# More than two only happen while builders publish in a loop.
_LOOKS = 10
_MISSING = "is missing"
_REBUILD = "build the model again with `headrace build`, or remove the file"

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
Seconds = Annotated[float, Field(ge=0)]
Scalar = str | bool | int | float | None


@dataclass(frozen=True, slots=True)
class Timing:
    """How fast an engine is on one batch size, inputs where the engine wants them, nothing else running.

    Attributes:
        rows: of the batch.
        median_us: of one execution.
        p99_us: of one execution.
        rows_per_s: sustained, back to back.
    """

    rows: Annotated[int, Field(ge=0)]
    median_us: Annotated[float, Field(ge=0)]
    p99_us: Annotated[float, Field(ge=0)]
    rows_per_s: Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Stamp:
    """What an artefact is. Digests are SHA-256 in hex.

    Attributes:
        key: of the store; the first 12 digits are in the artefact's name.
        artefact: its file's name.
        artefact_sha256: its `onnx_digest`.
        size_bytes: of the file.
        onnx_sha256: the `onnx_digest` of the model it was built from.
        config_digest: of the configuration it was built for.
        spec_digest: of what was built, in detail; only builders can tell it.
        precision: that it has.
        asked: that was asked for, e.g. "best".
        overridden: `asked` is the command line's, not the configuration's.
        machine: that it was built on, and is for.
        accuracy: against the FP32 model, by name; None where nothing was measured, a value None where it is not finite.
        forced: published although it misses what was asked of it.
        refusal: what it misses, in sentences.
        kept: nodes left in floating point.
        timings: by batch size.
        seconds: that the build took.
        built_with: versions by name.
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
    asked: str
    overridden: bool
    machine: Machine
    accuracy: Mapping[str, Scalar] | None = None
    forced: bool = False
    refusal: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    timings: tuple[Timing, ...] = ()
    seconds: Seconds = 0.0
    built_with: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data; what of the accuracy is not finite becomes None, for which JSON has a word."""
        told = asdict(self)
        told["accuracy"] = _finite(self.accuracy)
        return told

    @staticmethod
    def from_json(value: object, where: str = STAMP_FILE) -> Stamp:
        """The stamp in plain data, whoever wrote it.

        Args:
            value: of JSON; tuples will do for lists.
            where: names it in the error.

        Raises:
            ConfigError: it is no stamp; tells what is wrong with it.
        """
        if isinstance(value, dict) and isinstance(value.get("accuracy"), Mapping):
            value = {**value, "accuracy": _finite(value["accuracy"])}
        try:
            stamp = _adapter().validate_json(json.dumps(value))
        except ValidationError as error:
            _refuse(where, "; ".join(_told(problem) for problem in error.errors(include_url=False)[:3]))
        except (TypeError, ValueError, RecursionError) as error:
            _refuse(where, f"holds something that is no JSON: {error}")
        if not is_artefact_name(stamp.artefact) or stamp.artefact.split(".")[1] != stamp.key[:12]:
            _refuse(where, f"{stamp.artefact!r:.80} is no name of an artefact of the key {stamp.key[:12]}...")
        return stamp


@dataclass(frozen=True, slots=True)
class Choice:
    """What to serve of a version.

    Attributes:
        stamp: of the artefact, None for `model.onnx` itself.
        path: of the artefact, None for `model.onnx` itself.
        reason: why it is not an artefact, in words; "" if it is one.
    """

    stamp: Stamp | None
    path: Path | None
    reason: str


def artefact_name(key: str, suffix: str) -> str:
    """What an artefact is called beside its model; "" if there cannot be one of this key and suffix."""
    name = f"model.{key[:12]}{suffix}"
    return name if _ARTEFACT.fullmatch(name) else ""


def is_artefact_name(name: str) -> bool:
    """True if a file is called as artefacts are, wherever it comes from."""
    return _ARTEFACT.fullmatch(name) is not None


def read_stamps(folder: Path) -> list[Stamp]:
    """The stamps in a version's folder; none where nothing was built, or only a demo model's own stamp is there.

    Raises:
        ConfigError: `build.json` cannot be read, is no such file, or is of a format that is not known here.
    """
    path = folder / STAMP_FILE
    shown = shown_file(path)
    content = _content(path, shown)
    if content is None:
        return []
    try:
        document = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        _refuse(shown, "is no JSON, or cut short")
    if not isinstance(document, dict):
        _refuse(shown, "is not what a builder writes")
    if "recipe" in document and "builds" not in document:
        return []
    if document.get("format") != FORMAT:
        found = document.get("format")
        raise refuse(
            shown, None, f"is of format {found!r:.40}, known here is {FORMAT}", f"update Headrace, or {_REBUILD}"
        )
    builds = document.get("builds")
    if not isinstance(builds, list):
        _refuse(shown, "has no list of builds")
    return [Stamp.from_json(build, f"{shown} (build {number})") for number, build in enumerate(builds, 1)]


def write_stamp(folder: Path, stamp: Stamp) -> None:
    """Add a stamp to a version's folder, in place of the one for the same machine; whole or not at all.

    A `build.json` that cannot be read is replaced. Nothing is written where nothing changes, so that no watcher wakes.

    Raises:
        ConfigError: the stamp is not sound, or the folder cannot be written.
    """
    try:
        with locked_folder(folder):
            put_stamp(folder, stamp)
    except OSError as error:
        cure = "check the folder's permissions and the room on its disk"
        raise refuse(shown_file(folder / STAMP_FILE), None, f"cannot be written: {error.strerror}", cure) from error


def put_stamp(folder: Path, stamp: Stamp) -> None:
    """`write_stamp` for who holds the folder's lock.

    Raises:
        ConfigError: the stamp is not sound.
        OSError: the folder cannot be written.
    """
    Stamp.from_json(stamp.to_json())
    path = folder / STAMP_FILE
    try:
        stamps = read_stamps(folder)
    except ConfigError:
        stamps = []
    _keep_recipe(path)
    kept = [old for old in stamps if old.machine != stamp.machine]
    builds = [one.to_json() for one in (*kept, stamp)]
    content = (json.dumps({"format": FORMAT, "builds": builds}, indent=2, allow_nan=False) + "\n").encode()
    if len(content) > MAX_STAMP_BYTES:
        cure = "remove the file: it is written anew for this machine alone"
        raise refuse(shown_file(path), None, f"would be larger than {MAX_STAMP_BYTES} bytes", cure)
    if path.is_symlink() or not path.is_file() or path.read_bytes() != content:
        write_durably(path, content)


def choose(
    stamps: Sequence[Stamp],
    folder: Path,
    onnx_sha256: str,
    config: ModelConfig | str,
    machine: Machine,
    check: bool = True,
) -> Choice:
    """The artefact to serve on a machine, or why there is none.

    Args:
        stamps: of the folder.
        folder: of the version.
        onnx_sha256: of the model now.
        config: the configuration now, complete; or its digest, where a precision written since the build is not to count.
        machine: this one.
        check: read the whole artefact and compare its digest, not its size alone.
    """
    if not stamps:
        return Choice(None, None, "no engine is built")
    stamp = next((stamp for stamp in stamps if stamp.machine == machine), None)
    if stamp is None:
        others = ", ".join(str(stamp.machine) for stamp in stamps)
        return Choice(None, None, f"built for {others}; this is {machine}")
    if stamp.onnx_sha256 != onnx_sha256:
        return Choice(None, None, "built from another model.onnx")
    fits = stamp.config_digest == config if isinstance(config, str) else stamp_fits(stamp, config)
    if not fits:
        return Choice(None, None, f"built for another configuration (precision {stamp.asked})")
    path = folder / stamp.artefact
    wrong = artefact_problem(path, stamp.size_bytes, stamp.artefact_sha256 if check else "")
    return Choice(None, None, wrong) if wrong else Choice(stamp, path, "")


def stamp_fits(stamp: Stamp, config: ModelConfig) -> bool:
    """True if a stamp's artefact was built for a configuration; see `fits_config`."""
    return fits_config(stamp.config_digest, stamp.asked, config)


def choose_in(
    folder: Path, onnx_sha256: str, config: ModelConfig | str, machine: Machine, check: bool = True
) -> Choice:
    """`choose` from the stamps in a folder, also while a builder publishes there; a `build.json` that is wrong is a reason."""
    choice = Choice(None, None, "")
    for _ in range(_LOOKS):
        try:
            stamps = read_stamps(folder)
        except ConfigError as error:
            return Choice(None, None, f"{error.findings[0].path} {error.findings[0].message}")
        choice = choose(stamps, folder, onnx_sha256, config, machine, check)
        if not choice.reason.endswith(_MISSING):
            break
    return choice


def artefact_problem(path: Path, size_bytes: int, sha256: str) -> str:
    """What is wrong with an artefact's file, "" if it is as its stamp says.

    Args:
        path: the file; links are not followed.
        size_bytes: that it should have.
        sha256: its `onnx_digest`, "" to believe the size.
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


def _keep_recipe(path: Path) -> None:
    """Put a demo model's own stamp, which once had this name, where it is now: it tells what its model was made from."""
    with suppress(ConfigError, ValueError, RecursionError, FileExistsError):
        content = _content(path, path.name)
        document = None if content is None else json.loads(content)
        if isinstance(document, dict) and "recipe" in document and "builds" not in document:
            os.link(path, path.with_name(RECIPE_FILE), follow_symlinks=False)


def _content(path: Path, shown: str) -> bytes | None:
    """What is in the file, None if there is none; reads no more than a stamp may have, and waits for no pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                _refuse(shown, "is no file")
            content = stream.read(MAX_STAMP_BYTES + 1)
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        _refuse(shown, "is a folder")
    except OSError as error:
        if path.is_symlink():
            _refuse(shown, "is a link, which is not followed")
        raise refuse(shown, None, f"cannot be read: {error.strerror}", "check the file's permissions") from None
    if len(content) > MAX_STAMP_BYTES:
        _refuse(shown, f"is larger than {MAX_STAMP_BYTES} bytes")
    return content


def _finite(values: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if values is None:
        return None
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}


def _told(problem: Mapping[str, Any]) -> str:
    place = ".".join(map(str, _plain(problem["loc"])))
    return f"{place or 'it'}: {problem['msg']}"


def _plain(location: Iterable[str | int]) -> list[str]:
    """Without what pydantic adds for the members of a union."""
    return [str(part)[:60] for part in location if part not in ("str", "bool", "int", "float")]


def _refuse(where: str, message: str) -> NoReturn:
    raise refuse(where, None, message, _REBUILD)


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


@cache
def _adapter() -> TypeAdapter[Stamp]:
    return TypeAdapter(Stamp)
