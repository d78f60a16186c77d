"""`headrace simulate`: replays a load against batching and scheduling policies in virtual time, without models or devices."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from headrace_reports.command_line import open_console
from headrace_reports.svg_plot import curve_picture
from rich.console import Console
from rich.text import Text

from headrace.config.config_base import Problems
from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import find_model_folder, read_model_folder
from headrace.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US, monotonic_ns
from headrace.core.errors import ConfigError, HeadraceError, NotFound
from headrace.core.quota import Quota
from headrace.inference.pipelines.graph import PipelineGraph, build_graph
from headrace.inference.pipelines.yaml_steps import build_yaml_graph
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy, RateLimits, Sharing
from headrace.inference.simulation.options import KINDS, SettingParser, add_setting
from headrace.inference.simulation.pipelines import SimulatedPipeline, called_by, plain_graph
from headrace.inference.simulation.replay import LatencyProfile, SimulatedModel, parse_profile, profile_of, replay
from headrace.inference.simulation.report import panels, print_reports, report
from headrace.inference.simulation.traces import ArrivalPattern, Trace, Workload, make_trace, read_trace
from headrace.models.version_policies import handle_policy
from headrace.server.embedding import Server

_PROFILE = "1000+100n"
_Policies = dict[str, tuple[HandlePolicy, float | None]]


@dataclass(frozen=True, slots=True)
class _SimulatedNames:
    """Models and pipelines to simulate."""

    policies: _Policies  # policy and latency objective of each model
    pipelines: dict[str, tuple[SimulatedPipeline, float | None]]  # pipelines with their latency objectives, by name
    targets: tuple[str, ...]  # names of those that get the requests
    folders: dict[str, Path]  # of the models that have one

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the models, then of the pipelines."""
        return (*self.policies, *self.pipelines)


@dataclass(frozen=True, slots=True)
class _SimulatedSetting:
    """One configuration to simulate: the first one, or one of `--compare`."""

    label: str  # the options in which it differs
    models: tuple[SimulatedModel, ...]  # by number
    pipelines: tuple[SimulatedPipeline, ...]  # they follow the models
    slos_ms: tuple[float | None, ...]  # latency objective by model and pipeline, None without one
    overhead_ns: int  # added to each request


def main(args: argparse.Namespace) -> int:
    """Run the command with the options of `options.add_arguments`; return the exit status."""
    console, errors = open_console(highlight=False), open_console(stderr=True, highlight=False)
    try:
        simulated = _read_models(args.folders, Path(args.model_repository))
        if not simulated.names:
            policies: _Policies = {
                f"model{number}": (HandlePolicy(BatchPolicy(max_rows=8)), None) for number in range(args.models)
            }
            simulated = _SimulatedNames(policies, {}, tuple(policies), {})
        measured = {} if "profile" in args else _measured_profiles(simulated, args.state_dir, errors)
        settings = _settings(args, simulated, measured)
        trace = _trace(args, simulated)
        warm_up_ns = round(args.warm_up * NS_PER_S)
        if warm_up_ns >= trace.duration_ns:
            raise ValueError(
                f"--warm-up {args.warm_up:g} leaves nothing to measure of {trace.duration_ns / NS_PER_S:g} seconds"
            )
        start_ns = monotonic_ns()
        replays = [(setting.label, replay(trace, setting.models, args.seed, setting.pipelines)) for setting in settings]
        reports = [
            (label, report(replayed, setting.slos_ms, warm_up_ns, setting.overhead_ns))
            for (label, replayed), setting in zip(replays, settings, strict=True)
        ]
        elapsed_ns = monotonic_ns() - start_ns
        if args.plot:
            plot_panels = panels(replays, [setting.slos_ms for setting in settings], settings[0].overhead_ns)
            title = f"{len(trace):,} requests to {len(simulated.targets)} models"
            args.plot.write_text(curve_picture(plot_panels, title), encoding="utf-8")
    except (ValueError, OSError, ConfigError, NotFound) as error:
        errors.print(Text(f"headrace simulate: {error}", style="red"))
        return 2
    if args.json:
        document = [{"setting": label, **each.as_json()} for label, each in reports]
        totals = {"requests": len(trace), "seconds": trace.duration_ns / NS_PER_S, "seed": args.seed}
        console.print_json(json.dumps({**totals, "settings": document}))
        return 0
    print_reports(reports, console)
    count = len(trace) * len(reports)
    console.print(
        f"{count:,} requests simulated in {elapsed_ns / NS_PER_S:.1f} s, {count * NS_PER_S / elapsed_ns:,.0f} a second"
    )
    return 0


def _read_models(folders: Sequence[str], repository: Path) -> _SimulatedNames:
    """Read the configured models and pipelines, and the models that pipelines call."""
    simulated = _SimulatedNames({}, {}, (), {})
    targets = [_read_model(find_model_folder(folder, repository), simulated) for folder in folders]
    return replace(simulated, targets=tuple(dict.fromkeys(targets)))


def _read_model(path: Path, simulated: _SimulatedNames) -> str:
    """Add the model or pipeline in a folder, and what it calls in the folders beside it; return its name."""
    config = read_model_folder(path, path.parent).config
    if config.name in simulated.names:
        return config.name
    policy = (handle_policy(config), config.slo.p99_ms)
    if config.pipeline is None and config.ensemble_scheduling is None:
        if policy[0].sequences is not None:
            raise ValueError(f"model '{config.name}' has sequence_batching: sequences are not simulated, leave it out")
        simulated.policies[config.name] = policy
        simulated.folders[config.name] = path
        return config.name
    graph = _graph(config)
    pipeline = SimulatedPipeline(plain_graph(graph), max(config.max_batch_size, 1), policy[0])
    simulated.pipelines[config.name] = pipeline, policy[1]
    builtin = {f"{config.name}.{step.name}" for step in graph.steps if step.builtin}
    for name in called_by(pipeline.graph):
        if name in builtin:
            simulated.policies[name] = (HandlePolicy(BatchPolicy(max_rows=pipeline.max_rows)), None)
        else:
            _read_model(find_model_folder(name, path.parent), simulated)
    return config.name


def _graph(config: ModelConfig) -> PipelineGraph:
    try:
        return build_graph(config) if config.pipeline is None else build_yaml_graph(config)
    except Problems as error:
        problem = error.problems[0]
        raise ValueError(f"{config.name}: {problem.message}: {problem.cure}") from None


def _trace(args: argparse.Namespace, simulated: _SimulatedNames) -> Trace:
    """Return the requests, whose models are indices in all names."""
    trace, names = _requests(args, simulated.targets), simulated.names
    if simulated.targets == names:
        return trace
    indices = np.array([names.index(name) for name in simulated.targets], dtype=trace.models.dtype)
    return replace(trace, models=indices[trace.models], names=names)


def _requests(args: argparse.Namespace, names: Sequence[str]) -> Trace:
    timeout_ns = round(args.timeout_ms * NS_PER_MS)
    if args.arrivals not in KINDS:
        if not args.arrivals.endswith(".csv"):
            raise ValueError(f"--arrivals {args.arrivals}: write {', '.join(KINDS)}, or the name of a .csv file")
        return read_trace(Path(args.arrivals), names, timeout_ns)
    bursts = (args.burst_factor, args.burst_seconds, args.calm_seconds)
    pattern = ArrivalPattern(args.arrivals, *bursts, args.period, args.swing)
    load = Workload(args.rate, args.seconds, pattern, args.rows, args.skew, timeout_ns, args.clients)
    trace = make_trace(load, names, np.random.default_rng(args.seed))
    if not len(trace):
        raise ValueError(f"the trace has no requests in {args.seconds:g} seconds at a rate of {args.rate:g}")
    return trace


def _measured_profiles(simulated: _SimulatedNames, state_dir: str, errors: Console) -> dict[str, LatencyProfile]:
    """Return the batch times that this machine measures, or has stored, when it loads a model; print where the times come from.

    Models that are not served here, and built-in steps, have none.
    """
    profiles = dict[str, LatencyProfile]()
    for name in simulated.policies:
        reason = "it is a built-in step"
        if folder := simulated.folders.get(name):
            try:
                with Server(folder, state_dir=state_dir) as server:
                    rows = server.model(name).profile()
                reason = "the server measures no such model"
            except HeadraceError as error:
                rows, reason = [], str(error)
            if rows:
                profiles[name] = profile_of({"profile": rows})
                first, last = rows[0], rows[-1]
                times = f"{first['median_us']:.0f} us for {first['rows']}, {last['median_us']:.0f} us for {last['rows']} rows"
                errors.print(Text(f"{name}: batch times as measured on this machine, {times}"), soft_wrap=True)
                continue
        if simulated.folders:
            text = f"{name}: batch times are not measured ({reason}): {_PROFILE} us is an invented one, name yours with"
            errors.print(Text(f"{text} --profile {name}=T", style="yellow"), soft_wrap=True)
    return profiles


def _settings(
    args: argparse.Namespace, simulated: _SimulatedNames, measured: Mapping[str, LatencyProfile]
) -> list[_SimulatedSetting]:
    parser = SettingParser(prog="--compare", add_help=False)
    add_setting(parser)
    settings = [_setting("as given", args, simulated, measured)]
    for text in args.compare:
        try:
            other = parser.parse_args([f"--{word}" for word in text.split()], copy.copy(args))
        except ValueError as error:
            raise ValueError(f'--compare "{text}": {error}') from None
        settings.append(_setting(text, other, simulated, measured))
    return settings


def _setting(
    label: str, args: argparse.Namespace, simulated: _SimulatedNames, measured: Mapping[str, LatencyProfile]
) -> _SimulatedSetting:
    options = vars(args)
    names = tuple(simulated.policies)
    profiles = _profiles(options.get("profile", _PROFILE), names)
    if "profile" not in options:
        profiles = [measured.get(name, profile) for name, profile in zip(names, profiles, strict=True)]
    if "variation" in options:
        profiles = [replace(profile, variation=args.variation) for profile in profiles]
    depth, devices = options.get("depth", 1), options.get("devices", 0)
    models, placed = [], 0
    slos_ms = _slos_ms(options.get("slo_ms", {}), simulated)
    for (configured, _), profile, slo_ms in zip(simulated.policies.values(), profiles, slos_ms, strict=False):
        policy = _policy(configured, args, slo_ms)
        numbers = range(placed, placed + policy.instances) if devices else ()
        placed += policy.instances
        models.append(SimulatedModel(policy, profile, depth, tuple(number % devices for number in numbers)))
    pipelines = tuple(
        replace(pipeline, policy=_policy(pipeline.policy, args, slo_ms))
        for (pipeline, _), slo_ms in zip(simulated.pipelines.values(), slos_ms[len(models) :], strict=True)
    )
    overhead_ns = round(options.get("overhead_us", 0.0) * NS_PER_US)
    return _SimulatedSetting(label, tuple(models), pipelines, slos_ms, overhead_ns)


def _slos_ms(slo_options: Mapping[str, float], simulated: _SimulatedNames) -> tuple[float | None, ...]:
    names = simulated.names
    configured = [slo_ms for _, slo_ms in (*simulated.policies.values(), *simulated.pipelines.values())]
    for name in slo_options:
        if name and name not in names:
            raise ValueError(f"--slo-ms {name}=...: no model '{name}' is simulated, only {', '.join(list(names)[:5])}")
    return tuple(
        # An objective without a name is that of the requests, not of the steps of a pipeline.
        slo_options.get(name, slo_options.get("", slo_ms) if name in simulated.targets else slo_ms)
        for name, slo_ms in zip(names, configured, strict=True)
    )


def _profiles(text: str, names: Sequence[str]) -> list[LatencyProfile]:
    """Parse `--profile`, one latency profile for each model.

    The text is `450+20n`, `some.json`, or either of them after a model's name, e.g. `tiny=20+1n,resnet50=r.json`.
    """
    default, named = _PROFILE, {}
    for part in text.split(","):
        name, equals, profile = part.rpartition("=")
        if not equals:
            default = profile
        elif name in names:
            named[name] = profile
        else:
            raise ValueError(f"--profile {part}: no model '{name}' is simulated, only {', '.join(list(names)[:5])}")
    profiles = {profile: parse_profile(profile) for profile in {default, *named.values()}}
    return [profiles[named.get(name, default)] for name in names]


def _policy(policy: HandlePolicy, args: argparse.Namespace, slo_ms: float | None) -> HandlePolicy:
    """Replace fields of a configured policy by the command's options."""
    options, batch = vars(args), policy.batch
    if "max_batch_size" in options:
        batch = replace(batch, max_rows=args.max_batch_size)
    if "preferred" in options:
        batch = replace(batch, preferred_rows=args.preferred)
    if "delay_us" in options:
        batch = replace(batch, max_delay_ns=round(args.delay_us * NS_PER_US))
    if batch != policy.batch:
        batch = replace(batch, merge=True)
    promised = options.get("scheduler", "promise") == "promise"
    batch = replace(batch, objective_ns=round((slo_ms or 0) * NS_PER_MS) if promised else 0)
    policy = replace(policy, batch=batch, instances=options.get("instances", policy.instances))
    if "max_queue_size" in options:
        policy = replace(policy, limits=replace(policy.limits, max_count=args.max_queue_size))
    if "queue_timeout_us" in options:
        queue_policy = replace(policy.queue_policy, queue_timeout_ns=round(args.queue_timeout_us * NS_PER_US))
        policy = replace(policy, queue_policy=queue_policy)
    if "levels" in options:
        policy = replace(policy, levels=args.levels, default_level=args.levels)
    if "aging_us" in options:
        policy = replace(policy, aging_ns=round(args.aging_us * NS_PER_US))
    if "share" in options:
        policy = replace(policy, sharing=Sharing(dict(args.share)))
    if "quota" in options:
        quotas = {name: Quota(*quota) for name, quota in args.quota.items()}
        policy = replace(policy, rate_limits=RateLimits(quotas, quotas.pop("", None)))
    return policy
