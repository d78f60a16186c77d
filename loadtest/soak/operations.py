"""Operations under load: replaces a model, breaks it, unloads another, and kills a model's process."""

from __future__ import annotations

import http.client
import os
import signal
from itertools import cycle
from pathlib import Path
from typing import ClassVar

import grpc
from headrace_bench.processor import children
from tritonclient.grpc import service_pb2

from loadtest.protocol import HttpRequest, binary_request
from loadtest.servers import Running
from loadtest.soak.clients import ADMIN_KEY, TIMEOUT_S, ChannelClient, connect, post, read_http
from loadtest.soak.ledger import Ledger, Outcome
from loadtest.soak.models import GUEST, SEEDS, SWAPPED, Repository

KILL = "kill"
RELOADS = ("reload", "reload over gRPC")
_LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"
_CHILD = b"headrace.runtimes.isolated.child"


class Operator(ChannelClient):
    """One thing after the other, so that each phase has seen all of them.

    Args:
        server, ledger, per_s, seed: as for `Client`.
        repository: the folder that is served.
    """

    KEY: ClassVar[str] = ADMIN_KEY
    STEPS = (*RELOADS, KILL, "unload", "broken", "load", *RELOADS)

    def __init__(self, server: Running, ledger: Ledger, per_s: float, seed: int, repository: Repository) -> None:
        super().__init__(server, ledger, per_s, seed)
        self._repository = repository
        self._seeds = cycle(reversed(SEEDS))
        self._seed = SEEDS[0]
        self._steps = iter(self.STEPS)

    def turn(self) -> None:
        """The next step; nothing once all are done."""
        step = next(self._steps, None)
        if step is None:
            return
        self.ledger.event(step)
        try:
            wrong = self._do(step)
        except (OSError, http.client.HTTPException) as error:
            self.ledger.note("operator", step, Outcome.LOST, 0.0, repr(error))
            return
        self.ledger.note("operator", step, Outcome.FAILED if wrong else Outcome.RIGHT, 0.0, wrong)

    def close(self) -> None:
        """Run the remaining steps, then close: a phase ends as it began, with everything loaded."""
        for _ in range(len(self.STEPS)):
            self.turn()
        super().close()

    def _do(self, step: str) -> str:
        """Run a step; return the error, "" on success."""
        if step == KILL:
            return self._kill()
        if step == "broken":
            return self._break()
        if step in RELOADS:
            return self._reload(over_grpc=step != RELOADS[0])
        return self._ask(GUEST, step, 200)

    def _reload(self, over_grpc: bool) -> str:
        self._seed = next(self._seeds)
        case = self._repository.swap(self._seed)
        wrong = self._call_load() if over_grpc else self._ask(SWAPPED, "load", 200)
        if wrong:
            return wrong
        connection = connect(self.server)
        try:
            request = binary_request(case.model, case.inputs)
            outcome, detail = read_http(case, *post(connection, request, self.headers))
        finally:
            connection.close()
        return "" if outcome is Outcome.RIGHT else f"loaded, but the new weights do not serve: {detail}"

    def _break(self) -> str:
        self._repository.put(self._repository.broken(self._seed))
        wrong = self._ask(SWAPPED, "load", 400)
        self._repository.swap(self._seed)
        return wrong or self._ask(SWAPPED, "load", 200)

    def _kill(self) -> str:
        found = [child for child in children(self.server.pid) if _CHILD in _words(child)]
        if not found:
            return "no process of an isolated model is there"
        for child in found:
            os.kill(child, signal.SIGKILL)
        return ""

    def _ask(self, model: str, verb: str, expected: int) -> str:
        connection = connect(self.server)
        try:
            request = HttpRequest(f"/v2/repository/models/{model}/{verb}", b"{}")
            status, _, body = post(connection, request, self.headers)
        finally:
            connection.close()
        return "" if status == expected else f"{verb} of {model}: status {status}, expected {expected}: {body[:300]!r}"

    def _call_load(self) -> str:
        message = service_pb2.RepositoryModelLoadRequest(model_name=SWAPPED).SerializeToString()
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(_LOAD)
        try:
            call(message, timeout=TIMEOUT_S, metadata=self.metadata)
        except grpc.RpcError as error:
            return f"load over gRPC: {error.code().name}: {error.details()}"
        return ""


def _words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
