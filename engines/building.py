"""`headrace build`: engines for this machine, compared with FP32, published beside the model."""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from rich.console import Console

from engines.arguments import add_cache, add_places, add_state, add_version
from engines.build import Built, find_fp32, make, make_best, stamp_of
from engines.errors import BuildError, CallError
from engines.progress import Report, printed
from engines.project import Project, all_projects, open_project
from engines.publishing import publishing_folder
from engines.spec import BuildSpec, spec_of
from engines.store import Store
from engines.targets.base import Target
from engines.targets.choice import choose_target
from server.core.console import open_console
from server.core.errors import HeadraceError
from server.core.optimization_config import PRECISIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `build`."""
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a model's name in the repository, or its folder")
    parser.add_argument("--all", action="store_true", help="every model of the repository")
    add_version(parser)
    parser.add_argument("--precision", choices=PRECISIONS, help="instead of the configuration's")
    parser.add_argument(
        "--force", action="store_true", help="publish with a mark what misses the accuracy it should have"
    )
    parser.add_argument("--rebuild", action="store_true", help="build anew what is in the store")
    # For the server, which starts builders: lines "progress SHARE PHASE" on standard output.
    parser.add_argument("--progress", action="store_true", help=argparse.SUPPRESS)
    add_places(parser)
    add_cache(parser)
    add_state(parser)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one model.

    Attributes:
        name: the model's.
        built: the artefact, None if there is none.
        published: it lies beside the model now.
        forced: although it misses its bar.
        error: why there is none, or why it was not published.
        seconds: that this call spent on it.
        repository: folder in which the model lies.
        fp32_rows_per_s: of FP32 on the same target; 0: not known.
    """

    name: str
    built: Built | None
    published: bool
    forced: bool
    error: str
    seconds: float
    repository: str = ""
    fp32_rows_per_s: float = 0.0


def run(options: argparse.Namespace, console: Console) -> int:
    """Build what was asked for; 1 if something could not be built or was refused.

    Raises:
        BuildError: nothing could be begun: no such model, no such target.
    """
    if options.models and options.all:
        raise CallError("models are named and --all is said: leave one of them out")
    if not options.models and not options.all:
        raise CallError("name the models to build, or say --all")
    if options.all and options.version is not None:
        raise CallError("--version is of one model: name it in place of --all")
    projects = _projects(options)
    with ThreadPoolExecutor(1) as pool:
        # Reading a large model takes as long as waking a GPU; neither waits for the other.
        digests = [pool.submit(project.digest) for project in projects if isinstance(project, Project)]
        target = choose_target(options.target)
        wait(digests)
    store = Store(options.cache)

    from engines.build_display import BuildDisplay, show_outcomes

    outcomes = []
    with BuildDisplay(console, [p.name for p in projects if isinstance(p, Project)]) as display:
        for project in projects:
            if isinstance(project, BuildError):
                outcomes.append(Outcome("", None, False, False, str(project), 0.0))
                continue
            report = display.report(project.name)
            outcome = build_one(project, options, target, store, printed(report) if options.progress else report)
            outcomes.append(outcome)
            display.finish(outcome)
    show_outcomes(console, open_console(stderr=True), outcomes, target.describe())
    return 1 if any(outcome.error for outcome in outcomes) else 0


def build_one(project: Project, options: argparse.Namespace, target: Target, store: Store, report: Report) -> Outcome:
    """Build and publish one model; what goes wrong is told in the outcome."""
    started_s = time.monotonic()
    built = None
    try:
        spec = spec_of(project.config, options.precision or "")
        built = _make(project, spec, target, store, report, options.rebuild)
        if built.refusal and not options.force:
            error = "; ".join(built.refusal) + "; --force publishes it with a mark"
            return Outcome(project.name, built, False, False, error, time.monotonic() - started_s)
        forced = bool(built.refusal)
        overridden = bool(options.precision) and options.precision != spec_of(project.config).precision
        entry = store.find(built.key)
        if entry is None:
            raise BuildError("the engine has gone from the store meanwhile: build it again")
        stamp = stamp_of(built, entry, project, spec.precision, overridden, forced)
        store.publish(entry, publishing_folder(project, options.state_dir), stamp)
        seconds, repository = time.monotonic() - started_s, str(project.folder.path.parent)
        fp32 = _fp32_rows_per_s(project, built, target, store)
        return Outcome(project.name, built, True, forced, "", seconds, repository, fp32)
    except HeadraceError as error:
        told = str(error)
    except MemoryError:
        told = "there is not enough memory: close other programs, or use fewer calibration samples"
    except OSError as error:
        told = _told(error)
    return Outcome(project.name, built, False, False, told, time.monotonic() - started_s)


def _fp32_rows_per_s(project: Project, built: Built, target: Target, store: Store) -> float:
    """Rows a second of FP32 on the target: of its FP32 engine, or of the model's own file on ONNX Runtime; 0: not known."""
    fp32 = find_fp32(project, built.spec, target, store)
    if fp32 is not None:
        return fp32.rows_per_s
    own = built.baseline if target.name == "onnxruntime" else None
    return 0.0 if own is None else own.rows_per_s


def _told(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}: make room, or check the permissions"


def _make(project: Project, spec: BuildSpec, target: Target, store: Store, report: Report, rebuild: bool) -> Built:
    if spec.precision == "best":
        return make_best(project, spec, target, store, report, rebuild=rebuild)
    return make(project, spec, target, store, report, rebuild=rebuild)


def _projects(options: argparse.Namespace) -> list[Project | BuildError]:
    if options.all:
        return all_projects(options.model_repository)
    return [open_project(name, options.model_repository, options.version) for name in options.models]
