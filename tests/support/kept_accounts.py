"""Keeps the accounts that a front end gives, for tests of front ends."""

from __future__ import annotations

from headrace.core.telemetry import TraceContext
from headrace.observability.access_log import Account
from headrace.observability.tracing import Choice, Exemplars, Pick


class KeptAccounts:
    """A `headrace.inference.models.Accounts`; chooses every request while it is active.

    Attributes:
        active: as the front ends see it.
        answers, failures: what they gave.
        contexts: they asked about, with the model.
        untraced: failures of requests that were not chosen.
    """

    def __init__(self, active: bool = False) -> None:
        self.active = active
        self.answers: list[Account] = []
        self.failures: list[Account] = []
        self.contexts: list[tuple[str, TraceContext | None]] = []
        self.untraced = 0

    def choose(self, model: str, context: TraceContext | None) -> Choice | None:
        assert self.active, "they must not ask while nothing is wanted"
        self.contexts.append((model, context))
        return Choice(Pick("0" * 31 + "1"), True)

    def answered(self, choice: Choice, account: Account, exemplars: Exemplars) -> None:
        assert choice.log
        self.answers.append(account)

    def failed(self, choice: Choice | None, account: Account) -> None:
        self.untraced += choice is None
        self.failures.append(account)
