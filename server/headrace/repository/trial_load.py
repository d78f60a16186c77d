"""Load models once as the server does, report the outcome: `python -m headrace.repository.trial_load` for `headrace validate`.

Standard input is JSON: `{"state_dir": PATH, "models": [[name, folder, repository], ...]}`. Standard output gets one line of JSON
a model, in the same order: `{"states": [[version, state, reason], ...], "findings": [[path, line, message, cure, fatal], ...],
"substitutes": [[version, reason], ...]}`. A model that crashes its runtime ends the process; the missing lines say which one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.core.completion import Mailbox
from headrace.core.errors import ConfigError, Finding
from headrace.repository.builds import BUILDER, Builds
from headrace.repository.deployment import Deployments, Source
from headrace.repository.draining import Drains
from headrace.repository.loader import Loader
from headrace.repository.registry import Registry
from headrace.repository.residency import Residency

_CLOSE_TIMEOUT_S = 30.0
# A server runs each model for a while before it serves, to measure it; a few runs find what fails in them.
_MEASURE_S = 0.02


def trial_load(name: str, folder: Path, repository: Path, state: Path | None = None) -> dict[str, object]:
    """Load one model through the server's own `Deployments` and close it again.

    It is run for a moment, as a server measures it before it serves; no engine is built.

    Args:
        name: of the model.
        folder: of the model.
        repository: that contains the folder.
        state: the state folder, where engines of read-only folders lie; None: there are none.

    Returns:
        `states`: version, state and reason as the server's index has them; `findings`: why a version is not served;
        `substitutes`: version and reason where the CPU serves though the configuration asks for a GPU.
    """
    registry, residency, loop = Registry(), Residency(), asyncio.new_event_loop()
    drains = Drains(registry, residency.forget)
    loader = Loader(Mailbox(loop), histograms=False, residency=residency, profile_s=_MEASURE_S, state=state)
    # Never started, so that orders for engines only wait.
    builds = Builds(BUILDER, lambda _order, _failure: None)
    deployments = Deployments(loader, registry, drains, builds)
    findings: Sequence[Finding] = ()
    try:
        deployments.load(Source(name, folder, repository))
    except ConfigError as error:
        findings = error.findings
    states = [[row["version"], row["state"], row["reason"]] for row in registry.index() if row["name"] == name]
    substitutes = [[version, reason] for model, version, reason in registry.substitutes() if model == name]
    deployments.unload_all()
    drains.wait(_CLOSE_TIMEOUT_S)
    loop.close()
    errors = [[f.path, f.line, f.message, f.cure, f.fatal] for f in findings]
    return {"states": states, "findings": errors, "substitutes": substitutes}


def main() -> int:
    """Load what standard input lists; exit status 0."""
    logging.disable()
    # Libraries print to standard output too; the results keep it to themselves.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results:
        os.dup2(2, 1)
        order = json.load(sys.stdin)
        state = Path(order["state_dir"]) if order["state_dir"] else None
        for name, folder, repository in order["models"]:
            results.write(json.dumps(trial_load(name, Path(folder), Path(repository), state)) + "\n")
            results.flush()
    return 0


if __name__ == "__main__":
    # Threads of a runtime that never end must not keep the process.
    _status = main()
    sys.stderr.flush()
    os._exit(_status)
