"""Random interleavings over real sockets: no sequence reads another's state, whatever ends, dies or is replaced."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import tritonclient.http as triton

from tests.support.examples import examples
from tests.support.sequence_clients import KINDS, SequenceClient, running
from tests.support.sequence_models import add_accumulator
from tests.support.serving import Server, serving

MODEL = "sums"


def interleave(tmp_path: Path, clients: int, steps: int, seed: int, *options: str) -> Counter[str]:
    """Run clients of all protocols while processes are killed and the model is reloaded; returns the outcomes."""
    repository = tmp_path / "repository"
    # 2 instances of 3 slots are fewer than the live sequences: some wait in the backlog, and forgotten ones expire.
    strategy = "oldest { max_candidate_sequences: 3 }"
    folder = add_accumulator(repository, MODEL, strategy=strategy, count=2, idle_us=200_000)
    code = folder / "1" / "model.py"
    choose, events = random.Random(seed), Counter[str]()
    with serving(repository, tmp_path, "--model-control", "explicit", "--load-model", "*", *options) as server:
        group = [KINDS[number % 3](server, MODEL, 1 + number, seed + number) for number in range(clients)]
        for number, _ in enumerate(running(group, steps)):
            if number % 10 == 5:
                events["killed"] += kill(group, choose)
            if number % 20 == 15:
                code.write_text(code.read_text() + "# changed\n")
                reload(server)
                events["reloaded"] += 1
    problems = [problem for client in group for problem in client.problems]
    assert not problems, "\n".join(problems)
    return sum((client.counts for client in group), events)


def kill(clients: list[SequenceClient], choose: random.Random) -> int:
    """Kill the process of a model that has answered a client lately; 1 if there was one."""
    processes = [client.process for client in clients if client.process]
    if not processes:
        return 0
    with suppress(ProcessLookupError):  # it has been killed, or its version has ended
        os.kill(choose.choice(processes), signal.SIGKILL)
        return 1
    return 0


def reload(server: Server) -> None:
    """Load the model again."""
    with triton.InferenceServerClient(server.address) as client:
        client.load_model(MODEL)


@pytest.mark.parametrize("front_ends", [(), ("--front-ends", "1")], ids=["one process", "front end"])
def test_random_interleavings(tmp_path: Path, front_ends: tuple[str, ...]) -> None:
    counts = interleave(tmp_path, 9, 60, 1, *front_ends)
    assert counts["answered"] > 100, counts
    assert all(counts[name] for name in ("cancelled", "not live", "killed", "reloaded")), counts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(examples(3, min_count=1)))
def test_long_random_interleavings(tmp_path: Path, seed: int) -> None:
    steps = examples(300, min_count=60)
    counts = interleave(tmp_path, 24, steps, 1000 * seed)
    assert counts["answered"] > 6 * steps, counts
    assert all(counts[name] for name in ("cancelled", "not live", "timed out", "killed", "reloaded")), counts
