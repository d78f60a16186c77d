"""`headrace build`: engines for this machine, compared with FP32, published beside the model."""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from engines.arguments import add_cache, add_places, add_state, add_version
from engines.build import Built, find_fp32, make, make_best, stamp_of
from engines.errors import BuildError, CallError
from engines.progress import Report, printed
from engines.project import Project, all_projects, open_project
from engines.publishing import publish, publishing_folder
from engines.serving import Forecast, cpu_change, forecast, gpu_runtime, now_rows_per_s, now_words
from engines.spec import BuildSpec, spec_of
from engines.store import Store
from engines.targets.base import Target
from engines.targets.choice import choose_target
from server.config.serving_plan import cpu_pin, engine_folder
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
        now: what served the version before the build, in words; "" if it was this very engine.
        now_rows_per_s: of what served; 0: not known.
        not_served: why a server does not take the published engine, and what to change; "" if it does.
        advice: what would make the engine another one, e.g. one for the GPU.
        place: the folder that it is published in, if that is not the version's own.
    """

    name: str
    built: Built | None
    published: bool
    forced: bool
    error: str
    seconds: float
    repository: str = ""
    fp32_rows_per_s: float = 0.0
    now: str = ""
    now_rows_per_s: float = 0.0
    not_served: str = ""
    advice: str = ""
    place: Path | None = None


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
    targets = _Targets(options.target)
    with ThreadPoolExecutor(1) as pool:
        # Reading a large model takes as long as waking a GPU; neither waits for the other.
        digests = [pool.submit(project.digest) for project in projects if isinstance(project, Project)]
        targets.default()
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
            outcome = build_one(project, options, targets, store, printed(report) if options.progress else report)
            outcomes.append(outcome)
            display.finish(outcome.name, _ending(outcome))
    show_outcomes(console, open_console(stderr=True), outcomes)
    return 1 if any(outcome.error for outcome in outcomes) else 0


def _ending(outcome: Outcome) -> str:
    """The last phase of a model's progress bar."""
    if outcome.error:
        return "failed"
    return "stored" if outcome.built is not None and outcome.built.cached else "built"


class _Targets:
    """The target of each model.

    Args:
        name: of the command line: "auto" is TensorRT where it and a GPU are, but not for models that are kept on the CPU.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._default: Target | None = None
        self.gpu = gpu_runtime()

    def default(self) -> Target:
        """The target of models that leave the choice to the machine.

        Raises:
            BuildError: TensorRT is asked for and not to be had.
        """
        if self._default is None:
            self._default = choose_target(self._name)
        return self._default

    def of(self, project: Project) -> tuple[Target, str]:
        """The target of a model, and what would make it another one."""
        target, kept = self.default(), cpu_pin(project.config)
        if self._name != "auto" or target.name == "onnxruntime" or not kept:
            return target, ""
        return choose_target("onnxruntime"), f"built for the CPU ({kept}); for the GPU {cpu_change(project)}"


def build_one(
    project: Project, options: argparse.Namespace, targets: _Targets, store: Store, report: Report
) -> Outcome:
    """Build and publish one model; what goes wrong is told in the outcome."""
    started_s = time.monotonic()
    built = None
    try:
        spec = spec_of(project.config, options.precision or "")
        target, advice = targets.of(project)
        outlook = forecast(project, target, targets.gpu, _state_place(project, options.state_dir))
        if outlook.refusal:
            raise BuildError(f"its engine would not be served: {outlook.refusal}")
        built = _make(project, spec, target, store, report, options.rebuild)
        if built.refusal and not options.force:
            error = "; ".join(built.refusal) + "; --force publishes it with a mark"
            return Outcome(project.name, built, False, False, error, time.monotonic() - started_s)
        forced = bool(built.refusal)
        place = _publish(project, options, built, store, spec.precision, forced)
        fp32 = _fp32_rows_per_s(project, built, target, store)
        outcome = Outcome(project.name, built, True, forced, "", time.monotonic() - started_s)
        outcome = replace(outcome, repository=str(project.folder.path.parent), fp32_rows_per_s=fp32, place=place)
        outcome = replace(outcome, not_served=outlook.not_served, advice=advice)
        return _compared(outcome, outlook, built)
    except HeadraceError as error:
        told = str(error)
    except MemoryError:
        told = "there is not enough memory: close other programs, or use fewer calibration samples"
    except OSError as error:
        told = _told(error)
    return Outcome(project.name, built, False, False, told, time.monotonic() - started_s)


def _compared(outcome: Outcome, outlook: Forecast, built: Built) -> Outcome:
    """The outcome with what serves now and how fast that is."""
    if outlook.now is None:
        return replace(outcome, now="nothing")
    if outlook.now.stamp is not None and outlook.now.stamp.key == built.key:
        return outcome
    return replace(outcome, now=now_words(outlook.now), now_rows_per_s=now_rows_per_s(outlook.now, built))


def _publish(
    project: Project, options: argparse.Namespace, built: Built, store: Store, asked: str, forced: bool
) -> Path | None:
    """Put the engine beside the model, or into the state folder where that cannot be written.

    Returns:
        The folder, if it is not the version's own.

    Raises:
        BuildError: neither can be written, or the engine has gone from the store.
    """
    overridden = bool(options.precision) and options.precision != spec_of(project.config).precision
    entry = store.find(built.key)
    if entry is None:
        raise BuildError("the engine has gone from the store meanwhile: build it again")
    stamp = stamp_of(built, entry, project, asked, overridden, forced)
    place = publishing_folder(project, options.state_dir)
    publish(entry.path, place, stamp)
    return None if place == project.version_folder else place


def _state_place(project: Project, state: Path) -> Path:
    """Where a server looks for engines of a version besides its own folder."""
    return engine_folder(state.expanduser(), project.folder.path, project.version)


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
