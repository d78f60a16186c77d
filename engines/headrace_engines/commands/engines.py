"""`headrace engines ls | gc | verify`: lists, removes and checks stored and published engines.

Stored and published engines are compared with the model and the configuration that they were built from.
"""

from __future__ import annotations

import argparse
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.config import manifest
from headrace.config.machine import Machine, onnxruntime_machine
from headrace.core.errors import ConfigError
from headrace_reports.command_line import fit_title, number_parser, printable
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace_engines.commands import add_cache
from headrace_engines.errors import BuildError
from headrace_engines.project import Project, open_project
from headrace_engines.report import Heading, finite, narrow_table, print_text, size
from headrace_engines.store import Store, StoreEntry, disk_error

# State of a published artefact: served on this machine; for another machine; not served because the model or its configuration
# has changed; not served because the file differs from the built one.
USED, FOREIGN, STALE, DAMAGED = "used", "foreign", "stale", "damaged"


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """A key of the store with its entry and state.

    Attributes:
        key: key in the store.
        entry: its entry; None if it cannot be read.
        problem: the fault; "" without any.
        published: "model/version" of each version that publishes it.
    """

    key: str
    entry: StoreEntry | None
    problem: str
    published: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PublishedEngine:
    """One artefact in a version's folder, or a fault of that folder.

    Attributes:
        model: name of the model.
        version: number of the version.
        folder: folder of the version.
        stamp: stamp of the artefact; None if none can be read.
        state: USED, FOREIGN, STALE or DAMAGED.
        problem: reason why it is stale or damaged, or the machine that it is for; "" if it is used.
    """

    model: str
    version: int
    folder: Path
    stamp: manifest.Stamp | None
    state: str
    problem: str


def list_stored(store: Store, published: Sequence[PublishedEngine], check: bool = False) -> list[StoreRecord]:
    """Return every key of the store with its entry and state.

    Args:
        store: the store.
        published: engines that the repositories publish.
        check: read every artefact and compare its digest.
    """
    publishers: dict[str, list[str]] = {}
    for engine in published:
        if engine.stamp is not None:
            publishers.setdefault(engine.stamp.key, []).append(f"{engine.model}/{engine.version}")
    records: list[StoreRecord] = []
    for key in store.keys():  # noqa: SIM118  (returns a list, not a mapping's keys)
        used_by = tuple(publishers.get(key, ()))
        try:
            entry = store.read(key)
        except BuildError as error:
            records.append(StoreRecord(key, None, str(error), used_by))
            continue
        problem = manifest.artefact_problem(entry.path, entry.size_bytes, entry.sha256 if check else "")
        records.append(StoreRecord(key, entry, problem, used_by))
    return records


def list_published(repositories: Sequence[Path], check: bool = False) -> list[PublishedEngine]:
    """Return every artefact that repositories publish, by model and version.

    Args:
        repositories: folders of models.
        check: read every artefact and compare its digest.

    Raises:
        BuildError: a repository does not exist.
    """
    machines = _Machines()
    published: list[PublishedEngine] = []
    for repository in repositories:
        for model, version in _versions(repository):
            published += _list_version(repository, model, version, machines, check)
    return published


class _Machines:
    """Machine descriptions of this host. TensorRT's takes seconds and is read only if an artefact is built for it."""

    def __init__(self) -> None:
        self._by_target: dict[str, Machine | None] = {"onnxruntime": onnxruntime_machine()}

    def runs(self, stamp: manifest.Stamp) -> bool:
        machine = stamp.machine
        if machine.target not in self._by_target:
            self._by_target[machine.target] = _tensorrt_machine() if machine.target == "tensorrt" else None
        here = self._by_target[machine.target]
        return here is not None and manifest.runs_on(stamp, here)


def _tensorrt_machine() -> Machine | None:
    from headrace_engines.targets import choose_target

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
            path.name == manifest.STAMP_FILE or manifest.is_artefact_name(path.name) for path in folder.iterdir()
        )
    except OSError:
        return False


def _list_version(
    repository: Path, model: str, version: int, machines: _Machines, check: bool
) -> Iterator[PublishedEngine]:
    folder = repository / model / str(version)
    try:
        stamps = manifest.read_stamps(folder)
    except ConfigError as error:
        yield PublishedEngine(
            model, version, folder, None, DAMAGED, f"{manifest.STAMP_FILE} {error.findings[0].message}"
        )
        return
    artefacts = {path.name for path in folder.iterdir() if manifest.is_artefact_name(path.name)}
    for name in sorted(artefacts - {stamp.artefact for stamp in stamps}):
        yield PublishedEngine(model, version, folder, None, STALE, f"no stamp names {name}")
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
        problem = manifest.artefact_problem(
            folder / stamp.artefact, stamp.size_bytes, stamp.artefact_sha256 if check else ""
        )
        stale = wrong or (_stale(stamp, project, digest) if project else "")
        state = USED if machines.runs(stamp) else FOREIGN
        if problem or stale:
            state = DAMAGED if problem else STALE
        elif state == FOREIGN:
            problem = f"for {stamp.machine}"
        yield PublishedEngine(model, version, folder, stamp, state, problem or stale)


def _stale(stamp: manifest.Stamp, project: Project, digest: str) -> str:
    if stamp.onnx_sha256 != digest:
        return f"built from another {project.source.name}"
    if not manifest.stamp_fits(stamp, project.config):
        return f"built for another configuration (precision {stamp.requested})"
    return ""


_DEFAULT_REPOSITORY = Path("model_repository")
_DAY_S = 86_400
_STORED = (
    Heading("key"),
    Heading("model", wraps=True),
    Heading("engine"),
    Heading("for", rank=3),
    Heading("size", number=True, rank=1),
    Heading("used", number=True, rank=2),
    Heading("published", wraps=True),
)
_PUBLISHED = (
    Heading("model"),
    Heading("engine"),
    Heading("for", rank=1),
    Heading("size", number=True, rank=3),
    Heading("accuracy", number=True, wraps=True, rank=2),
    Heading("age", number=True, rank=4),
    Heading("state", wraps=True),
)
_STYLES = {USED: "green", FOREIGN: "dim", STALE: "yellow", DAMAGED: "red"}


def add_arguments(parser: argparse.ArgumentParser, action: str) -> None:
    """Add the options of one of the commands.

    Args:
        parser: parser of that command.
        action: "ls", "gc" or "verify".
    """
    add = parser.add_argument
    text = "model repository; may be repeated (default: model_repository, if it exists)"
    add("--model-repository", type=Path, action="append", metavar="DIR", help=text)
    add_cache(parser)
    add("--json", action="store_true", help="print JSON")
    if action == "gc":
        add("--keep-days", type=_days, default=30.0, metavar="N", help="keep engines used in the last N days (30)")
        add("--all", action="store_true", help="remove all stored engines; published ones stay published")
        add("--dry-run", action="store_true", help="only print what would be removed")
    parser.set_defaults(store_action=action)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run one of the commands; return 1 if `verify` finds a fault, else 0.

    Raises:
        BuildError: a repository does not exist, or the store cannot be written.
    """
    folders: list[Path] | None = options.model_repository
    repositories = folders or [path for path in (_DEFAULT_REPOSITORY,) if path.is_dir()]
    store = Store(options.cache)
    if options.store_action == "gc":
        return _gc(store, repositories, options, console)
    check = options.store_action == "verify"
    published = list_published(repositories, check)
    stored = list_stored(store, published, check)
    if check:
        return _verify(stored, published, options.json, console)
    _ls(store, stored, published, options.json, console)
    return 0


_days = number_parser(float, lambda days: 0 <= days < 1e6, "is not a number of days")


# ls


def _ls(
    store: Store, stored: Sequence[StoreRecord], published: Sequence[PublishedEngine], as_json: bool, console: Console
) -> None:
    if as_json:
        document = {"path": str(store.root), "entries": [_stored_json(record) for record in stored]}
        console.print_json(data={"store": document, "published": [_published_json(engine) for engine in published]})
        return
    if stored:
        console.print(_store_table(store, stored, console.width))
    else:
        print_text(console, f"The store {store.root} is empty.")
    if published:
        console.print()
        console.print(_published_table(published, console.width))
    else:
        print_text(console, "No engine is published: `headrace build MODEL` builds one.")
    _print_problems(stored, published, console)


def _store_table(store: Store, stored: Sequence[StoreRecord], width: int) -> Table:
    rows: list[list[Text | str]] = []
    for record in stored:
        key = record.key[:12]
        publishers = Text("damaged", "red") if record.problem else Text(", ".join(record.published) or "none")
        if record.entry is None:
            rows.append([key, *[""] * 5, publishers])
            continue
        facts = record.entry.facts
        names = [printable(str(facts.get(name) or "")) for name in ("model", "precision")]
        figures = (size(record.entry.size_bytes), _age(record.entry.used_s))
        rows.append([key, *names, _machine(facts.get("machine")), *figures, publishers])
    table = narrow_table(printable(f"Store {store.root}"), _STORED, rows, width)
    total_bytes = sum(record.entry.size_bytes for record in stored if record.entry)
    table.caption = Text(f"{len(stored)} in all, {size(total_bytes)}")
    return fit_title(table, width)


def _published_table(published: Sequence[PublishedEngine], width: int) -> Table:
    rows: list[list[Text | str]] = []
    for engine in published:
        state, stamp = Text(engine.state, _STYLES[engine.state]), engine.stamp
        name = printable(f"{engine.model}/{engine.version}")
        if stamp is None:
            rows.append([name, *[""] * 5, state])
            continue
        if stamp.forced:
            state.append(" forced", "yellow")
        if stamp.overridden:
            state.append(" by option")
        cells = (printable(stamp.precision), _machine(asdict(stamp.machine)), size(stamp.size_bytes))
        age = _age(_changed_s(engine.folder / stamp.artefact))
        rows.append([name, *cells, _accuracy(stamp.accuracy), age, state])
    return narrow_table("Published", _PUBLISHED, rows, width)


def _print_problems(stored: Sequence[StoreRecord], published: Sequence[PublishedEngine], console: Console) -> None:
    lines = [(record.key[:12], "damaged", record.problem) for record in stored if record.problem]
    # The row of an engine for another machine names that machine.
    broken = [engine for engine in published if engine.problem and engine.state != FOREIGN]
    lines += [(f"{engine.model}/{engine.version}", engine.state, engine.problem) for engine in broken]
    for location, state, problem in lines:
        line = Text.assemble((printable(location), "bold"), " ", (state, _STYLES[state]), f": {printable(problem)}")
        console.print(line, soft_wrap=True)


def _machine(machine: Any) -> str:
    machine = machine if isinstance(machine, dict) else {}
    lines = (("device", "capability"), ("target", "version"))
    return "\n".join(printable(" ".join(str(machine.get(name, "")) for name in line)) for line in lines)


def _accuracy(accuracy: Any) -> str:
    """Return the most meaningful measure: accuracy, else top-1 agreement with FP32, else the cosine of the outputs."""
    accuracy = accuracy if hasattr(accuracy, "get") else {}
    for name, what in (("accuracy", "true"), ("top1_agreement", "top-1")):
        if isinstance(accuracy.get(name), float | int):
            return f"{what} {100 * accuracy[name]:.1f}%"
    return f"cosine {accuracy['cosine']:.5f}" if isinstance(accuracy.get("cosine"), float | int) else ""


def _changed_s(path: Path) -> float | None:
    try:
        return path.lstat().st_mtime
    except OSError:
        return None


def _age(moment_s: float | None) -> str:
    if moment_s is None:
        return ""
    age_s = max(time.time() - moment_s, 0.0)
    for unit, size_s in (("d", _DAY_S), ("h", 3600), ("min", 60)):
        if age_s >= size_s:
            return f"{age_s / size_s:.0f} {unit}"
    return "now"


def _stored_json(record: StoreRecord) -> dict[str, Any]:
    document = {"key": record.key, "problem": record.problem or None, "published": list(record.published)}
    if (entry := record.entry) is None:
        return document
    # rich prints JSON as Python does, with NaN, which JSON does not have.
    facts = finite(entry.facts)
    return document | {"path": str(entry.path), "size_bytes": entry.size_bytes, "used_s": entry.used_s, "facts": facts}


def _published_json(engine: PublishedEngine) -> dict[str, Any]:
    stamp = None if engine.stamp is None else engine.stamp.to_json()
    location = {"model": engine.model, "version": engine.version, "path": str(engine.folder)}
    return {**location, "state": engine.state, "problem": engine.problem or None, "stamp": stamp}


# gc


def _gc(store: Store, repositories: Sequence[Path], options: argparse.Namespace, console: Console) -> int:
    stored = list_stored(store, list_published(repositories))
    oldest_s = time.time() - options.keep_days * _DAY_S
    removed: list[dict[str, Any]] = []
    busy: list[str] = []
    for record in stored:
        unused = not record.published and record.entry is not None and record.entry.used_s <= oldest_s
        if not (options.all or unused or record.problem):
            continue
        freed_bytes = store.remove(record.key, options.dry_run)
        if freed_bytes is None:
            busy.append(record.key)
        else:
            model = "(damaged)" if record.entry is None else str(record.entry.facts.get("model", ""))
            removed.append({"key": record.key, "model": model, "freed_bytes": freed_bytes})
    if not options.dry_run:
        store.sweep()
    files = _old_files(store, oldest_s, options.all)
    freed_bytes = sum(entry["freed_bytes"] for entry in removed) + _remove_files(files, options.dry_run)
    if options.json:
        document = {"dry_run": options.dry_run, "freed_bytes": freed_bytes, "removed": removed, "busy": busy}
        console.print_json(data={**document, "files": [str(path) for path in files]})
        return 0
    word, would = ("would remove", "would be ") if options.dry_run else ("removed", "")
    lines = [f"{word} {entry['key'][:12]} {entry['model']}: {size(entry['freed_bytes'])}" for entry in removed]
    lines += [f"{word} {path.relative_to(store.root)}" for path in files]
    lines += [f"kept {key[:12]}: it is being built" for key in busy]
    retained = len(stored) - len(removed) - len(busy)
    if retained:
        lines.append(f"kept {retained}: published here, or used in the last {options.keep_days:g} days (--keep-days)")
    lines.append(f"{len(removed)} of {len(stored)} engines {would}removed, {size(freed_bytes)} {would}freed")
    print_text(console, "\n".join(lines))
    return 0


def _old_files(store: Store, oldest_s: float, everything: bool) -> list[Path]:
    """Return calibration tables and timing caches; builds write missing ones again."""
    files = []
    for folder in ("tables", "timing"):
        for path in sorted((store.root / folder).glob("*")):
            changed_s = _changed_s(path)
            if changed_s is not None and (everything or changed_s <= oldest_s) and path.is_file():
                files.append(path)
    return files


def _remove_files(files: Sequence[Path], dry_run: bool) -> int:
    freed_bytes = 0
    for path in files:
        try:
            freed_bytes += path.lstat().st_size
            if not dry_run:
                path.unlink(missing_ok=True)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise disk_error(error, path) from error
    return freed_bytes


# verify


def _verify(
    stored: Sequence[StoreRecord], published: Sequence[PublishedEngine], as_json: bool, console: Console
) -> int:
    wrong = [
        {"where": f"store {record.key[:12]}", "problem": record.problem, "cure": _store_cure(record)}
        for record in stored
        if record.problem
    ]
    wrong += [
        {"where": f"{engine.model}/{engine.version}", "problem": engine.problem, "cure": _cure(engine)}
        for engine in published
        if engine.state in (STALE, DAMAGED)
    ]
    checked = len(stored) + len(published)
    if as_json:
        console.print_json(data={"checked": checked, "wrong": wrong})
        return 1 if wrong else 0
    for fault in wrong:
        line = Text.assemble((fault["where"], "bold"), ": ", (fault["problem"], "red"), f" ({fault['cure']})")
        console.print(line, soft_wrap=True)
    sound = checked - len(wrong)
    console.print(
        f"{checked} checked, {sound} as built, {len(wrong)} wrong", style="bold red" if wrong else "bold green"
    )
    return 1 if wrong else 0


def _store_cure(record: StoreRecord) -> str:
    if record.entry is None:
        return "`headrace engines gc` removes it"
    model, precision = record.entry.facts.get("model", "MODEL"), record.entry.facts.get("precision")
    return f"`headrace build {model} --precision {precision}` builds it again, `headrace engines gc --all` empties the store"


def _cure(engine: PublishedEngine) -> str:
    command = f"headrace build {engine.model} --version {engine.version}"
    if engine.stamp is None:
        return f"`{command}`"
    if engine.stamp.overridden:
        command += f" --precision {engine.stamp.requested}"
    return f"`{command}` on {engine.stamp.machine.device} {engine.stamp.machine.capability}"
