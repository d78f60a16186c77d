"""Configurations of public Triton repositories: each is served, or refused with the reason."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.public_configs import PUBLIC_CONFIGS, add_to
from tests.support.public_score import PAGE, PENDING, score, with_score
from tests.support.serving import start

LOAD_TIMEOUT_S = 300.0  # about a hundred models, some twenty processes


def test_the_sample_has_the_kinds_of_public_repositories() -> None:
    assert len({config.name for config in PUBLIC_CONFIGS}) == len({config.source for config in PUBLIC_CONFIGS}) == 73
    counts = Counter(config.kind for config in PUBLIC_CONFIGS)
    assert counts == {"onnx": 32, "python": 22, "ensemble": 13, "decoupled": 3, "sequence": 2, "iterative": 1}
    # Refused whatever is built: mistakes of their authors, and files that are not in their repositories.
    assert sum(bool(config.refused) for config in PUBLIC_CONFIGS) == 10
    assert [config.name for config in PUBLIC_CONFIGS if bool(config.refused) != bool(config.why)] == []


def test_the_page_for_users_of_triton_has_the_score() -> None:
    page = PAGE.read_text()
    assert with_score(page) == page, "make docs"
    assert "| all | 73 | 63 | 10 | 0 |" in score()


@pytest.mark.slow
@pytest.mark.timeout(2 * LOAD_TIMEOUT_S)
def test_every_configuration_is_served_or_refused_with_the_reason(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    add_to(repository)
    with start(repository, tmp_path / "server.log") as server:
        server.wait_until_ready(LOAD_TIMEOUT_S)
        rows = json.loads(server.request("POST", "/v2/repository/index")[2])
        server.stop()
    index = {row["name"]: (row["state"], row.get("reason", "")) for row in rows}
    wrong = {}
    for config in PUBLIC_CONFIGS:
        state, reason = index[config.name]
        expected = config.refused or PENDING.get(config.kind, "")
        if state != ("UNAVAILABLE" if expected else "READY") or expected not in reason:
            wrong[config.name] = (state, reason)
    assert wrong == {}
