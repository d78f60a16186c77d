"""What there is: the entries of the store, and what repositories publish, each held against what it was built from."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.errors import BuildError
from engines.project import Project, open_project
from engines.store import Entry, Store
from server.config.machine import Machine, onnxruntime_machine
from server.config.stamps import STAMP_FILE, Stamp, artefact_problem, is_artefact_name, read_stamps, stamp_fits
from server.core.errors import ConfigError

# How an artefact that is published stands: it is served on this machine; on another one; nowhere, since the model or its
# configuration is another now; nowhere, since the file is not what was built.
USED, FOREIGN, STALE, DAMAGED = "used", "foreign", "stale", "damaged"


@dataclass(frozen=True, slots=True)
class Stored:
    """A place in the store.

    Attributes:
        key: of the store.
        entry: what is noted there, None if that cannot be read.
        problem: what is wrong with it, "" if nothing is.
        published: "model/version" that publish it.
    """

    key: str
    entry: Entry | None
    problem: str
    published: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Published:
    """One artefact in a version's folder, or what is wrong with that folder.

    Attributes:
        model: its name.
        version: its number.
        folder: of the version.
        stamp: of the artefact, None if there is none that can be read.
        state: USED, FOREIGN, STALE or DAMAGED.
        problem: why it is stale or damaged, or for what it is; "" for what is used.
    """

    model: str
    version: int
    folder: Path
    stamp: Stamp | None
    state: str
    problem: str


def survey_store(store: Store, published: Sequence[Published], check: bool = False) -> list[Stored]:
    """Every place in the store.

    Args:
        store: the store.
        published: by the repositories.
        check: read every artefact and compare its digest.
    """
    places: dict[str, list[str]] = {}
    for one in published:
        if one.stamp is not None:
            places.setdefault(one.stamp.key, []).append(f"{one.model}/{one.version}")
    found: list[Stored] = []
    for key in store.keys():  # noqa: SIM118  (a list that it makes, not a mapping's)
        used_by = tuple(places.get(key, ()))
        try:
            entry = store.read(key)
        except BuildError as error:
            found.append(Stored(key, None, str(error), used_by))
            continue
        problem = artefact_problem(entry.path, entry.size_bytes, entry.sha256 if check else "")
        found.append(Stored(key, entry, problem, used_by))
    return found


def survey_repositories(repositories: Sequence[Path], check: bool = False) -> list[Published]:
    """Every artefact that repositories publish, by model and version.

    Args:
        repositories: folders of models.
        check: read every artefact and compare its digest.

    Raises:
        BuildError: a repository is not there.
    """
    machines = _Machines()
    found: list[Published] = []
    for repository in repositories:
        for model, version in _versions(repository):
            found += _survey_version(repository, model, version, machines, check)
    return found


def orphans(folder: Path, stamps: Sequence[Stamp]) -> list[Path]:
    """Artefacts in a version's folder that none of its stamps names."""
    named = {stamp.artefact for stamp in stamps}
    return sorted(path for path in folder.iterdir() if is_artefact_name(path.name) and path.name not in named)


class _Machines:
    """What artefacts can be for here; TensorRT, which takes seconds to ask, is asked when something is for it."""

    def __init__(self) -> None:
        self._known: dict[str, Machine | None] = {"onnxruntime": onnxruntime_machine()}

    def here(self, machine: Machine) -> bool:
        if machine.target not in self._known:
            self._known[machine.target] = _tensorrt_machine() if machine.target == "tensorrt" else None
        return self._known[machine.target] == machine


def _tensorrt_machine() -> Machine | None:
    from engines.targets.choice import choose_target

    try:
        return choose_target("tensorrt").describe()
    except BuildError:
        return None


def _versions(repository: Path) -> Iterator[tuple[str, int]]:
    try:
        models = sorted(path for path in repository.iterdir() if not path.name.startswith(".") and path.is_dir())
    except OSError as error:
        cure = "name another with --model-repository"
        raise BuildError(f"the model repository {repository} cannot be read ({error.strerror}): {cure}") from None
    for model in models:
        try:
            numbers = sorted(int(p.name) for p in model.iterdir() if p.name.isdecimal() and p.name.isascii())
        except OSError:
            continue
        for number in numbers:
            if _has_engines(model / str(number)):
                yield model.name, number


def _has_engines(folder: Path) -> bool:
    try:
        return stat.S_ISDIR(folder.stat().st_mode) and any(
            path.name == STAMP_FILE or is_artefact_name(path.name) for path in folder.iterdir()
        )
    except OSError:
        return False


def _survey_version(
    repository: Path, model: str, version: int, machines: _Machines, check: bool
) -> Iterator[Published]:
    folder = repository / model / str(version)
    try:
        stamps = read_stamps(folder)
    except ConfigError as error:
        yield Published(model, version, folder, None, DAMAGED, f"{STAMP_FILE} {error.findings[0].message}")
        return
    for path in orphans(folder, stamps):
        yield Published(model, version, folder, None, STALE, f"no stamp names {path.name}")
    if not stamps:
        return
    project: Project | None = None
    wrong = digest = ""
    try:
        project = open_project(model, repository, version)
        digest = project.digest()
    except BuildError as error:
        wrong = str(error)
    for stamp in stamps:
        problem = artefact_problem(folder / stamp.artefact, stamp.size_bytes, stamp.artefact_sha256 if check else "")
        stale = wrong or (_stale(stamp, project, digest) if project else "")
        state = USED if machines.here(stamp.machine) else FOREIGN
        if problem or stale:
            state = DAMAGED if problem else STALE
        elif state == FOREIGN:
            problem = f"for {stamp.machine}"
        yield Published(model, version, folder, stamp, state, problem or stale)


def _stale(stamp: Stamp, project: Project, digest: str) -> str:
    if stamp.onnx_sha256 != digest:
        return f"built from another {project.source.name}"
    if not stamp_fits(stamp, project.config):
        return f"built for another configuration (precision {stamp.asked})"
    return ""
